"""Images as an overview and crops: equal to what the model's published processor makes of them.

That processor needs torchvision, which is no part of the installation; where it is there, the two are compared pixel by
pixel. Everywhere else they are compared by numbers that it gave (transformers 5.24, torchvision 0.29).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from engine.crops import CropRules, choose_grid, cut_into_crops, num_crop_features
from tests.media_models import picture

RULES = CropRules(24, 4, 6, [0.5] * 3, [0.5] * 3)
# Image size; height and width of all crops, tokens, patches that are no padding; fingerprint of the pixels.
PUBLISHED = [
    ((40, 30), (48, 48), 48, 144, (0.25464, 0.18595, 0.06338, 0.10266)),
    ((30, 30), (48, 48), 55, 180, (-0.05988, -0.05285, 0.02768, 0.10771)),
    ((24, 24), (24, 24), 25, 72, (-0.0661, 0.04235, 0.11718, 0.14384)),
    ((11, 24), (24, 24), 22, 54, (0.54882, 0.0263, 0.06856, 0.20319)),
    ((64, 20), (24, 72), 43, 144, (0.16553, -0.00403, 0.13528, 0.13808)),
    ((20, 64), (72, 24), 49, 144, (0.06211, -0.09289, 0.02063, 0.15505)),
    ((300, 40), (24, 144), 70, 216, (0.26193, 0.28633, 0.12865, 0.10659)),
    ((200, 90), (24, 48), 34, 108, (0.08875, 0.12022, 0.11027, 0.08808)),
    ((61, 133), (48, 24), 37, 108, (0.18371, -0.07061, 0.02948, 0.13409)),
]  # fmt: skip


def fingerprint(pixels: torch.Tensor) -> tuple[float, float, float, float]:
    """Means that a shift, another filter or another order of the crops [C, 3, s, s] would change."""
    pixels = pixels.double()
    weights = torch.linspace(-1, 1, pixels[0].numel(), dtype=torch.float64).reshape(pixels.shape[1:])
    steps = torch.arange(1, len(pixels) + 1, dtype=torch.float64)[:, None, None, None]
    overview = pixels[0]
    edges = (overview[:, :, 1:] - overview[:, :, :-1]).square().mean()
    return (
        float(pixels.mean()),
        float((pixels * weights * steps).mean()),
        float((pixels[1:, :, 1:] - pixels[1:, :, :-1]).square().mean()),
        float(edges),
    )


@pytest.mark.parametrize(("size", "total", "num_tokens", "num_patches", "expected"), PUBLISHED)
def test_crops_equal_what_the_published_processor_made(
    size: tuple[int, int], total: tuple[int, int], num_tokens: int, num_patches: int, expected: tuple[float, ...]
) -> None:
    crops = cut_into_crops(np.asarray(picture(*size, seed=size[0])), RULES)
    assert (crops.height, crops.width) == total
    assert num_crop_features(crops.mask, crops.height // 24, crops.width // 24) == num_tokens
    assert int(crops.mask.sum()) == num_patches
    # A rounding of the resizing may differ from one processor to another by one of 255 levels in single pixels.
    assert fingerprint(crops.pixels) == pytest.approx(expected, abs=2e-4)


@pytest.mark.real
@pytest.mark.parametrize(("side", "patch", "most"), [(24, 4, 6), (42, 14, 4), (448, 14, 36)])
def test_crops_equal_the_published_processor_itself(side: int, patch: int, most: int) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    processor = transformers.Phi4MultimodalImageProcessor(
        dynamic_hd=most, size={"height": side, "width": side}, patch_size=patch
    )
    rules = CropRules(side, patch, most, [0.5] * 3, [0.5] * 3)
    rng = np.random.default_rng(0)
    for width, height in rng.integers(1, side * 5, (3 if side > 100 else 40, 2)).tolist():
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        try:
            crops = cut_into_crops(np.asarray(image), rules)
        except ValueError:
            with pytest.raises(ValueError, match="extreme"):
                processor([image], return_tensors="pt")
            continue
        made = processor([image], return_tensors="pt")
        torch.testing.assert_close(crops.pixels, made["image_pixel_values"][0], atol=1e-6, rtol=0)
        assert torch.equal(crops.mask, made["image_attention_mask"][0].bool())
        assert made["image_sizes"].tolist() == [[crops.height, crops.width]]
        # It counts the overview's squares and separators as those of 448 pixels in patches of 14.
        squares = math.ceil(side // patch / 2)
        expected = int(made["num_img_tokens"][0]) - (256 + 16) + squares * (squares + 1)
        assert num_crop_features(crops.mask, crops.height // side, crops.width // side) == expected


def test_an_image_of_one_crop_is_its_own_overview() -> None:
    crops = cut_into_crops(np.asarray(picture(24, 24, seed=1)), RULES)
    assert torch.equal(crops.pixels[0], crops.pixels[1]) and bool(crops.mask.all())
    assert num_crop_features(crops.mask, 1, 1) == 3 * 4 + 1 + 3 * 4


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [(1, 1, (1, 1)), (24, 25, (1, 2)), (48, 72, (2, 3)), (73, 48, (3, 2)), (1000, 1000, (2, 2)), (30, 300, (1, 6))],
)
def test_the_grid_covers_the_image_or_is_of_the_closest_shape(height: int, width: int, grid: tuple[int, int]) -> None:
    assert choose_grid(height, width, 24, 6) == grid


def test_images_that_would_become_too_narrow_are_refused() -> None:
    with pytest.raises(ValueError, match="too narrow"):
        cut_into_crops(np.zeros((3, 500, 3), np.uint8), RULES)
