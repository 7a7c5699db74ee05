"""Adapters are copied to the GPU while decode graphs run, and no token of any request changes for it."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from adapters import slab_pool
from adapters.generation import Generation
from adapters.intake import read_generation
from adapters.slab_pool import SlabPool
from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.config import LoRAModule
from engine.lora_copies import slab_of
from engine.lora_layers import LoraBuffers
from engine.page_lock import CudaPageLock
from engine.request import TokenPrompt
from kernels import LoraMetadata
from tests.adapters.world import edit, surface_of
from tests.oracles import random_ids

pytestmark = pytest.mark.gpu

LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def pools_small_slabs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_pool, "MIN_BYTES", 1)


@pytest.fixture
def engine(llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path) -> Iterator[Engine]:
    modules = [LoRAModule(name, str(path)) for name, path in llama_adapters.items()]
    engine = Engine(
        EngineConfig(
            model=str(llama_dir), device="cuda", dtype="float32", kv_cache_memory_mb=64, lora_modules=modules,
            max_loras=3, max_lora_rank=16, max_num_batched_tokens=50, max_num_seqs=7, max_model_len=200,
            enable_prefix_caching=False, adapter_dir=str(tmp_path),
        ),
        checks_integrity=True,
    )  # fmt: skip
    yield engine
    engine.close()
    engine.check_integrity()


def tokens(answer: Answer) -> list[int]:
    return [token_id for delta in answer for token_id in delta.token_ids]


def start(engine: Engine, seed: int, name: str | None, sampling: SamplingParams) -> Answer:
    return engine.start_sync(TokenPrompt(random_ids(9, seed)), sampling, lora=name)[0]


def test_tokens_are_those_of_a_quiet_run_while_adapters_come_and_go(
    engine: Engine, llama_adapters: dict[str, Path]
) -> None:
    streams = [(1, None), (2, "qv"), (3, "qv"), (4, None)]
    others = sorted(set(llama_adapters) - {"qv"})
    shorts = {(seed, name): tokens(start(engine, seed, name, SHORT)) for seed in (5, 6, 7) for name in others}
    assert len(set(map(tuple, shorts.values()))) > 3, "the adapters must differ"
    quiet = [tokens(start(engine, seed, name, LONG)) for seed, name in streams]
    chance, num_done = random.Random(0), 0
    for _ in range(4):
        answers = [start(engine, seed, name, LONG) for seed, name in streams]
        asked = []
        for _ in range(12):
            name, seed = chance.choice(others), chance.choice((5, 6, 7))
            engine.adapters.load("swapped", str(llama_adapters[name]), load_inplace=True)
            if chance.random() < 0.5:
                engine.prefetch(chance.choice(others))
            asked.append(((seed, name), start(engine, seed, "swapped", SHORT)))
            if chance.random() < 0.3:
                engine.adapters.unload("swapped")
        for key, answer in asked:
            assert tokens(answer) == shorts[key]
            num_done += 1
        assert [tokens(answer) for answer in answers] == quiet
    assert num_done == 48


def test_memory_of_rows_and_of_page_locked_buffers_stays_flat(engine: Engine, llama_adapters: dict[str, Path]) -> None:
    def go_around() -> tuple[int, int]:
        for name, path in llama_adapters.items():
            engine.adapters.load("swapped", str(path), load_inplace=True)
            tokens(start(engine, 1, "swapped", SHORT))
            tokens(start(engine, 1, name, SHORT))
        engine.adapters.unload("swapped")
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.host_memory_stats()["allocated_bytes.current"]

    before = go_around()
    for _ in range(5):
        after = go_around()
    assert abs(after[0] - before[0]) < 2**20 and after[1] == before[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_hold_what_the_plain_copy_puts_there(
    llama_adapters: dict[str, Path], dtype: torch.dtype, llama_dir: Path
) -> None:
    buffers = {}
    for device in ("cpu", "cuda"):
        model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=dtype).to(device)
        surface = surface_of(model, lora_dtype=dtype)
        metadata = {"decoder": LoraMetadata(8, 3, torch.device(device), max_columns=48, max_in=256)}
        buffers[device] = LoraBuffers(model, surface.linears, metadata, num_slots=3, max_rank=16, dtype=dtype)
    on_gpu = buffers["cuda"]._groups
    generations = [read_generation(path, surface) for path in llama_adapters.values()]
    chance = random.Random(0)
    for _ in range(20):
        lora_slot, generation = chance.randrange(3), chance.choice(generations)
        torch.cuda._sleep(50_000_000)  # Steps that are still to read the row as it was.
        reads = [group.lora_a[lora_slot].clone() for group in on_gpu]
        expected = [group.lora_a[lora_slot].clone() for group in buffers["cpu"]._groups]
        copy = buffers["cuda"].write(lora_slot, generation)
        assert copy is not None and not copy.has_failed()
        copy.wait()
        after = [group.lora_a[lora_slot].clone() for group in on_gpu]  # On the current stream: after the copy.
        buffers["cpu"].write(lora_slot, generation)
        for index, (group, wanted) in enumerate(zip(on_gpu, buffers["cpu"]._groups, strict=True)):
            assert torch.equal(reads[index].cpu(), expected[index])
            assert group.host_ranks == wanted.host_ranks and group.ranks.tolist() == wanted.host_ranks
            start = 0
            for member, end in enumerate(group.slice_ends):
                rank = wanted.host_ranks[lora_slot][member]
                assert torch.equal(after[index][member, :rank].cpu(), wanted.lora_a[lora_slot, member, :rank])
                assert torch.equal(
                    group.lora_b[lora_slot, start:end, :rank].cpu(), wanted.lora_b[lora_slot, start:end, :rank]
                )
                start = end
    buffers["cuda"].clear(1)
    copy = buffers["cuda"].write(0, generations[0])
    assert copy is not None
    while not copy.is_ready():
        time.sleep(0.001)
    assert all(not any(group.ranks[1].tolist()) for group in on_gpu)


def check_row(buffers: LoraBuffers, lora_slot: int, generation: Generation) -> None:
    """The row holds the adapter."""
    for group in buffers.groups:
        start = 0
        for member, (name, end) in enumerate(zip(group.names, group.slice_ends, strict=True)):
            pair = generation.pairs.get(name)
            rank = 0 if pair is None else pair.rank
            assert int(group.ranks[lora_slot, member]) == group.host_ranks[lora_slot][member] == rank
            if pair is not None:
                assert torch.equal(group.lora_a[lora_slot, member, :rank].cpu(), pair.a), name
                assert torch.equal(group.lora_b[lora_slot, start:end, :rank].cpu(), pair.b), name
            start = end


def comes_to_nothing(lock: CudaPageLock) -> bool:
    """Whether all memory is unlocked, soon: the slabs that were copied last are let go of by a thread."""
    deadline = time.monotonic() + 60
    while lock.num_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    return lock.num_bytes == 0


def test_rows_equal_their_adapters_while_those_come_and_go_at_random(
    engine: Engine, llama_adapters: dict[str, Path], llama_dir: Path, tmp_path: Path
) -> None:
    streams = [(1, None), (2, "qv"), (3, "all")]
    quiet = [tokens(start(engine, seed, name, LONG)) for seed, name in streams]
    model = AutoModelForCausalLM.from_pretrained(llama_dir).to("cuda")
    surface = surface_of(model)
    metadata = {"decoder": LoraMetadata(8, 3, torch.device("cuda"), max_columns=48, max_in=256)}
    buffers = LoraBuffers(model, surface.linears, metadata, num_slots=4, max_rank=16, dtype=torch.float32)
    folders = [
        edit(source, tmp_path / f"{name}-{number}",
             tensors=lambda rows, number=number: {key: row * (number + 1) for key, row in rows.items()})
        for name, source in llama_adapters.items() for number in range(5)
    ]  # fmt: skip
    fresh = [read_generation(folder, surface) for folder in folders]
    largest = max(slab_of(generation).nbytes for generation in fresh)
    lock = CudaPageLock(torch.device("cuda"), 3 * largest)
    pool = SlabPool(lock)
    pool.prepare(largest)
    chance = random.Random(0)
    held: dict[int, Generation] = {}
    num_sent, addresses = {False: 0, True: 0}, set()
    for _ in range(6):
        answers = [start(engine, seed, name, LONG) for seed, name in streams]
        for _ in range(40):
            wanted: dict[int, int] = {}
            if chance.random() < 0.5:
                torch.cuda._sleep(20_000_000)  # A step that copies wait for: transfers of later ones queue up behind.
            for _ in range(chance.randrange(1, 6)):
                lora_slot, index = chance.randrange(4), chance.randrange(len(folders))
                generation = held.get(index) or read_generation(folders[index], surface, memory=pool.lend)
                num_sent[slab_of(generation).is_pinned()] += 1
                addresses.add(slab_of(generation).data_ptr())
                copy = buffers.write(lora_slot, generation)
                assert copy is not None
                wanted[lora_slot] = index
                if chance.random() < 0.3:
                    held[index] = generation  # Stays loaded.
                elif chance.random() < 0.5:
                    held.pop(index, None)  # Unloaded while it may still be on its way.
                del generation
                if len(held) > 6:
                    held.pop(chance.choice(list(held)))
            copy.wait()  # All copies run in order.
            for lora_slot, index in wanted.items():
                check_row(buffers, lora_slot, fresh[index])
        assert [tokens(answer) for answer in answers] == quiet
    assert min(num_sent.values()) > 20 and sum(num_sent.values()) > 2 * len(addresses), (num_sent, len(addresses))
    assert 0 < lock.num_bytes <= 3 * largest
    torch.cuda.synchronize()
    held.clear()
    pool.close()
    assert comes_to_nothing(lock)


def test_an_engines_adapters_lie_in_locked_memory_until_it_is_closed(
    llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path
) -> None:
    modules = [LoRAModule(name, str(path)) for name, path in llama_adapters.items()]
    engine = Engine(
        EngineConfig(
            model=str(llama_dir), device="cuda", dtype="float32", kv_cache_memory_mb=64, lora_modules=modules,
            max_loras=2, max_lora_rank=16, max_num_seqs=4, max_model_len=200, enforce_eager=True,
            adapter_dir=str(tmp_path),
        )
    )  # fmt: skip
    pool = engine._lora._slabs
    lock = pool._page_lock
    assert isinstance(lock, CudaPageLock)
    with engine.adapters.borrow("all") as handle:
        assert slab_of(handle.generation).is_pinned()
        assert lock.num_bytes >= pool.usage().lent_bytes > 0
    for turn in range(8):
        engine.adapters.load("swapped", str(llama_adapters["all"]), load_inplace=True)
        assert tokens(start(engine, turn, "swapped", SHORT))
        engine.adapters.unload("swapped")
    engine.close()
    usage = pool.usage()
    assert usage.idle_bytes == 0 and lock.num_bytes <= usage.lent_bytes
    for name in llama_adapters:
        engine.adapters.unload(name)
    del handle
    gc.collect()
    assert comes_to_nothing(lock)


def test_what_cuda_refuses_to_lock_leaves_no_error_for_others() -> None:
    memory = np.empty(1 << 20, dtype=np.uint8)
    address = -(-memory.ctypes.data // 4096) * 4096
    pages = torch.from_numpy(memory[address - memory.ctypes.data :])  # is_pinned() looks where a storage starts
    lock = CudaPageLock(torch.device("cuda"))
    assert lock.lock(address, 1 << 19)
    assert pages.is_pinned()
    assert not lock.lock(address, 1 << 19), "it is locked already"
    assert torch.ones(5, device="cuda").sum().item() == 5
    lock.unlock(address)
    assert lock.num_bytes == 0 and not pages.is_pinned()
