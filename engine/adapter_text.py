"""The text side of adapters that bring a tokenizer: prompts, decoding and end tokens in the adapter's own vocabulary.

An adapter that adds tokens is trained with a tokenizer that knows them, and perhaps with a chat template of its own. Its
requests use both. Tokenizers are made from the bytes that were loaded with the adapter and kept for the few that were used
last. Called by `engine/intake` on callers' threads, and by `adapters` through the model's surface when it checks files.

V vocabulary of the base.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.detokenizer import DecodingTable
from engine.errors import InvalidRequest
from engine.prompt import PromptBuilder
from engine.tokenizer import eos_token_ids, load_like

if TYPE_CHECKING:
    from adapters.generation import Generation
    from engine.frontend import Frontend
    from engine.model import BaseModel

_MAX_KEPT = 8
"""Tokenizers in memory; one of 128,000 tokens takes about 100 MB and a second to make."""


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
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, TextSide] = OrderedDict()

    def of(self, generation: Generation | None) -> TextSide:
        """The text side of requests on a generation; None is the base model."""
        if generation is None or not generation.extras.tokenizer_files:
            return self.base
        return self._get(generation.extras.tokenizer_files, generation.extras.num_added_tokens)

    def why_unfit(self, files: Mapping[str, bytes], num_added: int) -> str | None:
        """Why an adapter's tokenizer cannot be used with this model, as the end of a sentence; None where it can."""
        try:
            tokenizer = self._get(files, num_added).tokenizer
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

    def _get(self, files: Mapping[str, bytes], num_added: int) -> TextSide:
        key = _digest(files, num_added)
        with self._lock:
            side = self._kept.get(key)
            if side is None:
                side = self._kept[key] = self._make(files, num_added)
            self._kept.move_to_end(key)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            return side

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


def _digest(files: Mapping[str, bytes], num_added: int) -> str:
    digest = hashlib.sha256(str(num_added).encode())
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])} ".encode())
        digest.update(files[name])
    return digest.hexdigest()
