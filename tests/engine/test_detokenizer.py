"""Text that comes in pieces equals the tokenizer's own decoding of all ids; stop strings never leak."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import DecodingTable, Detokenizer, StopMatcher

TEXTS = [
    "The quick brown fox jumps over the lazy dog. Hello, world!  Two spaces, a\ttab and\na line.",
    "Grüße, naïve façade — “quotes” … €",
    "你好世界。多语言模型服务器",
    "こんにちは世界 안녕하세요 세계",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumbs",
    "e\u0301 n\u0303 combining, \u0915\u094d\u0937 conjunct",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:1], trainer)  # so that other scripts fall apart into bytes
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's and Gemma's kind: `▁` for spaces, `<0xE4>` for what the vocabulary lacks."""
    letters = sorted(set(TEXTS[0].replace(" ", "▁")) | {"▁"})
    words = ["▁t", "he", "▁the", "lo", "▁▁"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for token in [*letters, *words]:
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "o"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((letter, -3.0) for letter in sorted(set("".join(TEXTS).replace(" ", "▁")) | {"▁"}))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["[UNK]", "hello", "world", ".", ",", "!", "do", "not", "n't", "##s", "##ing", "'", "s", "i", "'m"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_suffix() -> Tokenizer:
    tokens = ["a", "b", "a</w>", "b</w>", "ab</w>", "<unk>"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "<unk>": 3}, unk_token="<unk>"))


KINDS = [byte_level, byte_fallback, metaspace, word_piece, word_suffix, no_decoder]


@pytest.fixture(scope="module", params=KINDS, ids=[kind.__name__ for kind in KINDS])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return wrap(request.param())


def wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(["<|end|>", "<|audio|>"])
    backend.add_tokens([AddedToken("<tool call>", special=False), AddedToken("é plain", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


BYTE_TOKENIZERS = {kind: wrap(kind()) for kind in (byte_level, byte_fallback)}


def pieces_of(tokenizer: PreTrainedTokenizerFast, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(DecodingTable(tokenizer), skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int], *, skip_special_tokens: bool = True) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_add_up_to_the_decoding_of_random_ids(
    tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool
) -> None:
    rng = random.Random(0)
    specials = sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder())
    for num_ids in [*range(1, 12)] * 12 + [200] * 10:
        ids = [rng.choice([rng.randrange(len(tokenizer)), rng.choice(specials)]) for _ in range(num_ids)]
        pieces = pieces_of(tokenizer, ids, skip_special_tokens=skip_special_tokens)
        assert "".join(pieces) == decode(tokenizer, ids, skip_special_tokens=skip_special_tokens), ids


@pytest.mark.parametrize("kind", [byte_level, byte_fallback], ids=["byte_level", "byte_fallback"])
@settings(max_examples=300, deadline=None)
@given(tail=st.lists(st.binary(min_size=1, max_size=6), max_size=6), text=st.sampled_from(["", "the ", "é"]))
def test_pieces_add_up_for_any_bytes_valid_or_not(kind: object, tail: list[bytes], text: str) -> None:
    tokenizer = BYTE_TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    for run in tail:
        ids += [byte_id(tokenizer, byte) for byte in run] + tokenizer.encode("lo", add_special_tokens=False)
    ids = ids[:-1]  # so that some end inside a run of bytes
    assert "".join(pieces_of(tokenizer, ids)) == decode(tokenizer, ids)


def byte_id(tokenizer: PreTrainedTokenizerFast, byte: int) -> int:
    """The id of the token that stands for one byte."""
    token_id = tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>")
    if token_id in (None, tokenizer.unk_token_id) or tokenizer.convert_ids_to_tokens(token_id) != f"<0x{byte:02X}>":
        # GPT-2's table, built as its authors describe it: printable Latin-1 stays, the rest is counted up from U+0100.
        stays = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace() and b != 0xAD]
        character = chr(byte) if byte in stays else chr(0x100 + [b for b in range(256) if b not in stays].index(byte))
        token_id = tokenizer.convert_tokens_to_ids(character)
    assert isinstance(token_id, int)
    return token_id


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_ends_inside_a_character(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == decode(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_byte_fixtures_really_split_characters() -> None:
    for tokenizer in BYTE_TOKENIZERS.values():
        assert len(tokenizer.encode("👍", add_special_tokens=False)) >= 4
        naive = "".join(decode(tokenizer, [token_id]) for token_id in tokenizer.encode("👍你"))
        assert "\ufffd" in naive


def test_text_is_not_delayed_where_it_is_certain() -> None:
    tokenizer = BYTE_TOKENIZERS[byte_level]
    detokenizer = Detokenizer(DecodingTable(tokenizer))
    ids = [tokenizer.convert_tokens_to_ids("a"), *tokenizer.encode("👍c", add_special_tokens=False)]
    assert [detokenizer.push(token_id) for token_id in ids] == ["a", "", "", "", "👍", "c"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_comes_out_as_a_replacement_at_the_end() -> None:
    tokenizer = BYTE_TOKENIZERS[byte_level]
    assert pieces_of(tokenizer, tokenizer.encode("a👍")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_a_skipped_special_token_does_not_eat_the_next_words_space() -> None:
    tokenizer = BYTE_TOKENIZERS[byte_fallback]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ids = [*tokenizer.encode("the", add_special_tokens=False), end, *tokenizer.encode("the", add_special_tokens=False)]
    assert "".join(pieces_of(tokenizer, ids)) == "the the"


def test_ids_that_the_tokenizer_does_not_know_add_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    unknown = len(tokenizer) + 1000
    ids = [unknown, *range(3), unknown, unknown]
    assert "".join(pieces_of(tokenizer, ids)) == decode(tokenizer, ids)


def run(stops: list[str], pushes: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """What is shown, push by push and with the flush at the end, and the stop string."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown: list[str] = []
    for text in pushes:
        emitted, matched = matcher.push(text)
        shown.append(emitted)
        if matched is not None:
            return shown, matched
    return [*shown, matcher.flush()], None


def expected(stops: list[str], text: str, *, include_stop: bool) -> tuple[str, str | None]:
    """By definition: the match that ends first; of those, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include_stop else end - len(stop)], stop


ALPHABET = st.text(alphabet="ab👍", max_size=12)


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text(alphabet="ab👍", min_size=1, max_size=4), max_size=4),
    pushes=st.lists(ALPHABET, max_size=8),
    include_stop=st.booleans(),
)
def test_any_cut_of_the_text_gives_the_same_as_the_definition(
    stops: list[str], pushes: list[str], include_stop: bool
) -> None:
    shown, matched = run(stops, pushes, include_stop=include_stop)
    assert ("".join(shown), matched) == expected(stops, "".join(pushes), include_stop=include_stop)


@settings(max_examples=300, deadline=None)
@given(stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3), text=ALPHABET)
def test_only_a_proper_prefix_of_a_stop_is_held_back(stops: list[str], text: str) -> None:
    if any(stop in text for stop in stops):
        return
    matcher = StopMatcher(stops)
    emitted = "".join(matcher.push(character)[0] for character in text)
    longest = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
    assert emitted == text[: len(text) - longest]
    assert emitted + matcher.flush() == text


@pytest.mark.parametrize(
    ("stops", "pushes", "shown", "matched"),
    [
        (["DEFGHIJ"], ["AB", "CD", "EF", "GH", "IJ", "KL"], ["AB", "C", "", "", ""], "DEFGHIJ"),
        (["D", "DEF"], ["ABC", "DEF"], ["ABC", ""], "D"),
        (["👍"], ["A", "👍", "B"], ["A", ""], "👍"),
        (["AB"], ["AB"], [""], "AB"),
        (["x", "y", "z", "CD"], ["ABC", "D"], ["AB", ""], "CD"),
        (["DEFG"], ["ABC", "DE", "X"], ["ABC", "", "DEX", ""], None),
        (["DEF"], ["ABC", "DE"], ["ABC", "", "DE"], None),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        ([], ["AB", "CD"], ["AB", "CD", ""], None),
    ],
)
def test_stop_strings_by_example(stops: list[str], pushes: list[str], shown: list[str], matched: str | None) -> None:
    assert run(stops, pushes) == (shown, matched)


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a stop b") == ("a ", "stop")
    assert matcher.push("more") == ("", "stop")
    assert matcher.flush() == ""


def test_an_empty_push_keeps_what_is_held() -> None:
    matcher = StopMatcher(["stop"])
    assert [matcher.push(text) for text in ("st", "", "op")] == [("", None), ("", None), ("", "stop")]
