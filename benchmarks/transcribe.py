"""Word error rate and speed of the embedded model, with the speech LoRA and without.

    python -m benchmarks.transcribe [--clips 60 [--voices held-out] [--split blind]] [--long-seconds 300]

On the clips of assets/audio, and with `--clips N` on N newly spoken ones of each held-out set: sentences, voices, noise and
rooms, strings of words that are no sentence (`assets.training.held_out`). Those need espeak-ng and flite (Debian's packages of
these names) and scipy. All clips are asked for at once, as many clients would; the engine batches them. The long recording is
the clips of assets/audio one after another with pauses, over and over, through the service that the API and the web app
call. Refuses to report where the audio default does not bring the speech adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from typing import Any

import numpy as np
import soundfile

from api.service import Service
from api.settings import ServerSettings
from api.transcript import TranscriptDelta, TranscriptStart
from assets.training import held_out, speech
from assets.training.evaluate import word_errors
from assets.training.text import Split
from benchmarks.report import finish, refuse
from engine import Engine, EngineConfig, SamplingParams
from engine.config import EMBEDDED_ASSETS
from engine.request import AudioPart

AUDIO = EMBEDDED_ASSETS / "audio"
RATE = 16_000
PAUSE_SECONDS = (0.6, 2.0)
ROOM = 3e-4  # root mean square of the noise between clips, -70 dB of full scale


def transcribe(engine: Engine, waves: list[Any], lora: str | None) -> tuple[list[str], float, set[str]]:
    """Transcripts of clips (paths, or samples with their rate), seconds in all, and the reasons on the receipts."""
    sampling = SamplingParams(temperature=0, max_tokens=96)
    started = time.perf_counter()
    answers = [
        engine.start_sync(engine.transcription_prompt(AudioPart(wave)), sampling, lora=lora)[0] for wave in waves
    ]
    texts = ["".join(delta.text for delta in answer) for answer in answers]
    return texts, time.perf_counter() - started, {answer.receipt.reason for answer in answers}


def synthesised(count: int, voices: str, split: Split) -> dict[str, list[held_out.Spoken]]:
    """`count` clips of each held-out set whose voices are wanted: `all`, `seen` or `held-out`; texts of one split."""
    chosen = [name for name, kind in held_out.SETS.items() if voices in ("all", kind.voices)]
    try:
        return {name: held_out.clips(name, count, split) for name in chosen}
    except OSError as error:
        refuse(f"--clips needs espeak-ng and flite: {error}")


def measure(engine: Engine, sets: dict[str, list[held_out.Spoken]]) -> dict[str, Any]:
    """Of each set the error rates with the adapter and without; seconds of audio per second with it; what spoke."""
    rows: dict[str, dict[str, float]] = {}
    audio_seconds = elapsed = 0.0
    for name, clips in sets.items():
        waves, said = [(clip.wave, RATE) for clip in clips], [clip.text for clip in clips]
        heard, seconds, _ = transcribe(engine, waves, None)
        without, _, _ = transcribe(engine, waves, "none")
        audio_seconds += sum(clip.wave.size for clip in clips) / RATE
        elapsed += seconds
        rows[name] = {"wer_with_lora": error_rate(said, heard), "wer_without_lora": error_rate(said, without)}
    return {
        "sets": rows,
        "audio_seconds_per_second": round(audio_seconds / elapsed, 1),
        "voices": speech.synthesisers(),
    }


def print_table(rows: dict[str, dict[str, float]]) -> None:
    """The sets' error rates for people."""
    width = max(map(len, rows))
    print(f"| {'set':{width}} | WER with the LoRA | without |\n|{'-' * (width + 2)}|---|---|")
    for name, row in rows.items():
        print(f"| {name:{width}} | {row['wer_with_lora']:.3f} | {row['wer_without_lora']:.2f} |")


def long_recording(clips: list[dict[str, Any]], min_seconds: float, *, seed: int = 0) -> tuple[np.ndarray, str]:
    """[S] float32 at `RATE` of clips in order, again and again, with pauses in a quiet room; and what is said in it."""
    rng = np.random.default_rng(seed)
    parts: list[np.ndarray] = []
    texts: list[str] = []
    num_samples = 0
    while num_samples < min_seconds * RATE or len(texts) % len(clips):
        clip = clips[len(texts) % len(clips)]
        samples, rate = soundfile.read(AUDIO / clip["file"], dtype="float32")
        assert rate == RATE
        parts += [samples, np.zeros(round(RATE * rng.uniform(*PAUSE_SECONDS)), np.float32)]
        texts.append(clip["text"])
        num_samples += parts[-1].size + samples.size
    recording = np.concatenate(parts)
    recording += ROOM * rng.standard_normal(recording.size, dtype=np.float32)
    return recording, " ".join(texts)


