"""Where the time of an adapter's way to the GPU goes: milliseconds of each part by itself, with nothing else running.

    python -m benchmarks.load_parts --shape llama-3.1-8b --rank 16

Random weights and adapters, files in the page cache, no engine around it. From disk: opening and judging the files, all
numbers read, hashed and checked by 1 to 8 threads, into fresh memory and into memory of an adapter that has gone
(`_reused`), and beside it what the machine alone takes to hand out fresh memory, to copy the file's bytes and to hash them
by as many threads. From CPU memory, on a GPU: from the start of a copy until the row can be read, straight from page-locked
memory (`row_direct`) and by ring of page-locked buffers, and beside it the link, the locking of fresh memory and the
buffers' filling alone. Before a copy is timed its row must equal the adapter; else no figure is printed. Medians and least of
`--repeat`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from adapters.folder import WEIGHTS_NAME, AdapterFolder
from adapters.generation import Generation
from adapters.intake import read_generation
from adapters.manager import AdapterManager
from adapters.plan import plan_adapter
from adapters.slab import PIECE_BYTES, Half, read_slab
from adapters.slab_pool import Buffer, Memory, SlabPool, fresh_memory
from adapters.surface import ModelSurface
from benchmarks.report import finish, refuse
from benchmarks.workload import ALL_LINEARS, SHAPES, write_adapter, write_model
from engine import EngineConfig
from engine.lora_copies import Ring, RowCopies, slab_of
from engine.lora_layers import LoraGroup
from engine.lora_side import make_buffers, make_metadata
from engine.model import BaseModel
from engine.page_lock import CudaPageLock
from engine.setup import freeze_startup_objects, load_base

NUM_THREADS = (1, 2, 4, 8)
RINGS = (
    Ring(),
    Ring(4 << 20, 8, 8),
    Ring(2 << 20, 16, 8),
)
_PAGE = 4096

Times = dict[str, float]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=9)
    return parser.parse_args()


def timed(action: Callable[[], object], repeat: int) -> Times:
    """Median and least milliseconds by the clock, and median ones of processor time in all threads."""
    action()
    walls, cpus = [], []
    for _ in range(repeat):
        started, cpu = time.perf_counter(), time.process_time()
        kept = action()
        walls.append((time.perf_counter() - started) * 1000)
        cpus.append((time.process_time() - cpu) * 1000)
        del kept
    return {
        "ms": round(statistics.median(walls), 2), "least": round(min(walls), 2), "cpu": round(statistics.median(cpus), 2),
    }  # fmt: skip


def shared(threads: ThreadPoolExecutor, num_threads: int, work: Callable[[int], object], num_bytes: int) -> None:
    """`work(start)` for each piece, dealt in turn to the threads."""
    starts = range(0, num_bytes, PIECE_BYTES)
    jobs = [threads.submit(lambda mine: list(map(work, mine)), starts[row::num_threads]) for row in range(num_threads)]
    for job in jobs:
        job.result()


def machine_parts(path: Path, num_threads: int, repeat: int) -> dict[str, Times]:
    """What the machine takes for a file's bytes by itself."""
    num_bytes = path.stat().st_size
    warm = np.zeros(num_bytes, np.uint8)
    with path.open("rb") as file, ThreadPoolExecutor(num_threads) as threads:

        def touch() -> np.ndarray:
            fresh = np.empty(num_bytes, np.uint8)

            def one(start: int) -> None:
                fresh[start : start + PIECE_BYTES : _PAGE] = 1

            shared(threads, num_threads, one, num_bytes)
            return fresh

        def copy(start: int) -> None:
            os.preadv(file.fileno(), [warm[start : start + PIECE_BYTES].data], start)

        def digest(start: int) -> None:
            hashlib.sha256(warm[start : start + PIECE_BYTES].data).digest()

        return {
            "fresh_memory": timed(touch, repeat),
            "copy_bytes": timed(lambda: shared(threads, num_threads, copy, num_bytes), repeat),
            "sha256": timed(lambda: shared(threads, num_threads, digest, num_bytes), repeat),
        }


def disk_parts(folder: Path, surface: ModelSurface, catalogue: Path, slabs: SlabPool, repeat: int) -> dict[str, Times]:
    """From files to a listed adapter; `load` is all of it, and ends with what the parts before it are parts of.

    `slabs` is closed afterwards.
    """

    def opened() -> None:
        with AdapterFolder(folder):
            pass

    def planned() -> None:
        with AdapterFolder(folder) as files:
            plan_adapter(files, surface)

    def load_with(slabs: SlabPool) -> Times:
        manager = AdapterManager(surface, adapter_dir=catalogue, max_cpu_loras=4, slabs=slabs)
        times = timed(lambda: manager.load("adapter", folder, load_inplace=True), repeat)
        manager.close()
        return times

    found = {"open": timed(opened, repeat), "open_and_judge": timed(planned, repeat)}
    with AdapterFolder(folder) as files:
        plan = plan_adapter(files, surface)
        for num_threads in NUM_THREADS:

            def numbers(num_threads: int = num_threads, memory: Memory = fresh_memory) -> list[Half]:
                halves = [
                    Half(place, scale)
                    for pair in plan.pairs.values()
                    for place, scale in ((pair.a, 1.0), (pair.b, pair.scale))
                ]
                read_slab(halves, surface.lora_dtype, memory=memory, max_threads=num_threads)
                return halves

            found[f"numbers_{num_threads}"] = timed(numbers, repeat)
            found[f"numbers_{num_threads}_reused"] = timed(functools.partial(numbers, memory=slabs.lend), repeat)
    closed = SlabPool()
    closed.close()  # It lends fresh memory alone.
    return found | {"load": load_with(closed), "load_reused": load_with(slabs)}


