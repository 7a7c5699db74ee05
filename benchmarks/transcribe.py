"""Word error rate and speed of the embedded model on the clips of assets/audio, with the speech LoRA and without.

    python -m benchmarks.transcribe

All clips are asked for at once, as many clients would; the engine batches them. Refuses to report where the audio default
does not bring the speech adapter.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from typing import Any

import soundfile

from assets.training.evaluate import word_errors
from benchmarks.report import finish, refuse
from engine import Engine, EngineConfig, SamplingParams
from engine.config import EMBEDDED_ASSETS
from engine.request import AudioPart

AUDIO = EMBEDDED_ASSETS / "audio"


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


def error_rate(clips: list[dict[str, Any]], texts: list[str]) -> float:
    """Word edits over words."""
    pairs = [word_errors(clip["text"], _plain(text)) for clip, text in zip(clips, texts, strict=True)]
    return round(sum(edits for edits, _ in pairs) / sum(words for _, words in pairs), 4)


def _plain(text: str) -> str:
    return re.sub(r"[^\w' ]", " ", text.lower()).strip()


def main() -> None:
    """Measure and print the result line."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    clips = json.loads((AUDIO / "manifest.json").read_text(encoding="utf-8"))
    seconds = sum(soundfile.info(AUDIO / clip["file"]).duration for clip in clips)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(EngineConfig(adapter_dir=folder))
        transcribe(engine, clips[:2], None)
        with_lora, elapsed, reasons = transcribe(engine, clips, None)
        without_lora, _, _ = transcribe(engine, clips, "none")
        engine.close()
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
        },
    )


if __name__ == "__main__":
    main()
