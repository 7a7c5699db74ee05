"""What a model family's way to write calls is made of. The families themselves have a file each. Used by all of `tools`."""

from __future__ import annotations

import hashlib
import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

from engine.tools.spec import ToolCall

_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: `opening item between item … closing`.

    An item is `{"name": "f", "arguments": {…}}`, or with `is_named` the name, `arguments_mark` and the arguments.

    Attributes:
        name: shown at start-up.
        opening, between, closing: the texts around items, as the model was trained to write them.
        starts: marks by which calls are recognised in an answer: what `opening` begins with, then others that models
            write too. Without any, an answer that begins with an object is a call.
        ends: marks that may stand after calls.
        optional_start: a mark that may stand before calls.
        arguments_key: the key of the arguments.
        is_named: whether an item is a name and its arguments rather than one object.
        reads_names: whether such items are read, too.
        arguments_mark: between the two.
        repeats: whether an answer may hold more than one call, as far as the family goes.
        call_id_len: characters of a call's id, where the family's template takes no others.
        marks: texts that are one token in most vocabularies, and special there.
    """

    name: str
    opening: str
    closing: str
    between: str
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    optional_start: str | None = None
    arguments_key: str = "arguments"
    is_named: bool = False
    reads_names: bool = False
    arguments_mark: str = ""
    repeats: bool = True
    call_id_len: int | None = None
    marks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert not self.starts or self.opening.startswith(self.starts[0]), "grammars know the first start alone"

    def around(self, name: str) -> tuple[str, str]:
        """What stands before and after the arguments in an item that calls the function `name`."""
        if self.is_named:
            return f"{name}{self.arguments_mark}", ""
        return f'{{"name": "{name}", "{self.arguments_key}": ', "}"

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the model would have written them."""
        items = [before + call.arguments + after for call in calls for before, after in [self.around(call.name)]]
        return f"{self.opening}{self.between.join(items)}{self.closing}"

    def new_call_id(self) -> str:
        """An id for a call of the model's."""
        letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(self.call_id_len or 24))
        return letters if self.call_id_len else f"call_{letters}"

    def template_id(self, call_id: str) -> str:
        """A client's id of a call as the template takes it: the same for equal ids, and its own ids unchanged."""
        length = self.call_id_len
        if length is None or (len(call_id) == length and call_id.isascii() and call_id.isalnum()):
            return call_id
        return hashlib.sha256(json.dumps(call_id).encode()).hexdigest()[:length]
