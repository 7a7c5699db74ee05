"""Patterns from configs match as PEFT matches them, and cannot hang the server."""

from __future__ import annotations

import itertools
import time

import pytest
from peft.utils.other import get_pattern_key

from adapters.patterns import UnsafePattern, compile_pattern, compile_peft_pattern
from adapters.spec import AdapterSpec

NAMES = [f"model.layers.{layer}.{leaf}" for layer in (0, 1, 10) for leaf in ("self_attn.q_proj", "mlp.up_proj")]
PATTERNS = [
    "q_proj", "proj", "0.self_attn.q_proj", "layers.0.self_attn.q_proj", "^model.layers.1.mlp.up_proj", ".*q_proj",
    r".*\.layers\.0\..*q_proj", "(q|k)_proj", "model", "layers.[01].mlp.up_proj", "", "^q_proj", r"mlp\.(up|down)_proj",
]  # fmt: skip
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|k_proj|v_proj|o_proj)))"
)


@pytest.mark.parametrize("patterns", list(itertools.permutations(PATTERNS, 2)))
def test_the_entry_that_decides_is_the_one_that_peft_picks(patterns: tuple[str, ...]) -> None:
    spec = AdapterSpec(rank=8, alpha=8.0, rank_pattern={pattern: rank for rank, pattern in enumerate(patterns, 1)})
    for name in NAMES:
        picked = get_pattern_key(list(patterns), name)
        expected = patterns.index(picked) + 1 if picked in patterns else None
        assert next(iter(spec.pattern_values(spec.rank_pattern, name)), None) == expected, name


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", "(.*a)*b", "(a|aa)+$", "(?:x+x+)+y", r"(.)\1", ".*.*.*.*.*.*=", "(((a*)*)*)*", "a{5000}", "(?:a{1,900})*",
        "(a{0,16}){0,16}b", "(a?){50}b", "a?" * 40 + "a" * 40, "(a|aa)" * 40, "(", "[", "*", "a" * 5000, "(?P<n>a)(?(n)b|c)",
    ],
)  # fmt: skip
def test_patterns_that_could_hang_are_refused_at_once(pattern: str) -> None:
    started = time.thread_time()
    with pytest.raises(UnsafePattern):
        compile_peft_pattern(pattern)
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize(
    "pattern",
    [".*q_proj", UNSLOTH, r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$", r"model\.layers\.\d+\.(?!mlp).*_proj"],
)
def test_patterns_that_trainers_write_are_allowed(pattern: str) -> None:
    compile_pattern(pattern)


@pytest.mark.parametrize("pattern", [".*.*.*Z", ".*?.*?.*?Z", "a*a*a*(a|aa)(a|aa)(a|aa)(a|aa)(a|aa)Z"])
def test_the_costliest_allowed_pattern_is_quick_on_a_long_name(pattern: str) -> None:
    compiled = compile_peft_pattern(pattern)
    started = time.thread_time()
    assert compiled.match("a" * 80) is None
    assert time.thread_time() - started < 2.0
