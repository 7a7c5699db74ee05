"""Grouped LoRA: the plain version and the Triton kernels against float64, under Triton's interpreter and on a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import kernels
from kernels import LoraMetadata, LoraSegment, reference, tuning
from tests.kernels.interpreted import call_interpreted

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

Function = Callable[..., None]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Largest ‖output - oracle‖ / ‖oracle - base‖; the half formats round x @ A.T and the output."""


@dataclass
class Group:
    """One call's arguments; everything above a slice's own rank, and all rows in no segment, is NaN."""

    base: torch.Tensor
    x: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    ranks: torch.Tensor
    slice_ends: tuple[int, ...]
    metadata: LoraMetadata

    def run(self, function: Function) -> torch.Tensor:
        """The output of `function`, with NaN wherever a kernel has no business to read."""
        output = self.base.clone()
        if self.metadata.has_tiles:
            self.metadata.scratch.fill_(torch.nan)
        function(output, self.x, self.lora_a, self.lora_b, self.ranks, self.ranks.tolist(), self.slice_ends,
                 self.metadata)  # fmt: skip
        return output

    def oracle(self) -> torch.Tensor:
        """The definition in float64."""
        expected = self.base.double()
        for lora_slot, token_start, token_end in self.metadata.segments:
            slice_start = 0
            for index, slice_end in enumerate(self.slice_ends):
                rank = int(self.ranks[lora_slot, index])
                if rank:
                    a = self.lora_a[lora_slot, index, :rank].double()
                    b = self.lora_b[lora_slot, slice_start:slice_end, :rank].double()
                    expected[token_start:token_end, slice_start:slice_end] += (
                        self.x[token_start:token_end].double() @ a.T @ b.T
                    )
                slice_start = slice_end
        return expected


def make_group(
    num_tokens: int,
    segments: Sequence[LoraSegment],
    ranks: Sequence[Sequence[int]],
    max_rank: int,
    in_features: int,
    slice_ends: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: str,
    has_tiles: bool | None = None,
    max_tokens: int | None = None,
) -> Group:
    """Random weights with NaN above the ranks and random tokens."""
    generator = torch.Generator().manual_seed(num_tokens * 1000 + in_features)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    lora_a = torch.full((len(ranks), len(slice_ends), max_rank, in_features), torch.nan, dtype=dtype)
    lora_b = torch.full((len(ranks), slice_ends[-1], max_rank), torch.nan, dtype=dtype)
    for row, row_ranks in enumerate(ranks):
        for index, (rank, start, end) in enumerate(zip(row_ranks, (0, *slice_ends), slice_ends, strict=False)):
            lora_a[row, index, :rank] = randn(rank, in_features) * in_features**-0.5
            lora_b[row, start:end, :rank] = randn(end - start, rank)
    metadata = LoraMetadata(
        max_tokens or num_tokens,
        max(1, len(segments)),
        torch.device(device),
        max_columns=len(slice_ends) * max_rank,
        max_in=in_features,
        has_tiles=has_tiles,
    )
    metadata.update(segments, num_tokens)
    return Group(
        base=randn(num_tokens, slice_ends[-1]).to(device),
        x=randn(num_tokens, in_features).to(device),
        lora_a=lora_a.to(device),
        lora_b=lora_b.to(device),
        ranks=torch.tensor(ranks, dtype=torch.int32, device=device),
        slice_ends=slice_ends,
        metadata=metadata,
    )


