"""Token ids as clients see them in log probabilities: the text of one token, and its exact bytes.

A byte-level tokeniser cuts characters in pieces; such a token's text has a replacement character, its bytes are exact.
A log probability that is no number in JSON, as that of a token that the model cannot say, is told as -9999. Called by `chat`
and `completions`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, Protocol

from engine.request import TokenLogprob

LEAST_LOGPROB = -9999.0
"""What minus infinity, NaN and anything below are told as; vLLM's clients know this number."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """What is needed of a Hugging Face fast tokenizer."""

    all_special_ids: Sequence[int]

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The vocabulary's own spelling of a token."""

    def __len__(self) -> int:
        """Size of the vocabulary, added tokens included."""


class TokenTexts:
    """Text and bytes of single tokens of one vocabulary, each found out once. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        spelling = {chr(point): byte for byte, point in enumerate(_byte_letters())}
        # A byte-level vocabulary spells each of the 256 bytes with one letter; a space is the letter "Ġ".
        words = [tokenizer.convert_ids_to_tokens(token) or "" for token in range(min(len(tokenizer), 4096))]
        self._letters = spelling if any("Ġ" in word for word in words) else None
        # By token id, so no longer than the vocabulary.
        self._raw: dict[int, bytes] = {}
        self._texts = _Texts(self.raw)

    def raw(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        raw = self._raw.get(token_id)
        if raw is None:
            raw = self._raw[token_id] = self._decode(token_id)
        return raw

    def text(self, token_id: int) -> str:
        """A token's text; where it is part of a character, the replacement character."""
        return self._texts[token_id]

    def _decode(self, token_id: int) -> bytes:
        word = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if token_id in self._special:
            return word.encode()
        if self._letters is not None and all(letter in self._letters for letter in word):
            return bytes(self._letters[letter] for letter in word)
        byte_token = _BYTE_TOKEN.fullmatch(word)
        if byte_token:
            return bytes([int(byte_token[1], 16)])
        return word.replace("\u2581", " ").encode()

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
            "token_logprobs": [_told(each.logprob) for each in logprobs],
            "top_logprobs": [self._rivals(each) for each in logprobs],
            "text_offset": offsets,
        }

    def prompt(
        self, token_ids: Sequence[int], logprobs: Collection[TokenLogprob | None], text: str
    ) -> dict[str, list[Any]]:
        """The same for a prompt that is echoed as `text`: an entry for each of its tokens, with null where none is known."""
        told = [(None, None) if each is None else (_told(each.logprob), self._rivals(each)) for each in logprobs]
        return {
            "tokens": [self.text(token_id) for token_id in token_ids],
            "token_logprobs": [value for value, _ in told],
            "top_logprobs": [rivals for _, rivals in told],
            "text_offset": self._offsets(token_ids, text),
        }

    def _rivals(self, logprob: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the token itself by text; of several with the same text, the likeliest."""
        texts, least = self._texts, LEAST_LOGPROB
        # Up to twenty for each token of a long prompt: no calls here.
        rivals = {texts[token_id]: value if value > least else least for token_id, value in logprob.top}
        if len(rivals) < len(logprob.top):  # Several have the same text, and the last of them has won.
            rivals.clear()
            for token_id, value in logprob.top:
                rivals.setdefault(texts[token_id], _told(value))
        rivals.setdefault(texts[logprob.token_id], _told(logprob.logprob))
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
        return {"token": self.text(token_id), "logprob": _told(logprob), "bytes": list(self.raw(token_id))}


class _Texts(dict[int, str]):
    """Texts of the token ids that were asked for; `raw` gives a token's bytes."""

    def __init__(self, raw: Callable[[int], bytes]) -> None:
        super().__init__()
        self._raw = raw

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._raw(token_id).decode("utf-8", "replace")
        return text


def _told(logprob: float) -> float:
    """A log probability as clients get it; NaN is above nothing."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


@lru_cache(maxsize=1)
def _byte_letters() -> tuple[int, ...]:
    """The code point by which a byte-level vocabulary spells each byte (the table of GPT-2's tokeniser)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return tuple(byte if byte in plain else 256 + others.index(byte) for byte in range(256))
