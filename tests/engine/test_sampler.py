"""The sampler keeps the tokens and probabilities that transformers' warpers keep; rows do not disturb each other."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.errors import InvalidRequest
from engine.request import SamplingParams, TokenLogprob
from engine.sampler import INVALID_TOKEN, Sampler, SamplerRow, check_logit_bias, likeliest, make_generator

VOCAB = 133
RECIPES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.6, min_p=0.05),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.0, top_k=VOCAB + 5, top_p=0.95),
    SamplingParams(temperature=1.0, repetition_penalty=1.7, top_p=0.8),
    SamplingParams(temperature=0.9, repetition_penalty=0.6),
]


def random_logits(num_rows: int, *, seed: int = 0, scale: float = 2.0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def oracle_probabilities(logits: Tensor, params: SamplingParams, seen: list[int]) -> Tensor:
    """[V] float32 by transformers' own chain, in the order in which `generate` builds it."""
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        chain.append(MinPLogitsWarper(params.min_p))
    scores: Tensor = chain(torch.tensor([seen]), logits.unsqueeze(0).clone())
    return scores.softmax(dim=-1).squeeze(0)


class Grid(Sampler):
    """A sampler whose uniform numbers are given, so that the whole distribution can be read off."""

    def __init__(self, uniforms: list[float]) -> None:
        super().__init__(0, "cpu")
        self._given = uniforms

    def _uniforms(self, rows: object, drawn: object) -> list[float]:
        return self._given


def distribution(logits: Tensor, row: SamplerRow, *, num_points: int = 20_000) -> Tensor:
    """[V] float64: the share of evenly spread uniform numbers that choose each token; exact to 1 / num_points."""
    uniforms = [(point + 0.5) / num_points for point in range(num_points)]
    ids, _ = Grid(uniforms).sample(logits.expand(num_points, -1), [row] * num_points)
    return torch.bincount(torch.tensor(ids), minlength=logits.shape[-1]).double() / num_points


@pytest.mark.parametrize("params", RECIPES, ids=lambda params: repr(params)[15:75])
def test_probabilities_equal_those_of_transformers(params: SamplingParams) -> None:
    logits = random_logits(1, seed=3)
    seen = [1, 5, 5, 77, 132]
    row = SamplerRow(params, prompt_token_ids=seen[:2], output_token_ids=seen[2:])
    expected = oracle_probabilities(logits[0], params, seen)
    actual = distribution(logits, row)
    assert (actual - expected).abs().max() <= 2 / 20_000
    assert set(actual.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())


def test_the_recipes_differ_from_plain_sampling() -> None:
    logits = random_logits(1, seed=3)
    plain = oracle_probabilities(logits[0], RECIPES[0], [1])
    for params in RECIPES[1:7]:
        assert (oracle_probabilities(logits[0], params, [1]) - plain).abs().max() > 0.01


@pytest.mark.parametrize("params", RECIPES, ids=lambda params: repr(params)[15:75])
@pytest.mark.parametrize("seed", range(5))
def test_the_kept_set_equals_that_of_transformers(params: SamplingParams, seed: int) -> None:
    logits = random_logits(1, seed=100 + seed, scale=1.0 + seed)
    expected = oracle_probabilities(logits[0], params, [2, 9])
    expected = torch.where(expected > 1e-3, expected, 0.0)  # what 5,000 points must meet
    row = SamplerRow(params, prompt_token_ids=[2, 9])
    chosen = distribution(logits, row, num_points=5_000)
    assert set(expected.nonzero().flatten().tolist()) <= set(chosen.nonzero().flatten().tolist())
    allowed = oracle_probabilities(logits[0], params, [2, 9])
    assert allowed[chosen > 0].min() > 0


def test_top_p_keeps_just_enough_of_equal_tokens() -> None:
    chosen = distribution(torch.zeros(1, 100), SamplerRow(SamplingParams(top_p=0.5)), num_points=1_000)
    assert int((chosen > 0).sum()) == 50


def test_top_k_keeps_all_tokens_that_equal_the_last() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 0.0]])
    chosen = distribution(logits, SamplerRow(SamplingParams(top_k=2)), num_points=1_000)
    assert (chosen > 0).tolist() == [True, True, True, True, False]


def test_frequencies_of_many_draws_fit_the_distribution() -> None:
    params = SamplingParams(temperature=0.9, top_k=20)
    logits = random_logits(1, seed=8)
    num_draws = 20_000
    ids, _ = Sampler(1, "cpu").sample(logits.expand(num_draws, -1), [SamplerRow(params)] * num_draws)
    expected = oracle_probabilities(logits[0], params, []) * num_draws
    counts = torch.bincount(torch.tensor(ids), minlength=VOCAB).double()
    kept = expected > 5
    chi_square = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert chi_square < 45  # 99.9 % quantile of 19 degrees of freedom is 43.8; the seed is fixed
    assert counts[expected == 0].sum() == 0


