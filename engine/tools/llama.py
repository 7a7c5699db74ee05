"""Llama 3.1 and 3.2: the answer is one object with `parameters`, perhaps after `<|python_tag|>`.

Models write several with `;` between them now and then, which is read; the template takes one call a turn.
"""

from __future__ import annotations

from engine.tools.format import ToolFormat

LLAMA = ToolFormat(
    name="llama",
    opening="",
    between="; ",
    closing="",
    ends=(";",),
    optional_start="<|python_tag|>",
    arguments_key="parameters",
    repeats=False,
    marks=("<|python_tag|>",),
)
