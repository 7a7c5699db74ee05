"""From an image to what a vision tower takes, and to the number of placeholders that stand for it.

Wraps the models' own image processors; for each, one function gives the number of placeholders, and the tower's output is
checked against it. Runs on the caller's thread, never in an engine step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from engine.crops import CropRules, cut_into_crops, num_crop_features
from engine.errors import MediaError
from engine.frontend import MediaLimits
from engine.images import DecodedImage, decode_image
from engine.request import ImagePart, Modality
from engine.state import MediaInput


class ImageFrontend:
    """What all image sides share.

    Args:
        image_processor: transformers' image processor.
        tokenizer: the model's.
        placeholder, inline, expansion: as in `engine.frontend.Frontend`; by default the placeholder is all three.
        repeated: the token in `expansion` that is repeated; by default the placeholder.
    """

    modality: Modality = "image"

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        placeholder: str,
        *,
        inline: str | None = None,
        expansion: str | None = None,
        repeated: str | None = None,
    ) -> None:
        self._processor = image_processor
        self.placeholder = placeholder
        self.expansion = placeholder if expansion is None else expansion
        self.inline = placeholder if inline is None else inline
        self.placeholder_id: int = tokenizer.convert_tokens_to_ids(placeholder if repeated is None else repeated)

    def read(self, part: ImagePart, limits: MediaLimits) -> MediaInput:
        """Decode and prepare one image; raises `MediaError`."""
        image = decode_image(part, max_bytes=limits.max_media_bytes)
        try:
            return self.prepare(image)
        except ValueError as error:  # Image processors refuse some sizes, such as very long and narrow ones.
            raise MediaError(f"The model cannot take this image: {error}.", param=part.param) from None

    def beside(self, media: MediaInput, modalities: Collection[Modality]) -> MediaInput:
        """As in `engine.frontend.Frontend`: an image is the same whatever else the prompt holds."""
        return media

    def prepare(self, image: DecodedImage) -> MediaInput:
        """One image's pixels in the model's size; raises ValueError where the model cannot take its size."""
        pixels = self._processor(images=[image.pixels], return_tensors="pt")
        return self._input(image.digest, pixels)

    def _input(self, digest: str, pixels: Any) -> MediaInput:
        raise NotImplementedError


class FixedImageFrontend(ImageFrontend):
    """Every image has the same number of placeholders, which see each other both ways (Gemma 3)."""

    def __init__(self, processor: Any, config: Any) -> None:
        tokenizer, begin = processor.tokenizer, processor.boi_token
        self._num_tokens: int = config.mm_tokens_per_image
        super().__init__(
            processor.image_processor, tokenizer, begin, repeated=tokenizer.image_token,
            expansion=f"\n\n{begin}{tokenizer.image_token}{tokenizer.eoi_token}\n\n",
        )  # fmt: skip

    def _input(self, digest: str, pixels: Any) -> MediaInput:
        return MediaInput(digest, {"pixel_values": pixels["pixel_values"]}, self._num_tokens, "image", is_mutual=True)


class PatchImageFrontend(ImageFrontend):
    """One placeholder for each patch of the image, which is cut to the tower's size (LLaVA)."""

    def __init__(self, processor: Any, config: Any) -> None:
        super().__init__(processor.image_processor, processor.tokenizer, processor.image_token)
        self._patch_size: int = config.vision_config.patch_size
        # CLIP's towers put a class token before the patches, which the strategy "default" leaves out again.
        has_class_token = config.vision_config.model_type == "clip_vision_model"
        self._num_extra = int(has_class_token) - int(config.vision_feature_select_strategy == "default")

    def num_tokens(self, pixels: torch.Tensor) -> int:
        """Placeholders for [1, 3, h, w] pixels: h // p * (w // p), and what the tower adds or the model drops."""
        height, width = pixels.shape[-2:]
        return (height // self._patch_size) * (width // self._patch_size) + self._num_extra

    def _input(self, digest: str, pixels: Any) -> MediaInput:
        values: torch.Tensor = pixels["pixel_values"]
        return MediaInput(digest, {"pixel_values": values}, self.num_tokens(values), "image")


class GridImageFrontend(ImageFrontend):
    """Images keep their shape; one placeholder for each square of merged patches, placed by row and column (Qwen-VL)."""

    def _input(self, digest: str, pixels: Any) -> MediaInput:
        grid: torch.Tensor = pixels["image_grid_thw"]
        _, height, width = grid[0].tolist()
        rows, columns = height // self._processor.merge_size, width // self._processor.merge_size
        inputs = {"pixel_values": pixels["pixel_values"], "image_grid_thw": grid}
        return MediaInput(digest, inputs, rows * columns, "image", grid=(rows, columns))


class CropImageFrontend(ImageFrontend):
    """Images keep their shape: an overview and a grid of crops, as many as cover them (Phi-4-multimodal).

    The model's config says how large crops and patches are, the image processor's settings how many there may be.
    """

    def __init__(self, processor: Any, config: Any) -> None:
        vision, settings = config.vision_config, processor.image_processor
        placeholder = processor.tokenizer.convert_ids_to_tokens(vision.image_token_id)
        super().__init__(settings, processor.tokenizer, placeholder)
        self._rules = CropRules(
            crop_size=vision.crop_size,
            patch_size=vision.patch_size,
            max_crops=getattr(settings, "dynamic_hd", 36),
            mean=getattr(settings, "image_mean", (0.5, 0.5, 0.5)),
            std=getattr(settings, "image_std", (0.5, 0.5, 0.5)),
        )

    def prepare(self, image: DecodedImage) -> MediaInput:
        """As in `ImageFrontend`."""
        crops, side = cut_into_crops(np.asarray(image.pixels), self._rules), self._rules.crop_size
        features = {
            "image_pixel_values": crops.pixels[None],
            "image_attention_mask": crops.mask[None],
            "image_sizes": torch.tensor([[crops.height, crops.width]]),
        }
        num_tokens = num_crop_features(crops.mask, crops.height // side, crops.width // side)
        return MediaInput(image.digest, features, num_tokens, "image")
