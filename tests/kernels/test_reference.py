"""The plain-torch kernels against definitions written out token by token."""

from __future__ import annotations

import pytest
import torch

from kernels import AttentionMetadata, LoraMetadata, LoraSegment, paged_attention, reference, write_kv_


def _naive_attention(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    lens: list[int],
    scale: float,
    window: int | None,
    soft_cap: float | None,
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
                logits = visible @ q[token, head].double() * scale
                if soft_cap is not None:
                    logits = soft_cap * torch.tanh(logits / soft_cap)
                weights = torch.softmax(logits, 0)
                heads.append(weights @ value[first : position + 1, head // group].double())
            rows.append(torch.stack(heads))
            token += 1
    return torch.stack(rows)


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize(
    ("query_lens", "kv_lens"),
    [([1], [1]), ([1, 1, 1], [9, 1, 30]), ([7], [7]), ([5, 1, 9, 1], [5, 17, 26, 2]), ([1, 12], [8, 40])],
)
def test_paged_attention_equals_a_loop_over_queries(
    query_lens: list[int], kv_lens: list[int], window: int | None, soft_cap: float | None
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
    output = paged_attention(q, k_pool, v_pool, metadata, scale=0.4, window=window, soft_cap=soft_cap)

    expected = _naive_attention(q, keys, values, query_lens, 0.4, window, soft_cap)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    if soft_cap is not None and window != 1 and max(kv_lens) > 1:
        uncapped = _naive_attention(q, keys, values, query_lens, 0.4, window, None)
        assert (uncapped - expected).norm() > 1e-2 * expected.norm(), "the cap must matter to what is compared"


@pytest.mark.parametrize(
    ("slots", "lens", "num_calls"),
    [
        ([0, 1, 2, 3], [1, 1, 1, 1], 1),
        ([0, 1, 2, 3], [3, 3, 3, 2], 2),
        ([0, 2, 3], [2, 2, 2], 2),
        ([1, 0, 3], [2, 2, 2], 3),
        ([3, 4], [2, 2], 2),  # of different ranks
    ],
)
def test_neighbouring_segments_of_equal_length_and_rank_share_products(
    slots: list[int], lens: list[int], num_calls: int
) -> None:
    generator = torch.Generator().manual_seed(len(slots))
    ends, host_ranks = (5, 12), [[3, 2], [3, 2], [3, 2], [3, 2], [3, 0]]
    lora_a = torch.randn(5, 2, 4, 9, generator=generator, dtype=torch.float64)
    lora_b = torch.randn(5, 12, 4, generator=generator, dtype=torch.float64)
    first = 2  # tokens of the base model
    x = torch.randn(first + sum(lens), 9, generator=generator, dtype=torch.float64)
    base = torch.randn(x.shape[0], 12, generator=generator, dtype=torch.float64)
    segments, start = [], first
    for lora_slot, length in zip(slots, lens, strict=True):
        segments.append(LoraSegment(lora_slot, start, start + length))
        start += length
    expected = base.clone()
    for lora_slot, token_start, token_end in segments:
        for index, (column, end) in enumerate(((0, 5), (5, 12))):
            rank = host_ranks[lora_slot][index]
            for token in range(token_start, token_end):
                shrunk = lora_a[lora_slot, index, :rank] @ x[token]
                expected[token, column:end] += lora_b[lora_slot, column:end, :rank] @ shrunk
    metadata = LoraMetadata(64, 5, torch.device("cpu"), max_columns=8, max_in=9)
    metadata.update(segments, x.shape[0])
    output = base.clone()
    ranks = torch.tensor(host_ranks, dtype=torch.int32)
    reference.lora_add_group_(output, x, lora_a, lora_b, ranks, host_ranks, ends, metadata)
    torch.testing.assert_close(output, expected)
    assert torch.equal(output[:first], base[:first])
    assert len(list(reference._runs(metadata.segments, host_ranks))) == num_calls
