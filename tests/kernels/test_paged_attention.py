"""The Triton paged attention and KV write against loops over queries, under Triton's interpreter and on a GPU.

Kernels are interpreted where TRITON_INTERPRET=1 was set before Triton was first imported, so the ordinary run starts
this file once more in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kernels import HAS_TRITON, AttentionBuffers, AttentionMetadata, reference

if not HAS_TRITON:
    pytest.skip("Triton is not made for this platform", allow_module_level=True)

from kernels.kv_write import write_kv_
from kernels.paged_attention import paged_attention, plan_splits
from tests.kernels.interpreted import run_interpreted

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """A packed batch and a model's attention shape; `spans` are (request, start, end) of keys that see each other."""

    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    num_kv_heads: int = 2
    group: int = 1
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    spans: Sequence[tuple[int, int, int]] = ()

    def __str__(self) -> str:
        kind = "mixed" if 1 in self.query_lens and max(self.query_lens) > 1 else "-".join(map(str, self.query_lens[:3]))
        shape = f"g{self.group}-d{self.head_dim}-p{self.block_size}"
        return f"{kind}-{shape}-w{self.window or 0}-c{self.soft_cap or 0:.0f}" + "-spans" * bool(self.spans)


DECODES = ([1, 1, 1, 1], [1, 133, 64, 317])
MIXED = ([1, 19, 1, 63, 2], [70, 19, 1, 133, 66])
CASES = [
    Case(*DECODES, group=3),
    Case(*DECODES, group=4, head_dim=80, block_size=4),
    Case(*DECODES, group=8, head_dim=128, num_kv_heads=1, window=5),
    Case([1, 1], [900, 37], group=4, head_dim=64, window=1000),
    Case([1, 1], [900, 37], head_dim=256, num_kv_heads=1, window=300, soft_cap=20.0),
    Case([1], [1500], group=4, num_kv_heads=1, head_dim=32),
    Case([1] * 63, list(range(1, 64)), head_dim=16, num_kv_heads=1, window=1),
    Case([1], [1], group=17, num_kv_heads=1, head_dim=24, soft_cap=5.0),
    Case([133], [133], group=4, head_dim=96),
    Case([63, 1, 70], [63, 1, 200], group=8, num_kv_heads=1, head_dim=128, soft_cap=10.0),
    Case(*MIXED, group=4, block_size=1),
    Case(*MIXED, group=3, head_dim=80, window=5),
    Case(*MIXED, group=1, head_dim=256, num_kv_heads=1, block_size=32, window=1),
    Case(*MIXED, group=8, num_kv_heads=1, head_dim=64, window=1000, soft_cap=3.0),
    Case(*MIXED, group=2, head_dim=40, block_size=12, window=40),
    Case([2, 3], [2, 300], group=1, head_dim=32, block_size=8),
    Case([63, 1, 133, 40], [63, 1, 133, 90], group=4, num_kv_heads=1, head_dim=32),
    Case([133, 9, 1], [133, 9, 7], group=3, num_kv_heads=2, head_dim=64, window=500, soft_cap=4.0),
    Case([133], [133], group=4, head_dim=16, spans=[(0, 3, 67), (0, 67, 70), (0, 90, 133)]),
    Case(*MIXED, group=2, head_dim=16, window=64, spans=[(1, 0, 9), (1, 9, 19), (3, 71, 131)]),
    Case([70, 1], [200, 40], group=1, num_kv_heads=1, window=40, spans=[(0, 120, 160), (0, 165, 200)]),
]


