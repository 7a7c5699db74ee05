"""Answers that must be JSON of a schema, or calls of functions: which tokens may come next, by a grammar library (llguidance).

Owns compiled tokenizers and the state of one answer's grammar. Compiling happens on the intake's threads; on the engine
thread a token costs one advance of the grammar and one mask. The library is imported when the first such request comes.
"""

from __future__ import annotations

import copy
import json
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.tools.format import ToolFormat
from engine.tools.grammar import CallGrammar
from engine.tools.spec import ToolUse

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
        _check_size(json_schema, "json_schema")
        tokenizer = self._tokenizer(text, "json_schema")
        return Guide(_matcher(tokenizer, _json_grammar(json_schema), "json_schema"), text.eos_token_ids)

    def compile_calls(self, use: ToolUse, tool_format: ToolFormat, answer_schema: str | None, text: TextSide) -> Guide:
        """A guide to calls of functions, or where none is required to text or JSON of `answer_schema` that may hold some.

        Raises:
            InvalidRequest: as `compile`; `param` names the function whose schema is at fault.
        """
        tokenizer = self._tokenizer(text, "tools")
        added = text.tokenizer.added_tokens_decoder
        special = {token.content: id_ for id_, token in added.items() if tokenizer.is_special_token(id_)}
        mark_ids = {mark: special[mark] for mark in tool_format.marks if mark in special}
        others = set(special.values()) - set(mark_ids.values()) - text.eos_token_ids
        grammar = CallGrammar(tool_format, mark_ids, others, _WHITE_SPACE).build(use, answer_schema)
        _check_size(grammar, "tools")
        try:
            matcher = _matcher(tokenizer, grammar, "tools")
        except InvalidRequest:
            # Whose fault it is, if it is one schema's.
            for place, function in enumerate(use.functions):
                if not use.holds(function):
                    continue
                _matcher(tokenizer, _json_grammar(json.dumps(function.schema)), f"tools[{place}].function.parameters")
            if answer_schema is not None:
                _matcher(tokenizer, _json_grammar(answer_schema), "json_schema")
            raise
        return Guide(matcher, text.eos_token_ids)

    def _tokenizer(self, text: TextSide, param: str) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise InvalidRequest(
                f"{param} needs the package llguidance; install it on the server.", param=param
            ) from None

        with self._lock:
            made = self._tokenizers.get(text.tokenizer)
            if made is None:
                backend = copy.copy(getattr(text.tokenizer, "backend_tokenizer", None))
                if backend is None or not text.eos_token_ids:
                    raise InvalidRequest(f"{param} is not served with this model's tokenizer.", param=param)
                backend.no_padding()
                backend.no_truncation()
                num_ids = max(text.vocab_size, len(text.tokenizer))
                try:
                    made = LLTokenizer(backend.to_str(), n_vocab=num_ids, eos_token=sorted(text.eos_token_ids))
                except ValueError as error:
                    raise InvalidRequest(
                        f"{param} is not served with this model's tokenizer ({error}).", param=param
                    ) from None
                self._tokenizers[text.tokenizer] = made
            return made


def _check_size(text: str, param: str) -> None:
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(
            f"{param} has {len(text)} characters, but may have {MAX_SCHEMA_CHARS} at most.", param=param
        )


def _json_grammar(json_schema: str) -> Callable[[], str]:
    from llguidance import LLMatcher

    return lambda: LLMatcher.grammar_from_json_schema(json_schema, defaults={"whitespace_pattern": _WHITE_SPACE})


def _matcher(tokenizer: Any, grammar: str | Callable[[], str], param: str) -> Any:
    """The matcher of a grammar; raises `InvalidRequest` where it is wrong."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, grammar if isinstance(grammar, str) else grammar(), log_level=0)
        fault = matcher.get_error() if matcher.is_error() else ""
    except ValueError as error:
        fault = str(error)
    if fault:
        reason = fault.splitlines()[0].rstrip(".")[:300]
        raise InvalidRequest(f"{param} cannot be served: {reason}.", param=param)
    return matcher
