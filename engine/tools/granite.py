"""Granite 3: a list of objects after `<|tool_call|>`; some write `<tool_call>` instead."""

from __future__ import annotations

from engine.tools.format import ToolFormat

GRANITE = ToolFormat(
    name="granite",
    opening="<|tool_call|>[",
    between=", ",
    closing="]",
    starts=("<|tool_call|>", "<tool_call>"),
    marks=("<|tool_call|>",),
)