def sweep(device: str, dtype: torch.dtype, has_tiles: bool | None = None) -> list[tuple[str, Group]]:
    """Odd shapes: mixed ranks, slices that some adapters do not touch, unused rows, base rows before, between and after."""
    ranks = [[4, 0, 4], [64, 64, 64], [0, 0, 0], [8, 3, 0], [1, 8, 64]]
    groups = {}
    for num_tokens, in_features, slice_ends in [
        (1, 96, (40, 56, 72)),
        (63, 600, (70, 150, 153)),
        (133, 600, (130, 138, 140)),
        (600, 100, (40, 300, 310)),
        (2100, 48, (20, 40, 56)),
    ]:
        cut = [num_tokens * part // 9 for part in range(10)]
        segments = [LoraSegment(3, cut[1], cut[4]), LoraSegment(1, cut[4], cut[6]), LoraSegment(4, cut[7], cut[8])]
        segments = [*segments, LoraSegment(0, cut[8], num_tokens)]
        groups[f"{num_tokens} tokens"] = make_group(
            num_tokens, [segment for segment in segments if segment.token_start < segment[2]], ranks, 64, in_features,
            slice_ends, dtype=dtype, device=device, has_tiles=has_tiles,
        )  # fmt: skip
    one_each = [LoraSegment(row, row, row + 1) for row in range(5)]
    options = {"dtype": dtype, "device": device, "has_tiles": has_tiles}
    groups["a token each"] = make_group(6, one_each, [[16], [5], [0], [16], [1]], 16, 80, (264,), **options)
    groups["rank 100"] = make_group(33, [LoraSegment(1, 2, None)], [[0, 0], [100, 65]], 100, 64, (48, 80), **options)
    groups["rank 3"] = make_group(5, [LoraSegment(0, 0, 5)], [[3]], 3, 20, (12,), **options)
    groups["no segment"] = make_group(7, [], [[4]], 4, 16, (16,), **options)
    return list(groups.items())


def check(name: str, group: Group, function: Function, *, repeats: bool = True) -> None:
    """Compare with the oracle, after proof that the comparison can fail; and with another run if `repeats`."""
    expected, base, output = group.oracle(), group.base.double(), group.run(function)
    is_touched = (expected != base).any(1)
    assert torch.equal(output[~is_touched], group.base[~is_touched]), f"{name}: base rows changed"
    if group.metadata.segments:
        size = float((expected - base).norm())
        assert size > 0.1, f"{name}: the adapters must do something"
        error = float((output.double() - expected).norm()) / size
        print(f"{name}, {group.x.dtype}: relative error {error:.2e}")  # noqa: T201 - read with -s
        assert error < TOLERANCE[group.x.dtype], f"{name}, {group.x.dtype}: relative error {error}"
    assert not repeats or torch.equal(group.run(function), output), f"{name}: two runs differ"


@pytest.mark.parametrize(
    ("name", "group"), sweep("cpu", torch.float32), ids=[name for name, _ in sweep("cpu", torch.float32)]
)
def test_the_plain_group_equals_float64(name: str, group: Group) -> None:
    check(name, group, kernels.lora_add_group_)


def in_halves(shrink: Callable[..., torch.Tensor], expand: Function) -> Function:
    """The function that does one half and then the other, with a check of what lies between them."""

    def function(output, x, lora_a, lora_b, ranks, host_ranks, slice_ends, metadata):  # type: ignore[no-untyped-def]
        shrunk = shrink(x, lora_a, ranks, host_ranks, metadata)
        expected = torch.zeros_like(shrunk, dtype=torch.bool)
        for lora_slot, token_start, token_end in metadata.segments:
            for index, rank in enumerate(host_ranks[lora_slot]):
                expected[token_start:token_end, index, :rank] = True
        assert torch.equal(shrunk != 0, expected), "zeros elsewhere, which other ranks may add to"
        expand(output, shrunk, lora_b, ranks, host_ranks, slice_ends, metadata)

    return function


def apart(output, x, lora_a, lora_b, ranks, host_ranks, slice_ends, metadata):  # type: ignore[no-untyped-def]
    """The function that takes product and LoRA apart and adds them, with a check of slices that no adapter touches."""
    arguments = x, lora_a, lora_b, ranks, host_ranks, slice_ends, metadata
    product, delta = kernels.product_and_delta(output.clone, *arguments)
    assert delta.dtype == torch.float32 and torch.equal(product, output)
    for lora_slot, token_start, token_end in metadata.segments:
        output[token_start:token_end] = product[token_start:token_end] + delta[token_start:token_end]
        start = 0
        for rank, end in zip(host_ranks[lora_slot], slice_ends, strict=True):
            assert rank > 0 or not delta[token_start:token_end, start:end].any()
            start = end


def test_product_and_lora_apart_make_the_whole() -> None:
    for name, group in sweep("cpu", torch.float32):
        check(name, group, apart)


def test_the_two_halves_make_the_whole() -> None:
    for name, group in sweep("cpu", torch.float32):
        check(name, group, in_halves(kernels.lora_shrink, kernels.lora_expand_))


def test_a_group_equals_its_modules_one_by_one() -> None:
    name, group = sweep("cpu", torch.float32)[1]
    together = group.run(kernels.lora_add_group_)
    start, parts = 0, []
    for index, end in enumerate(group.slice_ends):
        part = group.base[:, start:end].clone()
        own = slice(index, index + 1)
        ranks = group.ranks[:, own]
        reference.lora_add_group_(
            part,
            group.x,
            group.lora_a[:, own],
            group.lora_b[:, start:end],
            ranks,
            ranks.tolist(),
            (end - start,),
            group.metadata,
        )
        parts.append(part)
        start = end
    assert name == "63 tokens" and torch.equal(together, torch.cat(parts, 1))


def test_metadata_refuses_more_than_it_was_made_for() -> None:
    metadata = LoraMetadata(8, 1, torch.device("cpu"), max_columns=4, max_in=4)
    with pytest.raises(ValueError, match="at most 8 tokens"):
        metadata.update([], 9)
    with pytest.raises(ValueError, match="in 1 segments"):
        metadata.update([LoraSegment(0, 0, 1), LoraSegment(1, 1, 2)], 8)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 65, 300, 513, 5000])
