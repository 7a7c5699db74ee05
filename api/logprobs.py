"""Token ids as clients see them in log probabilities: the text of one token, and its exact bytes.

A byte-level tokeniser cuts characters in pieces; such a token's text has a replacement character, its bytes are exact.
Called by `chat` and `completions`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from engine.request import TokenLogprob

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """What is needed of a Hugging Face fast tokenizer."""

    all_special_ids: Sequence[int]

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The vocabulary's own spelling of a token."""

    def __len__(self) -> int:
        """Size of the vocabulary, added tokens included."""


class TokenTexts:
    """Text and bytes of single tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        spelling = {chr(point): byte for byte, point in enumerate(_byte_letters())}
        # A byte-level vocabulary spells each of the 256 bytes with one letter; a space is the letter "Ġ".
        words = [tokenizer.convert_ids_to_tokens(token) or "" for token in range(min(len(tokenizer), 4096))]
        self._letters = spelling if any("Ġ" in word for word in words) else None

    def raw(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        word = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if token_id in self._special:
            return word.encode()
        if self._letters is not None and all(letter in self._letters for letter in word):
            return bytes(self._letters[letter] for letter in word)
        byte_token = _BYTE_TOKEN.fullmatch(word)
        if byte_token:
            return bytes([int(byte_token[1], 16)])
        return word.replace("\u2581", " ").encode()

    def text(self, token_id: int) -> str:
        """A token's text; where it is part of a character, the replacement character."""
        return self.raw(token_id).decode("utf-8", "replace")

    def chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` object of a chat choice."""
        return {
            "content": [
                {
                    **self._entry(each.token_id, each.logprob),
                    "top_logprobs": [self._entry(*rival) for rival in each.top],
                }
                for each in logprobs
            ],
            "refusal": None,
        }

    def completion(self, logprobs: Sequence[TokenLogprob], text_start: int) -> dict[str, list[Any]]:
        """The `logprobs` object of a completion choice; `text_start` is the first token's place in the text."""
        tokens = [self.text(each.token_id) for each in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(text_start)
            text_start += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [self._rivals(each) for each in logprobs],
            "text_offset": offsets,
        }

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], text: str
    ) -> dict[str, list[Any]]:
        """The same for a prompt that is echoed as `text`: an entry for each of its tokens, with null where none is known."""
        return {
            "tokens": [self.text(token_id) for token_id in token_ids],
            "token_logprobs": [each and each.logprob for each in logprobs],
            "top_logprobs": [each and self._rivals(each) for each in logprobs],
            "text_offset": self._offsets(token_ids, text),
        }

    def _rivals(self, logprob: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the token itself by text; of several with the same text, the likeliest."""
        rivals: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            rivals.setdefault(self.text(token_id), value)
        return rivals

    def _offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """For each token the character of `text` that it begins with, or that its bytes are part of.

        Special tokens that the tokenizer puts before a text are not in it, nor is the space that some put before its first
        word; they take no room.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets, place = list[int](), 0
        for token_id in token_ids:
            offsets.append(min(place, len(text)))
            piece = decoder.decode(self.raw(token_id))
            if not text.startswith(piece, place):
                if token_id in self._special:
                    continue
                if piece.startswith(" ") and text.startswith(piece[1:], place):
                    piece = piece[1:]
            place += len(piece)
        return offsets

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.raw(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


@lru_cache(maxsize=1)
def _byte_letters() -> tuple[int, ...]:
    """The code point by which a byte-level vocabulary spells each byte (the table of GPT-2's tokeniser)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return tuple(byte if byte in plain else 256 + others.index(byte) for byte in range(256))
