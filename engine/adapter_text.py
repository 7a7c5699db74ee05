"""The text side of adapters that bring a tokenizer: prompts, decoding and end tokens in the adapter's own vocabulary.

An adapter that adds tokens is trained with a tokenizer that knows them, and perhaps with a chat template of its own. Its
requests use both. Tokenizers are made from the bytes that were loaded with the adapter; they stay while a request uses them,
and beyond that for the few that were used last. Asked by `engine/intake`, and by `adapters` through the model's surface when
it checks files.

Making one holds the interpreter's lock almost throughout: the tokenizers library parses without letting go of it. So one
thread makes them all, one after the other, and the engine's thread gets its turn in between; who waits for one holds no
thread where it asks by `soon`, and what is at hand is given at once.

V vocabulary of the base.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from engine.detokenizer import DecodingTable
from engine.errors import InvalidRequest
from engine.prompt import PromptBuilder
from engine.tokenizer import eos_token_ids, load_like

if TYPE_CHECKING:
    from adapters.generation import Generation
    from engine.frontend import Frontend
    from engine.model import BaseModel

_MAX_KEPT = 8
"""Tokenizers in memory beside those in use; one of 128,000 tokens takes about 100 MB and a second to make."""


@dataclass(frozen=True)
class TextSide:
    """What turns a request's text into tokens and back.

    Attributes:
        tokenizer: a fast tokenizer of transformers.
        builder: builds prompts with it.
        decoding: decodes answers with it.
        eos_token_ids: tokens that end an answer.
        vocab_size: token ids that a request may use are below this.
    """

    tokenizer: Any
    builder: PromptBuilder
    decoding: DecodingTable
    eos_token_ids: frozenset[int]
    vocab_size: int


class AdapterTexts:
    """Text sides by adapter; the base's for all that bring no tokenizer.

    Args:
        base: the base model's.
        chat_template: the base's, for adapters whose tokenizer has none.
        frontends: one for each modality that the model takes.
    """

    def __init__(self, base: TextSide, chat_template: str | None, frontends: Sequence[Frontend]) -> None:
        self.base = base
        self._chat_template = chat_template
        self._frontends = frontends
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-text")
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, TextSide] = OrderedDict()
        self._alive: WeakValueDictionary[str, TextSide] = WeakValueDictionary()
        self._flights: dict[str, list[Future[TextSide]]] = {}
        self._keys: WeakKeyDictionary[Generation, str] = WeakKeyDictionary()

    def of(self, generation: Generation | None) -> TextSide:
        """The text side of requests on a generation; None is the base model. Blocking where it must be made.

        Raises:
            InvalidRequest: its tokenizer cannot be read.
        """
        return self.soon(generation).result()

    def soon(self, generation: Generation | None) -> Future[TextSide]:
        """What `of` gives, as a future that is done already where it is at hand. Never blocks."""
        if generation is None or not generation.extras.tokenizer_files:
            return _done(self.base)
        files, num_added = generation.extras.tokenizer_files, generation.extras.num_added_tokens
        key = self._keys.get(generation)
        if key is None:
            key = self._keys[generation] = _digest(files, num_added)
        return self._get(key, files, num_added)

    def close(self) -> None:
        """Take no more threads; whoever asks later makes a tokenizer in person."""
        self._thread.shutdown(wait=False)

    def why_unfit(self, files: Mapping[str, bytes], num_added: int) -> str | None:
        """Why an adapter's tokenizer cannot be used with this model, as the end of a sentence; None where it can."""
        try:
            tokenizer = self._get(_digest(files, num_added), files, num_added).result().tokenizer
        except InvalidRequest:
            return "its tokenizer cannot be read; save it again beside the adapter with save_pretrained"
        own, base = tokenizer.get_vocab(), self.base.tokenizer.get_vocab()
        moved = next((token for token, token_id in base.items() if own.get(token) != token_id), None)
        if moved is not None:
            return f"its tokenizer gives the base model's token {moved!r} another id; it belongs to another base model"
        outside = {token: token_id for token, token_id in own.items() if token_id >= self.base.vocab_size + num_added}
        if outside:
            return (
                f"its tokenizer has {len(outside)} tokens without a row in the adapter's files, the first is "
                f"{min(outside, key=outside.__getitem__)!r}; save the adapter with save_embedding_layers=True"
            )
        return None

    def _get(self, key: str, files: Mapping[str, bytes], num_added: int) -> Future[TextSide]:
        with self._lock:
            side = self._alive.get(key)
            if side is not None:
                self._keep(key, side)
                return _done(side)
            future: Future[TextSide] = Future()
            waiting = self._flights.setdefault(key, [])
            waiting.append(future)
            if len(waiting) > 1:
                return future
        try:
            self._thread.submit(self._fly, key, files, num_added)
        except RuntimeError:  # Shut down since.
            self._fly(key, files, num_added)
        return future

    def _fly(self, key: str, files: Mapping[str, bytes], num_added: int) -> None:
        """Make a text side for all who wait for it."""
        try:
            side = self._make(files, num_added)
        except BaseException as error:  # noqa: BLE001 - thread border: it is every waiter's answer
            with self._lock:
                waiting = self._flights.pop(key)
            for future in waiting:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            return
        with self._lock:
            self._alive[key] = side
            self._keep(key, side)
            waiting = self._flights.pop(key)
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(side)

    def _keep(self, key: str, side: TextSide) -> None:
        """With the lock held: note that a text side was used last."""
        self._kept[key] = side
        self._kept.move_to_end(key)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)

    def _make(self, files: Mapping[str, bytes], num_added: int) -> TextSide:
        vocab_size, eos_token_ids = self.base.vocab_size + num_added, self.base.eos_token_ids
        with tempfile.TemporaryDirectory(prefix="switchboard-") as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            tokenizer = load_like(self.base.tokenizer, folder)
        if tokenizer.eos_token_id is not None:
            eos_token_ids |= {tokenizer.eos_token_id}
        template = tokenizer.chat_template or self._chat_template
        builder = PromptBuilder(tokenizer, template, self._frontends, vocab_size)
        return TextSide(tokenizer, builder, DecodingTable(tokenizer), eos_token_ids, vocab_size)


def base_text(base: BaseModel, tokenizer: Any, chat_template: str | None, frontends: Sequence[Frontend]) -> TextSide:
    """The text side of the base model."""
    builder = PromptBuilder(tokenizer, chat_template, frontends, base.vocab_size)
    return TextSide(tokenizer, builder, DecodingTable(tokenizer), eos_token_ids(base.model, tokenizer), base.vocab_size)


def _done(side: TextSide) -> Future[TextSide]:
    future: Future[TextSide] = Future()
    future.set_result(side)
    return future


def _digest(files: Mapping[str, bytes], num_added: int) -> str:
    digest = hashlib.sha256(str(num_added).encode())
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])} ".encode())
        digest.update(files[name])
    return digest.hexdigest()
