"""Audio in any container, rate and channel layout becomes the same mono samples, and bad audio becomes a sentence."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from engine import media
from engine.errors import MediaError
from engine.media import AudioClip, decode_audio, decode_base64
from engine.request import AudioPart

RATE = 16_000
PARAM = "messages[0].content[1].input_audio.data"


def tone(frequency: float, *, rate: int = 48_000, seconds: float = 1.0, amplitude: float = 0.5) -> np.ndarray:
    """[S] float32."""
    times = np.arange(round(rate * seconds)) / rate
    return (amplitude * np.sin(2 * np.pi * frequency * times)).astype(np.float32)


def with_soundfile(samples: np.ndarray, rate: int = 48_000, *, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def with_ffmpeg(samples: np.ndarray, kind: str, codec: str, *, has_video: bool = False) -> bytes:
    """`samples` [S] float32 at 48 kHz in container `kind`."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        if has_video:
            video: Any = container.add_stream("mpeg4", rate=10)
            video.width = video.height = 32
            video.pix_fmt = "yuv420p"
        stream: Any = container.add_stream(codec, rate=48_000, layout="mono")
        if has_video:
            for index in range(10):
                picture = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 20 * index, np.uint8), format="rgb24")
                container.mux(video.encode(picture.reformat(format="yuv420p")))
            container.mux(video.encode(None))
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = 48_000
        frame.time_base = Fraction(1, 48_000)
        frame.pts = 0
        resampler = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=48_000)
        for converted in resampler.resample(frame):
            container.mux(stream.encode(converted))
        container.mux(stream.encode(None))
    return file.getvalue()


FILES: dict[str, Callable[[np.ndarray], bytes]] = {
    "wav": with_soundfile,
    "flac": lambda samples: with_soundfile(samples, kind="FLAC"),
    "ogg": lambda samples: with_ffmpeg(samples, "ogg", "libopus"),
    "mp3": lambda samples: with_ffmpeg(samples, "mp3", "libmp3lame"),
    "m4a": lambda samples: with_ffmpeg(samples, "ipod", "aac"),
    "webm": lambda samples: with_ffmpeg(samples, "webm", "libopus"),
    "mp4": lambda samples: with_ffmpeg(samples, "mp4", "aac", has_video=True),
}


def decode(
    source: bytes | Path | tuple[Any, int],
    *,
    rate: int = RATE,
    max_seconds: float = 30.0,
    max_bytes: int = 2**24,
    min_samples: int = 400,
) -> AudioClip:
    part = AudioPart(source, param=PARAM)
    return decode_audio(part, rate=rate, max_seconds=max_seconds, max_bytes=max_bytes, min_samples=min_samples)


def refusal(source: bytes | Path | tuple[Any, int], **limits: Any) -> str:
    """The sentence of a refusal, after a check of its manners."""
    with pytest.raises(MediaError) as caught:
        decode(source, **limits)
    error = caught.value
    assert error.status == 400
    assert error.param == PARAM
    assert "/" not in error.message.replace("M4A/MP4", "")
    assert "Traceback" not in error.message
    return error.message


def spectrum(samples: np.ndarray, rate: int = RATE) -> tuple[np.ndarray, np.ndarray]:
    return np.fft.rfftfreq(samples.size, 1 / rate), np.abs(np.fft.rfft(samples * np.hanning(samples.size)))


def dominant_frequency(samples: np.ndarray) -> float:
    frequencies, magnitudes = spectrum(samples)
    return float(frequencies[magnitudes.argmax()])


@pytest.fixture(scope="module", params=FILES)
def encoded(request: pytest.FixtureRequest) -> bytes:
    return FILES[request.param](tone(440))


