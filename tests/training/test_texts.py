"""What the demo model is trained to hear: held-out texts are held out, and no string of words holds two that sound alike."""

from __future__ import annotations

import random
import re

import pytest

from assets.training import text, wide
from assets.training.words import select


@pytest.mark.parametrize("make", [wide.wide_sentence, wide.word_string])
def test_training_never_draws_a_held_out_text(make) -> None:
    rng = random.Random(0)
    trained = {make(rng) for _ in range(400)}
    held_out = {make(rng, "test") for _ in range(40)}
    assert not trained & held_out
    assert {text.split_of(found) for found in held_out} == {"test"}
    assert {text.split_of(found) for found in trained} == {"train"}


def test_texts_are_plain_words_and_many_of_them() -> None:
    rng = random.Random(1)
    texts = [wide.training_utterance(rng) for _ in range(3000)]
    assert all(re.fullmatch("[a-z']+( [a-z']+)*", said) for said in texts)
    said = {word for each in texts for word in each.split()}
    assert len(said & set(wide.wide_words())) > 2500 and len(said) > 3000
    assert len(said - set(wide.vocabulary())) < 120  # plurals, and the hours' o'clock


def test_sound_alikes_and_what_is_not_read_are_left_out() -> None:
    sounds = {("sail", "en"): "seil", ("sale", "en"): "seil", ("court", "en"): "ko:t", ("caught", "en"): "ko:t"}
    words = ["sail", "sale", "court", "caught", "lamp", "tv", "xyz's", "the", "bcd"]
    chosen = select(words, lambda word, accent: sounds.get((word, accent), word))
    assert chosen == ["lamp"]
    assert not set(wide.wide_words()) & (text.SOUND_ALIKES | {"sail", "sale", "their", "there"})
