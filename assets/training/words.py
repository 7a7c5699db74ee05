"""The wide vocabulary: common English words that no other word of it sounds like.

    python -m assets.training.words /usr/share/dict/scowl/english-words.10

makes `words.txt` from a list of Debian's package `scowl`. Words that espeak-ng pronounces as another word of the list or of
the sentences, in either of two accents, are left out: nothing could tell which of the two was said.
"""

from __future__ import annotations

import argparse
import ctypes
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from . import speech, text
from .wide import WORDS_FILE

ACCENTS = ("en-us", "en")
# In the list, but nothing that a demo should say, or letters that are spelled out rather than read.
_LEFT_OUT = frozenset(
    "ass bitch cock crap cum cums damn dick fuck fucked fucking gay hell nazi piss pissed porn screw sex sexual shit slut "
    "suck sucks whore ascii cpu dos etc faq ftp ibm mhz unix url uucp vax vms www".split()
)
_HEADER = """\
# Common English words, one a line: the level 10 of SCOWL's list english-words without sound-alikes.
# SCOWL is copyright 2000-2018 by Kevin Atkinson. Permission to use, copy, modify, distribute and sell these word lists, the
# associated scripts, the output created from the scripts, and its documentation for any purpose is hereby granted without
# fee, provided that the above copyright notice appears in all copies and that both that copyright notice and this permission
# notice appear in supporting documentation. Kevin Atkinson makes no representations about the suitability of this array for
# any purpose. It is provided "as is" without express or implied warranty.
"""


def select(words: Iterable[str], pronounce: Callable[[str, str], str]) -> list[str]:
    """What of `words` goes into the file: readable, decent, and sounding like no other word in any accent."""
    chosen = {w for w in words if re.fullmatch("[a-z]{3,}", w) and re.search("[aeiouy]", w)} - _LEFT_OUT
    by_sound: dict[tuple[str, str], set[str]] = defaultdict(set)
    for accent in ACCENTS:
        for word in chosen.union(text.VOCABULARY):
            by_sound[accent, pronounce(word, accent)].add(word)
    alike = {word for group in by_sound.values() if len(group) > 1 for word in group}
    return sorted(chosen - alike - text.SOUND_ALIKES)


class Pronounce:
    """espeak-ng's phonemes of a word, without stress."""

    def __init__(self) -> None:
        self._library = speech.espeak_library()
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        self._library.espeak_TextToPhonemes.argtypes = (ctypes.POINTER(ctypes.c_char_p), ctypes.c_int, ctypes.c_int)

    def __call__(self, word: str, accent: str) -> str:
        """Phonemes of `word`; raises `ValueError` where espeak-ng lacks the accent."""
        if self._library.espeak_SetVoiceByName(accent.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {accent!r}")
        rest = ctypes.c_char_p(word.encode())
        phonemes = b""
        while rest.value is not None:
            phonemes += self._library.espeak_TextToPhonemes(ctypes.byref(rest), 1, 0)
        return re.sub("[',]", "", phonemes.decode())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a list, one word a line")
    words = select(parser.parse_args().source.read_text(encoding="latin-1").split(), Pronounce())
    WORDS_FILE.write_text(_HEADER + "\n".join(words) + "\n", encoding="ascii")
    print(f"{len(words)} words")


if __name__ == "__main__":
    main()