def test_greedy_is_the_argmax() -> None:
    logits = random_logits(63)
    ids, logprobs = Sampler(0, "cpu").sample(logits, [SamplerRow(SamplingParams(temperature=0.0))] * 63)
    assert ids == logits.argmax(-1).tolist()
    assert logprobs == [None] * 63


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(len(RECIPES))
    before = logits.clone()
    bias = {3: 5.0}
    rows = [SamplerRow(replace(params, logit_bias=bias, presence_penalty=1.0), None, [1], [2]) for params in RECIPES]
    Sampler(0, "cpu").sample(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", RECIPES, ids=lambda params: repr(params)[15:75])
def test_a_seeded_row_draws_the_same_alone_and_in_any_batch(params: SamplingParams) -> None:
    logits = random_logits(1, seed=9, scale=0.5)

    def draws(num_others: int, position: int) -> list[int]:
        row = SamplerRow(params, make_generator(1234), prompt_token_ids=[4])
        sampler = Sampler(num_others, "cpu")
        others = [SamplerRow(RECIPES[index % len(RECIPES)], None, [1]) for index in range(num_others)]
        rows = [*others[:position], row, *others[position:]]
        batch = torch.cat([random_logits(num_others, seed=2), logits])
        order = [*range(position), num_others, *range(position, num_others)]
        return [sampler.sample(batch[order], rows)[0][position] for _ in range(30)]

    alone = draws(0, 0)
    assert draws(13, 0) == alone
    assert draws(13, 7) == alone
    if params.top_k != 1 and params.top_p > 0.5:
        assert len(set(alone)) > 1  # or the property would hold for a constant


def test_equal_engine_seeds_give_equal_draws_and_others_do_not() -> None:
    logits = random_logits(64, scale=0.5)
    rows = [SamplerRow(SamplingParams())] * 64
    first, again, other = (Sampler(seed, "cpu").sample(logits, rows)[0] for seed in (5, 5, 6))
    assert first == again != other


def test_a_row_with_nan_or_nothing_finite_is_marked_and_the_others_are_not() -> None:
    logits = random_logits(6)
    logits[1, 5] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    logits[4, :130] = -math.inf
    for params in (SamplingParams(temperature=0.0, logprobs=1), *RECIPES):
        ids, logprobs = Sampler(0, "cpu").sample(logits, [SamplerRow(params, None, [1], [2])] * 6)
        assert [token_id == INVALID_TOKEN for token_id in ids] == [False, True, True, True, False, False], params
        assert ids[4] >= 130
        assert all(0 <= token_id < VOCAB for token_id in (ids[0], ids[4], ids[5]))
        assert logprobs[1] is None


def test_logit_bias_is_added_before_the_choice() -> None:
    logits = random_logits(3)
    best = logits.argmax(-1).tolist()
    rows = [
        SamplerRow(SamplingParams(temperature=0.0, logit_bias={best[0]: -100.0})),
        SamplerRow(SamplingParams(temperature=0.0, logit_bias={17: 100.0})),
        SamplerRow(SamplingParams(temperature=0.0)),
    ]
    ids, _ = Sampler(0, "cpu").sample(logits, rows)
    assert ids == [int(logits[0].topk(2).indices[1]), 17, best[2]]


def test_presence_and_frequency_penalties_follow_the_formula_of_openai() -> None:
    logits = random_logits(1, seed=4, scale=0.5)
    output = logits[0].topk(3).indices.tolist() * 2 + [int(logits[0].argmax())]
    params = SamplingParams(presence_penalty=0.4, frequency_penalty=0.3)
    expected = logits[0].clone()
    for token_id, count in Counter(output).items():
        expected[token_id] -= 0.3 * count + 0.4
    # The prompt does not count.
    actual = distribution(logits, SamplerRow(params, None, list(range(VOCAB)), output))
    assert (actual - expected.softmax(-1)).abs().max() <= 2 / 20_000
    assert (actual - logits[0].softmax(-1)).abs().max() > 0.01


def test_penalties_touch_only_the_rows_that_ask_for_them() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 4)
    heavy = SamplingParams(temperature=0.0, presence_penalty=1.5)
    plain = SamplingParams(temperature=0.0)
    rows = [
        SamplerRow(plain, None, [], [0]),
        SamplerRow(heavy, None, [], [0]),
        SamplerRow(replace(plain, repetition_penalty=3.0), None, [0], []),
        SamplerRow(heavy, None, [0], []),
    ]
    assert Sampler(0, "cpu").sample(logits, rows)[0] == [0, 1, 1, 0]


