"""What the rotary embedding is told about each token, where that is more than the token's place in its request.

Two cases: images whose placeholders stand in a grid (Qwen2.5-VL), and models with one set of frequencies for short and one
for long requests (Phi-3). Both are settled once a request, before it is queued, so that the numbers of one request never
depend on its neighbours in a batch. Called by `engine/intake` and `engine/model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.state import MediaSpan

LONG = 1 << 40
"""Added to every position of a request that takes the long frequencies; far beyond any position."""

NUM_GRID_ROWS = 3
"""Time, row and column."""


def grid_positions(prompt_len: int, spans: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
    """[3, P] int64 positions of a prompt, and what is added to a later token's place to get its position.

    Text moves all three rows on by one. An image's tokens share the time at which it begins and count rows and columns
    from there; what follows it begins after its longer side. (Qwen2-VL, arXiv 2409.12191, section 2.1: M-RoPE.)
    """
    positions = np.empty((NUM_GRID_ROWS, prompt_len), np.int64)
    place = position = 0
    for span in spans:
        if span.media.grid is None:
            continue
        num_text = span.start - place
        positions[:, place : span.start] = position + np.arange(num_text)
        position += num_text
        rows, columns = span.media.grid
        positions[:, span.start : span.end] = position
        positions[1, span.start : span.end] += np.repeat(np.arange(rows), columns)
        positions[2, span.start : span.end] += np.tile(np.arange(columns), rows)
        position += max(rows, columns)
        place = span.end
    positions[:, place:] = position + np.arange(prompt_len - place)
    return positions, position - place


class LongRope(nn.Module):
    """Rotary embedding with two sets of frequencies, chosen token by token (LongRoPE, arXiv 2402.13753).

    transformers' own takes the long set for a whole batch as soon as one of its requests is long.

    Args:
        rotary: transformers' module, of which it takes the frequencies.
        config: the decoder's config.
    """

    def __init__(self, rotary: Any, config: Any) -> None:
        super().__init__()
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        device = rotary.original_inv_freq.device
        self.original_len: int = config.rope_parameters["original_max_position_embeddings"]
        """Longest request, in tokens, that takes the short set."""
        long_frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=self.original_len + 1)
        self._scaling: float = rotary.attention_scaling
        # Plain attributes, float32 whatever the model's type.
        self._short: torch.Tensor = rotary.original_inv_freq.float()
        self._long: torch.Tensor = long_frequencies.float().to(device)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, T, D], in x's type, of positions [1, T], on which `LONG` is added for the long set."""
        is_long = position_ids >= LONG
        frequencies = torch.where(is_long[..., None], self._long, self._short)
        angles = (position_ids - LONG * is_long)[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scaling).to(x.dtype), (angles.sin() * self._scaling).to(x.dtype)
