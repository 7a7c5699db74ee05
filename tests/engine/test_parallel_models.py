"""Each architecture that is split gives the same logits over two ranks as in one process, with adapters and without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version

from adapters.weights import LoraPair
from engine.architectures import ARCHITECTURES
from engine.compiler import StepKind, compile_decoder
from engine.config import EngineConfig
from engine.parallel.group import join_group, leave_group
from engine.parallel.loading import ShardedLoad
from engine.parallel.messages import SharedSlab
from engine.parallel.shards import LinearShard, Share, lay_out, pack, unpack
from engine.setup import load_base
from tests.engine.rank_models import jobs, logits
from tests.oracles import make_adapter, make_model

SPLIT = [name for name, architecture in ARCHITECTURES.items() if architecture.is_split]
ROOT = Path(__file__).parents[2]
TOLERANCE = 5e-5
CUTS_UNEVENLY = Version(transformers.__version__) >= Version("5.24")
"""Whether transformers reads a vocabulary into shares of different size."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tmp_path_factory.mktemp(name) for name in SPLIT]


@pytest.fixture(scope="module")
def split_logits(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[list[torch.Tensor]]:
    """What rank 0 computes; rank 1 is a process of its own, which imports while this one makes the models."""
    store = str(tmp_path_factory.mktemp("store") / "store")
    words = [sys.executable, "-m", "tests.engine.rank_models", store, *map(str, folders)]
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE)
    try:
        for name, folder in zip(SPLIT, folders, strict=True):
            # Odd vocabularies cannot be cut in two: that head is whole on every rank. Mistral's is tied.
            more = {} if name == "LlamaForCausalLM" and CUTS_UNEVENLY else {"vocab_size": 280}
            more |= {"tie_word_embeddings": True} if name.startswith("Mistral") else {}
            more |= {"attention_bias": True} if name.startswith("Granite") else {}
            make_model(name, folder / "model", **more)
            make_adapter(folder / "model", name, folder / "adapter", targets="all-linear", rank=5, std=0.2)
        join_group(0, 2, store, torch.device("cpu"))
        found = jobs(folders, 0)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        leave_group(is_whole=False)
        status = process.wait(120)
    assert status == 1, "a worker ends when its parent's end of the pipe does"
    return found


@pytest.mark.parametrize("index", range(len(SPLIT)), ids=SPLIT)
def test_each_architecture_equals_one_process(
    index: int, folders: list[Path], split_logits: list[list[torch.Tensor]]
) -> None:
    base = load_base(EngineConfig(model=str(folders[index] / "model")))
    expected = logits(base, folders[index] / "adapter")
    half = expected[0].shape[0] // 2
    assert torch.equal(expected[0][:half], expected[1][:half])
    assert not torch.allclose(expected[0][half:], expected[1][half:], atol=0.1), "the adapter must do something"
    rounds = [split_logits[index]] + ([split_logits[-2]] if index == len(SPLIT) - 1 else [])
    for found in rounds:
        for actual, right in zip(found, expected, strict=True):
            assert float((actual - right).abs().max()) < TOLERANCE * float(right.abs().max())


def test_random_weights_do_not_depend_on_the_number_of_ranks(
    folders: list[Path], split_logits: list[list[torch.Tensor]], tmp_path: Path
) -> None:
    with one_rank(tmp_path):
        config = EngineConfig(model=str(folders[-1] / "model"), load_format="dummy")
        (expected,) = logits(load_base(config, ShardedLoad(0, 1, lambda device: None)), None)
    (actual,) = split_logits[-1]
    assert float((actual - expected).abs().max()) < TOLERANCE * float(expected.abs().max())
    assert float(expected.std()) > 0


class one_rank:
    """A process group of this process alone."""

    def __init__(self, folder: Path) -> None:
        self._store = str(folder / "store")

    def __enter__(self) -> None:
        join_group(0, 1, self._store, torch.device("cpu"))

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


@pytest.mark.parametrize("fully_sharded", [False, True], ids=["cut as the base", "fully sharded"])
def test_compiled_layers_are_one_graph_with_their_collectives(
    folders: list[Path], split_logits: list[list[torch.Tensor]], tmp_path: Path, fully_sharded: bool
) -> None:
    """With one rank the operators and hooks are those of any number."""
    with one_rank(tmp_path):
        folder = folders[SPLIT.index("GraniteForCausalLM")]
        load = ShardedLoad(0, 1, lambda device: None)
        base = load_base(EngineConfig(model=str(folder / "model"), load_format="dummy"), load)
        expected = logits(base, folder / "adapter", fully_sharded=fully_sharded)
        seen: list[int] = []
        torch._dynamo.utils.counters.clear()
        compile_decoder(base.decoder, [StepKind(seen.append, 40)], backend="eager")
        # The layers' adapters are where the call above left them: on half of the tokens.
        (found,) = logits(base, None)
        assert seen and torch.allclose(found, expected[1], atol=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one for all layers, and the final norm"
        assert not torch.allclose(expected[0], expected[1], atol=1e-3)
        torch._dynamo.reset()


def test_a_rank_gets_its_part_of_an_adapter_and_all_parts_make_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    shards = {"column": LinearShard("column", 6, 8), "row": LinearShard("row", 6, 8)}
    pairs = {
        name: LoraPair(torch.randn(3, 6, generator=generator), torch.randn(8, 3, generator=generator), 3, 1.0)
        for name in (*shards, "whole")
    }
    for full_rank, num_rows in ((None, [3, 3]), (4, [2, 1])):
        parts = []
        for rank in range(2):
            share = Share(rank, 2, full_rank)
            _, length = lay_out(pairs, shards, share)
            slab = SharedSlab(length, torch.float32)
            parts.append(unpack(pack(pairs, shards, share, slab.tensor), slab.tensor).pairs)
            slab.close()
        assert [part["column"].a.shape[0] for part in parts] == num_rows
        assert torch.equal(torch.cat([part["column"].b for part in parts]), pairs["column"].b)
        assert torch.equal(torch.cat([part["row"].a for part in parts], 1), pairs["row"].a)
        assert torch.equal(parts[1]["whole"].b, pairs["whole"].b) and all(part["row"].rank == 3 for part in parts)
        if full_rank is not None:
            assert torch.equal(torch.cat([part["column"].a for part in parts]), pairs["column"].a)
            assert torch.equal(torch.cat([part["row"].b for part in parts]), pairs["row"].b)
