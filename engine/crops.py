"""Large images as an overview and a grid of crops, which some vision towers take one beside the other (Phi-4-multimodal).

Pure functions of pixels and sizes; nothing here knows of requests or of a model. The rules are those of the model's
published image processor, which needs torchvision; this one needs torch alone. Called by `engine/vision` and, for the
number of features, by `engine/encoders`.

s pixels along a crop's side, g patches along it, C crops with the overview.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

_MIN_SIDE = 10
"""Shortest side of the image in its grid, in pixels; narrower ones are refused."""
_WHITE = 255


@dataclass(frozen=True)
class CropRules:
    """How a model wants its crops.

    Attributes:
        crop_size: s.
        patch_size: pixels along a patch's side.
        max_crops: most crops of an image, without the overview.
        mean, std: of each channel, for values of 0 to 1.
    """

    crop_size: int
    patch_size: int
    max_crops: int
    mean: Sequence[float]
    std: Sequence[float]


@dataclass(frozen=True)
class Crops:
    """An image, cut up.

    Attributes:
        pixels: [C, 3, s, s] float32, the overview first, then the crops row by row.
        mask: [C, g, g] bool, false for patches of padding.
        height, width: of all crops together, in pixels.
    """

    pixels: torch.Tensor
    mask: torch.Tensor
    height: int
    width: int


def cut_into_crops(image: np.ndarray, rules: CropRules) -> Crops:
    """Cut an [H, W, 3] uint8 image; raises ValueError where it is too narrow for the model."""
    side, patch = rules.crop_size, rules.patch_size
    height, width = image.shape[:2]
    rows, columns = choose_grid(height, width, side, rules.max_crops)
    total_height, total_width = rows * side, columns * side
    if total_width / width < total_height / height:
        inner_height, inner_width = int(height * (total_width / width)), total_width
    else:
        inner_height, inner_width = total_height, int(width * (total_height / height))
    if min(inner_height, inner_width) < _MIN_SIDE:
        raise ValueError(f"{width} x {height} pixels are too narrow, since they become {inner_width} x {inner_height}")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].contiguous()
    if (inner_height, inner_width) != (height, width):
        pixels = functional.interpolate(
            pixels, (inner_height, inner_width), mode="bilinear", align_corners=False, antialias=True
        )
    padding = (0, total_width - inner_width, 0, total_height - inner_height)
    pixels = functional.pad(pixels, padding, value=_WHITE)
    mean, std = (255 * torch.tensor(list(values))[:, None, None] for values in (rules.mean, rules.std))
    pixels = (pixels.float() - mean) / std
    # The published processor makes the overview of the padded image, and does not smooth it.
    overview = pixels
    if (rows, columns) != (1, 1):
        overview = functional.interpolate(pixels, (side, side), mode="bicubic", align_corners=False)
    mask = torch.ones(total_height // patch, total_width // patch, dtype=torch.bool)
    mask[:, mask.shape[1] - padding[1] // patch :] = False
    mask[mask.shape[0] - padding[3] // patch :] = False
    whole = torch.ones(1, side // patch, side // patch, dtype=torch.bool)
    return Crops(
        torch.cat([overview, _tiles(pixels[0], rows, columns)]),
        torch.cat([whole, _tiles(mask[None], rows, columns)[:, 0]]),
        total_height,
        total_width,
    )


def choose_grid(height: int, width: int, side: int, max_crops: int) -> tuple[int, int]:
    """Rows and columns of crops: as many as cover the image, else those of the closest shape.

    Of equally close ones the larger is taken where the image has more than half its pixels.
    """
    rows, columns = -(-height // side), -(-width // side)
    if rows * columns <= max_crops:
        return rows, columns
    best, best_difference = (1, 1), math.inf
    grids = [(r, c) for r in range(1, max_crops + 1) for c in range(1, max_crops // r + 1)]
    for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - grid[1] / grid[0])
        is_filled = width * height > 0.5 * side * side * grid[0] * grid[1]
        if difference < best_difference or (difference == best_difference and is_filled):
            best, best_difference = grid, difference
    return best


def num_crop_features(mask: torch.Tensor, rows: int, columns: int) -> int:
    """Features of an image with the mask [C, g, g]: one for each square of 2 x 2 patches that is not padding.

    b * (b + 1) of the overview, b = ceil(g / 2), and h * (w + 1) of the h x w squares of the crops, since each row ends
    with a separator; one more separator stands between the two.
    """
    squares = mask[1:, ::2, ::2].unflatten(0, (rows, columns)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    num_rows, num_columns = int(squares[:, 0].sum()), int(squares[0].sum())
    overview = mask[0, ::2, ::2]
    return overview.shape[0] * (overview.shape[1] + 1) + 1 + num_rows * (num_columns + 1)


def _tiles(image: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[c, rows * s, columns * s] -> [rows * columns, c, s, s]."""
    tiles = image.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))
    in_order: torch.Tensor = tiles.permute(1, 3, 0, 2, 4).flatten(0, 1).contiguous()
    return in_order
