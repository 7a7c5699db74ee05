"""What a request says about tools, and what a call is: the dataclasses that prompts, grammars and parsers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Function:
    """A function that the model may be told of.

    Attributes:
        name: letters, digits, `_` and `-`.
        description: what it does, for the model.
        parameters: JSON schema of its arguments, which are an object; None for a function without any.
        is_strict: whether its arguments follow the schema even where the model is free to call it or not.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of its arguments, an object in any case."""
        return {**(_NO_PARAMETERS if self.parameters is None else self.parameters), "type": "object"}

    @property
    def definition(self) -> dict[str, Any]:
        """As templates take it, inside `{"type": "function", "function": …}`."""
        description = {} if self.description is None else {"description": self.description}
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"name": self.name, **description, "parameters": parameters}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and what it wants of them.

    Attributes:
        functions: what the model is told of, at least one.
        callable_names: those of them that it may call.
        is_required: whether the answer must be calls.
        is_parallel: whether it may be more than one.
    """

    functions: Sequence[Function]
    callable_names: frozenset[str]
    is_required: bool = False
    is_parallel: bool = True

    @property
    def callable(self) -> list[Function]:
        """The functions that may be called."""
        return [function for function in self.functions if function.name in self.callable_names]

    def holds(self, function: Function) -> bool:
        """Whether the arguments of a call of the function are made to follow its schema."""
        return function.name in self.callable_names and (self.is_required or function.is_strict)

    @property
    def needs_guide(self) -> bool:
        """Whether something is promised that a model does not do by itself."""
        is_narrowed = len(self.callable_names) < len(self.functions)
        return (
            self.is_required
            or not self.is_parallel
            or is_narrowed
            or any(function.is_strict for function in self.callable)
        )


@dataclass(frozen=True)
class ToolCall:
    """A call in a conversation; `arguments` is the JSON text of an object."""

    call_id: str
    name: str
    arguments: str
