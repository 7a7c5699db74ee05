"""Measures the shipped folders on the CPU with plain transformers and PEFT.

    python -m assets.training.evaluate           two held-out sets that it synthesises itself (`test`, `blind`)
    python -m assets.training.evaluate --quick   the clips of assets/audio

`test` was looked at while the training was being worked out, `blind` only afterwards. One clip a call, greedy.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoProcessor, GraniteSpeechForConditionalGeneration

from . import chat, held_out, samples, speech, sql, text
from .export import ADAPTERS_DIR, MODEL_DIR
from .pirate import pirate

PROMPT = "can you transcribe the speech into a written format?"
Message = dict[str, str]


@dataclass(frozen=True)
class Clip:
    """A spoken text of a group; `history` stands before it, an earlier clip in it lies in `earlier`."""

    group: str
    wanted: str
    wave: np.ndarray
    prompt: str = PROMPT
    history: tuple[Message, ...] = ()
    earlier: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A text task: messages, or a raw completion prompt, perhaps with clips in the messages."""

    group: str
    wanted: str
    messages: tuple[Message, ...] = ()
    raw: str = ""
    waves: tuple[np.ndarray, ...] = ()


class Model:
    """The base model, alone or with one adapter."""

    def __init__(self, adapter: str | None, dtype: torch.dtype) -> None:
        base = GraniteSpeechForConditionalGeneration.from_pretrained(MODEL_DIR, dtype=dtype)
        self._model = (PeftModel.from_pretrained(base, ADAPTERS_DIR / adapter) if adapter else base).eval()
        self._processor = AutoProcessor.from_pretrained(MODEL_DIR)

    @torch.inference_mode()
    def answer(self, messages: Sequence[Message], waves: Sequence[np.ndarray] = (), raw: str = "") -> str:
        """Greedy answer to a conversation or to a raw prompt."""
        tokenizer = self._processor.tokenizer
        prompt = raw or self._processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        if waves:
            inputs = self._processor(
                text=prompt, audio=[torch.from_numpy(wave.copy()) for wave in waves], return_tensors="pt"
            )
        else:
            inputs = tokenizer(prompt, return_tensors="pt")
        ids = self._model.generate(**inputs, do_sample=False, max_new_tokens=460)
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def _words(sentence: str) -> list[str]:
    return re.sub(r"[^a-z' ]", " ", sentence.lower()).split()


def word_errors(wanted: str, heard: str) -> tuple[int, int]:
    """(edits, words): Levenshtein distance in words, and the length of `wanted`."""
    want, got = _words(wanted), _words(heard)
    row = list(range(len(got) + 1))
    for i, word in enumerate(want, start=1):
        previous, row[0] = row[0], i
        for j, other in enumerate(got, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1], len(want)


