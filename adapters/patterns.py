"""Regular expressions that come from an adapter's config: matched as PEFT matches them, refused where they could hang.

`re` has no time limit and holds the interpreter lock, so a hostile pattern would stop the whole server. Patterns are
therefore judged by their parse tree before they run. Used by `spec` (rank and alpha patterns) and `targets`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from typing import Any

MAX_PATTERN_LEN = 4096
# An open-ended repeat can stop at any of a name's characters, of which there are about this many.
NAME_LEN = 60
# Most ways through a pattern on one name: four open-ended repeats and a hundred alternatives, as trainers write them.
MAX_WAYS = 128.0 * NAME_LEN**4

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


class UnsafePattern(ValueError):
    """The pattern is not a regular expression, or is one that might take for ever; the text says which."""


def compile_pattern(pattern: str, *, prefix: str = "", suffix: str = "") -> re.Pattern[str]:
    """Compile `prefix + (pattern) + suffix`; raises `UnsafePattern`."""
    if len(pattern) > MAX_PATTERN_LEN:
        raise UnsafePattern(f"is {len(pattern)} characters long, over the limit of {MAX_PATTERN_LEN}")
    whole = f"{prefix}({pattern}){suffix}" if prefix or suffix else pattern
    try:
        ways = _ways(_parser.parse(whole))
        compiled = re.compile(whole)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsafePattern(f"is not a regular expression ({error})") from None
    if ways > MAX_WAYS:
        raise UnsafePattern("has too many repeats and alternatives to be matched in reasonable time")
    return compiled


def compile_peft_pattern(pattern: str) -> re.Pattern[str]:
    """A key of `rank_pattern` or `alpha_pattern`, as PEFT's `get_pattern_key` matches it: a dotted suffix."""
    return compile_pattern(pattern, prefix=r"(.*\.)?", suffix="$")


def _ways(tree: Iterable[Any]) -> float:
    """An upper bound on the ways in which a pattern can be tried on one name; raises `UnsafePattern`."""
    ways = 1.0
    for op, argument in tree:
        name = str(op)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            ways *= _repeat_ways(*argument)
        elif name == "BRANCH":
            ways *= sum(_ways(branch) for branch in argument[1])
        elif name == "SUBPATTERN":
            ways *= _ways(argument[-1])
        elif name in ("ASSERT", "ASSERT_NOT"):
            ways *= _ways(argument[1])
        elif name == "ATOMIC_GROUP":
            ways *= _ways(argument)
        elif name in ("GROUPREF", "GROUPREF_EXISTS"):
            raise UnsafePattern("uses a back-reference")
    return ways


def _repeat_ways(minimum: int, maximum: int, body: Any) -> float:
    inner = _ways(body)
    if maximum > 1 and inner > 1.0:
        raise UnsafePattern("has a choice or a repeat inside a repeat")
    if maximum <= 1:
        return inner + (maximum - minimum)
    if minimum > MAX_PATTERN_LEN:
        raise UnsafePattern(f"repeats something {minimum} times")
    return float(min(maximum - minimum + 1, NAME_LEN))
