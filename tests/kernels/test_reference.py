"""The plain-torch kernels against definitions written out token by token."""

from __future__ import annotations

import pytest
import torch

from kernels import AttentionMetadata, LoraSegment, lora_add_, paged_attention, write_kv_


@pytest.mark.parametrize("num_tokens", [1, 63, 133])
def test_lora_add_equals_the_sum_over_tokens(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ranks = [4, 0, 8, 64, 1]
    lora_a = torch.randn(5, 64, 40, generator=generator)
    lora_b = torch.randn(5, 24, 64, generator=generator)
    x = torch.randn(num_tokens, 40, generator=generator)
    base = torch.randn(num_tokens, 24, generator=generator)
    cuts = sorted({0, num_tokens // 5, num_tokens // 2, (3 * num_tokens) // 4, num_tokens})
    slots = [2, 3, 1, 0]
    segments = [LoraSegment(slot, start, end) for slot, start, end in zip(slots, cuts, cuts[1:], strict=False)][1:]

    output = base.clone()
    lora_add_(output, x, lora_a, lora_b, ranks, segments)

    expected = base.clone().double()
    for slot, start, end in segments:
        for token in range(start, end or num_tokens):
            shrunk = lora_a[slot, : ranks[slot]].double() @ x[token].double()
            expected[token] += lora_b[slot, :, : ranks[slot]].double() @ shrunk
    torch.testing.assert_close(output.double(), expected, atol=2e-4, rtol=1e-5)
    covered = {token for _, start, end in segments for token in range(start, end or num_tokens)}
    untouched = [token for token in range(num_tokens) if token not in covered]
    assert torch.equal(output[untouched], base[untouched])
    if num_tokens > 5:
        assert not torch.equal(output, base), "the test's adapters must do something"


def test_rows_above_an_adapters_rank_are_never_read() -> None:
    lora_a = torch.full((1, 8, 6), float("nan"))
    lora_b = torch.full((1, 5, 8), float("nan"))
    lora_a[0, :3], lora_b[0, :, :3] = 1.0, 2.0
    output = torch.zeros(4, 5)
    lora_add_(output, torch.ones(4, 6), lora_a, lora_b, [3], [LoraSegment(0, 1, 3)])
    assert torch.equal(output[1:3], torch.full((2, 5), 36.0))
    assert torch.equal(output[[0, 3]], torch.zeros(2, 5))


def _naive_attention(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    lens: list[int],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    rows, token = [], 0
    for key, value, query_len in zip(keys, values, lens, strict=True):
        kv_len = key.shape[0]
        for offset in range(query_len):
            position = kv_len - query_len + offset
            first = 0 if window is None else max(0, position - window + 1)
            group = q.shape[1] // key.shape[1]
            heads = []
            for head in range(q.shape[1]):
                visible = key[first : position + 1, head // group].double()
                weights = torch.softmax(visible @ q[token, head].double() * scale, 0)
                heads.append(weights @ value[first : position + 1, head // group].double())
            rows.append(torch.stack(heads))
            token += 1
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize(
    ("query_lens", "kv_lens"),
    [([1], [1]), ([1, 1, 1], [9, 1, 30]), ([7], [7]), ([5, 1, 9, 1], [5, 17, 26, 2]), ([1, 12], [8, 40])],
)
def test_paged_attention_equals_a_loop_over_queries(
    query_lens: list[int], kv_lens: list[int], window: int | None
) -> None:
    generator = torch.Generator().manual_seed(len(query_lens))
    block_size, num_heads, num_kv_heads, head_dim = 4, 6, 2, 10
    num_blocks = 1 + sum(-(-kv_len // block_size) for kv_len in kv_lens)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    k_pool = torch.zeros(num_blocks * block_size, num_kv_heads, head_dim)
    v_pool = torch.zeros_like(k_pool)
    keys, values, tables = [], [], []
    for kv_len in kv_lens:
        blocks = [order.pop() for _ in range(-(-kv_len // block_size))]
        key = torch.randn(kv_len, num_kv_heads, head_dim, generator=generator)
        value = torch.randn(kv_len, num_kv_heads, head_dim, generator=generator)
        index = torch.tensor(
            [blocks[position // block_size] * block_size + position % block_size for position in range(kv_len)]
        )
        write_kv_(key, value, k_pool, v_pool, index)
        keys.append(key)
        values.append(value)
        tables.append(blocks)
    width = max(len(blocks) for blocks in tables)
    block_table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in tables])
    q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator)

    metadata = AttentionMetadata(query_lens, kv_lens, block_table, block_size)
    output = paged_attention(q, k_pool, v_pool, metadata, scale=0.4, window=window)

    expected = _naive_attention(q, keys, values, query_lens, 0.4, window)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
