"""Paged attention on a GPU: microseconds a call in a CUDA graph, beside the floor and beside PyTorch's own attention.

    python -m benchmarks.attention --batch 1,8,32,128,256 --kv-len 256,2048 --prefill 8x2048

The shape is Llama-3.1-8B's unless told otherwise. Each call of a graph reads other keys than the one before, so that they
come from memory rather than the cache. Launches are sized for `--max-model-len`, as a captured decode step's must be. The
time is with the step's own keys and values at hand (`us`), which decodes then write too, and without (`blocks_us`), which
matters to whole prompts. The
floor is the larger of bytes over `--bandwidth` and operations over `--rate`. PyTorch's attention is given keys and values
that lie gathered already (`sdpa_us`, with a mask where a prefill has cached keys), and those of the pools
(`gather_sdpa_us`). Refuses to report where an answer is wrong.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton

from benchmarks.report import finish, refuse
from kernels import AttentionBuffers, AttentionMetadata, paged_attention, write_kv_

CACHE_BYTES = 200 << 20
"""What the calls of a graph read together, at least: several times the cache."""
MAX_ERROR = 1e-2
"""Bound of ||out - ref|| / ||ref|| for bfloat16 inputs; the reference is in float32."""
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Work:
    """Equal requests: `batch` times `query_len` queries, each request with `kv_len` keys."""

    batch: int
    query_len: int
    kv_len: int


@dataclass(frozen=True)
class Inputs:
    """What one call reads.

    Attributes:
        q: [T, Hq, D].
        kv_index: [B, L] int64, pool positions of each request's keys.
        metadata: the same for the kernel.
    """

    q: torch.Tensor
    kv_index: torch.Tensor
    metadata: AttentionMetadata


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", default="1,8,32,128,256", help="decodes in a step")
    parser.add_argument("--kv-len", default="256,2048", help="keys of each decode")
    parser.add_argument(
        "--prefill", default="8x2048,16x256,4x512x4096", help="prefills, each `requests`x`tokens` or with x`keys` too"
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads")
    parser.add_argument("--head-dim", type=int, default=128, help="width of a head")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a KV block")
    parser.add_argument("--max-model-len", type=int, default=8192, help="keys that launches are sized for")
    parser.add_argument("--bandwidth", type=float, default=4.24e12, help="bytes a second that the device copies")
    parser.add_argument("--rate", type=float, default=790e12, help="bfloat16 operations a second of the device")
    parser.add_argument("--repeat", type=int, default=15, help="replays of each graph; the median counts")
    return parser.parse_args()


def parse_work(options: argparse.Namespace) -> list[Work]:
    """Decodes by batch and length, then prefills."""
    lens = [int(kv_len) for kv_len in options.kv_len.split(",") if kv_len]
    decodes = [Work(int(batch), 1, kv_len) for kv_len in lens for batch in options.batch.split(",") if batch]
    sizes = [[int(size) for size in prefill.split("x")] for prefill in options.prefill.split(",") if prefill]
    return decodes + [Work(batch, length, *(rest or [length])) for batch, length, *rest in sizes]


def kv_bytes(work: Work, options: argparse.Namespace) -> int:
    """Keys and values of all requests, each once."""
    return 2 * work.batch * work.kv_len * options.kv_heads * options.head_dim * DTYPE.itemsize


def floor_us(work: Work, options: argparse.Namespace) -> float:
    """The larger of bytes over bandwidth and operations over rate."""
    num_queries = work.batch * work.query_len
    num_bytes = kv_bytes(work, options) + 2 * num_queries * options.heads * options.head_dim * DTYPE.itemsize
    first = work.kv_len - work.query_len + 1
    pairs = work.batch * work.query_len * (first + work.kv_len) / 2
    num_operations = 4 * pairs * options.heads * options.head_dim
    return 1e6 * max(num_bytes / options.bandwidth, num_operations / options.rate)


def make_inputs(
    work: Work, options: argparse.Namespace, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, list[Inputs]]:
    """Random pools and enough inputs over different blocks of them to overflow the cache."""
    size = options.block_size
    blocks_each = -(-work.kv_len // size)
    num_inputs = max(1, -(-CACHE_BYTES // kv_bytes(work, options)))
    num_blocks = 1 + num_inputs * work.batch * blocks_each
    order = 1 + torch.randperm(num_blocks - 1, generator=generator, device="cuda")
    shape = (2, num_blocks * size, options.kv_heads, options.head_dim)
    k_pool, v_pool = torch.randn(shape, generator=generator, device="cuda", dtype=DTYPE)
    inputs = []
    for table in order.view(num_inputs, work.batch, blocks_each):
        kv_index = (table[:, :, None] * size + torch.arange(size, device="cuda")).flatten(1)[:, : work.kv_len]
        q_shape = (work.batch * work.query_len, options.heads, options.head_dim)
        q = torch.randn(q_shape, generator=generator, device="cuda", dtype=DTYPE)
        max_blocks = max(blocks_each, -(-options.max_model_len // size))
        lens = [work.query_len] * work.batch, [work.kv_len] * work.batch
        if work.query_len == 1:
            metadata = AttentionBuffers(work.batch, max_blocks, size, q.device).fill(*lens, table)
        else:
            metadata = AttentionMetadata(*lens, table, size)
            assert metadata.tensors.max_kv_len == work.kv_len, "made here, as it cannot be while a graph is captured"
        inputs.append(Inputs(q, kv_index, metadata))
    return k_pool, v_pool, inputs


def attend_gathered(work: Work, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[T, Hq, D] by PyTorch's attention over keys and values [B, L, Hkv, D]."""
    mask = None
    if 1 < work.query_len < work.kv_len:
        shape = (work.query_len, work.kv_len)
        mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(work.kv_len - work.query_len)
    attended = F.scaled_dot_product_attention(
        q.view(work.batch, work.query_len, *q.shape[1:]).transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and work.query_len > 1,
        enable_gqa=True,
    )
    return attended.transpose(1, 2).flatten(0, 1)


