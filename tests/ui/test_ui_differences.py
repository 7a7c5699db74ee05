"""Marked differences lead back to both texts, and error rates are those of a plain edit distance."""

from __future__ import annotations

import random
import re
from html import unescape

import pytest

from assets.training.evaluate import word_errors as plain_word_errors
from ui.differences import WordErrors, compare, marked_html, stretches_html, word_errors, words_of


def test_stretches_rebuild_the_other_text_and_hold_what_the_base_alone_has() -> None:
    base, other = "The weather in Madrid is fine", "the weather  in Madrid was very fine"
    stretches = compare(base, other)
    assert "".join(piece for kind, piece in stretches if kind != "removed") == other
    assert [piece.strip() for kind, piece in stretches if kind == "removed"] == ["The", "is"]
    assert [piece.strip() for kind, piece in stretches if kind == "added"] == ["the", "was very"]
    folded = compare(base, "the weather, in madrid is fine!", folds=True)
    assert {kind for kind, _ in folded} == {"same"}


def test_texts_of_strangers_are_escaped() -> None:
    html = stretches_html(compare("a <b> '", "a <i> &"), shows_removed=True)
    assert "<b>" not in html and "<i>" not in html
    assert "<del" in html and "<ins>" in html and "'" not in html.split("data-words='")[1].split("'></del>")[0]


def test_the_text_of_marked_html_is_the_other_text_alone() -> None:
    base, other = "I hear no sound here", "the weather <here> in Madrid"
    for html in (marked_html(base, other), stretches_html(compare(base, other), shows_removed=True)):
        assert unescape(re.sub(r"<[^>]*>", "", html)) == other
    assert "data-words='I hear no sound here'" in html and "del" not in marked_html(base, other)
    assert "<del class=last data-words='sound'>" in stretches_html(compare("no sound", "no"), shows_removed=True)


def test_characters_of_chinese_are_words() -> None:
    assert words_of("你好，World!") == ["你", "好", "world"]
    assert word_errors("今天天气好", "今天天汽好").num_edits == 1


@pytest.mark.parametrize("seed", range(20))
def test_edits_are_those_of_the_textbook(seed: int) -> None:
    rng = random.Random(seed)
    wanted, heard = (" ".join(rng.choices("abcd", k=rng.randrange(12))) for _ in range(2))
    errors = word_errors(wanted, heard)
    assert (errors.num_edits, errors.num_words) == plain_word_errors(wanted, heard)
    kinds = (errors.num_substitutions, errors.num_deletions, errors.num_insertions)
    assert min(kinds) >= 0 and len(words_of(wanted)) - kinds[1] + kinds[2] == len(words_of(heard))


def test_errors_are_told_apart() -> None:
    assert word_errors("a b c d", "a x c d e f") == WordErrors(1, 0, 2, num_words=4)
    assert word_errors("a b c d", "b c x") == WordErrors(1, 1, 0, num_words=4)
    # Where two words of two could be wrong, one is missing and one is added, as their marks say.
    assert word_errors("a b", "b c") == WordErrors(0, 1, 1, num_words=2)


def test_a_rate_counts_made_up_words() -> None:
    assert word_errors("one two", "One, two!").rate == 0
    assert word_errors("one", "one two three").rate == 2
    assert word_errors("", "noise").rate == 1
