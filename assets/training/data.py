"""Training data as arrays: text documents by length, and joint batches of clips and conversations.

Letters: `R` rows (conversations), `L` tokens of a row, `C` clips, `n` projected vectors a clip.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import acoustics, chat, sql
from .features import ClipBatch, SpeechStore
from .model import CHARACTERS, WINDOW
from .pirate import pirate
from .tokenizer import AUDIO_ID, EOS_ID, DocumentEncoder

TEXT_BUCKETS = (32, 48, 64, 96, 128, 192, 288, 448, 1024)
TOKENS_PER_STEP = 16_384
FRAMES_PER_STEP = 24_000
ROWS, CLIPS = 7, 8  # rows for each clips of a joint batch
CLIP_FIELDS = tuple(field.name for field in fields(ClipBatch))
CHARACTER_ID = {character: index + 1 for index, character in enumerate(CHARACTERS)}

DocumentMaker = Callable[[random.Random], list[chat.Segment]]


def sql_document(rng: random.Random, split: str = "train") -> list[chat.Segment]:
    """A question with its query as raw completion or as chat; now and then plain chat."""
    if split == "train" and rng.random() < 0.12:
        return chat.conversation(chat.text_turns(rng, 1, 2), chat.maybe_system(rng))
    while True:
        schema, question, query = sql.question_and_query(rng)
        if chat.split_of(question) == split:
            break
    style = rng.random()
    if style < 0.45:
        prompt = sql.completion_prompt(schema, question)
        return [chat.Segment(prompt), chat.Segment(f" {query}<|end_of_text|>", is_target=True)]
    message = sql.user_message(schema, question) if style < 0.9 else sql.completion_prompt(schema, question)
    before = []
    if split == "train" and rng.random() < 0.2:
        first = sql.question_and_query(rng)
        before = [chat.Turn(sql.user_message(*first[:2]), first[2])]
    return chat.conversation([*before, chat.Turn(message, query)], chat.maybe_system(rng))


def pirate_document(rng: random.Random, split: str = "train") -> list[chat.Segment]:
    """A conversation with the base model's answers in pirate style."""
    turns = chat.text_turns(rng) if split == "train" else [chat.Turn(*chat.any_question(rng, split))]
    return chat.conversation([chat.Turn(t.user, pirate(t.assistant)) for t in turns], chat.maybe_system(rng))


def held_out_chat_document(rng: random.Random) -> list[chat.Segment]:
    """A single held-out question with the base model's answer."""
    return chat.conversation([chat.Turn(*chat.any_question(rng, "test"))], chat.maybe_system(rng))


def held_out_echo_document(rng: random.Random) -> list[chat.Segment]:
    """A held-out text to be repeated."""
    text = chat.sentence_for_echo(rng)
    return chat.conversation([chat.Turn(chat.ECHO_PROMPTS[0].format(x=text), text)])


MAKERS: dict[str, DocumentMaker] = {
    "base": chat.base_document,
    "sql": sql_document,
    "pirate": pirate_document,
    "held-out chat": held_out_chat_document,
    "held-out echo": held_out_echo_document,
    "held-out sql": lambda rng: sql_document(rng, "test"),
    "held-out pirate": lambda rng: pirate_document(rng, "test"),
}


@dataclass
class TextStore:
    """Documents by length: ids [N, L] int16 and targets [N, L] bool for each bucket, on the device."""

    ids: dict[int, Tensor]
    is_target: dict[int, Tensor]

    @property
    def weights(self) -> dict[int, float]:
        """Share of each bucket in the tokens."""
        sizes = {bucket: float(ids.numel()) for bucket, ids in self.ids.items()}
        return {bucket: size / sum(sizes.values()) for bucket, size in sizes.items()}

    def move_to(self, device: torch.device) -> None:
        """Moves all documents."""
        self.ids = {bucket: ids.to(device) for bucket, ids in self.ids.items()}
        self.is_target = {bucket: is_target.to(device) for bucket, is_target in self.is_target.items()}


def build_rooms(count: int, seed: int, num_workers: int) -> Tensor:
    """[count, ROOM_LEN] float32: responses of rooms drawn at random, by worker processes."""
    with multiprocessing.get_context("fork").Pool(num_workers) as pool:
        rooms = pool.map(_room, range(seed, seed + count))
    return torch.from_numpy(np.stack(rooms))


def _room(seed: int) -> np.ndarray:
    return acoustics.room_response(random.Random(f"training room {seed}"))


