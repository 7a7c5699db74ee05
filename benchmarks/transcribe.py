"""Word error rate and speed of the embedded model on the clips of assets/audio, with the speech LoRA and without.

    python -m benchmarks.transcribe [--long-seconds 300]

All clips are asked for at once, as many clients would; the engine batches them. The long recording is the same clips one
after another with pauses, over and over, through the service that the API and the web app call. Refuses to report where
the audio default does not bring the speech adapter.
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
from assets.training.evaluate import word_errors
from benchmarks.report import finish, refuse
from engine import Engine, EngineConfig, SamplingParams
from engine.config import EMBEDDED_ASSETS
from engine.request import AudioPart

AUDIO = EMBEDDED_ASSETS / "audio"
RATE = 16_000
PAUSE_SECONDS = (0.6, 2.0)
ROOM = 3e-4  # root mean square of the noise between clips, -70 dB of full scale


def transcribe(engine: Engine, clips: list[dict[str, Any]], lora: str | None) -> tuple[list[str], float, set[str]]:
    """Transcripts of all clips, seconds in all, and the reasons on the receipts."""
    sampling = SamplingParams(temperature=0, max_tokens=96)
    started = time.perf_counter()
    answers = [
        engine.start_sync(engine.transcription_prompt(AudioPart(AUDIO / clip["file"])), sampling, lora=lora)[0]
        for clip in clips
    ]
    texts = ["".join(delta.text for delta in answer) for answer in answers]
    return texts, time.perf_counter() - started, {answer.receipt.reason for answer in answers}


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


def error_rate(clips: list[dict[str, Any]], texts: list[str]) -> float:
    """Word edits over words."""
    pairs = [word_errors(clip["text"], _plain(text)) for clip, text in zip(clips, texts, strict=True)]
    return round(sum(edits for edits, _ in pairs) / sum(words for _, words in pairs), 4)


def _plain(text: str) -> str:
    return re.sub(r"[^\w' ]", " ", text.lower()).strip()


def main() -> None:
    """Measure and print the result line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--long-seconds", type=float, default=300.0, help="least length of the long recording")
    arguments = parser.parse_args()
    clips = json.loads((AUDIO / "manifest.json").read_text(encoding="utf-8"))
    seconds = sum(soundfile.info(AUDIO / clip["file"]).duration for clip in clips)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(EngineConfig(adapter_dir=folder))
        transcribe(engine, clips[:2], None)
        with_lora, elapsed, reasons = transcribe(engine, clips, None)
        without_lora, _, _ = transcribe(engine, clips, "none")
        recording, said = long_recording(clips, arguments.long_seconds)
        heard_long, long_elapsed, num_segments, long_reason = asyncio.run(transcribe_long(engine, recording))
        engine.close()
    reasons.add(long_reason)
    if reasons != {"default:audio"}:
        refuse(f"the reasons were {sorted(reasons)}, not default:audio")
    groups = {
        "all": clips,
        "seen_voices": [clip for clip in clips if not clip["held_out_voice"]],
        "held_out_voices": [clip for clip in clips if clip["held_out_voice"]],
    }
    heard = {clip["file"]: text for clip, text in zip(clips, with_lora, strict=True)}
    base = {clip["file"]: text for clip, text in zip(clips, without_lora, strict=True)}
    finish(
        {"model": "tiny-speech", "clips": len(clips), "audio_seconds": round(seconds, 1)},
        {
            "wer_with_lora": {
                name: error_rate(group, [heard[c["file"]] for c in group]) for name, group in groups.items()
            },
            "wer_without_lora": {
                name: error_rate(group, [base[c["file"]] for c in group]) for name, group in groups.items()
            },
            "audio_seconds_per_second": round(seconds / elapsed, 1),
            "long_recording": {
                "audio_seconds": round(recording.size / RATE, 1),
                "segments": num_segments,
                "wer": error_rate([{"text": said}], [heard_long]),
                "audio_seconds_per_second": round(recording.size / RATE / long_elapsed, 1),
            },
        },
    )


if __name__ == "__main__":
    main()
