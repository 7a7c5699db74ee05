"""The engine's front: loads everything, and starts answers for the API, the browser and the offline API.

Owns the parts and their start and end. It holds no logic of requests: `engine/intake` prepares them, `engine/loop` runs
them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from adapters.generation import GenerationHandle
from adapters.manager import AdapterInfo, AdapterManager, ManagerStats
from adapters.slots import SlotPool
from adapters.upload import ProbeReport, UploadFiles, UploadReport
from engine.adapter_text import AdapterTexts, TextSide, base_text
from engine.added_tokens import SlotMetadata
from engine.answer import Answer
from engine.attention import bind_attention
from engine.block_pool import BlockPool
from engine.config import EngineConfig, LoRAModule
from engine.cpu_linear import pack_linears
from engine.encoder_cache import EncoderCache
from engine.errors import AppError, EngineClosed, InvalidRequest, MediaError
from engine.finder import AdapterFinder, make_sources
from engine.flight import FlightTokens
from engine.frontend import Frontend
from engine.graphs import DecodeGraphs
from engine.intake import HeldRoute, Intake, Limits, RoutedPrompt, explain_missing
from engine.loop import EngineLoop
from engine.lora_layers import LoraBuffers, linear_weights
from engine.metrics import StepMetrics
from engine.model import load_model
from engine.probe import PROBE_TIMEOUT_S, Prober, probe_prompts
from engine.recording import RATE, RecordingReader
from engine.request import AudioPart, ChatPrompt, Delta, Message, Prompt, SamplingParams, TextPart
from engine.routing import RESERVED_NAMES, Route
from engine.runner import Runner
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.setup import (
    check_extra_vocab,
    check_settings,
    fit_context,
    lora_dtype,
    make_cache,
    packing_budget,
    runs_ahead,
    transcription_window,
    user_data_dir,
    with_embedded_defaults,
)
from engine.slot_writers import SlotWriters, make_extra_writers
from engine.state import EngineRequest
from engine.tokenizer import load_processor, load_tokenizer
from engine.transcription import transcription_request
from engine.warmup import warm_up
from kernels import HAS_TRITON, MAX_HEAD_DIM, LoraMetadata

logger = logging.getLogger(__name__)

_NUM_INTAKE_THREADS = 16
_CLOSED = "The server is shutting down; try again later."

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """What the engine is doing now and has done since its start.

    `is_alive`: it takes requests; `is_running`: it computes, be it only to end what is under way.
    """

    is_alive: bool
    is_running: bool
    uptime_s: float
    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_blocks_cached: int
    num_steps: int
    steps: StepMetrics
    prompt_tokens: int
    generated_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_preemptions: int
    encoder_hits: int
    encoder_misses: int
    encoder_bytes: int
    num_finished: dict[str, int]
    batch_by_adapter: dict[str, int]
    lora_rows_used: int
    lora_rows_total: int
    lora_row_loads: int
    lora_row_evictions: int
    adapters: ManagerStats


class Engine:
    """One base model, its adapters, and the thread that runs them.

    Args:
        config: the settings.
        checks_integrity: assert after every step that nothing leaked (tests).

    Raises:
        AppError: the model or an adapter cannot be served, or a setting is wrong.

    Attributes:
        config: the settings, with what follows from the embedded model filled in.
        model_names: names of the base model; the first is canonical.
        adapters: the adapter manager.
        sources: where adapters come from.
        recordings: reads recordings of any length for transcripts.
        tokenizer: the model's tokenizer.
        modalities: media that the model takes.
        max_model_len: prompt and answer, in tokens.
    """

    def __init__(self, config: EngineConfig, *, checks_integrity: bool = False) -> None:
        self.started_at = time.time()
        self._is_closed = False
        self.config = config = with_embedded_defaults(config)
        check_settings(config)
        self.base = load_model(
            config.model,
            load_format=config.load_format,
            dtype=config.dtype,
            device=config.device,
            gguf_file=config.gguf_file,
            seed=config.seed,
            quantization=config.quantization,
        )
        check_extra_vocab(config, self.base)
        self.model_names = tuple(config.served_model_name) or (self.base.name,)
        self.modalities = self.base.architecture.modalities
        known_config = self.base.config if self.base.architecture.renames else None
        self.tokenizer = load_tokenizer(config.model, config.gguf_file, known_config)
        processor = load_processor(config.model, self.tokenizer, self.modalities) if self.modalities else None
        frontends: list[Frontend] = [
            support.make_frontend(processor, self.base.config) for support in self.base.architecture.media.values()
        ]
        chat_template = self.tokenizer.chat_template or getattr(processor, "chat_template", None)
        self._texts = AdapterTexts(
            base_text(self.base, self.tokenizer, chat_template, frontends), chat_template, frontends
        )

        tools = self._texts.base.builder.tools
        tool_format = "none" if tools is None else tools.tool_format.name if tools.tool_format else "unknown"
        logger.info("event=tools format=%s", tool_format)
        cache = make_cache(config, self.base)
        self.max_model_len = fit_context(config, self.base, cache)
        attention_step = bind_attention(self.base.decoder, cache)
        lora_metadata = self._make_lora_metadata() if config.enable_lora else {}
        self._encoder_cache = EncoderCache(config.encoder_cache_mb * 2**20)
        self.lora_bytes = 0
        self._slots: SlotPool | None = None
        self.sources = make_sources(config, self.base.name, self._adapter_dir)
        has_kernels = HAS_TRITON and self.base.kv_shape.head_dim <= MAX_HEAD_DIM
        has_graphs = self.base.device.type == "cuda" and has_kernels and not config.enforce_eager
        self.adapters = self._make_adapters(lora_metadata, has_graphs=has_graphs)
        self._finder = AdapterFinder(self.sources, self.adapters, self.model_names)
        if self.base.device.type == "cpu":
            pack_linears(linear_weights(self.base.model), packing_budget(config, cache.num_bytes + self.lora_bytes))
        self._scheduler = Scheduler(
            BlockPool(cache.num_blocks, enable_prefix_caching=config.enable_prefix_caching),
            self._slots,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
        )
        sampler = Sampler(config.seed, self.base.device)
        flight_tokens = FlightTokens(self._scheduler.max_num_seqs, self.base.device)
        graphs = None
        if has_graphs:
            graphs = DecodeGraphs(
                self.base, attention_step, lora_metadata, flight_tokens, max_num_seqs=self._scheduler.max_num_seqs,
                max_blocks=-(-self.max_model_len // config.block_size), block_size=config.block_size,
            )  # fmt: skip
        runner = Runner(
            self.base,
            attention_step,
            lora_metadata,
            self._encoder_cache,
            sampler,
            config.block_size,
            flight_tokens,
            graphs,
        )
        if graphs is not None:
            sizes = lora_metadata["decoder"].step_sizes if lora_metadata else [config.max_num_batched_tokens]
            warm_up(self.base, runner, graphs, step_sizes=sizes, has_lora=bool(lora_metadata))
        self._loop = EngineLoop(
            self._scheduler, runner, cache, self.tokenizer, runs_ahead=runs_ahead(config, self.base),
            checks_integrity=checks_integrity,
        )  # fmt: skip
        limits = Limits(
            max_model_len=self.max_model_len,
            max_media=config.limit_mm_per_prompt,
            max_audio_seconds=config.max_audio_seconds,
            max_media_bytes=config.max_upload_mb * 2**20,
            # Beside it, every other request of the step gets its token.
            max_mutual_tokens=config.max_num_batched_tokens - self._scheduler.max_num_seqs + 1,
        )
        self._intake = Intake(
            texts=self._texts,
            frontends=frontends,
            adapters=self.adapters if config.enable_lora else None,
            base_names=self.model_names,
            limits=limits,
            has_grid_positions=self.base.architecture.has_grid_positions,
            short_len=None if self.base.long_rope is None else self.base.long_rope.original_len,
        )
        self.recordings = RecordingReader(
            window_seconds=transcription_window(config),
            max_seconds=config.max_recording_seconds,
            max_bytes=config.max_upload_mb * 2**20,
            fits=self._fits_transcript,
        )
        self._prober = Prober(
            self._loop.submit,
            lambda prompt: self._intake.build_only(prompt, self._texts.base),
            lambda built: self._intake.positions(built, 1),
            probe_prompts(self.base.architecture, has_template=bool(chat_template)),
            max_model_len=self.max_model_len,
            max_mutual_tokens=limits.max_mutual_tokens,
            num_bytes=self.base.dtype.itemsize,
        )
        # Threads of its own, for decoding and prompts; nobody waits for an adapter on them.
        self._intake_threads = ThreadPoolExecutor(_NUM_INTAKE_THREADS, thread_name_prefix="intake")
        try:
            self._load_adapters()
        except BaseException:
            self.adapters.close()
            raise
        self._loop.start()
        # A program that ends, or drops its engine, without `close` must not leave the thread in the middle of a step.
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, self.adapters, 0.0)

    @property
    def created(self) -> int:
        """Start of the engine, in Unix seconds."""
        return int(self.started_at)

    async def start(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        model: str | None = None,
        lora: str | None = None,
        request_id: str | None = None,
        n: int = 1,
        held: HeldRoute | None = None,
    ) -> list[Answer]:
        """Like `start_sync`, with the blocking part on a worker thread.

        `held` decides instead of `model` and `lora`, and is taken over.
        """
        try:
            self._check_open()
            if held is None:
                await self.find_adapters(model, lora)
            route = functools.partial(self._intake.route, prompt, sampling, model=model, lora=lora, n=n)
            routed = await asyncio.wrap_future(self._on_intake_thread(route))
        except BaseException:
            if held is not None:
                held.release()
            raise
        if held is None:
            handle = await self._claim(routed.route)
        else:
            routed, handle = dataclasses.replace(routed, route=held.route), held.handle
        try:
            # Referenced until the request has it too, so that it is at hand there.
            text = await asyncio.wrap_future(self._texts.soon(None if handle is None else handle.generation))
            job = self._on_intake_thread(functools.partial(self._begin, routed, handle, request_id))
        except BaseException:
            if handle is not None:
                handle.release()
            raise
        if handle is not None:
            job.add_done_callback(lambda _: handle.release())  # Where the job is cancelled before it began.
        answers = await asyncio.wrap_future(job)
        del text
        return answers

    def _on_intake_thread(self, work: Callable[[], T]) -> Future[T]:
        try:
            return self._intake_threads.submit(work)
        except RuntimeError:  # The threads were shut down since the caller looked.
            raise EngineClosed(_CLOSED) from None

    async def hold(
        self, modalities: Collection[str], *, model: str | None = None, lora: str | None = None
    ) -> HeldRoute:
        """Decide once who answers prompts that hold these modalities, for several `start`s; to be released.

        Raises:
            AppError: as `start_sync` does for names and adapters.
        """
        self._check_open()
        await self.find_adapters(model, lora)
        choose = functools.partial(self._intake.choose, modalities, model=model, lora=lora)
        route = await asyncio.wrap_future(self._on_intake_thread(choose))
        return HeldRoute(route, await self._claim(route))

    async def _claim(self, route: Route) -> GenerationHandle | None:
        """The route's adapter; waiting for it holds no thread."""
        future = self._intake.acquire(route)
        if future is None:
            return None
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_release_unclaimed)
            raise
        except AppError as error:
            raise explain_missing(error, route) from None

    def start_sync(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        model: str | None = None,
        lora: str | None = None,
        request_id: str | None = None,
        n: int = 1,
    ) -> list[Answer]:
        """Find the adapter where it is not known yet, decode, route, load it, build the prompt and queue n answers.

        Args:
            prompt: messages, text or token ids.
            sampling: how to choose tokens; `max_tokens` None means up to the context's end.
            model: a base name, an adapter's name, or None for the base.
            lora: None or "auto" (the routing rule), "none", or an adapter's name.
            request_id: for the log; made up when None.
            n: answers to the same prompt.

        Raises:
            AppError: the request cannot be served as asked.
        """
        self._check_open()
        self._finder.find_sync(model, lora)
        routed = self._intake.route(prompt, sampling, model=model, lora=lora, n=n)
        future = self._intake.acquire(routed.route)
        try:
            handle = None if future is None else future.result()
        except AppError as error:
            raise explain_missing(error, routed.route) from None
        return self._begin(routed, handle, request_id)

    def _begin(self, routed: RoutedPrompt, handle: GenerationHandle | None, request_id: str | None) -> list[Answer]:
        """Build the prompt and queue the answers; the handle is taken over."""
        requests = self._intake.build(routed, handle, request_id=request_id)
        prompt = routed.prompt
        answers: list[Answer] = []
        try:
            for index, request in enumerate(requests):
                answer = Answer(request.request_id, request.receipt, request.prompt_token_ids, index)
                answer.tokenizer = self.tokenizer if request.text is None else request.text.tokenizer
                answer.call_parser = request.call_parser
                if isinstance(prompt, ChatPrompt) and prompt.is_transcript and _is_silent(request):
                    _answer_nothing(request, answer)
                else:
                    self._loop.submit(request, answer)
                answers.append(answer)
        except BaseException:
            for answer in answers:
                answer.abort()
            for request in requests[len(answers) :]:
                if request.handle is not None:
                    request.handle.release()
            raise
        receipt = requests[0].receipt
        logger.info(
            "event=request request=%s adapter=%s reason=%s prompt_tokens=%d",
            requests[0].request_id, receipt.name, receipt.reason, len(requests[0].prompt_token_ids),
        )  # fmt: skip
        return answers

    def prefetch(self, name: str) -> Future[bool]:
        """Begin to bring an adapter into CPU memory and, where a row is free or idle, into it; returns at once.

        For an adapter that will probably be asked for next. Whatever goes wrong is logged; the request will hear of it.

        Returns:
            Done when there is no more to do; whether the adapter is in memory.

        Raises:
            EngineClosed: the engine is closed.
        """
        self._check_open()
        is_there: Future[bool] = Future()
        self.adapters.borrow_soon(name).add_done_callback(functools.partial(self._fill_row, name, is_there))
        return is_there

    def _fill_row(self, name: str, is_there: Future[bool], borrowed: Future[GenerationHandle]) -> None:
        """Give what was borrowed a row of the LoRA buffers, if one is free, and give it back."""
        try:
            handle = borrowed.result()
        except AppError as error:
            logger.warning("event=prefetch_failed adapter=%s reason=%r", name, error.message)
            is_there.set_result(False)
            return
        slots = self._slots

        def fill() -> None:
            try:
                with handle:
                    if slots is not None:
                        slots.prefetch(handle.generation)
            finally:
                is_there.set_result(True)

        if not self._loop.call(fill):
            handle.release()
            is_there.set_result(True)

    def probe(self, target: str | GenerationHandle, *, timeout_s: float = PROBE_TIMEOUT_S) -> ProbeReport:
        """How much an adapter changes the base model's answers; a name, or content that need not have one. Blocking.

        Takes `timeout_s` seconds at most, and one place in the batch.

        Raises:
            AppError: there is no such adapter, or it cannot be read.
        """
        if isinstance(target, GenerationHandle):
            return self._prober.measure(target, timeout_s)
        with self.adapters.borrow(target) as handle:
            return self._prober.measure(handle, timeout_s)

    def inspect_upload(self, files: UploadFiles) -> UploadReport:
        """Judge an upload, try it out where it is good, and keep nothing of it. Blocking.

        Raises:
            AppError: the upload cannot be judged now; what is wrong with it is in the report.
        """
        with self.adapters.examine_upload(files) as (report, handle):
            if handle is None or self._slots is None:
                return report
            return dataclasses.replace(report, probe=self.probe(handle))

    async def find_adapters(self, *names: str | None) -> None:
        """Have adapters listed that a request names and a source of `--lora-resolver` knows; unknown names are left.

        Holds no thread, and may be cancelled.

        Raises:
            AppError: a source has the adapter but it is refused, or a source cannot be asked now.
        """
        await self._finder.find(*names)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed(_CLOSED)

    def tokenize(self, prompt: Prompt, model: str | None = None) -> list[int]:
        """Token ids of a prompt for the base model or an adapter, media placeholders included."""
        return self._intake.build_only(prompt, self.text_of(model)).token_ids

    def text_of(self, model: str | None) -> TextSide:
        """The tokenizer of requests on a name: the base model's, unless it is an adapter that brings its own.

        Blocking where such an adapter must be read from its files.
        """
        if not self.config.lora_extra_vocab_size or model is None or not self.adapters.contains(model):
            return self._texts.base
        with self.adapters.borrow(model) as handle:
            return self._texts.of(handle.generation)

    @property
    def num_token_ids(self) -> int:
        """Token ids that a request can name are below this; those that adapters add count."""
        extra = self.config.lora_extra_vocab_size
        return self.base.vocab_size + extra if extra else len(self.tokenizer)

    def transcription_prompt(
        self, audio: AudioPart, *, language: str | None = None, prompt: str | None = None
    ) -> ChatPrompt:
        """The messages that ask this model for a transcript.

        Raises:
            InvalidRequest: the model takes no audio, or no language or prompt.
        """
        question = transcription_request(self.base.architecture, self.model_names[0], language=language, prompt=prompt)
        return ChatPrompt([Message("user", [audio, TextPart(question)])], is_transcript=True)

    def _fits_transcript(self, seconds: float) -> bool:
        """Whether the tower hears a clip of so many seconds, and the context holds it with as much room for its transcript."""
        silence = np.zeros(int(seconds * RATE), dtype=np.float32)
        try:
            num_tokens = len(self.tokenize(self.transcription_prompt(AudioPart((silence, RATE)))))
        except MediaError:  # The model's tower hears no clip of that length.
            return False
        return 2 * num_tokens <= self.max_model_len

    def stats(self) -> EngineStats:
        """A snapshot; numbers are those of the latest finished step."""
        scheduler, counters, blocks = self._scheduler, self._loop.counters, self._scheduler.blocks
        return EngineStats(
            is_alive=self._loop.is_alive,
            is_running=self._loop.is_running,
            uptime_s=time.time() - self.started_at,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_blocks_used=blocks.num_usable - blocks.num_free,
            kv_blocks_total=blocks.num_usable,
            kv_blocks_cached=blocks.num_cached,
            num_steps=counters.num_steps,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            encoder_hits=self._encoder_cache.num_hits,
            encoder_misses=self._encoder_cache.num_misses,
            encoder_bytes=self._encoder_cache.num_bytes,
            steps=counters.steps,
            num_finished=dict(counters.num_finished),
            batch_by_adapter=dict(counters.batch_by_adapter) if scheduler.has_work else {},
            lora_rows_used=len(self._slots.resident()) if self._slots else 0,
            lora_rows_total=self.config.max_loras if self._slots else 0,
            lora_row_loads=self._slots.loads if self._slots else 0,
            lora_row_evictions=self._slots.evictions if self._slots else 0,
            adapters=self.adapters.stats(),
        )

    @property
    def default_mm_loras(self) -> dict[str, str]:
        """Modality -> adapter that answers such prompts by itself, as it stands now."""
        return self.adapters.defaults()

    def set_default(self, modality: str, name: str | None) -> None:
        """Let an adapter answer prompts of a modality by itself from the next request on, or none. Thread-safe.

        It is pinned for as long as it does. Blocking where it must be read from its files.

        Raises:
            InvalidRequest: the model does not take the modality.
            AppError: there is no such adapter, or it cannot be served; the default is then what it was.
        """
        self.check_modalities([modality])
        self.adapters.set_default(modality, name)

    def set_default_for(self, name: str, modalities: Collection[str]) -> AdapterInfo:
        """Let an adapter answer exactly these modalities by itself; otherwise like `set_default`."""
        self.check_modalities(modalities)
        return self.adapters.set_default_for(name, modalities)

    def check_modalities(self, modalities: Collection[str], setting: str = "default_for") -> None:
        """Raise `InvalidRequest` where the model does not take one of these modalities, which `setting` names."""
        for modality in modalities:
            if modality not in self.modalities:
                takes = ", ".join(sorted(self.modalities)) or "no media"
                flag = "--default-mm-loras" if setting == "default_mm_loras" else setting
                raise InvalidRequest(f"{flag} names {modality!r}, but the model takes {takes}.", param=setting)

    def check_integrity(self) -> None:
        """Assert that the pools, caches and adapters agree; call it when nothing runs."""
        self._scheduler.check_integrity()
        self._encoder_cache.check_integrity()
        self.adapters.check_integrity()
        self._finder.check_integrity()

    def close(self, drain_s: float = 5.0) -> None:
        """Let answers under way end for `drain_s` seconds, cut off the rest, and stop."""
        self._is_closed = True
        self._finder.close()
        self._finalizer.detach()
        self._intake_threads.shutdown(wait=False)
        self._texts.close()
        _shut_down(self._loop, self.adapters, drain_s)

    def _make_lora_metadata(self) -> dict[str, LoraMetadata]:
        """What says which tokens use which adapter, for each part of the model.

        Tower and connector see one adapter a call and token counts of their own, which need no tiles.
        """
        config = self.config
        max_in = self.base.max_in_features
        tokens = {"decoder": config.max_num_batched_tokens, "head": config.max_num_seqs, "tower": 1, "connector": 1}
        metadata_class = SlotMetadata if config.lora_extra_vocab_size else LoraMetadata
        return {
            part: metadata_class(
                max_tokens,
                config.max_loras,
                self.base.device,
                max_columns=3 * config.max_lora_rank,
                max_in=max_in,
                has_tiles=None if part in ("decoder", "head") else False,
            )
            for part, max_tokens in tokens.items()
        }

    @property
    def _adapter_dir(self) -> Path:
        return Path(self.config.adapter_dir) if self.config.adapter_dir else user_data_dir()

    def _make_adapters(self, lora_metadata: dict[str, LoraMetadata], *, has_graphs: bool) -> AdapterManager:
        """The manager and, where adapters are on, the LoRA rows; what CUDA graphs read must be there before they are."""
        config = self.config
        surface = self.base.surface(
            max_lora_rank=config.max_lora_rank,
            lora_dtype=lora_dtype(config.lora_dtype, self.base),
            target_suffixes=tuple(config.lora_target_modules),
            has_scale_shift=config.enable_dora or not has_graphs,
            extra_vocab_size=config.lora_extra_vocab_size,
            why_tokenizer_unfit=self._texts.why_unfit,
        )
        if config.enable_lora:
            sites = {name: site for name, site in surface.linears.items() if surface.is_targeted(name)}
            buffers = LoraBuffers(
                self.base.model, sites, lora_metadata, num_slots=config.max_loras, max_rank=config.max_lora_rank,
                dtype=surface.lora_dtype,
            )  # fmt: skip
            extras = make_extra_writers(
                self.base, buffers, surface, lora_metadata, num_slots=config.max_loras, has_graphs=has_graphs
            )
            self.lora_bytes = buffers.num_bytes + sum(writer.num_bytes for writer in extras)
            self._slots = SlotPool(config.max_loras, SlotWriters([buffers, *extras]))
        adapters = AdapterManager(
            surface,
            adapter_dir=self._adapter_dir,
            max_cpu_loras=config.max_cpu_loras,
            max_cpu_bytes=None if config.max_cpu_lora_mb is None else config.max_cpu_lora_mb * 2**20,
            on_retire=_weakly(self._retire),
            reserved_names={*self.model_names, *RESERVED_NAMES},
            max_upload_bytes=config.max_upload_mb * 2**20,
            locate=self.sources.locate,
        )
        slots = self._slots
        adapters.residency = lambda digest: slots is not None and slots.lookup(digest) is not None
        return adapters

    def _retire(self, digest: str) -> None:
        """No name points to this content any more: free its LoRA row and what its tower computed, between two steps."""
        slots = self._slots
        if slots is None:
            return
        slots.drop(digest)

        def collect() -> None:
            slots.collect()
            self._encoder_cache.drop_adapter(digest)

        self._loop.call(collect)

    def _load_named(self, setting: str, module: LoRAModule) -> None:
        """Load an adapter that a setting names; faults say which setting it was."""
        try:
            self.adapters.load(module.name, module.path, load_inplace=True, base_model_name=module.base_model_name)
        except AppError as error:
            error.message = f"{setting}: {error.message}"
            raise

    def _load_adapters(self) -> None:
        config = self.config
        if not config.enable_lora:
            return
        self.adapters.restore()
        for module in config.lora_modules:
            self._load_named(f"--lora-modules {module.name}={module.path}", module)
        for modality, name in (config.default_mm_loras or {}).items():
            self.check_modalities([modality], "default_mm_loras")
            if not self.adapters.contains(name):
                # A path or id, as in vLLM: it becomes an adapter under the modality's name.
                setting = f"--default-mm-loras {modality}={name} (no adapter has that name)"
                self._load_named(setting, LoRAModule(modality, name))
                name = modality
            self.adapters.set_default(modality, name)


def _release_unclaimed(done: Future[GenerationHandle]) -> None:
    """Give back what arrived for somebody who had left."""
    if not done.cancelled() and done.exception() is None:
        done.result().release()


def _is_silent(request: EngineRequest) -> bool:
    return all(span.media.is_silent for span in request.spans)


def _answer_nothing(request: EngineRequest, answer: Answer) -> None:
    """The transcript of silence is empty; a model would make something up."""
    if request.handle is not None:
        request.handle.release()
    answer.put(Delta(receipt=request.receipt))
    answer.put(Delta(finish_reason="stop"))


def _weakly(method: Callable[[str], None]) -> Callable[[str], None]:
    """A bound method that does not keep its object alive; calls after the object's end do nothing."""
    reference = weakref.WeakMethod(method)

    def call(argument: str) -> None:
        alive = reference()
        if alive is not None:
            alive(argument)

    return call


def _shut_down(loop: EngineLoop, adapters: AdapterManager, drain_s: float) -> None:
    loop.close(drain_s)
    adapters.close()


__all__ = ["Engine", "EngineStats"]