@dataclass
class World:
    """Pools whose positions hold NaN but for the keys of the requests and the null block."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    block_table: torch.Tensor
    kv_index: list[torch.Tensor]


def make_world(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> World:
    """Random queries, keys and values in blocks of random order; written by plain indexing."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 2 + sum(-(-kv_len // case.block_size) for kv_len in case.kv_lens)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    size = (num_blocks * case.block_size, case.num_kv_heads, case.head_dim)
    k_pool, v_pool = torch.full(size, float("nan")), torch.full(size, float("nan"))
    k_pool[: case.block_size], v_pool[: case.block_size] = 0.0, 0.0
    tables, indices = [], []
    for kv_len in case.kv_lens:
        blocks = [order.pop() for _ in range(-(-kv_len // case.block_size))]
        position = torch.arange(kv_len)
        index = torch.tensor(blocks)[position // case.block_size] * case.block_size + position % case.block_size
        k_pool[index] = torch.randn(kv_len, *size[1:], generator=generator)
        v_pool[index] = torch.randn(kv_len, *size[1:], generator=generator)
        tables.append(blocks)
        indices.append(index)
    width = max(len(blocks) for blocks in tables)
    table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in tables])
    q = torch.randn(sum(case.query_lens), case.num_kv_heads * case.group, case.head_dim, generator=generator)
    return World(
        q.to(device, dtype), k_pool.to(device, dtype), v_pool.to(device, dtype), table.to(device),
        [index.to(device) for index in indices],
    )  # fmt: skip


def naive_attention(case: Case, world: World, scale: float) -> torch.Tensor:
    """[T, Hq, D] float64, one query at a time."""
    rows: list[torch.Tensor] = []
    for i_row, (query_len, kv_len, index) in enumerate(zip(case.query_lens, case.kv_lens, world.kv_index, strict=True)):
        keys = world.k_pool[index].double().repeat_interleave(case.group, 1)
        values = world.v_pool[index].double().repeat_interleave(case.group, 1)
        for position in range(kv_len - query_len, kv_len):
            first = 0 if case.window is None else max(0, position - case.window + 1)
            seen = set(range(first, position + 1))
            for row, start, end in case.spans:
                if row == i_row and start <= position < end:
                    seen |= set(range(start, end))
            visible = sorted(seen)
            query = world.q[len(rows)].double()
            logits = torch.einsum("hd,khd->hk", query, keys[visible]) * scale
            if case.soft_cap is not None:
                logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
            rows.append(torch.einsum("hk,khd->hd", logits.softmax(1), values[visible]))
    return torch.stack(rows)


def mutual_spans(case: Case) -> torch.Tensor | None:
    """`AttentionMetadata.mutual_spans` of a case."""
    if not case.spans:
        return None
    spans = torch.zeros(sum(case.query_lens), 2, dtype=torch.int32)
    for row, start, end in case.spans:
        first = sum(case.query_lens[:row]) - (case.kv_lens[row] - case.query_lens[row])
        spans[max(first + start, sum(case.query_lens[:row])) : first + end] = torch.tensor([start, end])
    return spans


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest of the rows' ||actual - expected|| / ||expected||."""
    difference = (actual.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(difference.max()) if bool(actual.isfinite().all()) else float("nan")


def attend(case: Case, world: World, metadata: AttentionMetadata, scale: float, **step: torch.Tensor) -> torch.Tensor:
    return paged_attention(
        world.q, world.k_pool, world.v_pool, metadata, scale=scale, window=case.window, soft_cap=case.soft_cap, **step
    )


def step_rows(case: Case, world: World, pool: torch.Tensor) -> torch.Tensor:
    """[T, Hkv, D]: a pool's rows of the step's own tokens, as layers compute them; NaN but for whole prompts."""
    rows = []
    for query_len, kv_len, index in zip(case.query_lens, case.kv_lens, world.kv_index, strict=True):
        own = pool[index[kv_len - query_len :]]
        rows.append(own if query_len == kv_len else torch.full_like(own, float("nan")))
    return torch.cat(rows)


def check_attention(case: Case, dtype: torch.dtype, device: str) -> None:
    world = make_world(case, dtype, device)
    scale = 1.7 * case.head_dim**-0.5
    # On the host, as the engine makes it.
    table = world.block_table.cpu()
    metadata = AttentionMetadata(
        list(case.query_lens), list(case.kv_lens), table, case.block_size, mutual_spans=mutual_spans(case)
    )
    expected = naive_attention(case, world, scale)

    error = relative_error(attend(case, world, metadata, scale), expected)

    print(f"attention {case} {dtype}: relative error {error:.2e}")  # noqa: T201 - read with -s
    assert error < RELATIVE_ERROR[dtype]
    if metadata.num_prompts:
        k, v = (step_rows(case, world, pool) for pool in (world.k_pool, world.v_pool))
        layouts = [k, k.transpose(0, 1).contiguous().transpose(0, 1)]  # tokens first, heads first
        if IS_INTERPRETED:  # which is slow: one for each case
            layouts = [layouts[case.group % 2]]
        for keys in layouts:
            output = attend(case, world, metadata, scale, k=keys, v=v)
            assert relative_error(output, expected) < RELATIVE_ERROR[dtype]
    if case.spans:
        plain = reference.paged_attention(
            world.q, world.k_pool, world.v_pool, metadata, scale=scale, window=case.window
        )
        assert relative_error(plain, expected) < RELATIVE_ERROR[dtype]
        without = naive_attention(replace(case, spans=()), world, scale)
        assert relative_error(without, expected) > 0.1, "the case's spans must matter to what is compared"
    other = naive_attention(replace(case, window=2 if case.window == 1 else 1, soft_cap=None), world, scale)
    if max(case.kv_lens) > 1:
        assert relative_error(other, expected) > 0.1, "the case's window must matter to what is compared"


def check_write(dtype: torch.dtype, device: str, num_tokens: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    # As attention layers give them: heads before tokens.
    k, v = (torch.randn(2, shape[0], num_tokens, shape[1], generator=generator)).to(device, dtype).transpose(1, 2)
    pools = torch.randn(2, 3 * num_tokens + 1, *shape, generator=generator).to(device, dtype)
    kv_index = torch.randperm(3 * num_tokens + 1, generator=generator)[:num_tokens].to(device)
    kv_index[1::3] = -1
    expected = pools.clone()
    kept = kv_index >= 0
    expected[0, kv_index[kept]], expected[1, kv_index[kept]] = k[kept], v[kept]
    assert not torch.equal(expected, pools)

    write_kv_(k, v, pools[0], pools[1], kv_index)

    assert torch.equal(pools, expected)


def check_new_keys(case: Case, dtype: torch.dtype, device: str) -> None:
    """Keys and values of the step itself are written first, and seen; none are for padding, nor where there is no place."""
    world = make_world(case, dtype, device)
    expected = naive_attention(case, world, 0.3)
    first_rows = [kv_len - query_len for query_len, kv_len in zip(case.query_lens, case.kv_lens, strict=True)]
    new = torch.cat([index[first:] for index, first in zip(world.kv_index, first_rows, strict=True)])
    pools = torch.stack((world.k_pool, world.v_pool))
    # As attention layers give them: heads before tokens, values in the midst of other columns.
    k = world.k_pool[new].transpose(0, 1).contiguous().transpose(0, 1)
    v = torch.cat((torch.zeros_like(k), world.v_pool[new]), 1)[:, k.shape[1] :]
    world.k_pool[new], world.v_pool[new] = float("nan"), float("nan")
    buffers = AttentionBuffers(len(case.query_lens) + 2, 100, case.block_size, torch.device(device))
    lens, num_padding = (list(case.query_lens), list(case.kv_lens)), 2
    if max(case.query_lens) == 1:
        metadata = buffers.fill(*lens, world.block_table, num_rows=len(case.query_lens) + num_padding)
    else:
        metadata = buffers.fill_open(*lens, world.block_table, sum(case.query_lens) + num_padding)
    num_tokens = world.q.shape[0]
    q, k, v = (torch.cat((part, torch.full_like(part[:1], 5).expand(2, -1, -1))) for part in (world.q, k, v))
    for index in (torch.full_like(new, -1), new):  # Seen either way, so that a launch for warming up writes nothing.
        kv_index = torch.cat((index, torch.full_like(new[:1], -1).expand(2)))
        output = attend(case, replace(world, q=q), metadata, 0.3, k=k, v=v, kv_index=kv_index)
        assert not output[num_tokens:].any()
        if max(case.query_lens) == 1 or index is new:
            assert relative_error(output[:num_tokens], expected) < RELATIVE_ERROR[dtype]
    assert torch.equal(torch.stack((world.k_pool, world.v_pool)).nan_to_num(9.5), pools.nan_to_num(9.5))


def check_padded_buffers(device: str) -> None:
    case = Case([1, 1, 1], [40, 1, 133], group=4)
    world = make_world(case, torch.float32, device)
    buffers = AttentionBuffers(8, 40, case.block_size, torch.device(device))
    buffers.fill([1] * 8, [640] * 8, torch.full((8, 40), 9))  # a step before, whose rests must not show
    world.q = torch.cat([world.q, torch.full_like(world.q[:2], float("nan"))])

    output = attend(case, world, buffers.fill([1] * 3, list(case.kv_lens), world.block_table, num_rows=5), 0.3)

    world.q = world.q[:3]
    assert relative_error(output[:3], naive_attention(case, world, 0.3)) < 1e-5
    assert torch.equal(output[3:], torch.zeros_like(output[3:]))


def check_open_buffers(device: str) -> None:
    """Any mix of rows in buffers of fixed addresses, with padding that is one row, and rows without tokens."""
    case = Case([1, 19, 1, 3, 2], [70, 19, 1, 33, 66], group=2)
    world = make_world(case, torch.float32, device)
    expected = naive_attention(case, world, 0.3)
    num_tokens, buffers = world.q.shape[0], AttentionBuffers(8, 30, case.block_size, torch.device(device))
    lens = list(case.query_lens), list(case.kv_lens)
    for num_padding in (0, 1, 6):
        padding = torch.full((num_padding, *world.q.shape[1:]), 7.0, device=device)
        padded = replace(world, q=torch.cat((world.q[:num_tokens], padding)))
        metadata = buffers.fill_open(*lens, world.block_table, num_tokens + num_padding)
        output = attend(case, padded, metadata, 0.3)
        assert relative_error(output[:num_tokens], expected) < 1e-5
        assert torch.equal(output[num_tokens:], torch.zeros_like(padding))
    empty = buffers.fill_open([], [], torch.zeros(0, 1, dtype=torch.int64), 4)
    assert not attend(case, replace(world, q=world.q[:4]), empty, 0.3).any()


NEW_KEYS = [*CASES[:3], CASES[4], CASES[6], CASES[7], CASES[11]]

if IS_INTERPRETED:  # else they do not exist: a test that is always skipped in a run says nothing in it

    @pytest.mark.parametrize("case", NEW_KEYS, ids=str)
    def test_what_a_step_adds_to_the_pools_is_written_and_seen(case: Case) -> None:
        check_new_keys(case, torch.float32, "cpu")

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_attention_equals_a_loop_over_queries(case: Case) -> None:
        check_attention(case, torch.float32, "cpu")

    def test_half_precision_attention_is_as_exact_as_its_inputs() -> None:
        for case in (CASES[11], *CASES[-2:]):
            check_attention(case, torch.float16, "cpu")

    @pytest.mark.parametrize(("num_tokens", "shape"), [(1, (2, 16)), (63, (3, 10)), (133, (9, 120))])
    def test_write_puts_each_token_at_its_index_and_padding_nowhere(num_tokens: int, shape: tuple[int, int]) -> None:
        check_write(torch.float32, "cpu", num_tokens, shape)

    def test_padded_rows_of_static_buffers_are_zeros() -> None:
        check_padded_buffers("cpu")

    def test_rows_of_any_kind_in_static_buffers() -> None:
        check_open_buffers("cpu")


@pytest.mark.skipif(IS_INTERPRETED or torch.cuda.is_available(), reason="the sweep runs here, or on the GPU")
@pytest.mark.timeout(600)  # A minute of one core, which others may be using too.
def test_the_sweep_passes_under_the_interpreter() -> None:
    printed = run_interpreted("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", __file__)
    assert f"{len(CASES) + len(NEW_KEYS) + 6} passed" in printed, printed[-1000:]


@pytest.mark.skipif(IS_INTERPRETED, reason="needs no kernel")
@pytest.mark.parametrize("window", [None, 1, 5, 40, 300])
def test_the_twin_reads_no_key_of_a_decode_before_its_window(window: int | None) -> None:
    case = Case([1, 1, 1, 1], [7, 133, 41, 1], group=2, head_dim=32, num_kv_heads=2, window=window)
    world = make_world(case, torch.float32, "cpu")
    for kv_len, index in zip(case.kv_lens, world.kv_index, strict=True):
        unseen = index[: max(0, kv_len - (window or kv_len))]
        world.k_pool[unseen] = world.v_pool[unseen] = float("nan")
    metadata = AttentionMetadata(list(case.query_lens), list(case.kv_lens), world.block_table, case.block_size)
    output = reference.paged_attention(world.q, world.k_pool, world.v_pool, metadata, scale=0.3, window=window)
    assert relative_error(output, naive_attention(case, world, 0.3)) < RELATIVE_ERROR[torch.float32]


@pytest.mark.skipif(IS_INTERPRETED, reason="needs no kernel")
def test_whole_prompts_are_counted_but_not_in_static_buffers() -> None:
    lens = [19, 1, 1, 5], [19, 1, 8, 30]
    table = torch.ones(4, 2, dtype=torch.int64)
    metadata = AttentionMetadata(*lens, table, 16)
    assert (metadata.num_prompts, metadata.max_prompt_len, metadata.num_decodes) == (1, 19, 2)
    assert metadata.on(table.device) is metadata
    static = AttentionBuffers(4, 2, 16, torch.device("cpu")).fill(*lens, table)
    assert (static.num_prompts, static.num_decodes) == (0, 2), "a replay may be of other requests"


@pytest.mark.skipif(IS_INTERPRETED, reason="needs no kernel")
@pytest.mark.parametrize("max_kv_len", [1, 2048, 131072])
@pytest.mark.parametrize("num_decodes", [1, 8, 256])
def test_splits_stay_few_and_none_is_too_long(num_decodes: int, max_kv_len: int) -> None:
    splits, min_split_len = plan_splits(num_decodes, 8, max_kv_len, 132)
    assert 1 <= splits <= 64 and splits <= -(-max_kv_len // min_split_len)
    assert max_kv_len / splits <= 4096


class TestOnGpu:
    """The same on the device, and what only a device has."""

    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_attention_equals_a_loop_over_queries(self, case: Case, dtype: torch.dtype) -> None:
        check_attention(case, dtype, "cuda")

    @pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
    @pytest.mark.parametrize(("num_tokens", "shape"), [(1, (2, 16)), (63, (3, 10)), (133, (9, 120))])
    def test_write_puts_each_token_at_its_index_and_padding_nowhere(
        self, num_tokens: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        check_write(dtype, "cuda", num_tokens, shape)

    @pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
    @pytest.mark.parametrize("case", NEW_KEYS, ids=str)
    def test_what_a_step_adds_to_the_pools_is_written_and_seen(self, case: Case, dtype: torch.dtype) -> None:
        check_new_keys(case, dtype, "cuda")

    def test_padded_rows_of_static_buffers_are_zeros(self) -> None:
        check_padded_buffers("cuda")

    def test_rows_of_any_kind_in_static_buffers(self) -> None:
        check_open_buffers("cuda")

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # PyTorch's, once a process
    def test_building_metadata_does_not_wait_for_the_device(self) -> None:
        case = Case(*MIXED)
        world = make_world(case, torch.bfloat16, "cuda")
        table = world.block_table.cpu()
        buffers = AttentionBuffers(8, 32, case.block_size, torch.device("cuda"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            metadata = AttentionMetadata(list(case.query_lens), list(case.kv_lens), table, case.block_size)
            eager = attend(case, world, metadata, 0.3)
            static = attend(case, world, buffers.fill(list(case.query_lens), list(case.kv_lens), table), 0.3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = naive_attention(case, world, 0.3)
        assert relative_error(eager, expected) < 1e-2 and relative_error(static, expected) < 1e-2

    def test_steps_prepared_while_the_device_is_behind_do_not_mix(self) -> None:
        """The host fills the buffers from its own memory several steps ahead, and forgets each table at once."""
        shape = Case([1] * 3, [40, 1, 133], group=4)
        world = make_world(shape, torch.bfloat16, "cuda")
        buffers = AttentionBuffers(4, 32, shape.block_size, torch.device("cuda"))
        lens = [[40 - step, 1, 133 - 5 * step] for step in range(12)]
        table = world.block_table.cpu()
        outputs = []
        for kv_lens in lens:
            torch.cuda._sleep(3_000_000)
            outputs.append(attend(shape, world, buffers.fill([1] * 3, kv_lens, table.clone()), 0.3))
            eager = AttentionMetadata([1] * 3, kv_lens, table.clone(), shape.block_size)
            outputs.append(attend(shape, world, eager, 0.3))
        for kv_lens, static, eager_output in zip(lens, outputs[::2], outputs[1::2], strict=True):
            index = [rows[:kv_len] for rows, kv_len in zip(world.kv_index, kv_lens, strict=True)]
            expected = naive_attention(replace(shape, kv_lens=kv_lens), replace(world, kv_index=index), 0.3)
            assert relative_error(static, expected) < 1e-2 and relative_error(eager_output, expected) < 1e-2

    def test_plain_pytorch_takes_a_table_on_the_host(self) -> None:
        case = Case(*MIXED, head_dim=40)
        world = make_world(case, torch.float32, "cuda")
        world.k_pool.nan_to_num_()
        world.v_pool.nan_to_num_()
        metadata = AttentionMetadata(
            list(case.query_lens), list(case.kv_lens), world.block_table.cpu(), case.block_size
        )
        output = reference.paged_attention(world.q, world.k_pool, world.v_pool, metadata, scale=0.3)
        assert relative_error(output, naive_attention(case, world, 0.3)) < 1e-4

    @pytest.mark.parametrize("window", [None, 100])
    def test_a_replayed_graph_equals_eager_bit_for_bit(self, window: int | None) -> None:
        shape = Case([], [], group=4, num_kv_heads=8, head_dim=128, window=window)
        steps = [replace(shape, query_lens=[1] * n, kv_lens=lens) for n, lens in
                 [(4, [1, 2, 3, 4]), (4, [517, 1, 64, 2000]), (2, [65, 1024]), (3, [2048, 333, 16])]]  # fmt: skip
        worlds = [make_world(step, torch.bfloat16, "cuda", seed) for seed, step in enumerate(steps)]
        largest = max(world.k_pool.shape[0] for world in worlds)
        still = World(
            torch.zeros(4, 32, 128, dtype=torch.bfloat16, device="cuda"),
            *torch.zeros(2, largest, 8, 128, dtype=torch.bfloat16, device="cuda"),
            torch.zeros(4, 1, device="cuda"), [],
        )  # fmt: skip
        buffers = AttentionBuffers(16, 2048 // 16, 16, torch.device("cuda"))

        def fill(step: Case, world: World) -> AttentionMetadata:
            num_requests = len(step.query_lens)
            still.q[:num_requests], still.k_pool[: len(world.k_pool)] = world.q, world.k_pool
            still.v_pool[: len(world.v_pool)] = world.v_pool
            return buffers.fill(list(step.query_lens), list(step.kv_lens), world.block_table.cpu(), num_rows=4)

        attend(shape, still, fill(steps[0], worlds[0]), 0.1)
        captured = buffers.fill([1], [1], torch.ones(1, 1), num_rows=4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = attend(shape, still, captured, 0.1)
        for step, world in zip(steps, worlds, strict=True):
            metadata = fill(step, world)
            replayed.fill_(float("nan"))
            graph.replay()
            num_requests = len(step.query_lens)
            assert relative_error(replayed[:num_requests], naive_attention(step, world, 0.1)) < 1e-2
            assert torch.equal(replayed, attend(shape, still, metadata, 0.1))
