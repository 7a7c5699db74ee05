"""What both processes of `test_parallel_models` compute: logits of models over two ranks, with and without an adapter.

Run as a program, it is rank 1: `python -m tests.engine.rank_models STORE FOLDER…`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from adapters.weights import read_adapter
from engine.attention import bind_attention
from engine.config import EngineConfig
from engine.kv_cache import KVCache
from engine.lora_side import make_buffers, make_metadata
from engine.model import BaseModel
from engine.parallel.group import join_group
from engine.parallel.loading import ShardedLoad
from engine.parallel.shards import LocalPairs, Share, lay_out, pack, unpack
from engine.parallel.worker import end_with_parent
from engine.setup import load_base
from kernels import AttentionMetadata, LoraSegment
from tests.oracles import random_ids

SIZE = 2
NUM_TOKENS = 40


def load(folder: Path, rank: int, load_format: str = "auto") -> BaseModel:
    """A rank's share of the model in `folder`."""
    config = EngineConfig(model=str(folder), load_format=load_format)
    return load_base(config, ShardedLoad(rank, SIZE, lambda device: None))


@torch.inference_mode()
def logits(base: BaseModel, adapter: Path | None, *, fully_sharded: bool = False) -> list[torch.Tensor]:
    """[T, V] of the base model and, where there is an adapter, of the second half of the tokens with it."""
    config = EngineConfig(max_loras=2, max_lora_rank=8, fully_sharded_loras=fully_sharded)
    cache = KVCache(base.kv_shape, 5, 16, base.device)
    step = bind_attention(base.decoder, cache)
    metadata = make_metadata(config, base)
    surface = base.surface(max_lora_rank=8, lora_dtype=base.dtype)
    segments: list[tuple[LoraSegment, ...]] = [()]
    if adapter is not None:
        buffers = make_buffers(config, base, surface, metadata)
        pairs = read_adapter(adapter, surface).pairs
        shards, share = {}, Share(0, 1)
        if base.split is not None:
            shards = dict(base.split.shards)
            share = Share(base.split.group.rank, base.split.group.size, 8 if fully_sharded else None)
        slab = torch.empty(lay_out(pairs, shards, share)[1])
        local: LocalPairs = unpack(pack(pairs, shards, share, slab), slab)
        buffers.write(1, local)
        segments.append((LoraSegment(1, NUM_TOKENS // 2, NUM_TOKENS),))
    ids = torch.tensor(random_ids(NUM_TOKENS, 3))
    table = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    found = []
    for used in segments:
        step.metadata = AttentionMetadata([NUM_TOKENS], [NUM_TOKENS], table, 16)
        step.kv_index = torch.arange(NUM_TOKENS) + 16
        for part in ("decoder", "head"):
            metadata[part].update(used, NUM_TOKENS)
        found.append(base.logits(base.decode(base.embed(ids), torch.arange(NUM_TOKENS)[None])))
    return found


def jobs(folders: Sequence[Path], rank: int) -> list[list[torch.Tensor]]:
    """For each folder its logits; the last one fully sharded, and then with random weights."""
    found = [logits(load(folder / "model", rank), folder / "adapter") for folder in folders]
    found.append(logits(load(folders[-1] / "model", rank), folders[-1] / "adapter", fully_sharded=True))
    found.append(logits(load(folders[-1] / "model", rank, "dummy"), None))
    return found


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    join_group(1, SIZE, sys.argv[1], torch.device("cpu"))
    jobs([Path(word) for word in sys.argv[2:]], 1)
    threading.Event().wait()