def test_penalties_see_tokens_that_are_appended_later() -> None:
    logits = random_logits(1)
    first, second = logits[0].topk(2).indices.tolist()
    output: list[int] = []
    row = SamplerRow(SamplingParams(temperature=0.0, repetition_penalty=100.0), None, [], output)
    sampler = Sampler(0, "cpu")
    assert sampler.sample(logits, [row])[0] == [first]
    output.append(first)
    assert sampler.sample(logits, [row])[0] == [second]


def test_a_prompt_with_ids_past_the_head_is_no_fault() -> None:
    row = SamplerRow(SamplingParams(temperature=0.0, repetition_penalty=2.0), None, [VOCAB + 3, 1])
    logits = random_logits(1)
    assert Sampler(0, "cpu").sample(logits, [row])[0] == logits.argmax(-1).tolist()


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(4)
    reference = logits.double().log_softmax(-1)
    rows = [
        SamplerRow(SamplingParams(temperature=0.3, logprobs=5, logit_bias={9: 100.0})),
        SamplerRow(SamplingParams(temperature=0.0)),
        SamplerRow(SamplingParams(temperature=0.0, logprobs=0)),
        SamplerRow(SamplingParams(temperature=1.0, logprobs=2, top_k=3)),
    ]
    ids, logprobs = Sampler(0, "cpu").sample(logits, rows)
    assert ids[0] == 9
    assert logprobs[1] is None
    for index, num_top in ((0, 5), (2, 0), (3, 2)):
        entry = logprobs[index]
        assert isinstance(entry, TokenLogprob)
        assert entry.token_id == ids[index]
        assert entry.logprob == pytest.approx(float(reference[index, ids[index]]), abs=1e-5)
        values, top_ids = reference[index].topk(num_top)
        assert [token_id for token_id, _ in entry.top] == top_ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-60, 1e-6, 100.0])
def test_extreme_temperatures_give_a_token(temperature: float) -> None:
    logits = random_logits(1, scale=50.0)
    ids, _ = Sampler(0, "cpu").sample(logits, [SamplerRow(SamplingParams(temperature=temperature, top_p=0.9))])
    assert 0 <= ids[0] < VOCAB
    if temperature < 1.0:
        assert ids == logits.argmax(-1).tolist()


def test_the_largest_uniform_number_never_chooses_an_impossible_token() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, :3] = torch.tensor([0.1, 0.2, 0.3])
    for uniform, expected in ((1.0 - 2**-53, 2), (0.0, 0)):
        assert Grid([uniform]).sample(logits, [SamplerRow(SamplingParams())])[0] == [expected]


@pytest.mark.parametrize("vocab", [7, 1023, 1024, 1535, 1537, 5000])
def test_the_likeliest_token_is_the_first_of_the_highest_wherever_it_stands(vocab: int) -> None:
    draw = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-50, 50, (400, vocab), generator=draw).float()  # mostly ties
    places = torch.randint(vocab, (400, 2), generator=draw)
    logits[:100].scatter_(1, places[:100, :1], 99.0)
    logits[100:200].scatter_(1, places[100:200], math.nan)
    logits[200:300].scatter_(1, places[200:300], math.inf)
    logits[300:310] = -math.inf
    logits[310] = math.nan
    logits[311, -1] = logits[312, -2] = logits[313, 0] = 99.0
    highest, token_ids = likeliest(logits)
    expected, first = logits.max(dim=-1)
    assert torch.equal(highest.nan_to_num(7.5), expected.nan_to_num(7.5)) and torch.equal(token_ids, first)


def test_an_empty_batch_gives_nothing() -> None:
    assert Sampler(0, "cpu").sample(torch.empty(0, VOCAB), []) == ([], [])


@pytest.mark.parametrize("bias", [{VOCAB: 1.0}, {-1: 1.0}, {1: 101.0}, {1: math.nan}])
def test_a_logit_bias_that_cannot_be_applied_is_refused(bias: dict[int, float]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_logit_bias(SamplingParams(logit_bias=bias), VOCAB)
    assert caught.value.param == "logit_bias"
    check_logit_bias(SamplingParams(logit_bias={VOCAB - 1: 100.0}), VOCAB)
    check_logit_bias(SamplingParams(), VOCAB)


@pytest.mark.gpu
def test_a_gpu_chooses_as_the_cpu_does() -> None:
    logits = random_logits(len(RECIPES), vocab=32_003)
    rows = [SamplerRow(params, make_generator(index), [5], [6]) for index, params in enumerate(RECIPES)]
    expected, _ = Sampler(0, "cpu").sample(logits, rows)
    rows = [SamplerRow(params, make_generator(index), [5], [6]) for index, params in enumerate(RECIPES)]
    assert Sampler(0, "cuda").sample(logits.cuda(), rows)[0] == expected
