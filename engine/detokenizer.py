"""From token ids to text, piece by piece, and the search for stop strings in that text.

`Detokenizer` owns the rule that a character is never split and that the pieces add up to the tokenizer's own decoding
of all ids. `StopMatcher` owns the rule that nothing of a stop string is shown. Neither knows of requests or batches;
the engine's loop holds one of each for every answer.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class _Backend(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    @property
    def decoder(self) -> Any: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...
    def id_to_token(self, id: int) -> str | None: ...
    def get_added_tokens_decoder(self) -> dict[int, Any]: ...


class FastTokenizer(Protocol):
    """A tokenizer of transformers with a Rust backend."""

    @property
    def backend_tokenizer(self) -> Any: ...


class _Pieces(Protocol):
    """A way to decode a stream of ids: text that is certain now, and the rest at the end."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class DecodingTable:
    """What decoding needs of a tokenizer, worked out once: some have thousands of special tokens."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.backend: _Backend = tokenizer.backend_tokenizer
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.decoder_kinds = _decoder_kinds(self.backend.decoder)
        self._byte_of_character = _byte_of_character()
        self._bytes_of: dict[int, bytes | None] = {}

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token of byte-level BPE stands for; None where the tokenizer does not know the id."""
        try:
            return self._bytes_of[token_id]
        except KeyError:
            found = self._bytes_of[token_id] = self._read_bytes(token_id)
            return found

    def _read_bytes(self, token_id: int) -> bytes | None:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return None
        try:
            return bytes([self._byte_of_character[character] for character in token])
        except KeyError:  # an added token with plain text, such as one with a space
            return token.encode()


class Detokenizer:
    """Decodes one answer's ids as they come.

    The concatenation of all `push` results and of `flush` equals `tokenizer.decode(ids, skip_special_tokens=…,
    clean_up_tokenization_spaces=False)`; no piece ends inside a character. A push costs the same however long the
    answer is. Ids that the tokenizer does not know add no text. `shown_ids` are special tokens that are not skipped.
    """

    def __init__(
        self, table: DecodingTable, *, skip_special_tokens: bool = True, shown_ids: frozenset[int] = frozenset()
    ) -> None:
        self._skipped_ids = table.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        self._pieces: _Pieces
        if table.decoder_kinds == ["ByteLevel"]:
            self._pieces = _ByteLevelPieces(table)
        else:
            self._pieces = _WindowPieces(table.backend, has_byte_tokens="ByteFallback" in table.decoder_kinds)

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that became certain, often the token's, sometimes none."""
        return "" if token_id in self._skipped_ids else self._pieces.push(token_id)

    def flush(self) -> str:
        """Return what was held back, where the ids end inside a character. Call once, at the answer's end."""
        return self._pieces.flush()


class _ByteLevelPieces:
    """GPT-2's byte-level BPE: each character of a token stands for one byte, so a UTF-8 stream decoder is exact."""

    def __init__(self, table: DecodingTable) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token_bytes = self._table.token_bytes(token_id)
        return "" if token_bytes is None else self._utf8.decode(token_bytes)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowPieces:
    """Any other decoder: decode the ids since an anchor with and without the new ones, and emit the difference.

    The anchor is the start of the ids that gave the last piece, never of ids that gave no text: decoders treat the very
    first text differently (they strip its space). Runs of byte tokens (`<0xE4>`) are held until they end, since one
    invalid byte in a run changes how the decoder reads the whole run.
    """

    def __init__(self, backend: _Backend, *, has_byte_tokens: bool) -> None:
        self._backend = backend
        self._has_byte_tokens = has_byte_tokens
        self._window: list[int] = []
        self._num_emitted = 0  # ids at the window's beginning whose text is out

    def push(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return ""
        return self._emit(is_last=False)

    def flush(self) -> str:
        return self._emit(is_last=True)

    def _emit(self, *, is_last: bool) -> str:
        # Specials that are to be skipped never get here, so they need no second look.
        before = self._backend.decode(self._window[: self._num_emitted], skip_special_tokens=False)
        after = self._backend.decode(self._window, skip_special_tokens=False)
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not self._has_byte_tokens and not is_last):
            return ""
        del self._window[: self._num_emitted]
        self._num_emitted = len(self._window)
        return after[len(before) :]


class StopMatcher:
    """Finds the stop string that is completed first and lets nothing of it out.

    Holds back only the longest end of the text that could be the beginning of a stop string. What comes out does not
    depend on how the text is cut into pushes. One Knuth-Morris-Pratt automaton a stop string: linear in the text.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string is refused where parameters are checked"
        self._automata = [_Automaton(stop) for stop in stops]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return the text to show and the stop string that was completed, if one was.

        Of several that are completed by the same character, the longest counts. After a match all text is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        if not text:
            return "", None
        num_pending = 0
        buffered = self._held + text
        for index, character in enumerate(text, start=len(self._held)):
            num_pending = 0
            for automaton in self._automata:
                num_pending = max(num_pending, automaton.step(character))
            complete = [automaton.stop for automaton in self._automata if automaton.is_complete]
            if complete:
                self._matched = max(complete, key=len)
                self._held = ""
                end = index + 1
                return buffered[: end if self._include_stop else end - len(self._matched)], self._matched
        emit_end = len(buffered) - num_pending
        self._held = buffered[emit_end:]
        return buffered[:emit_end], None

    def flush(self) -> str:
        """Return the text that was held back; call when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth-Morris-Pratt: after each character, how many characters of `stop` the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._num_matched = 0
        # _fallback[i]: longest proper prefix of stop that is a suffix of stop[:i + 1].
        self._fallback = [0] * len(stop)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[index] == stop[length]
            self._fallback[index] = length

    @property
    def is_complete(self) -> bool:
        return self._num_matched == len(self.stop)

    def step(self, character: str) -> int:
        while self._num_matched and character != self.stop[self._num_matched]:
            self._num_matched = self._fallback[self._num_matched - 1]
        self._num_matched += character == self.stop[self._num_matched]
        return self._num_matched


def _decoder_kinds(decoder: Any) -> list[str]:
    """The types of a backend's decoder, a sequence flattened: `["Replace", "ByteFallback", "Fuse"]`; none is `[]`."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _byte_of_character() -> dict[str, int]:
    """The inverse of GPT-2's `bytes_to_unicode`: printable Latin-1 stands for itself, the rest follows from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if chr(byte) not in table]
    return table | {chr(0x100 + offset): byte for offset, byte in enumerate(others)}