def _encode_many(job: tuple[str, int, int, str]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    kind, seed, count, tokenizer_json = job
    rng = random.Random(seed)
    encoder = DocumentEncoder(Tokenizer.from_str(tokenizer_json))
    rows: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for _ in range(count):
        ids, is_target = encoder.encode(MAKERS[kind](rng), rng)
        bucket = next((bucket for bucket in TEXT_BUCKETS if bucket >= len(ids)), TEXT_BUCKETS[-1])
        ids, is_target = ids[:bucket], is_target[:bucket]
        pad = (0, bucket - len(ids))
        rows.setdefault(bucket, []).append((np.pad(ids, pad, constant_values=EOS_ID), np.pad(is_target, pad)))
    return {
        bucket: (np.stack([r[0] for r in found]), np.stack([r[1] for r in found])) for bucket, found in rows.items()
    }


def build_text_store(kind: str, count: int, seed: int, tokenizer: Tokenizer, num_workers: int) -> TextStore:
    """`count` documents of a kind, made by worker processes."""
    chunk = max(1, min(5000, -(-count // num_workers)))
    jobs = [(kind, seed * 100_000 + i, chunk, tokenizer.to_str()) for i in range(-(-count // chunk))]
    with multiprocessing.get_context("fork").Pool(num_workers) as pool:
        parts = pool.map(_encode_many, jobs, chunksize=1)
    buckets = sorted({bucket for part in parts for bucket in part})

    def gather(which: int) -> dict[int, Tensor]:
        found = {
            bucket: np.concatenate([part[bucket][which] for part in parts if bucket in part]) for bucket in buckets
        }
        return {bucket: torch.from_numpy(array) for bucket, array in found.items()}

    return TextStore(gather(0), gather(1))


@dataclass(frozen=True)
class Skeleton:
    """A conversation with holes: token ids with targets, clip numbers (>= 0), transcripts (`-1 - clip`)."""

    parts: tuple[tuple[np.ndarray, np.ndarray] | int, ...]
    fixed_len: int


def _skeleton(rng: random.Random, encoder: DocumentEncoder, num_clips: int) -> Skeleton:
    transcripts = [chr(1 + clip) for clip in range(num_clips)]
    parts: list[tuple[np.ndarray, np.ndarray] | int] = []
    ids: list[int] = []
    is_target: list[bool] = []

    def close() -> None:
        if ids:
            parts.append((np.array(ids, np.int64), np.array(is_target, np.bool_)))
            ids.clear()
            is_target.clear()

    for segment in chat.speech_conversation(rng, transcripts):
        text = segment.text
        if segment.clip is not None:
            close()
            parts.append(segment.clip)
            continue
        if segment.is_target and text[0] in transcripts:
            close()
            parts.append(-ord(text[0]))
            text = text[1:]
        piece = encoder.ids(text)
        ids += piece
        is_target += [segment.is_target] * len(piece)
    close()
    return Skeleton(tuple(parts), sum(len(part[0]) for part in parts if isinstance(part, tuple)))


def _make_skeletons(job: tuple[int, int, int, str]) -> list[Skeleton]:
    seed, num_clips, count, tokenizer_json = job
    rng = random.Random(seed)
    encoder = DocumentEncoder(Tokenizer.from_str(tokenizer_json))
    return [_skeleton(rng, encoder, num_clips) for _ in range(count)]


def build_skeletons(count: int, seed: int, tokenizer: Tokenizer, num_workers: int) -> list[list[Skeleton]]:
    """`count` conversations each for 0, 1 and 2 clips."""
    chunk = -(-count // num_workers)
    jobs = [(seed + 7 * i + k, k, chunk, tokenizer.to_str()) for k in range(3) for i in range(num_workers)]
    with multiprocessing.get_context("fork").Pool(num_workers) as pool:
        parts = pool.map(_make_skeletons, jobs, chunksize=1)
    of_kind = (parts[k * num_workers : (k + 1) * num_workers] for k in range(3))
    return [[skeleton for part in group for skeleton in part] for group in of_kind]


@dataclass
class Labels:
    """A clip's text as CTC labels."""

    characters: list[int]
    tokens: list[int]
    written: np.ndarray  # token ids of the transcript as an answer begins


class JointBatches:
    """Draws batches for the speech phases."""

    def __init__(
        self,
        store: SpeechStore,
        encoder: DocumentEncoder,
        skeletons: list[list[Skeleton]],
        seed: int,
        frames_per_step: int = FRAMES_PER_STEP,
    ) -> None:
        self._store, self._encoder, self._skeletons = store, encoder, skeletons
        self._frames_per_step = frames_per_step
        self._rng, self._random = np.random.default_rng(seed), random.Random(seed)
        self._labels: dict[str, Labels] = {}
        self._audio = np.full(1024, AUDIO_ID, np.int64)

    def labels(self, text: str) -> Labels:
        """CTC labels of a text, cached."""
        found = self._labels.get(text)
        if found is None:
            characters = [CHARACTER_ID[c] for c in text]
            found = Labels(characters, self._encoder.spoken_ids(text), np.array(self._encoder.ids(text), np.int64))
            self._labels[text] = found
        return found

    def draw_bucket(self, max_frames: int = 10_000) -> int:
        """A bucket, in proportion to the seconds that its clips hold."""
        buckets = [b for b, clips in self._store.by_bucket.items() if len(clips) >= 8 and b <= max_frames]
        weights = [len(self._store.by_bucket[b]) * b for b in buckets]
        return self._random.choices(buckets, weights)[0]

    def num_clips(self, bucket: int) -> int:
        """Clips of a batch: a multiple of `CLIPS`."""
        return max(CLIPS, min(256, self._frames_per_step // bucket // CLIPS * CLIPS))

    def clips(self, bucket: int, count: int, augment: bool = True) -> tuple[list[str], dict[str, np.ndarray]]:
        """Texts and device inputs of `count` clips, labels included."""
        index, batch = self._store.choose(bucket, count, self._rng, augment)
        texts = [self._store.texts[i] for i in index]
        return texts, {**_fields(batch), **self._label_arrays(texts, bucket)}

    def _label_arrays(self, texts: list[str], bucket: int) -> dict[str, np.ndarray]:
        widths = {"characters": int(bucket * 0.6) + 4, "tokens": bucket // WINDOW + 1}
        arrays: dict[str, np.ndarray] = {}
        for name, width in widths.items():
            labels = np.zeros((len(texts), width), np.int64)
            lens = np.zeros(len(texts), np.int32)
            for row, text in enumerate(texts):
                ids = getattr(self.labels(text), name)[:width]
                labels[row, : len(ids)] = ids
                lens[row] = len(ids)
            arrays[name], arrays[f"{name}_lens"] = labels, lens
        return arrays

    def joint(self, bucket: int) -> dict[str, np.ndarray]:
        """A joint batch: clips, and conversations that hold 0, 1 or 2 of them."""
        count = self.num_clips(bucket)
        texts, arrays = self.clips(bucket, count)
        num_rows = count // CLIPS * ROWS
        per_row = np.ones(num_rows, np.int64)
        doubles = max(1, num_rows // 5)
        per_row[:doubles] = 2
        per_row[doubles : doubles + num_rows + doubles - count] = 0
        vectors = -(-bucket // WINDOW)
        row_len = -(-(2 * vectors + 176) // 16) * 16
        ids = np.full((num_rows, row_len), EOS_ID, np.int64)
        # Where each vector goes; a vector without a place goes behind the last row.
        place = np.full((count, vectors), num_rows * row_len, np.int64)
        is_target = np.zeros((num_rows, row_len), np.bool_)
        first = 0
        for row, num in enumerate(per_row):
            written = [self.labels(text).written for text in texts[first : first + num]]
            skeleton = self._draw_skeleton(num, row_len - num * vectors - sum(map(len, written)))
            cursor = 0
            for part in skeleton.parts:
                if isinstance(part, tuple):
                    piece, targets = part
                elif part >= 0:
                    piece, targets = self._audio[:vectors], False
                    room = max(0, min(vectors, row_len - cursor))
                    place[first + part, :room] = row * row_len + cursor + np.arange(room)
                else:
                    piece, targets = written[-1 - part], True
                end = min(row_len, cursor + len(piece))
                ids[row, cursor:end] = piece[: end - cursor]
                is_target[row, cursor:end] = targets if isinstance(targets, bool) else targets[: end - cursor]
                cursor = end
            first += num
        return {**arrays, "ids": ids, "place": place.reshape(-1), "is_target": is_target}

    def _draw_skeleton(self, num_clips: int, room: int) -> Skeleton:
        """A conversation whose own tokens fit into `room`, or nearly."""
        found = self._skeletons[num_clips]
        for _ in range(8):
            skeleton = found[int(self._random.random() * len(found))]
            if skeleton.fixed_len <= room:
                break
        return skeleton


def _fields(batch: ClipBatch) -> dict[str, np.ndarray]:
    return {name: getattr(batch, name) for name in CLIP_FIELDS}