def test_every_container_gives_the_same_tone(encoded: bytes) -> None:
    clip = decode(encoded)
    assert clip.samples.dtype == np.float32
    assert clip.samples.ndim == 1
    assert clip.rate == RATE
    assert abs(clip.samples.size - RATE) <= 0.05 * RATE  # AAC and MP3 add priming samples
    assert clip.seconds == pytest.approx(1.0, abs=0.05)
    assert abs(dominant_frequency(clip.samples) - 440) <= 2
    assert np.abs(clip.samples[4000:12000]).max() == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("name", ["clip", "clip.wav", "clip.mp3", "clip.raw", "clip.m3u8", "clip.txt"])
def test_the_name_of_a_file_does_not_matter(encoded: bytes, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(encoded)
    assert decode(path).digest == decode(encoded).digest


@pytest.mark.parametrize("channels", [(0.5, 0.0), (0.0, 0.5), (0.5, 0.5)])
@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
def test_stereo_becomes_the_mean_of_its_channels(channels: tuple[float, float], rate: int) -> None:
    samples = np.stack([tone(440, rate=rate, amplitude=amplitude) for amplitude in channels], axis=1)
    for source in (with_soundfile(samples, rate), (samples, rate)):
        clip = decode(source)
        assert abs(clip.samples.size - RATE) <= 1
        assert abs(dominant_frequency(clip.samples) - 440) <= 1
        assert np.abs(clip.samples[1000:-1000]).max() == pytest.approx(sum(channels) / 2, abs=0.01)


def test_six_channels_become_one() -> None:
    samples = np.zeros((44_100, 6), np.float32)
    samples[:, 4] = tone(440, rate=44_100, amplitude=0.6)
    clip = decode(with_soundfile(samples, 44_100))
    assert abs(clip.samples.size - RATE) <= 1
    assert np.abs(clip.samples[1000:-1000]).max() == pytest.approx(0.1, abs=0.005)


@pytest.mark.parametrize(("layout", "num_channels"), [("5.1", 6), ("7.1", 8)])
def test_many_channels_of_a_compressed_file_become_one(layout: str, num_channels: int) -> None:
    samples = np.zeros((48_000, num_channels), np.float32)
    samples[:, 0] = tone(440, amplitude=0.8)
    file = io.BytesIO()
    with av.open(file, "w", format="ipod") as container:
        stream: Any = container.add_stream("aac", rate=48_000, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout=layout)
        frame.sample_rate = 48_000
        for converted in av.AudioResampler(format=stream.codec_context.format).resample(frame):
            container.mux(stream.encode(converted))
        container.mux(stream.encode(None))
    clip = decode(file.getvalue())
    assert abs(dominant_frequency(clip.samples) - 440) <= 1
    assert np.abs(clip.samples[4000:12000]).max() == pytest.approx(0.8 / num_channels, rel=0.15)


def test_a_tone_above_the_new_band_does_not_alias() -> None:
    passed = decode(with_soundfile(tone(3_000))).samples
    blocked = decode(with_soundfile(tone(11_000))).samples
    middle = slice(1000, -1000)  # a tone that begins at once has energy everywhere at its ends
    rms_passed, rms_blocked = (float(np.sqrt((samples[middle] ** 2).mean())) for samples in (passed, blocked))
    assert rms_passed == pytest.approx(0.5 / np.sqrt(2), rel=0.01)
    assert rms_blocked < 0.01 * rms_passed


@pytest.mark.parametrize("source_rate", [47_999, 15_991, 191_999])
def test_rates_without_a_common_divisor_are_resampled_without_a_huge_filter(source_rate: int) -> None:
    clip = decode((tone(440, rate=source_rate), source_rate))
    assert abs(clip.samples.size - RATE) <= 1
    assert abs(dominant_frequency(clip.samples) - 440) <= 1


def test_resampling_works_without_torchaudio(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decode((tone(440), 48_000)).samples
    monkeypatch.setitem(__import__("sys").modules, "torchaudio.functional", None)
    actual = decode((tone(440), 48_000)).samples
    assert np.abs(actual - expected)[500:-500].max() < 0.005
    monkeypatch.setitem(__import__("sys").modules, "soxr", None)
    assert "send it at 16000 Hz" in refusal((tone(440), 48_000))


@pytest.mark.parametrize(
    ("samples", "peak"),
    [
        (tone(440, rate=RATE).astype(np.float64), 0.5),
        ((tone(440, rate=RATE) * 32768).astype(np.int16), 0.5),
        ((tone(440, rate=RATE) * 2**31).astype(np.int32), 0.5),
        ((tone(440, rate=RATE) * 128 + 128).astype(np.uint8), 0.5),
    ],
)
def test_arrays_of_any_number_type_are_scaled_to_one(samples: np.ndarray, peak: float) -> None:
    clip = decode((samples, RATE))
    assert np.abs(clip.samples).max() == pytest.approx(peak, abs=0.01)
    assert abs(float(clip.samples.mean())) < 0.01


def test_equal_audio_in_another_lossless_wrapper_has_the_same_digest() -> None:
    samples = (tone(440) * 32767).astype(np.int16)
    digests = {decode(with_soundfile(samples, kind=kind)).digest for kind in ("WAV", "FLAC", "AIFF", "W64")}
    assert digests == {decode((samples, 48_000)).digest}


def test_other_samples_or_another_rate_change_the_digest() -> None:
    clips = [decode((tone(440), 48_000)), decode((tone(441), 48_000)), decode((tone(440), 48_000), rate=8_000)]
    assert len({clip.digest for clip in clips}) == 3
    assert all(len(clip.digest) == 64 for clip in clips)


@pytest.mark.parametrize("num_samples", [1, 159, 160, 161, 399, 400, 401, 15_999, 16_000, 16_001, 479_999, 480_000])
def test_lengths_are_kept_but_for_padding_to_the_minimum(num_samples: int) -> None:
    samples = np.full(num_samples, 0.25, np.float32)
    clip = decode(with_soundfile(samples, RATE, subtype="FLOAT"))
    assert clip.samples.size == max(num_samples, 400)
    assert (clip.samples[:num_samples] == 0.25).all()
    assert (clip.samples[num_samples:] == 0.0).all()
    assert clip.seconds == num_samples / RATE


def test_one_sample_too_many_is_refused() -> None:
    assert "longer than 30 seconds" in refusal((np.zeros(480_001, np.float32), RATE))


def test_silence_is_audio() -> None:
    clip = decode(with_soundfile(np.zeros(48_000, np.float32)))
    assert clip.samples.size == RATE
    assert not clip.samples.any()


@pytest.mark.parametrize(
    "source",
    [
        b"",
        with_soundfile(np.zeros(0, np.float32)),
        with_soundfile(np.zeros(0, np.float32), kind="FLAC"),
        FILES["webm"](tone(440))[:110],
        FILES["m4a"](tone(440))[:40],
        FILES["wav"](tone(440))[:20],
        (np.zeros(0, np.float32), RATE),
        (np.zeros((0, 2), np.float32), RATE),
    ],
    ids=["0 bytes", "wav", "flac", "110 bytes of webm", "40 bytes of m4a", "20 bytes of wav", "array", "stereo array"],
)
def test_audio_without_a_sample_is_called_empty(source: bytes | tuple[np.ndarray, int]) -> None:
    assert refusal(source).startswith("The audio is empty")


@pytest.mark.parametrize("claimed", [0xFFFFFFFF, 0x7FFFFFFF, 0])
def test_a_streamed_wav_is_read_to_its_real_end(claimed: int) -> None:
    encoded = bytearray(with_soundfile(tone(440)))
    position = encoded.index(b"data") + 4
    encoded[position : position + 4] = struct.pack("<I", claimed)
    encoded[4:8] = struct.pack("<I", claimed)
    assert decode(bytes(encoded)).samples.size == RATE


@pytest.mark.parametrize(
    "source",
    [b"hello", b"\x00" * 5000, b"%PDF-1.7" + b"x" * 500, bytes(range(256)) * 40, b"<html></html>", b"\xff\xfb" * 9],
    ids=["text", "zeros", "pdf", "bytes", "html", "mp3 sync words"],
)
def test_data_of_another_kind_is_refused_with_the_kinds_that_are_read(source: bytes) -> None:
    assert refusal(source) == f"Unsupported audio format: the data is none of {media.SUPPORTED_FORMATS}."


def attempt(encoded: bytes) -> AudioClip | str:
    """The clip, or the sentence of the refusal."""
    try:
        return decode(encoded)
    except MediaError as error:
        return error.message


@pytest.mark.parametrize("kind", ["wav", "mp3", "webm"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_file_cut_short_is_read_as_far_as_it_goes(kind: str, share: float) -> None:
    encoded = FILES[kind](tone(440, seconds=3.0))
    clip = decode(encoded[: int(len(encoded) * share)])
    assert clip.seconds == pytest.approx(3.0 * share, abs=0.3)
    assert abs(dominant_frequency(clip.samples) - 440) <= 3


@pytest.mark.parametrize("kind", FILES)
def test_damage_never_escapes_as_another_error(kind: str) -> None:
    rng = np.random.default_rng(0)
    encoded = np.frombuffer(FILES[kind](tone(440)), np.uint8)
    for _ in range(25):
        damaged = encoded.copy()
        start = int(rng.integers(0, damaged.size - 1))
        noise = rng.integers(0, 256, int(rng.integers(1, damaged.size // 3)))[: damaged.size - start]
        damaged[start : start + noise.size] = noise
        for data in (damaged, encoded[:start]):
            outcome = attempt(data.tobytes())
            assert isinstance(outcome, str) or np.isfinite(outcome.samples).all()


def test_a_video_without_sound_says_so() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        video: Any = container.add_stream("mpeg4", rate=10)
        video.width = video.height = 32
        video.pix_fmt = "yuv420p"
        for _ in range(3):
            container.mux(video.encode(av.VideoFrame(32, 32, "yuv420p")))
        container.mux(video.encode(None))
    assert refusal(file.getvalue()) == "The file holds no audio track."


@pytest.mark.parametrize(
    "playlist",
    [
        "ffconcat version 1.0\nfile secret.wav\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1,\nsecret.wav\n#EXT-X-ENDLIST\n",
    ],
    ids=["concat", "hls"],
)
def test_a_playlist_opens_no_other_file(playlist: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.wav").write_bytes(with_soundfile(tone(440)))
    monkeypatch.chdir(tmp_path)
    assert refusal(playlist.encode()).startswith("Unsupported audio format")


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "m4a", "webm", "mp3"])
def test_long_audio_is_refused_before_it_is_decoded_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = FILES[kind](np.zeros(48_000 * 120, np.float32))
    monkeypatch.setattr(media, "_BLOCK_VALUES", 48_000)
    sizes: list[int] = []
    join = media._join

    def counting_join(blocks: Any, *rates_and_limit: Any) -> Any:
        def counted() -> Any:
            for block in blocks:
                sizes.append(block.size)
                yield block

        return join(counted(), *rates_and_limit)

    monkeypatch.setattr(media, "_join", counting_join)
    assert "longer than 5 seconds" in refusal(encoded, max_seconds=5.0)
    assert sum(sizes) <= 48_000 * 6.1


def test_a_header_that_claims_hours_is_refused_at_once() -> None:
    encoded = bytearray(with_soundfile(tone(440), kind="FLAC"))
    # STREAMINFO: 36 bits of total samples end at byte 26 (RFC 9639, section 8.2).
    encoded[22:26] = struct.pack(">I", 48_000 * 7200)
    assert "longer than 30 seconds" in refusal(bytes(encoded))


def test_data_over_the_byte_limit_is_refused(tmp_path: Path) -> None:
    encoded = with_soundfile(tone(440))
    path = tmp_path / "clip.wav"
    path.write_bytes(encoded)
    for source in (encoded, path):
        assert refusal(source, max_bytes=len(encoded) - 1).startswith("The audio is larger than")
        assert decode(source, max_bytes=len(encoded)).samples.size == RATE


def test_a_missing_file_or_a_folder_is_refused_without_its_path(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing.wav"):
        message = refusal(path)
        assert message == "The audio file does not exist or is not a file."


@pytest.mark.parametrize(
    ("samples", "rate", "words"),
    [
        (np.array([0.0, np.nan], np.float32), RATE, "not finite"),
        (np.zeros((2, 48_000), np.float32), 48_000, "must be [samples] or [samples, channels]"),
        (np.zeros((3, 2, 2), np.float32), RATE, "must be [samples] or [samples, channels]"),
        (np.zeros(800, np.complex64), RATE, "must be floats"),
        (np.zeros(800, np.float32), 0, "sample rate is 0 Hz"),
        (np.zeros(800, np.float32), 10**9, "sample rate is 1000000000 Hz"),
    ],
)
def test_arrays_that_are_no_audio_are_refused(samples: np.ndarray, rate: int, words: str) -> None:
    assert words in refusal((samples, rate))


def test_a_wav_with_values_that_are_not_numbers_is_refused() -> None:
    samples = tone(440)
    samples[100] = np.nan
    assert "not finite" in refusal(with_soundfile(samples, subtype="FLOAT"))


BYTES = bytes(range(256)) * 3 + b"\xfb\xff\xfe"
TEXT = base64.b64encode(BYTES).decode()
URL_SAFE = base64.urlsafe_b64encode(BYTES).decode()


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        base64.encodebytes(BYTES).decode(),
        base64.encodebytes(BYTES).decode().replace("\n", "\r\n"),
        f"  {TEXT}\n",
        URL_SAFE,
        URL_SAFE.rstrip("="),
        TEXT.rstrip("="),
        f"data:;base64,{TEXT}",
        f"data:audio/wav;base64,{TEXT}",
        f"DATA:audio/webm;codecs=opus;BASE64,{TEXT}",
        "data:audio/wav;base64," + TEXT.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
    ],
)
def test_base64_is_read_in_every_form_that_clients_write(text: str) -> None:
    assert TEXT != URL_SAFE
    assert decode_base64(text, param=PARAM, max_bytes=len(BYTES)) == BYTES


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
def test_base64_of_every_padding_is_read(num_bytes: int) -> None:
    text = base64.b64encode(BYTES[:num_bytes]).decode()
    assert decode_base64(text.rstrip("="), param=PARAM, max_bytes=9) == BYTES[:num_bytes]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("   \n", "empty"),
        ("====", "empty"),
        ("data:audio/wav;base64,", "empty"),
        ("data:audio/wav;base64", "no comma"),
        ("data:audio/wav,abc", "not base64"),
        ("not base64!", "not valid base64"),
        ("QUJD=QUJD", "not valid base64"),
        ("QUJDR", "not valid base64"),
        ("ÄÖÜß", "not valid base64"),
        ("https://example.com/a.wav", "not valid base64"),
    ],
)
def test_what_is_not_base64_is_refused_with_its_field(text: str, words: str) -> None:
    with pytest.raises(MediaError, match=words) as caught:
        decode_base64(text, param=PARAM, max_bytes=1000)
    assert caught.value.param == PARAM


@pytest.mark.parametrize("text", [TEXT, " " * 10_000, f"data:;base64,{TEXT}"])
def test_base64_over_the_limit_is_refused_before_it_is_decoded(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media.base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(MediaError, match="larger than"):
        decode_base64(text, param=PARAM, max_bytes=len(BYTES) - 1)
