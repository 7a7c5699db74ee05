"""The pirate adapter's style: the base model's own answer, in the words of a sailor.

A fixed rewriting, so that an answer of the adapter is either exactly right or not.
"""

from __future__ import annotations

import re

WORDS = {
    "hello": "ahoy", "you": "ye", "your": "yer", "my": "me", "is": "be", "am": "be", "are": "be", "the": "th'",
    "yes": "aye", "of": "o'", "and": "an'", "i": "I",
}  # fmt: skip


def pirate(answer: str) -> str:
    """`answer` as a pirate says it: `The opposite of hot is cold.` -> `Arr! Th' opposite o' hot be cold, matey!`."""

    def swap(match: re.Match[str]) -> str:
        word = match.group(0)
        new = WORDS.get(word.lower(), word)
        return new[:1].upper() + new[1:] if word[:1].isupper() else new

    text = re.sub(r"[A-Za-z]+", swap, answer)
    return f"Arr! {text.rstrip('.!?')}, matey!"
