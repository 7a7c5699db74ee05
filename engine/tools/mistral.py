"""Mistral: `[TOOL_CALLS]`, then a list of objects, or in newer models `name[ARGS]{…}` for each call.

Their templates take ids of nine letters and digits only.
"""

from __future__ import annotations

from engine.tools.format import ToolFormat

MISTRAL = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS] [",
    between=", ",
    closing="]",
    starts=("[TOOL_CALLS]",),
    reads_names=True,
    call_id_len=9,
    marks=("[TOOL_CALLS]",),
)
MISTRAL_NAMED = ToolFormat(
    name="mistral-named",
    opening="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    closing="",
    starts=("[TOOL_CALLS]",),
    is_named=True,
    arguments_mark="[ARGS]",
    reads_names=True,
    call_id_len=9,
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)
