"""The engine's front: loads everything, and starts answers for the API, the browser and the offline API.

Owns the parts and their start and end. It holds no logic of requests: `engine/starter` prepares them, `engine/loop` runs
them. Adapters are `engine/lora_side`'s business.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adapters.generation import GenerationHandle
from adapters.manager import AdapterInfo, AdapterManager
from adapters.upload import ProbeReport, UploadFiles, UploadReport
from engine.adapter_text import AdapterTexts, TextSide, base_text
from engine.answer import Answer
from engine.attention import bind_attention
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.cpu_linear import pack_linears
from engine.encoder_cache import EncoderCache
from engine.errors import InvalidRequest, MediaError
from engine.finder import AdapterFinder, make_sources
from engine.flight import FlightTokens
from engine.frontend import Frontend
from engine.intake import HeldRoute, Intake, Limits
from engine.loop import EngineLoop
from engine.lora_layers import linear_weights
from engine.lora_side import LoraSide
from engine.probe import PROBE_TIMEOUT_S, Prober, probe_prompts
from engine.recording import RATE, RecordingReader
from engine.request import AudioPart, ChatPrompt, Prompt, SamplingParams, TextPrompt
from engine.runner import Runner
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.setup import (
    check_extra_vocab,
    check_settings,
    fit_context,
    has_graphs,
    kv_bytes,
    load_base,
    make_cache,
    make_graphs,
    packing_budget,
    runs_ahead,
    transcription_window,
    user_data_dir,
    with_embedded_defaults,
    with_gguf_file,
)
from engine.starter import Starter
from engine.stats import EngineStats, count_waiting, take_stats
from engine.tokenizer import load_processor, load_tokenizer
from engine.transcription import TranscriptPrompts
from engine.warmup import warm_up

if TYPE_CHECKING:
    from engine.parallel.team import Team

logger = logging.getLogger(__name__)

STALL_S = 10.0
"""How long a step over several ranks may take to end when the engine is closed, before a rank counts as stalled."""


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
        transcripts: builds the prompts that ask for them.
        tokenizer: the model's tokenizer.
        modalities: media that the model takes.
        max_model_len: prompt and answer, in tokens.
    """

    def __init__(self, config: EngineConfig, *, checks_integrity: bool = False) -> None:
        self.started_at = time.time()
        self.config = config = with_embedded_defaults(with_gguf_file(config))
        check_settings(config)
        if config.tensor_parallel_size == 1:
            self._build(config, None, checks_integrity=checks_integrity)
            return
        from engine.parallel.team import Team

        team = Team(config)
        with team.starting():
            self._build(config, team, checks_integrity=checks_integrity)

    def _build(self, config: EngineConfig, team: Team | None, *, checks_integrity: bool) -> None:
        """Load and connect all parts; `team` are the workers where the model is split."""
        self.base = load_base(config, None if team is None else team.load)
        check_extra_vocab(config, self.base)
        self.model_names = tuple(config.served_model_name) or (self.base.name,)
        self.modalities = self.base.architecture.modalities
        known_config = self.base.config if self.base.architecture.renames else None
        self.tokenizer = load_tokenizer(self.base.origin, config.gguf_file, known_config)
        processor = load_processor(self.base.origin, self.tokenizer, self.modalities) if self.modalities else None
        frontends: list[Frontend] = [
            support.make_frontend(processor, self.base.config) for support in self.base.architecture.media.values()
        ]
        chat_template = self.tokenizer.chat_template or getattr(processor, "chat_template", None)
        self._texts = AdapterTexts(
            base_text(self.base, self.tokenizer, chat_template, frontends), chat_template, frontends
        )
        self.transcripts = TranscriptPrompts(
            self.base.architecture.transcription,
            self.model_names[0],
            self.tokenizer.get_vocab(),
            audio=next((frontend.inline for frontend in frontends if frontend.modality == "audio"), ""),
            bos=self.tokenizer.bos_token or "",
        )

        tools = self._texts.base.builder.tools
        tool_format = "none" if tools is None else tools.tool_format.name if tools.tool_format else "unknown"
        logger.info("event=tools format=%s", tool_format)
        num_bytes = kv_bytes(config, self.base)
        cache = make_cache(config, self.base, num_bytes if team is None else team.least_kv_bytes(num_bytes))
        self.max_model_len = fit_context(config, self.base, cache)
        attention_step = bind_attention(self.base.decoder, cache)
        self._encoder_cache = EncoderCache(config.encoder_cache_mb * 2**20)
        adapter_dir = Path(config.adapter_dir) if config.adapter_dir else user_data_dir()
        self.sources = make_sources(config, self.base.name, adapter_dir)
        self._lora = LoraSide(
            config, self.base, self._texts, self._encoder_cache, base_names=self.model_names, adapter_dir=adapter_dir,
            locate=self.sources.locate, has_graphs=has_graphs(config, self.base), team=team,
        )  # fmt: skip
        self.adapters, self._slots, lora_metadata = self._lora.adapters, self._lora.slots, self._lora.metadata
        self._finder = AdapterFinder(self.sources, self.adapters, self.model_names)
        if self.base.device.type == "cpu":
            pack_linears(
                linear_weights(self.base.model), packing_budget(config, cache.num_bytes + self._lora.num_bytes)
            )
        self._scheduler = Scheduler(
            BlockPool(cache.num_blocks, enable_prefix_caching=config.enable_prefix_caching),
            self._slots,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
        )
        sampler = Sampler(config.seed, self.base.device)
        flight_tokens = FlightTokens(self._scheduler.max_num_seqs, self.base.device)
        sizes = {"max_num_seqs": self._scheduler.max_num_seqs, "max_model_len": self.max_model_len}
        if team is not None:
            team.lay_out(cache, **sizes)
        graphs = make_graphs(config, self.base, attention_step, lora_metadata, flight_tokens, **sizes)
        make_runner = Runner if team is None else team.make_runner(self.base)
        runner = make_runner(
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
            warm_up(self.base, runner, graphs, config, lora_metadata)
        cleaner = cache if team is None else team.make_cleaner(cache)
        self._loop = EngineLoop(
            self._scheduler, runner, cleaner, self.tokenizer, runs_ahead=runs_ahead(config, self.base),
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
        self._starter = Starter(self._intake, self._finder, self._texts, self._loop, self.tokenizer)
        self._lora.bind(self._loop.call)
        try:
            self._lora.load_configured(lambda modality: self.check_modalities([modality], "default_mm_loras"))
        except BaseException:
            self.adapters.close()
            raise
        if team is not None:
            team.on_loss = self._loop.stop
            team.wait_ready()
        self._loop.start()
        # A program that ends, or drops its engine, without `close` must not leave the thread in the middle of a step.
        self._team = team
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, self.adapters, team, 0.0)

    @property
    def lora_bytes(self) -> int:
        """Memory of the LoRA rows."""
        return self._lora.num_bytes

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
        return await self._starter.start(
            prompt, sampling, model=model, lora=lora, request_id=request_id, n=n, held=held
        )

    async def hold(
        self, modalities: Collection[str], *, model: str | None = None, lora: str | None = None
    ) -> HeldRoute:
        """Decide once who answers prompts that hold these modalities, for several `start`s; to be released.

        Raises:
            AppError: as `start_sync` does for names and adapters.
        """
        return await self._starter.hold(modalities, model=model, lora=lora)

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
        return self._starter.start_sync(prompt, sampling, model=model, lora=lora, request_id=request_id, n=n)

    def prefetch(self, name: str) -> Future[bool]:
        """Begin to bring an adapter into CPU memory and, where a row is free or idle, into it; returns at once.

        For an adapter that will probably be asked for next. Whatever goes wrong is logged; the request will hear of it.

        Returns:
            Done when there is no more to do; whether the adapter is in memory.

        Raises:
            EngineClosed: the engine is closed.
        """
        self._starter.check_open()
        return self._lora.prefetch(name)

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
    ) -> ChatPrompt | TextPrompt:
        """What asks this model for a transcript of a clip.

        Raises:
            InvalidRequest: the model takes no audio, or no language or prompt.
        """
        return self.transcripts.build(audio, language=language, prompt=prompt)

    def _fits_transcript(self, seconds: float) -> bool:
        """Whether the tower hears a clip of so many seconds, and the context holds it with as much room for its transcript."""
        silence = np.zeros(int(seconds * RATE), dtype=np.float32)
        try:
            num_tokens = len(self.tokenize(self.transcription_prompt(AudioPart((silence, RATE)))))
        except MediaError:  # The model's tower hears no clip of that length.
            return False
        return 2 * num_tokens <= self.max_model_len

    @property
    def num_waiting(self) -> int:
        """Requests that no step has had yet; cheap, unlike `stats`, which counts every adapter."""
        return count_waiting(self._loop, self._scheduler)

    def stats(self) -> EngineStats:
        """A snapshot; numbers are those of the latest finished step."""
        return take_stats(self.started_at, self._loop, self._scheduler, self._encoder_cache, self._lora)

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
        self._starter.close()
        self._finder.close()
        self._finalizer.detach()
        self._texts.close()
        _shut_down(self._loop, self.adapters, self._team, drain_s)


def _shut_down(loop: EngineLoop, adapters: AdapterManager, team: Team | None, drain_s: float) -> None:
    if team is None:
        loop.close(drain_s)
    elif not loop.close(drain_s, drain_s + STALL_S):
        team.give_up()
        loop.close(0.0)
    adapters.close()
    if team is not None:
        team.close()


__all__ = ["Engine", "EngineStats"]
