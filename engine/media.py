"""From audio as a client sends it to samples that the model takes: the one entry point for API, uploads and microphone.

Decoders are chosen by content, never by name or MIME type: libsndfile first, FFmpeg (PyAV) for what it does not read.
Work and memory are bounded by `max_bytes` and `max_seconds`, whatever a header claims. All faults of a file are
`MediaError`s without a path. Knows nothing of models but their sample rate. Called by `engine/prompt`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote_to_bytes

import numpy as np
import torch

from engine.errors import MediaError
from engine.request import AudioPart
from engine.resampling import resample_blocks

SUPPORTED_FORMATS = "WAV, FLAC, MP3, Ogg (Opus, Vorbis), M4A/MP4 (AAC), WebM"

# FFmpeg's readers of plain containers. Playlists (hls, concat, dash, sdp …) are left out: they open files and URLs.
_FFMPEG_READERS = (
    "aac,ac3,aiff,amr,amrnb,amrwb,asf,au,avi,caf,eac3,flac,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,"
    "ogg,tta,w64,wav,wv"
)
_MAX_CHANNELS = 64
_MAX_RATE = 192_000
_BLOCK_VALUES = 1 << 20  # values (frames x channels) that are decoded at once
_MAX_SINC_WEIGHTS = 4_000_000  # torchaudio's filter bank holds about up x down weights
_SINC_ZERO_CROSSINGS = 32  # half width of the low-pass filter; the default, 6, lets more alias through


@dataclass(frozen=True, eq=False)
class AudioClip:
    """Decoded audio.

    Attributes:
        samples: [S] float32 mono at `rate`.
        rate: the model's sample rate in Hz.
        digest: sha256 (hex) of `samples` and `rate`; equal audio in another lossless container has the same.
        seconds: duration of the audio as it came, without padding.
    """

    samples: np.ndarray
    rate: int
    digest: str
    seconds: float


def decode_audio(
    part: AudioPart, *, rate: int, max_seconds: float, max_bytes: int, min_samples: int = 400
) -> AudioClip:
    """Decode to mono float32 at `rate` Hz: mean of the channels, band-limited resampling, zeros up to `min_samples`.

    Raises:
        MediaError: empty, unreadable, damaged, longer than `max_seconds` or larger than `max_bytes`; its `param` is the
            part's.
    """
    try:
        samples, seconds = _decode(part.source, rate, max_seconds, max_bytes)
        if samples.size == 0:
            raise MediaError("The audio is empty: it holds no samples.")
        if not np.isfinite(samples).all():
            raise MediaError("The audio holds values that are not finite numbers; export it again.")
    except MediaError as error:
        error.param = part.param
        raise
    if samples.size < min_samples:
        samples = np.pad(samples, (0, min_samples - samples.size))
    samples = np.ascontiguousarray(samples, dtype=np.float32)
    digest = hashlib.sha256(samples.data)
    digest.update(f"|{rate}".encode())
    return AudioClip(samples=samples, rate=rate, digest=digest.hexdigest(), seconds=seconds)


def decode_base64(text: str, *, param: str, max_bytes: int) -> bytes:
    """Bytes of base64 as clients write it: plain, in lines, without padding, URL-safe, or as a `data:` URL.

    Raises:
        MediaError: not base64, empty, or more than `max_bytes` bytes.
    """
    if len(text) > 2 * max_bytes + 1024:  # even base64 in short lines is under twice the bytes
        raise MediaError(f"The data is larger than {_megabytes(max_bytes)}.", param=param)
    payload = text.strip()
    if payload[:5].lower() == "data:":
        header, comma, payload = payload.partition(",")
        if not comma:
            raise MediaError("The data URL has no comma before its data.", param=param)
        if not header.lower().endswith(";base64"):
            raise MediaError("The data URL is not base64; write data:audio/wav;base64,… instead.", param=param)
        payload = unquote_to_bytes(payload).decode("ascii", "replace") if "%" in payload else payload
    payload = "".join(payload.split()).replace("-", "+").replace("_", "/").rstrip("=")
    if not payload:
        raise MediaError("The data is empty.", param=param)
    if len(payload) * 3 // 4 > max_bytes:
        raise MediaError(f"The data is larger than {_megabytes(max_bytes)}.", param=param)
    try:
        return base64.b64decode(payload + "=" * (-len(payload) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise MediaError("The data is not valid base64.", param=param) from None


def resample(samples: np.ndarray, source_rate: int, rate: int) -> np.ndarray:
    """Band-limited resampling of `samples` [S] float32 from `source_rate` to `rate` Hz.

    Windowed sinc interpolation (Julius O. Smith, "Digital Audio Resampling") by torchaudio; SoX's resampler, which
    librosa brings, where the two rates share no large divisor or torchaudio is missing.
    """
    if source_rate == rate:
        return samples
    divisor = math.gcd(source_rate, rate)
    if (source_rate // divisor) * (rate // divisor) <= _MAX_SINC_WEIGHTS:
        try:
            from torchaudio.functional import resample as sinc_resample
        except (ImportError, OSError):  # OSError: built for another torch
            pass
        else:
            signal = torch.from_numpy(np.ascontiguousarray(samples))
            resampled = sinc_resample(signal, source_rate, rate, lowpass_filter_width=_SINC_ZERO_CROSSINGS)
            return np.asarray(resampled.numpy(), dtype=np.float32)
    try:
        import soxr
    except ImportError:
        raise MediaError(
            f"Audio at {source_rate} Hz cannot be resampled here; send it at {rate} Hz or install torchaudio and soxr."
        ) from None
    return np.asarray(soxr.resample(samples, source_rate, rate, quality="HQ"), dtype=np.float32)


def _decode(
    source: bytes | Path | tuple[np.ndarray, int], rate: int, max_seconds: float, max_bytes: int
) -> tuple[np.ndarray, float]:
    """Mono float32 [S] at `rate` Hz, and its duration in seconds."""
    if isinstance(source, tuple):
        samples, source_rate = _decode_array(*source)
        return _join([samples], source_rate, rate, max_seconds)
    with _open_source(source) as file:
        num_bytes = file.seek(0, os.SEEK_END)
        if num_bytes == 0:
            raise MediaError("The audio is empty: it has 0 bytes.")
        if num_bytes > max_bytes:
            raise MediaError(f"The audio is larger than {_megabytes(max_bytes)}.")
        file.seek(0)
        head = file.read(16)
        for decode in (_decode_with_soundfile, _decode_with_ffmpeg):
            file.seek(0)
            decoded = decode(file, rate, max_seconds)
            if decoded is not None and decoded[0].size:
                return decoded
    container = _container_name(head)
    if container is not None:
        raise MediaError(f"The audio is empty: the {container} data holds a header but no sound that can be read.")
    raise MediaError(f"Unsupported audio format: the data is none of {SUPPORTED_FORMATS}.")


def _open_source(source: bytes | Path) -> BinaryIO:
    """A readable file without a name, so that no decoder can be led by an extension."""
    if not isinstance(source, Path):
        return io.BytesIO(source)
    try:
        if not source.is_file():
            raise MediaError("The audio file does not exist or is not a file.")
        return os.fdopen(os.open(source, os.O_RDONLY), "rb")
    except OSError:
        raise MediaError("The audio file cannot be read.") from None


def _decode_array(samples: Any, source_rate: Any) -> tuple[np.ndarray, int]:
    """`(samples, rate)` as given by a caller: floats in -1..1 or integers of their full range, [S] or [S, channels]."""
    array = np.asarray(samples)
    source_rate = int(source_rate)
    _check_rate(source_rate)
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] > _MAX_CHANNELS):
        raise MediaError(f"The samples have shape {array.shape}, but must be [samples] or [samples, channels].")
    if array.dtype.kind not in "fiu":
        raise MediaError(f"The samples are {array.dtype}, but must be floats in -1..1 or integers.")
    mono = _to_float(array)
    return (mono.mean(axis=1, dtype=np.float32) if mono.ndim == 2 and mono.size else mono.reshape(-1)), source_rate


def _decode_with_soundfile(file: BinaryIO, rate: int, max_seconds: float) -> tuple[np.ndarray, float] | None:
    """libsndfile: WAV, FLAC, MP3, Ogg, AIFF …; None where it cannot read the data."""
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: the wheel has no libsndfile for this platform
        return None
    try:
        with soundfile.SoundFile(file) as sound:
            _check_rate(sound.samplerate)
            _check_channels(sound.channels)
            # A streamed header claims the largest number there is; only the data then tells.
            if 0 < sound.frames < 2**62:
                _check_seconds(sound.frames / sound.samplerate, max_seconds)

            def blocks() -> Iterator[np.ndarray]:
                num_frames = max(1, _BLOCK_VALUES // sound.channels)
                while (block := sound.read(num_frames, dtype="float32", always_2d=True)).size:
                    yield block.mean(axis=1, dtype=np.float32)

            return _join(blocks(), sound.samplerate, rate, max_seconds)
    except (soundfile.SoundFileError, OSError, RuntimeError, TypeError, ValueError):
        return None


def _decode_with_ffmpeg(file: BinaryIO, rate: int, max_seconds: float) -> tuple[np.ndarray, float] | None:
    """FFmpeg through PyAV: the first audio track of M4A, MP4, WebM …; None where it cannot read the data."""
    try:
        import av
    except ImportError:
        return None
    try:
        with av.open(
            file, mode="r", options={"format_whitelist": _FFMPEG_READERS}, metadata_errors="ignore"
        ) as container:
            if not container.streams.audio:
                raise MediaError("The file holds no audio track.")
            stream = container.streams.audio[0]
            if stream.codec_context is None:  # a codec that this FFmpeg does not have
                return None
            source_rate = stream.codec_context.sample_rate
            if stream.duration is not None and stream.time_base is not None:
                _check_seconds(float(stream.duration * stream.time_base), max_seconds)
            return _join(_ffmpeg_blocks(container, stream, source_rate), source_rate, rate, max_seconds)
    except (av.error.FFmpegError, OSError, RuntimeError, TypeError, ValueError, EOFError):
        return None


def _ffmpeg_blocks(container: Any, stream: Any, source_rate: int) -> Iterator[np.ndarray]:
    """Mono float32 blocks of a track. A damaged packet is skipped as players do; many are a fault."""
    import av

    _check_rate(source_rate)
    num_packets = num_damaged = 0
    packers: dict[tuple[str, str], Any] = {}
    for packet in container.demux(stream):
        num_packets += 1
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            num_damaged += 1
            continue
        for frame in frames:
            if frame.sample_rate != source_rate:
                raise MediaError("The audio's sample rate changes midway; export it again.")
            _check_channels(len(frame.layout.channels))
            # Packed first: PyAV reads past the end of a planar frame of 8 or more channels.
            layout = (frame.format.name, frame.layout.name)
            packer = packers.setdefault(layout, av.AudioResampler(format="flt"))
            for packed in packer.resample(frame):
                values = packed.to_ndarray().reshape(-1, len(packed.layout.channels))
                yield values.mean(axis=1, dtype=np.float32)
    if num_damaged > max(1, num_packets // 10):
        raise MediaError("The audio is damaged: many parts of it cannot be decoded; export it again.")


def _join(blocks: Iterable[np.ndarray], source_rate: int, rate: int, max_seconds: float) -> tuple[np.ndarray, float]:
    """All blocks in one array [S] at `rate` Hz, and their duration; stops at the first that passes `max_seconds`."""
    num_samples = 0

    def counted() -> Iterator[np.ndarray]:
        nonlocal num_samples
        for block in blocks:
            num_samples += block.size
            _check_seconds(num_samples / source_rate, max_seconds)
            yield block

    taken = list(resample_blocks(counted(), source_rate, rate, resample))
    joined = taken[0] if len(taken) == 1 else np.concatenate(taken or [np.zeros(0, dtype=np.float32)])
    return joined, num_samples / source_rate


def _to_float(values: np.ndarray) -> np.ndarray:
    """Integers of any width to -1..1 (unsigned ones are centred at half their range); floats as they are."""
    if values.dtype.kind == "f":
        return values.astype(np.float32, copy=False)
    half_range = 2.0 ** (8 * values.dtype.itemsize - 1)
    centre = half_range if values.dtype.kind == "u" else 0.0
    return ((values.astype(np.float64) - centre) / half_range).astype(np.float32)


def _check_seconds(seconds: float, max_seconds: float) -> None:
    if seconds > max_seconds:
        raise MediaError(f"The audio is longer than {max_seconds:g} seconds; cut it into shorter pieces.")


def _check_rate(source_rate: int) -> None:
    if not 0 < source_rate <= _MAX_RATE:
        raise MediaError(f"The audio's sample rate is {source_rate} Hz, but must be between 1 and {_MAX_RATE} Hz.")


def _check_channels(num_channels: int) -> None:
    if not 0 < num_channels <= _MAX_CHANNELS:
        raise MediaError(f"The audio has {num_channels} channels, but must have between 1 and {_MAX_CHANNELS}.")


_SIGNATURES: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("WAV", lambda head: head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE"),
    ("FLAC", lambda head: head[:4] == b"fLaC"),
    ("Ogg", lambda head: head[:4] == b"OggS"),
    ("WebM", lambda head: head[:4] == b"\x1a\x45\xdf\xa3"),
    ("MP4", lambda head: head[4:8] == b"ftyp"),
    ("MP3", lambda head: head[:3] == b"ID3"),
    ("AIFF", lambda head: head[:4] == b"FORM"),
)


def _container_name(head: bytes) -> str | None:
    """The container that the first 16 bytes announce, for messages only."""
    return next((name for name, is_match in _SIGNATURES if is_match(head)), None)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB"
