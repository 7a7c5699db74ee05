"""Answers that must be JSON of a schema: which tokens may come next, by a grammar library (llguidance).

Owns compiled tokenizers and the state of one answer's grammar. Compiling happens on the intake's threads; on the engine
thread a token costs one advance of the grammar and one mask. The library is imported when the first such request comes.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from engine.adapter_text import TextSide

MAX_SCHEMA_CHARS = 200_000
# Room for indentation, and no more: a model that likes white space must come to an end.
_WHITE_SPACE = r"[ \n\t]{0,16}"


class Guide:
    """The grammar of one answer, at the place that the answer has reached.

    Args:
        matcher: llguidance's.
        eos_token_ids: what may end the answer; all that is allowed once the grammar can go no further.
    """

    def __init__(self, matcher: Any, eos_token_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_seen = 0

    def fork(self) -> Guide:
        """The same grammar at its beginning, for another answer."""
        assert self._num_seen == 0, "a guide under way is not shared"
        return Guide(self._matcher.deep_copy(), self._eos_token_ids)

    def allowed(self, output_token_ids: Sequence[int]) -> bytes:
        """A bit for each token id, the lowest of a byte first: whether it may follow these tokens of the answer."""
        self._matcher.consume_tokens(list(output_token_ids[self._num_seen :]))
        self._num_seen = len(output_token_ids)
        if not self._matcher.is_error():
            mask: bytes = self._matcher.compute_bitmask()
            if any(mask):
                return mask
        bits = bytearray(max(self._eos_token_ids) // 8 + 1)
        for token_id in self._eos_token_ids:
            bits[token_id // 8] |= 1 << token_id % 8
        return bytes(bits)


def apply_guides(logits: Tensor, picked: Sequence[int], masks: Sequence[bytes]) -> None:
    """Put minus infinity on all that is not allowed, in rows `picked` of logits [R, V]; ids past a mask are not allowed."""
    vocab_size = logits.shape[1]
    packed = torch.zeros(len(masks), -(-vocab_size // 8), dtype=torch.uint8)
    for row, mask in zip(packed, masks, strict=True):
        length = min(len(mask), row.shape[0])
        row[:length] = torch.frombuffer(bytearray(mask[:length]), dtype=torch.uint8)
    packed = packed.to(logits.device)
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    is_allowed = bits.flatten(1)[:, :vocab_size].bool()
    index = torch.tensor(list(picked), device=logits.device)
    logits[index] = logits[index].masked_fill(~is_allowed, -torch.inf)


class GuideCompiler:
    """Makes guides for an engine's tokenizers; each is prepared once, which takes up to a second. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokenizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def compile(self, json_schema: str, text: TextSide) -> Guide:
        """A guide to JSON of the schema.

        Raises:
            InvalidRequest: the schema is wrong or too large, or this tokenizer or installation cannot be guided.
        """
        if len(json_schema) > MAX_SCHEMA_CHARS:
            raise InvalidRequest(
                f"json_schema has {len(json_schema)} characters, but may have {MAX_SCHEMA_CHARS} at most.",
                param="json_schema",
            )
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise InvalidRequest(
                "json_schema needs the package llguidance; install it on the server.", param="json_schema"
            ) from None
        tokenizer = self._tokenizer(text)
        try:
            grammar = LLMatcher.grammar_from_json_schema(json_schema, defaults={"whitespace_pattern": _WHITE_SPACE})
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            fault = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            fault = str(error)
        if fault:
            reason = fault.splitlines()[0].rstrip(".")[:300]
            raise InvalidRequest(f"json_schema cannot be served: {reason}.", param="json_schema")
        return Guide(matcher, text.eos_token_ids)

    def _tokenizer(self, text: TextSide) -> Any:
        from llguidance import LLTokenizer

        with self._lock:
            made = self._tokenizers.get(text.tokenizer)
            if made is None:
                backend = copy.copy(getattr(text.tokenizer, "backend_tokenizer", None))
                if backend is None or not text.eos_token_ids:
                    raise InvalidRequest("json_schema is not served with this model's tokenizer.", param="json_schema")
                backend.no_padding()
                backend.no_truncation()
                num_ids = max(text.vocab_size, len(text.tokenizer))
                try:
                    made = LLTokenizer(backend.to_str(), n_vocab=num_ids, eos_token=sorted(text.eos_token_ids))
                except ValueError as error:
                    raise InvalidRequest(
                        f"json_schema is not served with this model's tokenizer ({error}).", param="json_schema"
                    ) from None
                self._tokenizers[text.tokenizer] = made
            return made
