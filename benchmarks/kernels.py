"""Grouped LoRA kernels on one decoder layer of Llama-3.1-8B's shape: microseconds beside plain torch and the memory floor.

    python -m benchmarks.kernels                # the table
    python -m benchmarks.kernels --tune         # first measures tile candidates, prints rows for kernels/tuning.py
                                                # and uses them for the table

A layer is four calls (q,k,v; o; gate+up; down), captured in one CUDA graph for many layers with weights and activations
of their own, so that the L2 cache holds none of a layer's data when its turn comes; a figure is the median of the
replays over the layers. The embedding and the head, which no layer has, are timed alone (`--ends`). The metadata has
room for 32 adapters throughout, as a server's would. The floor is the time to move, at the device's copy speed, each
active adapter and input once and each output twice. Results are compared with float64 first, and no figure is printed
where they differ.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from benchmarks.report import finish, refuse
from kernels import LoraMetadata, LoraSegment, lora_add_group_, lora_embedding_add_, reference, tuning
from kernels.tuning import ExpandTile, ShrinkTile

COPY_BYTES_PER_US = 4.24e6  # read plus written, measured on an H200
L2_BYTES = 60e6
MAX_ADAPTERS = 32
NUM_REPLAYS = 15
TOLERANCE = 0.005
GROUPS = {
    "q,k,v": (4096, (4096, 5120, 6144)),
    "o": (4096, (4096,)),
    "gate+up": (4096, (14336, 28672)),
    "down": (14336, (4096,)),
}


HEAD = {"lm_head": (4096, (128256,))}
VOCAB_SIZE, WIDTH = 128256, 4096
END_CELLS = [(1, 32), (32, 32), (32, 256)]
"""Adapters and tokens of the rows for the embedding and the head."""


class Cell(NamedTuple):
    """One row of the table."""

    rank: int
    num_adapters: int
    num_tokens: int


class Call(NamedTuple):
    """Arguments of `lora_add_group_` but for the metadata."""

    output: torch.Tensor
    x: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    ranks: torch.Tensor
    host_ranks: list[list[int]]
    slice_ends: tuple[int, ...]


class Choice(NamedTuple):
    """Tiles to try on one group."""

    group: str
    rank: int
    kind: str
    shrink: ShrinkTile
    expand: ExpandTile


def parse() -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=numbers, default=[16, 64])
    parser.add_argument("--adapters", type=numbers, default=[1, 8, 32])
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 32, 128, 256, 2048, 8192])
    parser.add_argument("--parts", action="store_true", help="also time each group alone")
    parser.add_argument("--ends", action="store_true", help="also time the embedding and the head")
    parser.add_argument("--tune", action="store_true", help="measure tile candidates first")
    parser.add_argument("--kinds", default=",".join(kind.name for kind in tuning.KINDS), help="kinds of step to tune")
    parser.add_argument("--processes", type=int, default=14, help="that compile candidates")
    return parser.parse_args()


def num_bytes(group: str, cell: Cell) -> int:
    """That must move between memory and chip for one call."""
    in_features, ends = {**GROUPS, **HEAD}[group]
    activations = cell.num_tokens * (in_features + 2 * ends[-1])
    return 2 * (activations + cell.num_adapters * cell.rank * (in_features * len(ends) + ends[-1]))


def make_call(group: str, cell: Cell) -> Call:
    """Random activations and weights, scaled so that the output's parts are of like size."""
    in_features, ends = {**GROUPS, **HEAD}[group]
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    host_ranks = [[cell.rank] * len(ends) for _ in range(cell.num_adapters)]
    return Call(
        torch.randn(cell.num_tokens, ends[-1], **options),
        torch.randn(cell.num_tokens, in_features, **options),
        torch.randn(cell.num_adapters, len(ends), cell.rank, in_features, **options) * in_features**-0.5,
        torch.randn(cell.num_adapters, ends[-1], cell.rank, **options) * cell.rank**-0.5,
        torch.tensor(host_ranks, dtype=torch.int32, device="cuda"),
        host_ranks,
        ends,
    )


