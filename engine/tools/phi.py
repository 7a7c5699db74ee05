"""Phi-4 mini: a list of objects between `<|tool_call|>` and `<|/tool_call|>`, or after the word `functools`."""

from __future__ import annotations

from engine.tools.format import ToolFormat

PHI = ToolFormat(
    name="phi",
    opening="<|tool_call|>[",
    between=", ",
    closing="]<|/tool_call|>",
    starts=("<|tool_call|>", "functools"),
    ends=("<|/tool_call|>",),
    marks=("<|tool_call|>", "<|/tool_call|>"),
)
PHI_FUNCTOOLS = ToolFormat(
    name="phi-functools",
    opening="functools[",
    between=", ",
    closing="]",
    starts=("functools", "<|tool_call|>"),
    ends=("<|/tool_call|>",),
    marks=("<|tool_call|>", "<|/tool_call|>"),
)