def check_row(groups: Sequence[LoraGroup], generation: Generation) -> None:
    """Row 0 holds the adapter; else refuse."""
    for group in groups:
        start = 0
        for index, (name, end) in enumerate(zip(group.names, group.slice_ends, strict=True)):
            pair = generation.pairs.get(name)
            rank = 0 if pair is None else pair.rank
            if int(group.ranks[0, index]) != rank:
                refuse(f"the row does not have the rank of {name}")
            halves = group.lora_a[0, index, :rank].cpu(), group.lora_b[0, start:end, :rank].cpu()
            if pair is not None and not (torch.equal(halves[0], pair.a) and torch.equal(halves[1], pair.b)):
                refuse(f"the row does not hold {name}")
            start = end


def gpu_parts(
    groups: Sequence[LoraGroup], generation: Generation, locked_generation: Generation, repeat: int
) -> dict[str, Times]:
    """From CPU memory to a row that can be read; the second is the first in page-locked memory."""
    slab = slab_of(generation).view(torch.uint8)
    device = groups[0].lora_a.device
    locked = torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(locked, device=device)

    def send() -> None:
        target.copy_(locked, non_blocking=True)
        torch.cuda.synchronize()

    lock = CudaPageLock(device)

    def lock_and_unlock() -> None:
        buffer = Buffer(len(slab), lock)
        del buffer

    found = {"link_32_mib": timed(send, repeat), "lock_fresh_and_unlock": timed(lock_and_unlock, repeat)}
    source, ring_memory = slab.numpy(), locked.numpy()
    for num_threads in NUM_THREADS:
        with ThreadPoolExecutor(num_threads) as threads:

            def fill(start: int) -> None:
                piece = source[start : start + PIECE_BYTES]
                place = start % len(ring_memory)
                np.copyto(ring_memory[place : place + len(piece)], piece)

            found[f"fill_{num_threads}"] = timed(lambda: shared(threads, num_threads, fill, len(source)), repeat)  # noqa: B023

    def row(ring: Ring, generation: Generation) -> Times:
        copies = RowCopies(groups, ring)
        copies.clear(0)

        def copy() -> None:
            copies.start(0, generation).wait()
            torch.cuda.current_stream(device).synchronize()

        copy()
        check_row(groups, generation)
        return timed(copy, repeat)

    if slab_of(locked_generation).is_pinned():  # Small adapters' memory is left as it is.
        found["row_direct"] = row(Ring(), locked_generation)
    for ring in RINGS:
        found[f"row_{ring.num_threads}x{ring.num_chunks}x{ring.chunk_bytes >> 20}MiB"] = row(ring, generation)
    return found


def make_groups(base: BaseModel, config: EngineConfig, surface: ModelSurface) -> Sequence[LoraGroup]:
    """The buffers that copies are written to."""
    return make_buffers(config, base, surface, make_metadata(config, base)).groups


def main() -> None:
    """Write, measure, print."""
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as root:
        config = EngineConfig(
            model=str(write_model(options.shape, Path(root) / "model")), load_format="dummy",
            dtype="bfloat16", max_loras=2, max_lora_rank=options.rank, lora_target_modules=list(ALL_LINEARS),
        )  # fmt: skip
        base = load_base(config, None)
        surface = base.surface(
            max_lora_rank=options.rank, lora_dtype=torch.bfloat16, target_suffixes=tuple(config.lora_target_modules)
        )
        folder = write_adapter(options.shape, options.rank, 0, Path(root) / "adapter", device)
        gc.collect()
        freeze_startup_objects()
        figures: dict[str, object] = {}
        slabs = SlabPool(CudaPageLock(base.device) if device == "cuda" else None)
        if device == "cuda":
            groups = make_groups(base, config, surface)
            generations = read_generation(folder, surface), read_generation(folder, surface, memory=slabs.lend)
            figures["cpu"] = gpu_parts(groups, *generations, options.repeat)
        parts = disk_parts(folder, surface, Path(root) / "catalogue", slabs, options.repeat)
        parts |= {
            f"{name}_{num_threads}": times
            for num_threads in NUM_THREADS
            for name, times in machine_parts(folder / WEIGHTS_NAME, num_threads, options.repeat).items()
        }
        figures["disk"] = parts
        for kind, rows in figures.items():
            for name, times in dict(rows).items():  # type: ignore[call-overload]
                print(kind, name, times, flush=True)
    finish({**vars(options), "num_cores": os.cpu_count()}, figures)


if __name__ == "__main__":
    main()
