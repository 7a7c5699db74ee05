"""The tenants file: keys as hashes, each with its role, its adapters and its share.

A JSON object `{"tenants": [...]}`; docs/api.md describes the fields. It is read again when it changes; one that is wrong then
leaves the earlier one in force. Knows nothing of HTTP. Used by `auth`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from api.quota import Quota
from api.settings import ConfigFault

log = logging.getLogger("switchboard.api")

CHECK_SECONDS = 1.0
_FIELDS = {"name", "key_sha256", "role", "adapters", "requests_per_minute", "tokens_per_minute"}


class Role(IntEnum):
    """What a credential allows; each role may do what the ones before it may."""

    NOBODY = 0
    USER = 1
    ADMIN = 2


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        name: for the log.
        role: what the credential allows.
        adapters: names or patterns (`team-*`) of the adapters that exist for this caller; None means all.
        quota: the caller's share.
    """

    name: str
    role: Role
    adapters: tuple[str, ...] | None = None
    quota: Quota = field(default_factory=Quota, compare=False)

    @property
    def sees_all(self) -> bool:
        """Whether every adapter exists for this caller."""
        return self.adapters is None

    def may_use(self, name: str) -> bool:
        """Whether an adapter exists for this caller."""
        return self.adapters is None or any(fnmatchcase(name, pattern) for pattern in self.adapters)


class TenantsFile:
    """The file and what it says.

    Args:
        path: the file.
        clock: seconds that never go back.

    Raises:
        ConfigFault: the file cannot be read, or says something that is not allowed.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen = self._stamp()
        self._callers = self._read({})
        self._checked_at = clock()

    def find(self, secret: str) -> Caller | None:
        """Whose key this is; how long that takes tells nothing about how near a guess came."""
        self._reload_if_changed()
        digest = hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
        found = None
        for key, caller in self._callers.items():
            if hmac.compare_digest(digest, key):
                found = caller
        return found

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _reload_if_changed(self) -> None:
        now = self._clock()
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._callers = self._read({caller.name: caller for caller in self._callers.values()})
        except ConfigFault as fault:
            log.error("event=tenants_kept reason=%r", fault.message)
        else:
            log.info("event=tenants_loaded count=%d", len(self._callers))

    def _read(self, known: dict[str, Caller]) -> dict[str, Caller]:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigFault(f"--tenants: the file cannot be read ({reason}).", param="tenants") from None
        if not isinstance(data, dict) or data.keys() != {"tenants"} or not isinstance(data["tenants"], list):
            raise _wrong('the file must hold an object {"tenants": [...]}')
        callers: dict[str, Caller] = {}
        for item in data["tenants"]:
            key, caller = _caller(item, known)
            if key in callers or caller.name in {other.name for other in callers.values()}:
                raise _wrong(f"{caller.name!r} has a name or a key that another tenant has")
            callers[key] = caller
        return callers


def _caller(item: Any, known: dict[str, Caller]) -> tuple[str, Caller]:
    """A tenant's key hash and what it allows; a share that has not changed is kept with what was used of it."""
    if not isinstance(item, dict):
        raise _wrong("each tenant must be an object")
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong("a tenant has no name")
    unknown = sorted(item.keys() - _FIELDS)
    if unknown:
        raise _wrong(f"{name!r} has the unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}")
    key = item.get("key_sha256")
    if not isinstance(key, str) or not re.fullmatch("[0-9a-f]{64}", key):
        raise _wrong(f"key_sha256 of {name!r} must be 64 lower-case hexadecimal digits")
    role = {"user": Role.USER, "admin": Role.ADMIN}.get(item.get("role", "user"))
    if role is None:
        raise _wrong(f'role of {name!r} must be "user" or "admin"')
    adapters = item.get("adapters")
    if adapters is not None and not (isinstance(adapters, list) and all(isinstance(each, str) for each in adapters)):
        raise _wrong(f"adapters of {name!r} must be a list of names or patterns; leave it out for all")
    if adapters is not None and role is Role.ADMIN:
        raise _wrong(f"{name!r} is an administrator, who has all adapters; leave adapters out")
    bounds = item.get("requests_per_minute"), item.get("tokens_per_minute")
    for bound in bounds:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 1):
            raise _wrong(f"requests_per_minute and tokens_per_minute of {name!r} must be whole numbers from 1")
    earlier = known.get(name)
    quota = earlier.quota if earlier is not None and earlier.quota.bounds == bounds else Quota(*bounds)
    return key, Caller(name, role, None if adapters is None else tuple(adapters), quota)


def _wrong(what: str) -> ConfigFault:
    return ConfigFault(f"--tenants: {what}.", param="tenants")