async def transcribe_long(engine: Engine, recording: np.ndarray) -> tuple[str, float, int, str]:
    """Transcript of a recording [S] float32, seconds it took, number of segments, and the receipt's reason."""
    service = Service(engine, ServerSettings().resolve())
    texts: list[str] = []
    num_segments, reason = 0, ""
    started = time.perf_counter()
    async for event in service.transcribe(AudioPart((recording, RATE))):
        if isinstance(event, TranscriptStart):
            num_segments, reason = event.total, event.receipt.reason
        elif isinstance(event, TranscriptDelta):
            texts.append(event.text)
    return "".join(texts), time.perf_counter() - started, num_segments, reason


def error_rate(said: list[str], heard: list[str]) -> float:
    """Word edits over words."""
    pairs = [word_errors(text, _plain(other)) for text, other in zip(said, heard, strict=True)]
    return round(sum(edits for edits, _ in pairs) / sum(words for _, words in pairs), 4)


def _plain(text: str) -> str:
    return re.sub(r"[^\w' ]", " ", text.lower()).strip()


def main() -> None:
    """Measure and print the result line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--long-seconds", type=float, default=300.0, help="least length of the long recording")
    parser.add_argument("--clips", type=int, default=0, help="newly spoken clips of each held-out set")
    parser.add_argument("--voices", choices=("all", "seen", "held-out"), default="all", help="whose sets --clips makes")
    parser.add_argument(
        "--split", choices=("test", "blind"), default="test", help="which held-out texts --clips speaks"
    )
    arguments = parser.parse_args()
    clips = json.loads((AUDIO / "manifest.json").read_text(encoding="utf-8"))
    files = [AUDIO / clip["file"] for clip in clips]
    seconds = sum(soundfile.info(file).duration for file in files)
    sets = synthesised(arguments.clips, arguments.voices, arguments.split) if arguments.clips else {}
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(EngineConfig(adapter_dir=folder))
        transcribe(engine, files[:2], None)
        with_lora, elapsed, reasons = transcribe(engine, files, None)
        without_lora, _, _ = transcribe(engine, files, "none")
        recording, said = long_recording(clips, arguments.long_seconds)
        heard_long, long_elapsed, num_segments, long_reason = asyncio.run(transcribe_long(engine, recording))
        synthesised_figures = measure(engine, sets) if sets else None
        engine.close()
    reasons.add(long_reason)
    if reasons != {"default:audio"}:
        refuse(f"the reasons were {sorted(reasons)}, not default:audio")
    if synthesised_figures:
        print_table(synthesised_figures["sets"])
    finish(
        {
            "model": "tiny-speech",
            "clips": len(clips),
            "audio_seconds": round(seconds, 1),
            "split": arguments.split,
            "synthesised_clips": {name: len(made) for name, made in sets.items()},
        },
        {
            "wer_with_lora": _by_voice(clips, with_lora),
            "wer_without_lora": _by_voice(clips, without_lora),
            "audio_seconds_per_second": round(seconds / elapsed, 1),
            "long_recording": {
                "audio_seconds": round(recording.size / RATE, 1),
                "segments": num_segments,
                "wer": error_rate([said], [heard_long]),
                "audio_seconds_per_second": round(recording.size / RATE / long_elapsed, 1),
            },
            "synthesised": synthesised_figures,
        },
    )


def _by_voice(clips: list[dict[str, Any]], heard: list[str]) -> dict[str, float]:
    """Error rates of the shipped clips: all, voices of the training, held-out voices."""
    groups = {"all": (False, True), "seen_voices": (False,), "held_out_voices": (True,)}
    return {
        name: error_rate(
            [clip["text"] for clip in clips if clip["held_out_voice"] in wanted],
            [text for clip, text in zip(clips, heard, strict=True) if clip["held_out_voice"] in wanted],
        )
        for name, wanted in groups.items()
    }


if __name__ == "__main__":
    main()