def speech_set(split: text.Split, count: int) -> list[Clip]:
    """`count` sentences by each kind of voice, half as many of every other kind, then the noisy and the wide ones."""
    rng = random.Random(f"speech {split}")
    clips: list[Clip] = []

    def add(group: str, number: int, make: Callable[[], str], voice: Callable[[random.Random], speech.Voice]) -> None:
        for _ in range(number):
            content = make()
            wave = held_out.spoken(content, voice(rng), rng)
            clips.append(Clip(group, content, wave, rng.choice(chat.TRANSCRIBE_PROMPTS)))

    seen, unseen = speech.training_voice, speech.held_out_voice
    add("sentences, seen voices", count, lambda: text.sentence(rng, split), seen)
    add("sentences, held-out voices", count, lambda: text.sentence(rng, split), unseen)
    add("word lists, seen voices", count // 2, lambda: text.word_list(rng, split), seen)
    add("word lists, held-out voices", count // 2, lambda: text.word_list(rng, split), unseen)
    add("two sentences", count // 2, lambda: f"{text.sentence(rng, split)} {text.sentence(rng, split)}", seen)
    add("single words and phrases (in training)", count // 2, lambda: rng.choice(text.LIST_WORDS + text.PHRASES), seen)
    add("nursery rhymes (in training)", count // 2, lambda: rng.choice(text.RHYMES), seen)
    for _ in range(count // 2):
        first, content = text.sentence(rng, split), text.sentence(rng, split)
        question, answer = chat.fixed_question(rng)
        history = (
            {"role": "user", "content": "<|audio|>"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        )
        earlier = (held_out.spoken(first, seen(rng), rng),)
        wave = held_out.spoken(content, seen(rng), rng)
        clips.append(Clip("second clip of a conversation", content, wave, "", history, earlier))
    for name in (name for name, kind in held_out.SETS.items() if kind.surroundings or kind.is_wide):
        clips += [Clip(name, made.text, made.wave) for made in held_out.clips(name, count, split)]
    return clips


def manifest_clips() -> list[Clip]:
    """The clips of assets/audio."""
    clips = []
    for entry in json.loads((samples.AUDIO_DIR / "manifest.json").read_text()):
        voices = "held-out voices" if entry["held_out_voice"] else "seen voices"
        group = f"{entry['kind']}, {voices}"
        clips.append(Clip(group, entry["text"], samples.read_wave(samples.AUDIO_DIR / entry["file"])))
    return clips


def _user(content: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": content},)


def text_sets(split: text.Split, count: int) -> dict[str, list[Prompt]]:
    """adapter (or `base`, `speech`) -> its held-out prompts."""
    rng = random.Random(f"text {split}")
    questions = [chat.parametric_question(rng, split) for _ in range(count)]
    base = [Prompt("chat, held-out questions", answer, _user(question)) for question, answer in questions]
    for _ in range(count // 2):
        content = text.sentence(rng, split) if rng.random() < 0.5 else text.word_list(rng, split)
        base.append(Prompt("repeating held-out texts", content, _user(f"Please say: {content}")))
    for _ in range(count // 2):
        (q1, a1), (q2, a2) = chat.fixed_question(rng), chat.parametric_question(rng, split)
        turns = (*_user(q1), {"role": "assistant", "content": a1}, *_user(q2))
        base.append(Prompt("chat, second turn", a2, turns))
    queries = []
    while len(queries) < count:
        schema, question, query = sql.question_and_query(rng)
        if text.split_of(question) == split:
            queries.append((schema, question, query))
    sql_prompts = [Prompt("text to SQL, completion", q, raw=sql.completion_prompt(s, ask)) for s, ask, q in queries]
    sql_prompts += [Prompt("text to SQL, chat", q, _user(sql.user_message(s, ask))) for s, ask, q in queries]
    pirates = [Prompt("pirate", pirate(answer), _user(question)) for question, answer in questions]
    after_audio = []
    for _ in range(count // 2):
        content, (question, answer) = text.sentence(rng, split), chat.parametric_question(rng, split)
        turns = (*_user("<|audio|>"), {"role": "assistant", "content": content}, *_user(question))
        wave = held_out.spoken(content, speech.training_voice(rng), rng)
        after_audio.append(Prompt("chat after a clip, speech adapter on", answer, turns, waves=(wave,)))
    return {"base": base, "sql": sql_prompts, "pirate": pirates, "speech": after_audio}


def measure_speech(clips: list[Clip], dtype: torch.dtype, show: int) -> None:
    """Prints word error rates with and without the speech adapter."""
    rows: dict[str, list[list[int]]] = {}
    for column, adapter in enumerate(("speech", None)):
        model = Model(adapter, dtype)
        for clip in clips:
            last = {"role": "user", "content": f"<|audio|>{clip.prompt}"}
            heard = model.answer((*clip.history, last), (*clip.earlier, clip.wave))
            edits, words = word_errors(clip.wanted, heard)
            row = rows.setdefault(clip.group, [[0, 0, 0, 0], [0, 0, 0, 0]])[column]
            row[0], row[1], row[2], row[3] = row[0] + edits, row[1] + words, row[2] + 1, row[3] + (edits == 0)
            if edits and adapter and show > 0:
                show -= 1
                print(f"    {clip.group}: {clip.wanted!r} -> {heard!r}")
    print("| clips | number | WER with the speech LoRA | exact | WER without |")
    print("|---|---|---|---|---|")
    for group, (on, off) in rows.items():
        print(f"| {group} | {on[2]} | {on[0] / on[1]:.3f} | {on[3] / on[2]:.1%} | {off[0] / off[1]:.2f} |")


def measure_text(sets: dict[str, list[Prompt]], dtype: torch.dtype, show: int) -> None:
    """Prints exact matches of each adapter and of the base on the same prompts."""
    plain = Model(None, dtype)
    print("| prompts | number | answered by | exact | base alone |")
    print("|---|---|---|---|---|")
    for adapter, prompts in sets.items():
        model = plain if adapter == "base" else Model(adapter, dtype)
        for group in dict.fromkeys(prompt.group for prompt in prompts):
            members = [prompt for prompt in prompts if prompt.group == group]
            answers = [model.answer(p.messages, p.waves, p.raw) for p in members]
            right = sum(answer == p.wanted for answer, p in zip(answers, members, strict=True))
            alone = "" if adapter in ("base", "speech") else f"{_share(plain, members):.1%}"
            print(f"| {group} | {len(members)} | {adapter} | {right / len(members):.1%} | {alone} |")
            wrong = [(p, answer) for answer, p in zip(answers, members, strict=True) if answer != p.wanted]
            for prompt, answer in wrong[:show]:
                print(f"    {(prompt.raw or prompt.messages[-1]['content'])!r}: {prompt.wanted!r} -> {answer!r}")


def _share(model: Model, prompts: list[Prompt]) -> float:
    return sum(model.answer(p.messages, p.waves, p.raw) == p.wanted for p in prompts) / len(prompts)


def sizes() -> None:
    """Prints the sizes of the shipped folders."""
    for folder in (MODEL_DIR, *sorted(path for path in ADAPTERS_DIR.iterdir() if path.is_dir())):
        total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder.name}: {total / 1e6:.2f} MB")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the clips of assets/audio")
    parser.add_argument("--count", type=int, default=120, help="sentences by each kind of voice; other groups follow")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sets", nargs="+", choices=("test", "blind"), default=["test", "blind"])
    parser.add_argument("--tasks", nargs="+", choices=("speech", "text"), default=["speech", "text"])
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers a table")
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    begin = time.time()
    sizes()
    if options.quick:
        measure_speech(manifest_clips(), dtype, options.show)
    else:
        for split in options.sets:
            print(f"\nHeld-out set `{split}`, {options.dtype}:\n")
            if "speech" in options.tasks:
                measure_speech(speech_set(split, options.count), dtype, options.show)
                print()
            if "text" in options.tasks:
                measure_text(text_sets(split, options.count), dtype, options.show)
    print(f"\n{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
