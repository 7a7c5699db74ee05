"""How two texts differ, word by word: what was added, what is missing, and the word error rate.

Pure functions on strings; knows nothing of answers. Called by the tabs that show answers side by side.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from itertools import groupby
from typing import Literal

import numpy as np

Kind = Literal["same", "added", "removed"]
# Words of scripts without spaces are single characters.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_PIECE = re.compile(rf"(?:[{_CJK}]|[^\s{_CJK}]+|^)\s*")
_TAGS: dict[Kind, tuple[str, str]] = {"same": ("", ""), "added": ("<ins>", "</ins>"), "removed": ("<del>", "</del>")}


@dataclass(frozen=True)
class WordErrors:
    """Edits (substitutions, insertions, deletions) that lead from a reference to what was heard, and its words."""

    num_edits: int
    num_words: int

    @property
    def rate(self) -> float:
        """Word error rate: edits by words of the reference; over 1 where much was made up."""
        return self.num_edits / self.num_words if self.num_words else float(self.num_edits > 0)


def compare(base: str, other: str, *, folds: bool = False) -> list[tuple[Kind, str]]:
    """`other` in stretches, with those of `base` that it lacks, word by word; spaces do not count.

    With `folds`, capitals and punctuation do not count either, as in error rates.
    """
    return compare_parts(base, [other], folds=folds)[0]


def compare_parts(base: str, parts: Sequence[str], *, folds: bool = False) -> list[list[tuple[Kind, str]]]:
    """Like `compare` with the parts one after another, but a list of stretches for each part."""
    old, by_part = _PIECE.findall(base), [_PIECE.findall(part) for part in parts]
    new = [piece for pieces in by_part for piece in pieces]
    owners = [place for place, pieces in enumerate(by_part) for _ in pieces]
    key = _folded if folds else str.strip
    matcher = SequenceMatcher(None, [key(piece) for piece in old], [key(piece) for piece in new], autojunk=False)
    stretches: list[list[tuple[Kind, str]]] = [[] for _ in parts]
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        removed = "".join(old[i1:i2])
        if tag != "equal" and removed.strip() and parts:
            # Words that are missing belong to the part in which the next word stands.
            owner = owners[j1] if j1 < len(owners) else len(parts) - 1
            stretches[owner].append(("removed", removed))
        for place, run in groupby(range(j1, j2), key=lambda index: owners[index]):
            added = "".join(new[index] for index in run)
            stretches[place].append(("added" if tag != "equal" and added.strip() else "same", added))
    return stretches


def _folded(piece: str) -> str:
    return " ".join(words_of(piece))


def marked_html(base: str, other: str, *, shows_removed: bool) -> str:
    """`other` as escaped HTML: what `base` lacks in `<ins>`, and what only `base` has in `<del>` if wanted."""
    return stretches_html([(kind, piece) for kind, piece in compare(base, other) if shows_removed or kind != "removed"])


def stretches_html(stretches: Sequence[tuple[Kind, str]]) -> str:
    """Stretches as escaped HTML."""
    return "".join(_tagged(kind, piece) for kind, piece in stretches)


def _tagged(kind: Kind, piece: str) -> str:
    """The space after a mark stays outside it."""
    words = piece.rstrip()
    space = piece[len(words) :] or (" " if kind == "removed" else "")
    return f"{_TAGS[kind][0]}{escape(words)}{_TAGS[kind][1]}{space}"


def words_of(text: str) -> list[str]:
    """Words as error rates count them: lower case, without punctuation; each Han or kana character is one."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    plain = re.sub(r"[^\w\s'’]|_", " ", folded).replace("’", "'")
    return re.findall(rf"[{_CJK}]|[^\s{_CJK}]+", plain)


def word_errors(reference: str, heard: str) -> WordErrors:
    """Levenshtein distance in words; O(n) NumPy operations on rows as long as `heard`."""
    wanted, got = _numbered(words_of(reference), words_of(heard))
    steps = np.arange(len(got) + 1)
    row = steps
    for index, word in enumerate(wanted, start=1):
        best = np.minimum(row[1:] + 1, row[:-1] + (got != word))
        # An insertion costs one more than its left neighbour: a running minimum on a slope of one.
        row = np.minimum.accumulate(np.concatenate([[index], best]) - steps) + steps
    return WordErrors(int(row[-1]), len(wanted))


def _numbered(*texts: Sequence[str]) -> list[np.ndarray]:
    numbers: dict[str, int] = {}
    return [np.array([numbers.setdefault(word, len(numbers)) for word in text], dtype=np.int64) for text in texts]
