"""From an image as a client sends it to RGB pixels: the one entry point for API, uploads and the offline API.

The format is told by content, never by name or MIME type. Size is checked on the header, before pixels are unpacked. All
faults of a file are `MediaError`s without a path. Knows nothing of models. Called by `engine/vision`.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import MediaError
from engine.request import ImagePart

if TYPE_CHECKING:
    from PIL import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 64_000_000
"""Largest image, width times height; larger ones (decompression bombs among them) are refused by their header."""


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """An image as it is to be seen: turned upright, on white where it was transparent.

    Attributes:
        pixels: PIL image in RGB.
        digest: sha256 (hex) of size and pixels; equal images in other lossless files have the same.
    """

    pixels: Image.Image
    digest: str


def decode_image(part: ImagePart, *, max_bytes: int, max_pixels: int = MAX_PIXELS) -> DecodedImage:
    """Decode PNG, JPEG, WebP or a GIF's first frame, or take a PIL image or an [H, W, 3] uint8 array.

    Raises:
        MediaError: empty, unreadable, damaged, of another format or too large; its `param` is the part's.
    """
    try:
        pixels = _to_rgb(_open(part.source, max_bytes, max_pixels))
    except MediaError as error:
        error.param = part.param
        raise
    digest = hashlib.sha256(f"image|{pixels.width}x{pixels.height}|".encode() + pixels.tobytes()).hexdigest()
    return DecodedImage(pixels, digest)


def _open(source: Any, max_bytes: int, max_pixels: int) -> Image.Image:
    """The decoded image, upright."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if isinstance(source, np.ndarray):
        if source.ndim != 3 or source.shape[2] != 3 or source.dtype != np.uint8 or not source.size:
            raise MediaError(f"The image is {source.dtype} {source.shape}, but must be uint8 [height, width, 3].")
        source = Image.fromarray(source)
    if isinstance(source, Image.Image):
        _check_size(source.size, max_pixels)
        return ImageOps.exif_transpose(source)
    content = _read(source, max_bytes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata and about sizes, which are checked here
            image = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
            _check_size(image.size, max_pixels)
            image.load()
            return ImageOps.exif_transpose(image)
    except UnidentifiedImageError:
        raise MediaError("Unsupported image format: the data is none of PNG, JPEG, WebP and GIF.") from None
    except Image.DecompressionBombError:
        raise MediaError(f"The image is too large: at most {max_pixels} pixels are taken; make it smaller.") from None
    # PIL's readers raise whatever a broken file leads them to.
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError):
        raise MediaError("The image is damaged: it cannot be decoded; export it again.") from None


def _read(source: bytes | Path, max_bytes: int) -> bytes:
    if isinstance(source, Path):
        try:
            if not source.is_file():
                raise MediaError("The image file does not exist or is not a file.")
            if os.path.getsize(source) > max_bytes:
                raise MediaError(f"The image is larger than {max_bytes / 2**20:g} MiB.")
            source = source.read_bytes()
        except OSError:
            raise MediaError("The image file cannot be read.") from None
    if not source:
        raise MediaError("The image is empty: it has 0 bytes.")
    if len(source) > max_bytes:
        raise MediaError(f"The image is larger than {max_bytes / 2**20:g} MiB.")
    return source


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    if size[0] * size[1] > max_pixels:
        raise MediaError(
            f"The image is too large: it has {size[0]} x {size[1]} pixels, and at most {max_pixels} are taken; make it "
            "smaller."
        )
    if size[0] * size[1] == 0:
        raise MediaError("The image is empty: it has no pixels.")


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB of 8 bits, on white."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits a pixel, grey; PIL would cut, not scale
        high_bytes = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255)
        image = Image.fromarray(high_bytes.astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")
