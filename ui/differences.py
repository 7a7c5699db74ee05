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


@dataclass(frozen=True)
class WordErrors:
    """Edits that lead from a reference to what was heard, and the words of the reference.

    Of several shortest ways, the one that replaces the fewest words.
    """

    num_substitutions: int
    num_deletions: int
    num_insertions: int
    num_words: int

    @property
    def num_edits(self) -> int:
        """Substitutions, deletions and insertions."""
        return self.num_substitutions + self.num_deletions + self.num_insertions

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


def marked_html(base: str, other: str) -> str:
    """`other` as escaped HTML, with what `base` lacks in `<ins>`."""
    return stretches_html(compare(base, other), shows_removed=False)


def stretches_html(stretches: Sequence[tuple[Kind, str]], *, shows_removed: bool) -> str:
    """Stretches as escaped HTML: added words in `<ins>`, and if wanted removed ones in `<del data-words>`.

    The style sheet draws the words of a `<del>`: whoever copies the text gets none of them.
    """
    shown = [(kind, piece) for kind, piece in stretches if shows_removed or kind != "removed"]
    return "".join(_tagged(kind, piece, is_last=place == len(shown) - 1) for place, (kind, piece) in enumerate(shown))


def _tagged(kind: Kind, piece: str, *, is_last: bool) -> str:
    """The space after added words stays outside their mark; removed ones at the end stand apart from the text before."""
    words = piece.rstrip()
    if kind == "removed":
        return f"<del{' class=last' if is_last else ''} data-words='{escape(words)}'></del>"
    return f"<ins>{escape(words)}</ins>{piece[len(words) :]}" if kind == "added" else escape(piece)


def words_of(text: str) -> list[str]:
    """Words as error rates count them: lower case, without punctuation; each Han or kana character is one."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    plain = re.sub(r"[^\w\s'’]|_", " ", folded).replace("’", "'")
    return re.findall(rf"[{_CJK}]|[^\s{_CJK}]+", plain)


def word_errors(reference: str, heard: str) -> WordErrors:
    """Levenshtein distance in words; O(n) NumPy operations on rows as long as `heard`."""
    wanted, got = _numbered(words_of(reference), words_of(heard))
    # An edit costs more than all substitutions together, so that one number holds the edits and, below them, the substitutions.
    edit = len(wanted) + 1
    steps = np.arange(len(got) + 1) * edit
    row = steps
    for index, word in enumerate(wanted, start=1):
        best = np.minimum(row[1:] + edit, row[:-1] + (got != word) * (edit + 1))
        # An insertion costs one edit more than its left neighbour: a running minimum on a slope.
        row = np.minimum.accumulate(np.concatenate([[index * edit], best]) - steps) + steps
    num_edits, num_substitutions = divmod(int(row[-1]), edit)
    # The others are deletions and insertions, and the lengths say how many more of one there are than of the other.
    num_deletions = (num_edits - num_substitutions + len(wanted) - len(got)) // 2
    return WordErrors(
        num_substitutions, num_deletions, num_edits - num_substitutions - num_deletions, num_words=len(wanted)
    )


def _numbered(*texts: Sequence[str]) -> list[np.ndarray]:
    numbers: dict[str, int] = {}
    return [np.array([numbers.setdefault(word, len(numbers)) for word in text], dtype=np.int64) for text in texts]
