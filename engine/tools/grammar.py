"""Grammars (llguidance's Lark) of answers that call functions: calls alone, or text that may end with calls.

Whatever is said about calls holds of every token: marks are those of the format, names those that may be called, and
arguments follow the functions' schemas. Called by `engine/guides`, which knows the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from engine.tools.format import ToolFormat
from engine.tools.spec import ToolUse

_ANY_OBJECT = {"type": "object"}


class CallGrammar:
    """Makes the grammar of one request's answers.

    Args:
        tool_format: how the model writes calls.
        mark_ids: marks that are one special token of the vocabulary, and its id; others are plain text.
        other_ids: special tokens that plain text may hold.
        white_space: a regular expression for what may stand between the parts of JSON.
    """

    def __init__(
        self, tool_format: ToolFormat, mark_ids: Mapping[str, int], other_ids: Collection[int], white_space: str
    ) -> None:
        self._format = tool_format
        self._mark_ids = mark_ids
        self._others = _id_set(other_ids)
        self._guidance = {"whitespace_pattern": white_space}

    def build(self, use: ToolUse, answer_schema: str | None) -> str:
        """The grammar as text; `answer_schema` is what the answer must follow where it calls nothing."""
        rules = self._call_rules(use)
        if use.is_required:
            rules["start"] = "calls"
        elif answer_schema is not None:
            rules["start"] = "calls | answer"
            rules["answer"] = f"%json {json.dumps(self._guided(json.loads(answer_schema)))}"
        else:
            rules |= self._text_rules()
        return "%llguidance {}\n" + "\n".join(f"{name}: {body}" for name, body in rules.items()) + "\n"

    def _call_rules(self, use: ToolUse) -> dict[str, str]:
        opening, between, closing = (
            self._text(text) for text in (self._format.opening, self._format.between, self._format.closing)
        )
        rest = closing
        if use.is_parallel and self._format.repeats:
            rest = f"({between} item)* {closing}"
        before = f"{self._text(self._format.optional_start)}?" if self._format.optional_start else ""
        functions = use.callable
        rules = {"calls": f"{before} {opening} after_opening", "after_opening": f"item {rest}"}
        rules["item"] = " | ".join(f"item_{index}" for index in range(len(functions)))
        for index, function in enumerate(functions):
            head, tail = self._format.around(function.name)
            rules[f"item_{index}"] = f"{self._text(head)} arguments_{index} {self._text(tail)}"
            schema = self._guided(function.schema if use.holds(function) else _ANY_OBJECT)
            rules[f"arguments_{index}"] = f"%json {json.dumps(schema)}"
        return rules

    def _text_rules(self) -> dict[str, str]:
        """Text, and calls once their first mark is there; a lazy lexeme, or a token that text cannot hold, sees to that."""
        others = f" | {self._others}" if self._others else ""
        rules = {"text": f"(TEXT{others})*", "TEXT": r"/(.|\n)+/"}
        if not self._format.starts:
            rules |= {
                "start": "/[ \\t\\r\\n]*/ calls | plain",
                "plain": f'"" | PLAIN | PLAIN{others} text' if others else '"" | PLAIN',
                "PLAIN": r"/[ \t\r\n]*[^ \t\r\n{](.|\n)*/",
            }
            return rules
        mark = self._format.starts[0]
        after_mark = self._text(self._format.opening.removeprefix(mark))
        if mark in self._mark_ids:
            rules["start"] = f"text ({self._text(mark)} {after_mark} after_opening)?"
            return rules
        before = f"(TEXT {self._others} | {self._others})*" if self._others else ""
        rules["start"] = f"text | {before} trigger {after_mark} after_opening"
        rules["trigger[lazy]"] = f"TEXT? {json.dumps(mark)}"
        return rules

    def _guided(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {**schema, "x-guidance": self._guidance}

    def _text(self, text: str) -> str:
        """Literal text as the grammar writes it, special tokens by their ids."""
        marks = sorted(self._mark_ids, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
        return " ".join(
            f"<[{self._mark_ids[piece]}]>" if piece in self._mark_ids else json.dumps(piece)
            for piece in pieces
            if piece
        )


def _id_set(ids: Collection[int]) -> str:
    """Any of these tokens: `<[5,7-9]>`, or nothing for none."""
    runs: list[Sequence[int]] = []
    for _, run in groupby(enumerate(sorted(ids)), key=lambda pair: pair[1] - pair[0]):
        runs.append([token_id for _, token_id in run])
    if not runs:
        return ""
    return "<[" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + "]>"
