"""The only door to the kernels: pure functions on tensors, no knowledge of requests, adapters or models.

Callers import from here and never from the modules behind. Today every function is plain PyTorch (`kernels/reference`),
which is both the CPU path and the oracle of faster ones.

Dimension letters: T packed tokens, B requests, R rank, N adapter rows, P block size, D head dim, Hq/Hkv query/KV heads.
"""

from kernels.metadata import NULL_BLOCK, AttentionMetadata, LoraSegment
from kernels.reference import lora_add_, paged_attention, write_kv_

__all__ = ["NULL_BLOCK", "AttentionMetadata", "LoraSegment", "lora_add_", "paged_attention", "write_kv_"]
