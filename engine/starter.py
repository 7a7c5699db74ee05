"""From a caller's prompt to answers under way: who answers, the adapter, the prompt's tokens, the queue.

Blocking work is done on threads of its own or on the caller's; whoever waits for an adapter or its tokenizer in a coroutine
holds none. Owned by `engine/engine`, whose `start`, `start_sync` and `hold` these are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from adapters.generation import GenerationHandle
from engine.adapter_text import AdapterTexts
from engine.answer import Answer
from engine.errors import AppError, EngineClosed
from engine.finder import AdapterFinder
from engine.intake import HeldRoute, Intake, RoutedPrompt, explain_missing
from engine.loop import EngineLoop
from engine.request import Delta, Prompt, SamplingParams
from engine.routing import Route
from engine.state import EngineRequest

logger = logging.getLogger(__name__)

_NUM_THREADS = 16
_CLOSED = "The server is shutting down; try again later."

T = TypeVar("T")


class Starter:
    """Starts answers.

    Args:
        intake: routes and builds prompts.
        finder: looks for adapters that nobody has loaded.
        texts: adapters' tokenizers.
        loop: runs the requests.
        tokenizer: the base model's.
    """

    def __init__(
        self, intake: Intake, finder: AdapterFinder, texts: AdapterTexts, loop: EngineLoop, tokenizer: Any
    ) -> None:
        self._intake = intake
        self._finder = finder
        self._texts = texts
        self._loop = loop
        self._tokenizer = tokenizer
        self._is_closed = False
        # For decoding and prompts; nobody waits for an adapter on them.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="intake")

    def close(self) -> None:
        """Start nothing more."""
        self._is_closed = True
        self._threads.shutdown(wait=False)

    def check_open(self) -> None:
        """Raise `EngineClosed` after `close`."""
        if self._is_closed:
            raise EngineClosed(_CLOSED)

    async def start(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        model: str | None,
        lora: str | None,
        request_id: str | None,
        n: int,
        held: HeldRoute | None,
    ) -> list[Answer]:
        """`Engine.start`."""
        try:
            self.check_open()
            if held is None:
                await self._finder.find(model, lora)
            route = functools.partial(self._intake.route, prompt, sampling, model=model, lora=lora, n=n)
            routed = await asyncio.wrap_future(self._on_thread(route))
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
            job = self._on_thread(functools.partial(self.begin, routed, handle, request_id))
        except BaseException:
            if handle is not None:
                handle.release()
            raise
        if handle is not None:
            job.add_done_callback(lambda _: handle.release())  # Where the job is cancelled before it began.
        answers = await asyncio.wrap_future(job)
        del text
        return answers

    def start_sync(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        model: str | None,
        lora: str | None,
        request_id: str | None,
        n: int,
    ) -> list[Answer]:
        """`Engine.start_sync`."""
        self.check_open()
        self._finder.find_sync(model, lora)
        routed = self._intake.route(prompt, sampling, model=model, lora=lora, n=n)
        future = self._intake.acquire(routed.route)
        try:
            handle = None if future is None else future.result()
        except AppError as error:
            raise explain_missing(error, routed.route) from None
        return self.begin(routed, handle, request_id)

    async def hold(self, modalities: Collection[str], *, model: str | None, lora: str | None) -> HeldRoute:
        """`Engine.hold`."""
        self.check_open()
        await self._finder.find(model, lora)
        choose = functools.partial(self._intake.choose, modalities, model=model, lora=lora)
        route = await asyncio.wrap_future(self._on_thread(choose))
        return HeldRoute(route, await self._claim(route))

    def begin(self, routed: RoutedPrompt, handle: GenerationHandle | None, request_id: str | None) -> list[Answer]:
        """Build the prompt and queue the answers; the handle is taken over."""
        requests = self._intake.build(routed, handle, request_id=request_id)
        prompt = routed.prompt
        answers: list[Answer] = []
        try:
            for index, request in enumerate(requests):
                answer = Answer(request.request_id, request.receipt, request.prompt_token_ids, index)
                answer.tokenizer = self._tokenizer if request.text is None else request.text.tokenizer
                answer.call_parser = request.call_parser
                if getattr(prompt, "is_transcript", False) and _is_silent(request):
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

    def _on_thread(self, work: Callable[[], T]) -> Future[T]:
        try:
            return self._threads.submit(work)
        except RuntimeError:  # The threads were shut down since the caller looked.
            raise EngineClosed(_CLOSED) from None

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
