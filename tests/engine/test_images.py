"""Images as people have them: by content, upright, on white, bounded, and every fault a sentence that names its part."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.errors import MediaError
from engine.images import DecodedImage, decode_image
from engine.request import ImagePart
from tests.media_models import picture

PARAM = "messages[0].content[1].image_url.url"


def encode(image: Image.Image, kind: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def decode(source: Any, max_bytes: int = 1 << 20, **bounds: int) -> DecodedImage:
    return decode_image(ImagePart(source, PARAM), max_bytes=max_bytes, **bounds)


def refusal(source: Any, **bounds: int) -> str:
    with pytest.raises(MediaError) as caught:
        decode(source, **bounds)
    assert caught.value.param == PARAM and caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "tolerance"),
    [("PNG", {}, 0), ("WEBP", {"lossless": True}, 0), ("JPEG", {"quality": 95, "subsampling": 0}, 12), ("GIF", {}, 12)],
)
def test_each_format_gives_the_picture(kind: str, settings: dict[str, Any], tolerance: int, tmp_path: Path) -> None:
    image = picture()
    content = encode(image, kind, **settings)
    misnamed = tmp_path / "image.wav"
    misnamed.write_bytes(content)
    for source in (content, misnamed):
        decoded = decode(source)
        assert decoded.pixels.mode == "RGB" and decoded.pixels.size == image.size
        difference = np.abs(np.asarray(decoded.pixels).astype(int) - np.asarray(image))
        assert difference.mean() <= tolerance


def test_pixels_arrays_and_lossless_files_of_one_picture_are_one_item() -> None:
    image = picture()
    sources = [image, np.asarray(image), encode(image, "PNG"), encode(image, "WEBP", lossless=True)]
    assert len({decode(source).digest for source in sources}) == 1
    assert decode(picture(seed=1)).digest != decode(image).digest
    flat = Image.new("RGB", (4, 6))
    assert decode(flat).digest != decode(flat.resize((6, 4))).digest, "the shape counts, not the bytes alone"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    image = Image.new("RGB", (16, 32), "black")
    image.paste("white", (0, 0, 16, 8))  # white above
    undo = {
        1: [], 2: [Image.Transpose.FLIP_LEFT_RIGHT], 3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM], 5: [Image.Transpose.TRANSPOSE], 6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE], 8: [Image.Transpose.ROTATE_270],
    }[orientation]  # fmt: skip
    stored = image
    for operation in undo:
        stored = stored.transpose(operation)
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode(encode(stored, "JPEG", exif=exif, quality=95)).pixels
    assert pixels.size == (16, 32)
    assert np.asarray(pixels)[:6].mean() > 240 > 15 > np.asarray(pixels)[10:].mean()


def test_a_gif_shows_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    content = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(content).pixels.getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_every_kind_of_pixel_becomes_rgb_of_the_same_brightness(mode: str) -> None:
    grey = Image.new("L", (10, 10), 128)
    if mode == "I;16":
        image = Image.fromarray(np.full((10, 10), 128 << 8, np.uint16))
    elif mode == "1":
        image = Image.new("1", (10, 10), 1)
    else:
        image = grey.convert("RGB").convert(mode) if mode in ("CMYK", "RGBA") else grey.convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    expected = 255 if mode == "1" else 128
    assert np.abs(np.asarray(decode(encode(image, kind)).pixels).astype(int) - expected).max() <= 3


def test_what_is_transparent_is_white() -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.putpixel((2, 2), (255, 0, 0, 255))
    palette = Image.new("P", (8, 8), 0)
    palette.info["transparency"] = 0
    for source in (encode(image, "PNG"), encode(palette, "PNG", transparency=0)):
        assert decode(source).pixels.getpixel((0, 0)) == (255, 255, 255)
    assert decode(encode(image, "PNG")).pixels.getpixel((2, 2)) == (255, 0, 0)


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def test_decompression_bombs_are_refused_by_their_header() -> None:
    assert "at most 64000000 pixels" in refusal(_png_header(30_000, 30_000))
    assert "60000 x 1200 pixels" in refusal(_png_header(60_000, 1200))
    assert "100 x 100 pixels" in refusal(Image.new("RGB", (100, 100)), max_pixels=9999)
    assert decode(Image.new("RGB", (100, 100)), max_pixels=10_000).pixels.size == (100, 100)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", "empty"), (b"not an image at all", "Unsupported image format"), (b"%PDF-1.4 ....", "Unsupported"),
        (encode(picture(), "BMP"), "Unsupported"), (encode(picture(), "TIFF"), "Unsupported"),
        (encode(picture(), "PNG")[:80], "damaged"), (encode(picture(200, 200), "JPEG")[:400], "damaged"),
        (_png_header(50, 50), "damaged"), (Path("/nowhere/image.png"), "does not exist"),
        (np.zeros((4, 4), np.uint8), "uint8 [height, width, 3]"), (np.zeros((4, 4, 3)), "float64"),
    ],
)  # fmt: skip
def test_each_fault_is_one_sentence_about_the_part(source: Any, words: str) -> None:
    message = refusal(source)
    assert words in message and "/nowhere" not in message and "Traceback" not in message


def test_files_above_the_bound_are_refused_before_they_are_read(tmp_path: Path) -> None:
    content = encode(picture(), "PNG")
    file = tmp_path / "x.png"
    file.write_bytes(content)
    for source in (content, file):
        assert "larger than" in refusal(source, max_bytes=len(content) - 1)
        assert decode(source, max_bytes=len(content)).pixels.size == (40, 30)


def test_no_damaged_file_gives_anything_but_a_sentence_or_an_image() -> None:
    chooser = np.random.default_rng(0)
    num_refused = 0
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        content = encode(picture(), kind)
        for _ in range(60):
            broken = bytearray(content)
            for place in chooser.integers(0, len(broken), 4):
                broken[place] = int(chooser.integers(0, 256))
            with contextlib.suppress(MediaError):
                decode(bytes(broken[: int(chooser.integers(1, len(broken) + 1))]))
                continue
            num_refused += 1
    assert 100 < num_refused <= 240
