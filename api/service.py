"""The one layer that HTTP routes and the browser app call: prompts in, answers out, adapters managed.

Owns limits that every way in must obey (queue length, token ids in the vocabulary, leave to change adapters) and the
model cards. Knows nothing of HTTP. Blocking work of the adapter manager runs in worker threads.
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ParamSpec, TypeVar

from adapters.errors import AdapterNotFound
from api.admission import Admission
from api.audit import Audit
from api.auth import Policy
from api.cards import adapter_card, base_card
from api.errors import PermissionDenied, RuntimeUpdatingOff
from api.logprobs import TokenTexts
from api.metrics import Metrics
from api.settings import ServerSettings
from api.tenants import Caller, Role
from api.transcript import TranscriptEvent, transcribe_recording
from api.turns import KeyedTurns
from engine.errors import AppError, InvalidRequest, ModelNotFound
from engine.request import (
    AudioPart,
    ChatPrompt,
    Message,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    modalities_of,
)
from engine.routing import AUTO, RESERVED_NAMES

if TYPE_CHECKING:
    from adapters.manager import AdapterManager
    from adapters.records import AdapterInfo, VersionInfo
    from adapters.resolvers import DownloadInfo
    from adapters.upload import ProbeReport, UploadReport
    from engine.answer import Answer
    from engine.engine import Engine, EngineStats
    from engine.intake import HeldRoute
    from engine.tools.spec import ToolUse

T = TypeVar("T")
Params = ParamSpec("Params")

MANAGER_THREADS = 8
LOAD_THREADS = 8
RECORDING_THREADS = 4  # decoding an hour takes memory
UploadFiles = Mapping[str, Path | bytes | BinaryIO]


_MAX_TOKEN_IDS = 2_000_000


class Service:
    """An engine and the rules of this server.

    Attributes:
        engine: the engine that answers.
        settings: the server's settings, resolved.
        policy: roles of credentials; whoever lets people change adapters asks it first.
        metrics: what `/metrics` shows.
        caller: for whom this view of the service works; see `for_caller`.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.policy = Policy(settings)
        self.caller = Caller("the server", Role.ADMIN)
        self._audit = Audit(None if settings.audit_log is None else Path(settings.audit_log))
        self._root = self
        self._admission = Admission(engine, settings)
        self.metrics = Metrics(engine, lambda: self._admission.num_waiting)
        # What only looks or points never waits behind what reads files or fetches them.
        self._pool = ThreadPoolExecutor(MANAGER_THREADS, thread_name_prefix="adapters")
        self._recording_pool = ThreadPoolExecutor(RECORDING_THREADS, thread_name_prefix="recordings")
        self._load_pool = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="adapter-changes")
        self._turns = KeyedTurns()

    def for_caller(self, caller: Caller) -> Service:
        """This service as it is for a caller: with the caller's adapters alone, and against the caller's share."""
        view = copy.copy(self._root)
        view.caller = caller
        return view

    async def start_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        *,
        model: str | None = None,
        lora: str | None = None,
        n: int = 1,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: ToolUse | None = None,
        request_id: str | None = None,
    ) -> list[Answer]:
        """Start `n` answers to a conversation; raises `AppError`s of decoding, routing, adapters and templating."""
        kwargs = dict(template_kwargs or {})
        prompt = ChatPrompt(messages, add_generation_prompt, continue_final_message, kwargs, tools=tools)
        return await self._start("chat", prompt, sampling, model=model, lora=lora, n=n, request_id=request_id)

    async def start_completion(
        self,
        prompt: TextPrompt | TokenPrompt,
        sampling: SamplingParams,
        *,
        model: str | None = None,
        lora: str | None = None,
        n: int = 1,
        request_id: str | None = None,
    ) -> list[Answer]:
        """Start `n` answers to a raw prompt."""
        return await self._start("completions", prompt, sampling, model=model, lora=lora, n=n, request_id=request_id)

    async def transcribe(
        self,
        audio: AudioPart,
        sampling: SamplingParams | None = None,
        *,
        model: str | None = None,
        lora: str | None = None,
        language: str | None = None,
        prompt: str | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[TranscriptEvent, None]:
        """Write down what is said in a recording of any length: one `TranscriptStart`, then deltas and segments in order.

        What does not fit the model's window is cut at silence; the pieces share batches, and all of them are answered by
        the version of the adapter that the name means now. Close it (`contextlib.aclosing`) to stop early.

        Args:
            audio: the recording.
            sampling: greedy, to a bound that follows the length of a piece, where it is None; it holds for each piece.
            model: as in `start_chat`.
            lora: as in `start_chat`.
            language: what is spoken, for models that take it.
            prompt: words to expect, for models that take them.
            request_id: for the log; pieces are `ID-0`, `ID-1` and so on.

        Raises:
            AppError: before the first event for what is wrong with the request; later for a piece that failed.
        """
        chosen = sampling or SamplingParams(temperature=0.0, max_tokens=None)
        self._check(chosen)
        self._admission.check_room()
        self.engine.transcription_prompt(audio, language=language, prompt=prompt)
        self._check_caller({"audio"}, model, lora)
        base_id = request_id or uuid.uuid4().hex
        held = await self.engine.hold({"audio"}, model=model, lora=lora)
        try:
            recording = await asyncio.get_running_loop().run_in_executor(
                self._recording_pool, self.engine.recordings.read, audio
            )

            async def start_piece(index: int) -> Answer:
                part = recording.part(recording.pieces[index], audio.param)
                chat = self.engine.transcription_prompt(part, language=language, prompt=prompt)
                piece_id = base_id if len(recording.pieces) == 1 else f"{base_id}-{index}"
                [answer] = await self._start("transcriptions", chat, chosen, n=1, request_id=piece_id, held=held)
                return answer

            num_at_once = max(1, self.engine.config.max_num_seqs // 2)
            events = transcribe_recording(recording, held.receipt, start_piece, num_at_once=num_at_once)
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            held.release()

    async def _start(
        self,
        route: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        model: str | None = None,
        lora: str | None = None,
        n: int,
        request_id: str | None,
        held: HeldRoute | None = None,
    ) -> list[Answer]:
        self._check(sampling)
        if isinstance(prompt, TokenPrompt):
            self.check_token_ids(prompt.token_ids, "prompt")
        if held is None:  # else this is a piece of a request that was checked as a whole
            self._check_caller(modalities_of(prompt), model, lora)
        answers = await self._admission.start(
            prompt, sampling, model=model, lora=lora, n=n, request_id=request_id, held=held
        )
        self.metrics.watch(route, answers)
        for answer in answers:
            answer.on_end(self._book)
        return answers

    def _check(self, sampling: SamplingParams) -> None:
        """Raise `InvalidRequest` where sampling names tokens that do not exist."""
        self.check_token_ids(sampling.logit_bias or (), "logit_bias")
        self.check_token_ids(sampling.stop_token_ids, "stop_token_ids")

    def _check_caller(self, modalities: Collection[str], model: str | None, lora: str | None) -> None:
        """Raise `AppError` where the caller may not ask for this, or has asked too often; books one request."""
        self._check_visible(model, "model")
        self._check_visible(lora, "lora")
        self._check_defaults(modalities, model, lora)
        self.caller.quota.admit()

    def _book(self, answer: Answer) -> None:
        """Book an answer's tokens; n answers share their prompt."""
        self.caller.quota.spend(answer.num_output_tokens + (len(answer.prompt_token_ids) if answer.index == 0 else 0))

    def _check_visible(self, name: str | None, param: str) -> None:
        """Raise what a name that does not exist gives, where it does not for this caller."""
        if name is None or self._is_visible(name):
            return
        kind = "model" if param == "model" else "adapter"
        raise ModelNotFound(f"The {kind} {name!r} does not exist; GET /v1/models lists what does.", param=param)

    def _is_visible(self, name: str) -> bool:
        return name in self.engine.model_names or name in RESERVED_NAMES or self.caller.may_use(name)

    def _check_defaults(self, modalities: Collection[str], model: str | None, lora: str | None) -> None:
        """Raise `PermissionDenied` where an adapter would answer by itself that does not exist for this caller."""
        is_explicit = lora not in (None, AUTO) or (model is not None and model not in self.engine.model_names)
        if self.caller.sees_all or is_explicit:
            return
        for modality, name in self.engine.default_mm_loras.items():
            if modality in modalities and not self.caller.may_use(name):
                raise PermissionDenied(
                    f"Prompts with {modality} are answered by an adapter that this key may not use; name one that it may, "
                    'or send lora: "none".',
                    param="lora",
                )

    def check_token_ids(self, token_ids: Sequence[int] | Mapping[int, float] | tuple[()], param: str) -> None:
        """Raise `InvalidRequest` where a token id is not in the model's vocabulary."""
        if len(token_ids) > _MAX_TOKEN_IDS:
            raise InvalidRequest(
                f"{param} holds {len(token_ids)} token ids; no model's context is that long.", param=param
            )
        vocabulary = self.engine.num_token_ids
        outside = next((token for token in token_ids if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise InvalidRequest(
                f"{param} holds the token id {outside}, but the vocabulary has ids 0 to {vocabulary - 1}.", param=param
            )

    def check_model(self, model: str | None) -> None:
        """Raise `ModelNotFound` unless `model` is None or names the base model or an adapter."""
        self._check_visible(model, "model")
        if model is not None and model not in self.engine.model_names and not self.engine.adapters.contains(model):
            raise ModelNotFound(f"The model {model!r} does not exist; GET /v1/models lists what does.", param="model")

    async def find_model(self, model: str | None) -> None:
        """`check_model`, once an adapter that only a source knows is listed; raises what `Engine.find_adapters` does."""
        await self.engine.find_adapters(model)
        self.check_model(model)

    async def tokenize(self, prompt: Prompt, model: str | None) -> list[int]:
        """Token ids [P] of a prompt as the model would see it."""
        return await asyncio.to_thread(self.engine.tokenize, prompt, model)

    async def tokenizer(self, model: str | None) -> Any:
        """The tokenizer of a model's requests; an adapter may bring its own."""
        return (await asyncio.to_thread(self.engine.text_of, model)).tokenizer

    def stats(self) -> EngineStats:
        """What the engine is doing."""
        return self.engine.stats()

    def readiness(self) -> str:
        """`ready`, or why a request would be refused now: `stopping` or `busy`."""
        if not self.engine.stats().is_alive:
            return "stopping"
        return "busy" if self._admission.is_full else "ready"

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer)

    def token_texts(self, answer: Answer) -> TokenTexts:
        """Texts and bytes of single tokens of an answer, for log probabilities."""
        is_own = answer.tokenizer is not None and answer.tokenizer is not self.engine.tokenizer
        return TokenTexts(answer.tokenizer) if is_own else self._root._token_texts

    def is_admin(self, authorization: str | None) -> bool:
        """Whether a request with this `Authorization` header may change adapters, as far as its credential goes."""
        return self.policy.role_of(authorization) is Role.ADMIN

    # Adapters

    @property
    def adapters(self) -> AdapterManager:
        """The adapter manager."""
        return self.engine.adapters

    def require_updates(self) -> None:
        """Raise `RuntimeUpdatingOff` unless adapters may be changed while the server runs."""
        if not self.engine.config.enable_lora:
            raise InvalidRequest("This server was started with --no-enable-lora and serves no adapters.")
        if not self.settings.allow_runtime_lora_updating:
            raise RuntimeUpdatingOff(
                "Adapters cannot be changed while this server runs; start it with --allow-runtime-lora-updating."
            )

    async def _manage(self, work: Callable[Params, T], *args: Params.args, **kwargs: Params.kwargs) -> T:
        """Run a call of the manager that blocks for moments only."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))

    async def _change(
        self, action: str, name: str, work: Callable[Params, T], *args: Params.args, **kwargs: Params.kwargs
    ) -> T:
        """Run a call of the manager that may read files for a name; those who wait for the name's turn hold no thread."""
        with self._audit.change(self.caller.name, action, name):
            async with self._turns.hold(name):
                return await asyncio.get_running_loop().run_in_executor(self._load_pool, partial(work, *args, **kwargs))

    async def list_adapters(self) -> list[AdapterInfo]:
        """Every adapter that has a name, and exists for the caller."""
        return [info for info in await self._manage(self.adapters.list) if self.caller.may_use(info.name)]

    def _check_exists(self, name: str) -> None:
        if not self.caller.may_use(name):
            raise AdapterNotFound(f"The model `{name[:200]}` does not exist.", param="model")

    async def get_adapter(self, name: str) -> AdapterInfo:
        """One adapter; raises `AdapterNotFound`."""
        self._check_exists(name)
        return await self._manage(self.adapters.get, name)

    @property
    def default_mm_loras(self) -> dict[str, str]:
        """Modality -> the adapter that answers it by itself, as far as that exists for the caller."""
        defaults = self.engine.default_mm_loras
        return {modality: name for modality, name in defaults.items() if self.caller.may_use(name)}

    def is_on_disk(self, name: str) -> bool:
        """Whether an adapter must be read before it can answer; False for a name that does not exist."""
        return self.adapters.contains(name) and self.adapters.get(name).state == "disk"

    async def prefetch_adapter(self, name: str) -> None:
        """Begin to bring an adapter into memory, for one that will probably be asked for next; nothing for an unknown name."""
        try:
            await self.get_adapter(name)
        except AdapterNotFound:
            return
        self.engine.prefetch(name)

    async def export_adapter(self, name: str) -> Path:
        """A new zip of an adapter's files, which the caller deletes; raises `AdapterNotFound`, or that files are gone."""
        self._check_exists(name)
        return await asyncio.get_running_loop().run_in_executor(self._load_pool, self._export, name)

    def _export(self, name: str) -> Path:
        with tempfile.NamedTemporaryFile(prefix="adapter-", suffix=".zip", delete=False) as target:
            try:
                self.adapters.export(name, target)
            except BaseException:
                Path(target.name).unlink()
                raise
        return Path(target.name)

    async def load_adapter(
        self, name: str, path: str, *, load_inplace: bool = False, base_model_name: str | None = None
    ) -> AdapterInfo:
        """Load an adapter from a folder, hub id or address; raises `AppError`."""
        self.require_updates()
        return await self._change(
            "load", name, self.adapters.load, name, path, load_inplace=load_inplace, base_model_name=base_model_name
        )

    def downloads(self) -> list[DownloadInfo]:
        """Adapters that are being downloaded now."""
        return self.engine.sources.downloads.list()

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away; answers under way end on it. Raises `AdapterNotFound`."""
        self.require_updates()
        with self._audit.change(self.caller.name, "unload", name):
            async with self._turns.hold(name):
                await self._manage(self.adapters.unload, name)

    async def delete_adapter(self, name: str) -> None:
        """Unload an adapter and delete the files of an upload; raises `AdapterNotFound`."""
        self.require_updates()
        with self._audit.change(self.caller.name, "delete", name):
            async with self._turns.hold(name):
                await self._manage(self.adapters.delete, name)

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo:
        """Keep an adapter in CPU memory, or stop doing so; raises `AdapterNotFound`."""
        self.require_updates()
        await self._change("pin" if is_pinned else "unpin", name, self.adapters.pin, name, is_pinned)
        return await self.get_adapter(name)

    async def roll_back_adapter(self, name: str, generation: str) -> AdapterInfo:
        """Point a name to one of its versions; raises `AdapterNotFound`, or why that version cannot be had."""
        self.require_updates()
        return await self._change("roll_back", name, self.adapters.rollback, name, generation)

    async def set_default_for(self, name: str, modalities: Sequence[str]) -> AdapterInfo:
        """Let an adapter answer exactly these modalities by itself; raises `AppError`."""
        self.require_updates()
        return await self._change("set_default", name, self.engine.set_default_for, name, modalities)

    async def adapter_versions(self, name: str) -> list[VersionInfo]:
        """What a name points to and what it can be rolled back to, newest first; raises `AdapterNotFound`."""
        self._check_exists(name)
        return await self._manage(self.adapters.versions, name)

    async def inspect_upload(self, files: UploadFiles) -> UploadReport:
        """Check an upload, try it out, and keep nothing of it."""
        return await asyncio.get_running_loop().run_in_executor(self._load_pool, self.engine.inspect_upload, files)

    async def probe_adapter(self, name: str) -> ProbeReport | None:
        """How much an adapter changes the base model's answers; None where it cannot be tried any more."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._load_pool, self.engine.probe, name)
        except AppError:
            return None

    async def install_upload(self, name: str, files: UploadFiles, *, load_inplace: bool = False) -> AdapterInfo:
        """Store an uploaded adapter and list it; it is there again after a restart. Raises `AppError`."""
        self.require_updates()
        return await self._change("upload", name, self.adapters.install_upload, name, files, load_inplace=load_inplace)

    # Model cards

    async def model_cards(self) -> list[dict[str, Any]]:
        """The base model's cards, one for each of its names, then one for each adapter."""
        return [base_card(self.engine, name) for name in self.engine.model_names] + [
            adapter_card(self.engine, info) for info in await self.list_adapters()
        ]

    async def model_card(self, name: str) -> dict[str, Any]:
        """The card of one model or adapter; raises `ModelNotFound`."""
        if name in self.engine.model_names:
            return base_card(self.engine, name)
        self.check_model(name)
        return adapter_card(self.engine, await self.get_adapter(name))


def now() -> int:
    """Seconds since 1970, for `created` fields."""
    return int(time.time())