def time_graph(calls: list[Callable[[], object]], repeat: int) -> float:
    """Median microseconds of one of `calls`, captured one after the other in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    milliseconds = []
    for _ in range(3 + repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return 1e3 * statistics.median(milliseconds[3:]) / len(calls)


def measure(work: Work, options: argparse.Namespace, generator: torch.Generator) -> dict[str, Any]:
    """Check one kind of step, then time it; one row of figures."""
    k_pool, v_pool, inputs = make_inputs(work, options, generator)
    scale = options.head_dim**-0.5

    gathered = [(k_pool[case.kv_index], v_pool[case.kv_index]) for case in inputs]
    # What the step itself computed: of a whole prompt all keys, of others the last.
    own = [[tensor[:, -work.query_len :].flatten(0, 1) for tensor in pair] for pair in gathered]

    # The launch of decodes writes them too.
    places = [case.kv_index[:, -1].contiguous() if work.query_len == 1 else None for case in inputs]

    def ours(case: Inputs, *kv: torch.Tensor, kv_index: torch.Tensor | None = None) -> torch.Tensor:
        k, v = kv or (None, None)
        return paged_attention(case.q, k_pool, v_pool, case.metadata, scale=scale, k=k, v=v, kv_index=kv_index)

    last = inputs[-1]
    reference = torch.cat([
        attend_gathered(Work(1, work.query_len, work.kv_len), *(tensor.float() for tensor in (q, k_pool[i], v_pool[i])))
        for q, i in zip(last.q.split(work.query_len), last.kv_index[:, None], strict=True)
    ])  # fmt: skip
    error = float((ours(last, *own[-1], kv_index=places[-1]).float() - reference).norm() / reference.norm())
    if not error < MAX_ERROR:
        refuse(f"{work} differs from the reference by {error}")

    times = {
        "us": time_graph(
            [
                lambda case=case, kv=kv, at=at: ours(case, *kv, kv_index=at)
                for case, kv, at in zip(inputs, own, places, strict=True)
            ],
            options.repeat,
        ),
        "blocks_us": time_graph([lambda case=case: ours(case) for case in inputs], options.repeat),
        "sdpa_us": time_graph(
            [
                lambda case=case, kv=kv: attend_gathered(work, case.q, *kv)
                for case, kv in zip(inputs, gathered, strict=True)
            ],
            options.repeat,
        ),
        "gather_sdpa_us": time_graph(
            [
                lambda case=case: attend_gathered(work, case.q, k_pool[case.kv_index], v_pool[case.kv_index])
                for case in inputs
            ],
            options.repeat,
        ),
    }
    floor = floor_us(work, options)
    return {
        "batch": work.batch,
        "query_len": work.query_len,
        "kv_len": work.kv_len,
        **{name: round(value, 2) for name, value in times.items()},
        "floor_us": round(floor, 2),
        "of_floor": round(floor / times["us"], 3),
        "error": float(f"{error:.2g}"),
    }


def measure_write(num_tokens: int, options: argparse.Namespace, generator: torch.Generator) -> dict[str, Any]:
    """The KV write of a step, beside the two index assignments that it replaces."""
    shape = (num_tokens, options.kv_heads, options.head_dim)
    k, v = torch.randn((2, *shape), generator=generator, device="cuda", dtype=DTYPE)
    pools = torch.zeros((2, 4 * num_tokens, *shape[1:]), device="cuda", dtype=DTYPE)
    kv_index = torch.randperm(4 * num_tokens, generator=generator, device="cuda")[:num_tokens]

    def assign() -> None:
        pools[0, kv_index] = k
        pools[1, kv_index] = v

    assign()
    expected = pools.clone()
    pools.zero_()
    write_kv_(k, v, pools[0], pools[1], kv_index)
    if not torch.equal(pools, expected):
        refuse(f"writing {num_tokens} tokens differs from index assignment")
    write = time_graph([lambda: write_kv_(k, v, pools[0], pools[1], kv_index)] * 20, options.repeat)
    return {
        "tokens": num_tokens,
        "us": round(write, 2),
        "index_put_us": round(time_graph([assign] * 20, options.repeat), 2),
        "floor_us": round(1e6 * 4 * k.numel() * DTYPE.itemsize / options.bandwidth, 2),
    }


def main() -> None:
    """Measure and print the result line."""
    options = parse()
    if not torch.cuda.is_available():
        refuse("there is no CUDA device")
    generator = torch.Generator("cuda").manual_seed(0)
    rows = []
    for work in parse_work(options):
        rows.append(measure(work, options, generator))
        print(" ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
        torch.cuda.empty_cache()
    writes = [measure_write(num_tokens, options, generator) for num_tokens in (32, 256, 16384)]
    finish(
        {**vars(options), "dtype": "bfloat16", "triton": triton.__version__}, {"attention": rows, "kv_write": writes}
    )


if __name__ == "__main__":
    main()
