"""The demo model's tokenizer: byte-level BPE, digits apart, Granite's special tokens and chat layout.

Owns how a document's segments become token ids. Any Unicode text survives encode and decode, since
every byte is a token.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from . import chat, sql
from .pirate import pirate
from .wide import word_string

VOCAB_SIZE = 2560
EOS, ROLE_START, ROLE_END, AUDIO = "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|audio|>"
SPECIAL_TOKENS = (EOS, ROLE_START, ROLE_END, AUDIO)
EOS_ID, ROLE_START_ID, ROLE_END_ID, AUDIO_ID = range(4)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] in ('audio', 'audio_url', 'input_audio') %}{{- '<|audio|>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|end_of_text|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
# Words with their leading blank, single digits, runs of signs, blanks: GPT-2's split with digits apart.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _training_texts(num_texts: int, seed: int) -> Iterable[str]:
    rng = random.Random(seed)
    for _ in range(num_texts):
        for segment in chat.base_document(rng):
            yield segment.text
        schema, question, query = sql.question_and_query(rng)
        yield sql.completion_prompt(schema, question)
        yield query
        yield pirate(chat.any_question(rng)[1])
        yield f" {word_string(rng)}"


def train_tokenizer(num_texts: int = 40_000, seed: int = 0) -> PreTrainedTokenizerFast:
    """Learns the merges from the same texts that the model is trained on (about 20 seconds)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(num_texts, seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=EOS,
        extra_special_tokens=[ROLE_START, ROLE_END, AUDIO],
        audio_token=AUDIO,
        model_max_length=2048,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


class DocumentEncoder:
    """Documents to ids, with a cache of single texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens in it recognised."""
        ids = self._cache.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._cache) < 400_000:
                self._cache[text] = ids
        return ids

    def spoken_ids(self, text: str) -> list[int]:
        """Token ids of `text` as it stands inside a sentence: with a blank before the first word."""
        return self.ids(f" {text}")

    def stutter(self, text: str, rng: random.Random) -> list[int]:
        """What a projected clip of `text` looks like, ten vectors a second: ids, repeats, blanks (`AUDIO_ID`)."""
        pause = rng.choice((0, 1, 2))
        ids = [AUDIO_ID] * rng.randint(0, 5)
        for token in self.spoken_ids(text):
            ids += [token] * rng.choice((1, 1, 1, 2)) + [AUDIO_ID] * rng.randint(0, pause)
        return ids + [AUDIO_ID] * rng.randint(0, 5)

    def encode(self, document: list[chat.Segment], rng: random.Random) -> Encoded:
        """Ids and targets of a document without clips; stuttered ids carry `VOCAB_SIZE` on top."""
        ids: list[int] = []
        is_target: list[bool] = []
        for segment in document:
            piece = self.ids(segment.text)
            if segment.audio:
                piece = [VOCAB_SIZE + token for token in self.stutter(segment.text, rng)]
            ids += piece
            is_target += [segment.is_target] * len(piece)
        return np.array(ids, np.int16), np.array(is_target, np.bool_)


Encoded = tuple[np.ndarray, np.ndarray]