def test_tiles_cover_each_token_of_a_segment_once_within_the_capacity(num_tokens: int) -> None:
    cuts = sorted({0, 1, num_tokens // 3, num_tokens // 3 + 1, num_tokens - 1, num_tokens})
    segments = [LoraSegment(row, *pair) for row, pair in enumerate(itertools.pairwise(cuts))]
    metadata = LoraMetadata(num_tokens, len(segments), torch.device("cpu"), max_columns=1, max_in=1, has_tiles=True)
    metadata.update(segments, num_tokens)
    rows = metadata.tiles[1 : 1 + int(metadata.tiles[0, 0])].tolist()
    assert len(rows) <= tuning.num_tiles_of(num_tokens, len(segments))
    owners = [(token, slot) for slot, start, end, _ in rows for token in range(start, end)]
    assert owners == [(token, slot) for slot, start, end in segments for token in range(start, end)]


def check_interpreted() -> None:
    """The sweep on the CPU by Triton's interpreter; for a process started with TRITON_INTERPRET=1."""
    from kernels import lora

    # Both rows of tiles; the interpreter has no products of bfloat16, and runs a kernel's programs always in one order.
    for family, dtype in (("any", torch.float32), ("sm90", torch.float16)):
        for name, group in sweep("cpu", dtype, has_tiles=True):
            group.metadata.family = family
            check(name, group, lora.lora_add_group_, repeats=False)
            check(name, group, apart, repeats=False)
            if group.base.shape[0] < 100:
                check(name, group, in_halves(lora.lora_shrink, lora.lora_expand_), repeats=False)


@needs_triton
@pytest.mark.timeout(600)  # A minute of one core, which others may be using too.
def test_the_interpreted_kernels_equal_float64() -> None:
    call_interpreted("tests.kernels.test_lora", "check_interpreted")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_kernels_on_a_gpu_equal_float64_and_repeat_bit_for_bit(dtype: torch.dtype) -> None:
    assert kernels.lora_add_group_ is not reference.lora_add_group_
    for name, group in sweep("cuda", dtype):
        check(name, group, kernels.lora_add_group_)
        check(name, group, apart)
        check(name, group, in_halves(kernels.lora_shrink, kernels.lora_expand_))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [5, 133])
def test_the_kernels_on_a_gpu_serve_a_head_as_wide_as_a_vocabulary(num_tokens: int) -> None:
    segments = [LoraSegment(1, 0, 2), LoraSegment(0, 3, num_tokens)]
    group = make_group(
        num_tokens, segments, [[64], [8]], 64, 512, (128256,), dtype=torch.bfloat16, device="cuda"
    )  # fmt: skip
    check("lm_head", group, kernels.lora_add_group_)


def test_a_product_with_lora_is_the_product_and_then_lora() -> None:
    group = make_group(33, [LoraSegment(0, 0, 10)], [[4, 2]], 8, 64, (24, 40), dtype=torch.float32, device="cpu")
    arguments = (
        group.x,
        group.lora_a,
        group.lora_b,
        group.ranks,
        group.ranks.tolist(),
        group.slice_ends,
        group.metadata,
    )
    assert torch.equal(kernels.lora_product(group.base.clone, *arguments), group.run(kernels.lora_add_group_))
    assert not torch.equal(group.run(kernels.lora_add_group_), group.base)


def summed(product: Callable[[], torch.Tensor], *arguments: Any) -> torch.Tensor:
    """`kernels.product_and_delta`, added up by PyTorch."""
    output, delta = kernels.product_and_delta(product, *arguments)
    metadata: LoraMetadata = arguments[-1]
    is_adapted = metadata.is_adapted[: len(output), None] > 0
    return torch.where(is_adapted, output + delta, output).to(output.dtype)


PLACES = {"after": kernels.lora_product, "beside": kernels.lora_product, "apart": summed}
"""Where LoRA is computed: after the product, its first half beside it, or all of it."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "place"),
    [(33, "after"), (33, "beside"), (33, "apart"), (64, "apart"), (133, "after"), (133, "beside")],
)
def test_a_captured_graph_follows_the_metadata(num_tokens: int, place: str) -> None:
    ranks = [[16, 4], [0, 8], [64, 64], [16, 0]]
    first = [LoraSegment(0, 0, 10), LoraSegment(2, 10, 30)]
    second = [LoraSegment(3, 0, 3), LoraSegment(1, 5, 6), LoraSegment(2, 6, num_tokens)]
    group = make_group(num_tokens, first, ranks, 64, 2048, (512, 768), dtype=torch.bfloat16, device="cuda")
    group.metadata = LoraMetadata(num_tokens, 4, torch.device("cuda"), max_columns=128, max_in=2048)
    group.metadata.update(first, num_tokens)
    group.run(kernels.lora_add_group_)
    group.metadata.is_recording = place != "after"
    graph = torch.cuda.CUDAGraph()
    arguments = (
        group.x,
        group.lora_a,
        group.lora_b,
        group.ranks,
        group.ranks.tolist(),
        group.slice_ends,
        group.metadata,
    )
    compute = functools.partial(PLACES[place], group.base.clone, *arguments)
    tried = compute()  # Compiles what is recorded next.
    with torch.cuda.graph(graph):
        output = compute()
    replayed = [tried]
    for segments in (first, second, [], first):
        group.metadata.update(segments, num_tokens)
        graph.replay()
        replayed.append(output.clone())
        assert torch.equal(replayed[-1], compute())
        after = group.run(kernels.lora_add_group_)
        # The sum is the same but for the order in which a tensor core adds up.
        assert (
            torch.allclose(replayed[-1], after, rtol=2**-7, atol=1e-3)
            if place == "apart"
            else torch.equal(replayed[-1], after)
        )
    assert torch.equal(replayed[0], replayed[1]) and torch.equal(replayed[0], replayed[4])
    assert torch.equal(replayed[3], group.base) and not torch.equal(replayed[0], replayed[2])


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["beside", "apart"])
def test_lora_and_a_slow_product_wait_for_each_other(place: str) -> None:
    """Many replays, the product's end being as late as it can: an output read too early would show."""
    segments = [LoraSegment(row, 2 * row, 2 * row + 2) for row in range(8)]
    for out_features in ((512, 768), (6000, 12000)):  # block by block, and along many blocks
        group = make_group(16, segments, [[16, 16]] * 8, 16, 4096, out_features, dtype=torch.bfloat16, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        weight = torch.randn(out_features[-1], 4096, generator=generator, device="cuda", dtype=torch.bfloat16) / 64
        arguments = group.x, group.lora_a, group.lora_b, group.ranks, (), group.slice_ends, group.metadata
        product = functools.partial(torch.nn.functional.linear, group.x, weight)
        after = product()
        kernels.lora_add_group_(after, *arguments)
        group.metadata.is_recording = True
        compute = functools.partial(PLACES[place], product, *arguments)
        expected = compute()
        torch.cuda.synchronize()
        assert torch.allclose(expected, after, rtol=2**-7, atol=1e-3) and not torch.equal(expected, product())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [compute() for _ in range(100)]
        for _ in range(20):
            for output in outputs:
                output.fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.gpu
def test_launches_that_overlap_equal_those_that_do_not() -> None:
    """Many calls back to back, each reading what the one before wrote: a missing wait would show."""
    from kernels.lora import lora_add_group_with_tiles_

    segments = [LoraSegment(row, row, row + 1) for row in range(16)]
    group = make_group(16, segments, [[16, 16]] * 16, 16, 4096, (4096, 8192), dtype=torch.bfloat16, device="cuda")
    shrink = tuning.shrink_tile(group.metadata.family, "decode", 16, 4096)
    expand = tuning.expand_tile(group.metadata.family, "decode", 16, 8192)
    outputs = []
    for is_overlapped in (False, True, True):
        first, second = group.x.clone(), group.base.clone()
        group.metadata.scratch.fill_(torch.nan)
        for _ in range(50):
            for output, x in ((second, first), (first.repeat(1, 2), second[:, :4096])):
                lora_add_group_with_tiles_(output, x, group.lora_a, group.lora_b, group.ranks, group.slice_ends,
                                           group.metadata, shrink, expand, is_overlapped=is_overlapped)  # fmt: skip
            first.copy_(second[:, :4096]).div_(second[:, :4096].abs().max())
            second.copy_(group.base)
        outputs.append(first)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("has_tiles", [False, True])
def test_the_metadata_says_which_tokens_have_an_adapter(has_tiles: bool) -> None:
    metadata = LoraMetadata(100, 3, torch.device("cpu"), max_columns=1, max_in=1, has_tiles=has_tiles)
    metadata.is_recording = True
    metadata.update([LoraSegment(2, 1, 3), LoraSegment(0, 62, None)], 64)
    assert metadata.is_delta_apart and metadata.is_adapted.nonzero().flatten().tolist() == [1, 2, 62, 63]
    metadata.update([LoraSegment(0, 5, 6)], 8)
    assert metadata.is_delta_apart and metadata.is_adapted.nonzero().flatten().tolist() == [5]
    for segments, num_tokens in (([], 8), ([LoraSegment(0, 5, 6)], 65)):
        metadata.update(segments, num_tokens)
        assert not metadata.is_delta_apart
    metadata.is_recording = False
    metadata.update([LoraSegment(0, 5, 6)], 8)
    assert not metadata.is_delta_apart
