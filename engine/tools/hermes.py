"""Hermes, Qwen 2.5 and 3, Granite 4: each call an object between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from engine.tools.format import ToolFormat

HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    starts=("<tool_call>",),
    ends=("</tool_call>",),
    marks=("<tool_call>", "</tool_call>"),
)
