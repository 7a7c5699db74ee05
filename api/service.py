"""The one layer that HTTP routes and the browser app call: prompts in, answers out, adapters managed.

Owns limits that every way in must obey (queue length, time, token ids in the vocabulary, what a caller may ask) and the
model cards; `adapter_service` is the part of it that changes adapters. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cached_property
from typing import TYPE_CHECKING, Any

from api.adapter_service import AdapterService
from api.admission import Admission
from api.auth import Policy
from api.cards import adapter_card, base_card
from api.errors import PermissionDenied
from api.logprobs import TokenTexts
from api.media_urls import MediaUrls
from api.metrics import Metrics
from api.settings import ServerSettings
from api.tenants import Caller, Role
from api.transcript import TranscriptEvent, transcribe_recording
from engine.errors import InvalidRequest, ModelNotFound
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
    from engine.answer import Answer
    from engine.engine import Engine, EngineStats
    from engine.intake import HeldRoute
    from engine.tools.spec import ToolUse

RECORDING_THREADS = 4  # decoding an hour takes memory
_MAX_TOKEN_IDS = 2_000_000


class Service(AdapterService):
    """An engine and the rules of this server.

    Attributes:
        engine: the engine that answers.
        settings: the server's settings, resolved.
        policy: roles of credentials; whoever lets people change adapters asks it first.
        media_urls: fetches media that requests give by address, where that is allowed.
        metrics: what `/metrics` shows.
        caller: for whom this view of the service works; see `for_caller`.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        super().__init__(engine, settings)
        self.policy = Policy(settings)
        self._root = self
        self._admission = Admission(engine, settings)
        self.media_urls = MediaUrls(settings.allowed_media_domains)
        self.metrics = Metrics(engine, lambda: self._admission.num_waiting)
        self._recording_pool = ThreadPoolExecutor(RECORDING_THREADS, thread_name_prefix="recordings")

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
        is_let_in: bool = False,
    ) -> list[Answer]:
        """Start `n` answers to a raw prompt; `is_let_in` as in `Admission.start`."""
        return await self._start(
            "completions",
            prompt,
            sampling,
            model=model,
            lora=lora,
            n=n,
            request_id=request_id,
            is_let_in=is_let_in,
        )

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
        deadline = self._admission.deadline()
        held = await self._admission.in_time(self.engine.hold({"audio"}, model=model, lora=lora), deadline)
        try:
            reading = asyncio.get_running_loop().run_in_executor(
                self._recording_pool, self.engine.recordings.read, audio
            )
            recording = await self._admission.in_time(reading, deadline)

            async def start_piece(index: int) -> Answer:
                part = recording.part(recording.pieces[index], audio.param)
                chat = self.engine.transcription_prompt(part, language=language, prompt=prompt)
                piece_id = base_id if len(recording.pieces) == 1 else f"{base_id}-{index}"
                [answer] = await self._start(
                    "transcriptions", chat, chosen, n=1, request_id=piece_id, held=held, deadline=deadline
                )
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
        deadline: float | None = None,
        is_let_in: bool = False,
    ) -> list[Answer]:
        self._check(sampling)
        if isinstance(prompt, TokenPrompt):
            self.check_token_ids(prompt.token_ids, "prompt")
        if held is None:  # else this is a piece of a request that was checked as a whole
            self._check_caller(modalities_of(prompt), model, lora)
        answers = await self._admission.start(
            prompt,
            sampling,
            model=model,
            lora=lora,
            n=n,
            request_id=request_id,
            held=held,
            deadline=deadline,
            is_let_in=is_let_in,
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
        self._check_visible(model, "model")  # first: what is hidden from a key is not looked for on its behalf
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