def make_layers(groups: Iterable[str], cell: Cell) -> list[list[Call]]:
    """As many layers as fill the L2 cache several times, at least three."""
    groups = list(groups)
    size = sum(num_bytes(group, cell) for group in groups)
    return [
        [make_call(group, cell) for group in groups] for _ in range(max(3, min(64, math.ceil(5 * L2_BYTES / size))))
    ]


def make_metadata(cell: Cell) -> LoraMetadata:
    """The tokens dealt evenly to the adapters."""
    metadata = LoraMetadata(
        cell.num_tokens, MAX_ADAPTERS, torch.device("cuda"), max_columns=3 * cell.rank, max_in=14336
    )
    cuts = [cell.num_tokens * row // cell.num_adapters for row in range(cell.num_adapters + 1)]
    metadata.update([LoraSegment(row, *pair) for row, pair in enumerate(itertools.pairwise(cuts))], cell.num_tokens)
    return metadata


def median_us(run: Callable[[], None], num_layers: int) -> float:
    """Microseconds a layer of `run`, which works on all layers, in a CUDA graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(NUM_REPLAYS + 2)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return 1000 * statistics.median(start.elapsed_time(end) for start, end in events[2:]) / num_layers


def relative_error(call: Call, metadata: LoraMetadata) -> float:
    """‖output - float64‖ / ‖float64‖ of one call on a copy of its output."""
    output, expected = call.output.clone(), call.output.double()
    lora_add_group_(output, *call[1:], metadata)
    double = [tensor.double() for tensor in call[1:4]]
    reference.lora_add_group_(expected, *double, *call[4:], metadata)
    return float((output.double() - expected).norm() / expected.norm())


def measure(cell: Cell, has_parts: bool) -> dict[str, object]:
    """One row of the table."""
    metadata, layers = make_metadata(cell), make_layers(GROUPS, cell)
    error = max(relative_error(call, metadata) for call in layers[0])
    if not error < TOLERANCE:
        refuse(f"{cell}: relative error {error}, allowed {TOLERANCE}")

    def run(function: Callable[..., None], indices: Sequence[int], count: int) -> Callable[[], None]:
        def all_layers() -> None:
            for layer in layers[:count]:
                for index in indices:
                    function(*layer[index], metadata)

        return all_layers

    everything = range(len(GROUPS))
    row: dict[str, object] = cell._asdict()
    row["us"] = round(median_us(run(lora_add_group_, everything, len(layers)), len(layers)), 1)
    if has_parts:
        row["parts_us"] = [
            round(median_us(run(lora_add_group_, [index], len(layers)), len(layers)), 1) for index in everything
        ]
    row["torch_us"] = round(median_us(run(reference.lora_add_group_, everything, 3), 3), 1)
    row["floor_us"] = round(sum(num_bytes(group, cell) for group in GROUPS) / COPY_BYTES_PER_US, 2)
    row["error"] = round(error, 5)
    return row


def measure_head(cell: Cell) -> dict[str, object]:
    """The head's call alone."""
    metadata, layers = make_metadata(cell), make_layers(HEAD, cell)
    error = relative_error(layers[0][0], metadata)
    if not error < TOLERANCE:
        refuse(f"head, {cell}: relative error {error}, allowed {TOLERANCE}")

    def run(function: Callable[..., None], count: int) -> Callable[[], None]:
        return lambda: [function(*call, metadata) for (call,) in layers[:count]]  # type: ignore[return-value]

    return {
        "part": "lm_head",
        **cell._asdict(),
        "us": round(median_us(run(lora_add_group_, len(layers)), len(layers)), 1),
        "torch_us": round(median_us(run(reference.lora_add_group_, 3), 3), 1),
        "floor_us": round(num_bytes("lm_head", cell) / COPY_BYTES_PER_US, 2),
        "error": round(error, 5),
    }


def measure_embedding(cell: Cell) -> dict[str, object]:
    """The embedding's call alone: other tokens, outputs and B in each of the calls of a graph."""
    metadata = make_metadata(cell)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    lora_a = torch.randn(cell.num_adapters, VOCAB_SIZE, cell.rank, **options)
    host_ranks = [cell.rank] * cell.num_adapters
    ranks = torch.tensor(host_ranks, dtype=torch.int32, device="cuda")
    size = 2 * (cell.num_tokens * (cell.rank + 2 * WIDTH) + cell.num_adapters * WIDTH * cell.rank)
    calls = [
        (
            torch.randn(cell.num_tokens, WIDTH, **options),
            torch.randint(VOCAB_SIZE, (cell.num_tokens,), device="cuda"),
            lora_a,
            torch.randn(cell.num_adapters, WIDTH, cell.rank, **options) * cell.rank**-0.5,
            ranks,
            host_ranks,
        )
        for _ in range(max(3, min(64, math.ceil(5 * L2_BYTES / size))))
    ]
    output, expected = calls[0][0].clone(), calls[0][0].double()
    lora_embedding_add_(output, *calls[0][1:], metadata)
    for lora_slot, start, end in metadata.segments:
        gathered = lora_a[lora_slot, calls[0][1][start:end]].double()
        expected[start:end] += gathered @ calls[0][3][lora_slot].double().T
    error = float((output.double() - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        refuse(f"embedding, {cell}: relative error {error}, allowed {TOLERANCE}")

    def run(function: Callable[..., None], count: int) -> Callable[[], None]:
        return lambda: [function(*call, metadata) for call in calls[:count]]  # type: ignore[return-value]

    return {
        "part": "embedding",
        **cell._asdict(),
        "us": round(median_us(run(lora_embedding_add_, len(calls)), len(calls)), 1),
        "torch_us": round(median_us(run(reference.lora_embedding_add_, 3), 3), 1),
        "floor_us": round(size / COPY_BYTES_PER_US, 2),
        "error": round(error, 5),
    }


# Tuning: shrink tiles first, beside the present expand tiles, then expand tiles beside the best of those.

TUNING_CELLS = {
    "decode": [(1, 1), (1, 32), (8, 8), (8, 32), (32, 32)],
    "batch": [(1, 128), (8, 128), (32, 128), (1, 256), (8, 256), (32, 256)],
    "chunk": [(1, 512), (8, 512), (32, 512)],
    "prefill": [(1, 2048), (8, 2048), (32, 2048)],
    "long": [(1, 8192), (32, 8192)],
}
TUNING_WIDTHS: dict[str, tuple[tuple[int | None, str], ...]] = {
    "shrink": ((8192, "q,k,v"), (None, "down")),
    "expand": ((8192, "q,k,v"), (None, "gate+up")),
}


def shrink_candidates(kind: str, rank: int) -> list[ShrinkTile]:
    """Tiles worth a try: small steps want many programs, each with few rows; large ones whole ranks in one program."""
    whole = min(64, max(16, rank))
    if kind in ("decode", "batch", "chunk"):
        if whole == 16:
            return [
                ShrinkTile(16, 128, 1, 512, 4, 4, 16),
                ShrinkTile(16, 128, 1, 1024, 4, 4, 16),
                ShrinkTile(16, 256, 1, 1024, 2, 3, 16),
                ShrinkTile(16, 128, 4, 512, 4, 1, 16),
            ]
        return [
            ShrinkTile(16, 256, 1, 1024, 4, 3, 16),
            ShrinkTile(32, 128, 1, 1024, 4, 4, 16),
            ShrinkTile(64, 128, 1, 1024, 4, 4, 16),
            ShrinkTile(32, 128, 1, 2048, 4, 4, 16),
            ShrinkTile(64, 128, 1, 2048, 4, 4, 16),
        ]
    if kind == "prefill":
        return [
            ShrinkTile(whole, 64, 1, 1024, 4, 4, 16),
            ShrinkTile(whole, 128, 1, 2048, 4, 3, 16),
            ShrinkTile(whole, 128, 1, 2048, 8, 3, 16),
        ]
    return [
        ShrinkTile(whole, 128, 1, 2048, 4, 3, 16),
        ShrinkTile(whole, 64, 1, 4096, 4, 4, 16),
        ShrinkTile(whole, 128, 1, 4096, 8, 3, 16),
    ]


def expand_candidates(kind: str, rank: int) -> list[ExpandTile]:
    """Tiles worth a try: one block at a time, then streams of as many programs as fit on the device together."""
    if kind in ("decode", "batch", "chunk"):
        tiles = [ExpandTile(256, 4, 0, 16), ExpandTile(256, 8, 0, 16)]
        if rank <= 16:
            return [*tiles, ExpandTile(128, 4, 3, 6), ExpandTile(256, 8, 3, 3), ExpandTile(128, 4, 4, 4)]
        return [*tiles, ExpandTile(128, 8, 3, 2), ExpandTile(128, 4, 3, 2), ExpandTile(64, 4, 4, 4)]
    return [
        ExpandTile(128, 4, 0, 16),
        ExpandTile(64, 4, 0, 16),
        ExpandTile(64, 4, 3, 4),
        ExpandTile(128, 8, 2, 2),
        ExpandTile(128, 8, 3, 2),
        ExpandTile(64, 8, 3, 3),
    ]


def default_tiles(group: str, rank: int, kind: str) -> tuple[ShrinkTile, ExpandTile]:
    """The present table's."""
    in_features, ends = {**GROUPS, **HEAD}[group]
    return tuning.shrink_tile("sm90", kind, rank, in_features), tuning.expand_tile("sm90", kind, rank, ends[-1])


def compile_choices(choices: Sequence[Choice]) -> None:
    """Launch each once on a small step; what is compiled stays in Triton's cache on disk."""
    from kernels.lora import lora_add_group_with_tiles_

    smallest = dict(zip((kind.name for kind in tuning.KINDS), (1, 65, 257, 513, 2049), strict=True))
    for choice in choices:
        cell = Cell(choice.rank, 1, smallest[choice.kind])
        call, metadata = make_call(choice.group, cell), make_metadata(cell)
        try:
            lora_add_group_with_tiles_(*call[:5], call.slice_ends, metadata, choice.shrink, choice.expand)
        except Exception as error:  # noqa: BLE001 - a tile that does not fit the device; the measurement skips it
            print(f"{choice}: {type(error).__name__}", flush=True)
    torch.cuda.synchronize()


def compile_in_parallel(choices: Iterable[Choice], num_processes: int) -> None:
    """`compile_choices` dealt to several processes."""
    todo = list(dict.fromkeys(choices))
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_choices, args=(todo[first::num_processes],)) for first in range(num_processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"compiled {len(todo)} pairs in {time.perf_counter() - started:.1f} s", flush=True)


def ranked(kind: str, rank: int, group: str, pairs: Sequence[tuple[ShrinkTile, ExpandTile]]) -> list[int]:
    """The pairs' indices by mean time over the kind's cells, each relative to the fastest there; fastest first."""
    from kernels.lora import lora_add_group_with_tiles_

    scores = [0.0] * len(pairs)
    for num_adapters, num_tokens in TUNING_CELLS[kind]:
        cell = Cell(rank, num_adapters, num_tokens)
        metadata, layers = make_metadata(cell), make_layers([group], cell)

        def run(
            shrink: ShrinkTile, expand: ExpandTile, metadata: LoraMetadata = metadata, layers: list = layers
        ) -> None:
            for (call,) in layers:
                lora_add_group_with_tiles_(*call[:5], call.slice_ends, metadata, shrink, expand)

        times = []
        for pair in pairs:
            try:
                times.append(median_us(functools.partial(run, *pair), len(layers)))
            except Exception:  # noqa: BLE001 - see `compile_choices`
                times.append(math.inf)
        print("  ", kind, rank, group, cell[1:], [round(us, 1) for us in times], flush=True)
        scores = [score + math.log(us / min(times)) for score, us in zip(scores, times, strict=True)]
    return sorted(range(len(pairs)), key=lambda index: scores[index])


def tune(ranks: Sequence[int], kinds: Sequence[str], num_processes: int) -> None:
    """Print the best tiles as rows of the table, and put them there for this process."""
    todo: list[Choice] = []
    for kind, rank in itertools.product(kinds, ranks):
        for _, group in TUNING_WIDTHS["shrink"]:
            expand = default_tiles(group, rank, kind)[1]
            todo += [Choice(group, rank, kind, tile, expand) for tile in shrink_candidates(kind, rank)]
        for _, group in TUNING_WIDTHS["expand"]:
            shrink = default_tiles(group, rank, kind)[0]
            todo += [Choice(group, rank, kind, shrink, tile) for tile in expand_candidates(kind, rank)]
    compile_in_parallel(todo, num_processes)
    shrink_rows, expand_rows = {}, {}
    for kind, rank in itertools.product(kinds, ranks):
        max_rank = None if rank == max(ranks) else rank
        for width, group in TUNING_WIDTHS["shrink"]:
            tiles, expand = shrink_candidates(kind, rank), default_tiles(group, rank, kind)[1]
            first, second, *_ = ranked(kind, rank, group, [(tile, expand) for tile in tiles])
            shrink_rows["sm90", kind, max_rank, width] = tiles[first]
            print(f'    ("sm90", "{kind}", {max_rank}, {width}): {tiles[first]},  # then {tiles[second]}', flush=True)
        for width, group in TUNING_WIDTHS["expand"]:
            outs, shrink = expand_candidates(kind, rank), default_tiles(group, rank, kind)[0]
            first, second, *_ = ranked(kind, rank, group, [(shrink, tile) for tile in outs])
            expand_rows["sm90", kind, max_rank, width] = outs[first]
            print(f'    ("sm90", "{kind}", {max_rank}, {width}): {outs[first]},  # then {outs[second]}', flush=True)
    for table, rows in ((tuning.SHRINK_TILES, shrink_rows), (tuning.EXPAND_TILES, expand_rows)):
        present = dict(table)
        table.clear()
        table.update({**rows, **{key: tile for key, tile in present.items() if key not in rows}})


def main() -> None:
    """Measure and print the result line."""
    options = parse()
    if not torch.cuda.is_available():
        refuse("these kernels need a CUDA device")
    torch.manual_seed(0)
    if options.tune:
        tune(options.ranks, options.kinds.split(","), options.processes)
    kinds = {tuning.kind_of(num_tokens).name for num_tokens in options.tokens}
    choices = [
        Choice(group, rank, kind, *default_tiles(group, rank, kind))
        for group, rank, kind in itertools.product(GROUPS, options.ranks, sorted(kinds))
    ]
    end_cells = (
        [Cell(rank, *cell) for rank, cell in itertools.product(options.ranks, END_CELLS)] if options.ends else []
    )
    end_kinds = {(cell.rank, tuning.kind_of(cell.num_tokens).name) for cell in end_cells}
    choices += [Choice("lm_head", *key, *default_tiles("lm_head", *key)) for key in sorted(end_kinds)]
    compile_in_parallel(choices, options.processes)
    rows = []
    for rank, num_adapters, num_tokens in itertools.product(options.ranks, options.adapters, options.tokens):
        if num_tokens >= num_adapters:
            rows.append(measure(Cell(rank, num_adapters, num_tokens), options.parts))
            print(rows[-1], flush=True)
    ends = [measure_part(cell) for measure_part in (measure_embedding, measure_head) for cell in end_cells]
    for row in ends:
        print(row, flush=True)
    setup = {
        "shape": "llama-3.1-8b, one layer",
        "dtype": "bfloat16",
        "cache": "L2 cold: layers with weights and activations of their own, rotated",
        "max_adapters": MAX_ADAPTERS,
        "copy_bytes_per_us": COPY_BYTES_PER_US,
    }
    finish(setup, {"rows": rows, "ends": ends})


if __name__ == "__main__":
    main()
