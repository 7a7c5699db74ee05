"""The embedded model hears a long recording about as well as its clips one by one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from benchmarks.transcribe import AUDIO, RATE, error_rate, long_recording, transcribe, transcribe_long
from engine import Engine, EngineConfig


def test_a_long_recording_is_heard_about_as_well_as_its_clips(tmp_path: Path) -> None:
    clips = json.loads((AUDIO / "manifest.json").read_text(encoding="utf-8"))[::3]
    engine = Engine(EngineConfig(adapter_dir=str(tmp_path)))
    try:
        alone, _, reasons = transcribe(engine, [AUDIO / clip["file"] for clip in clips], None)
        recording, said = long_recording(clips, 1.0)
        heard, _, num_segments, reason = asyncio.run(transcribe_long(engine, recording))
        assert engine.recordings.window_seconds == 12.0 < recording.size / RATE
    finally:
        engine.close()
    assert reasons == {reason} == {"default:audio"}
    assert num_segments == len(clips) > 10
    one_by_one, as_one = error_rate([clip["text"] for clip in clips], alone), error_rate([said], [heard])
    assert len(said.split()) > 70
    assert as_one <= one_by_one + 0.02
    assert error_rate([said], [heard[: len(heard) // 2]]) > 0.3
