"""The tensors of the paged KV cache, one pair of pools a layer.

Owns the memory; which block belongs to whom is `engine/block_pool`'s business. Sized once at start by `engine/model`'s
shapes and the memory that the settings allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVShape:
    """Shape of the cache: layers, KV heads, head dim and element type of the model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Zero-filled pools of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        size = (num_blocks * block_size, shape.num_kv_heads, shape.head_dim)
        self.keys = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        """One [num_blocks * P, Hkv, D] a layer."""
        self.values = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        """One [num_blocks * P, Hkv, D] a layer."""

    @property
    def num_bytes(self) -> int:
        """Memory of all pools."""
        return self.num_blocks * self.block_size * self.shape.bytes_per_token

    def clear(self, blocks: list[int]) -> None:
        """Zero some blocks, so that numbers gone wrong (NaN) cannot reach another request through padded reads."""
        for block in blocks:
            rows = slice(block * self.block_size, (block + 1) * self.block_size)
            for pool in (*self.keys, *self.values):
                pool[rows] = 0
