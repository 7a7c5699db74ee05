"""What an adapter may be called. Names appear in URLs, HTTP headers, metrics and logs, which sets the rules."""

from __future__ import annotations

import re
from collections.abc import Collection

from adapters.errors import InvalidAdapterName

MAX_NAME_LEN = 128
ALLOWED = "letters, digits and . _ - : @ + / (for example team/sql-v2), beginning with a letter or digit"
# `GET /v1/adapters/NAME/download` are an adapter's files, so no other adapter can have that path.
RESERVED_ENDING = "/download"
# Values of a request's `lora` field that mean something else.
KEYWORDS = frozenset({"auto", "none"})

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]*(?:/[A-Za-z0-9][A-Za-z0-9._:@+-]*)*")


def check_name(name: str, reserved: Collection[str] = (), *, param: str = "lora_name") -> None:
    """Raise `InvalidAdapterName` where `name` cannot be an adapter's; `reserved` are the base model's names."""
    if not isinstance(name, str) or not name:
        raise InvalidAdapterName(f"{param} is empty; give the adapter a name", param=param)
    if len(name) > MAX_NAME_LEN:
        raise InvalidAdapterName(
            f"the adapter's name is {len(name)} characters long, over the limit of {MAX_NAME_LEN}", param=param
        )
    if _NAME.fullmatch(name) is None:
        raise InvalidAdapterName(f"the adapter's name {name!r} is not allowed; use {ALLOWED}", param=param)
    if name.endswith(RESERVED_ENDING):
        raise InvalidAdapterName(
            f"the adapter's name {name!r} ends in {RESERVED_ENDING}, under which another adapter's files are fetched; use "
            "another one",
            param=param,
        )
    if name in KEYWORDS:
        raise InvalidAdapterName(
            f"{name!r} cannot name an adapter: it has a meaning of its own in requests", param=param
        )
    if name in reserved:
        raise InvalidAdapterName(f"{name!r} is the base model's name; give the adapter another one", param=param)
