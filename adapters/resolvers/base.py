"""What a source of adapters is, to those who ask it and to those who write one.

`Source` is the program's own interface: blocking, asked on threads of its own. `LoRAResolver` is the one for a user's
class, with vLLM's names, and `LoRAResolverRegistry` where such classes announce themselves.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Protocol

from adapters.located import Located


class Source(Protocol):
    """Something that may know an adapter by name.

    Attributes:
        label: what clients hear it called; holds no address and no credential.
    """

    label: str

    def find(self, lora_name: str) -> Located | None:
        """The adapter's files, fetched where need be; None where this source does not know the name. Blocks.

        `lora_name` has passed `check_name`. Raises `SourceUnreachable` where the source cannot be asked now, and other
        `AdapterError`s where it knows the name but cannot give the files.
        """

    def close(self) -> None:
        """Give up what is being waited for; `find` is not called again."""


class ResolvedLoRA(Protocol):
    """What a user's class answers with: `engine.LoRARequest` is one."""

    @property
    def lora_name(self) -> str:
        """The adapter's name."""

    @property
    def lora_path(self) -> str:
        """A folder, or any other address that `--lora-modules` takes."""


class LoRAResolver(ABC):
    """Base of a user's source of adapters, named to the program by `--lora-resolver package.module:Class`."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> ResolvedLoRA | None:
        """The adapter of this name for this base model, or None where there is none.

        A `FileNotFoundError` counts as None, an `OSError` or `TimeoutError` as a source that cannot be reached.
        """


class _Registry:
    """Resolvers by name, in the order in which they were registered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resolvers: dict[str, LoRAResolver] = {}

    def register_resolver(self, resolver_name: str, resolver: LoRAResolver) -> None:
        """Have a resolver asked by every engine that starts from now on; a name that is taken gets the new one."""
        with self._lock:
            self._resolvers[resolver_name] = resolver

    def unregister_resolver(self, resolver_name: str) -> None:
        """Take a resolver out again; raises `KeyError`."""
        with self._lock:
            del self._resolvers[resolver_name]

    def get_supported_resolvers(self) -> set[str]:
        """The names."""
        with self._lock:
            return set(self._resolvers)

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        """The resolver of a name; raises `KeyError`."""
        with self._lock:
            return self._resolvers[resolver_name]

    def snapshot(self) -> dict[str, LoRAResolver]:
        """All of them."""
        with self._lock:
            return dict(self._resolvers)


# Plugins register when they are imported, which may be before there is any engine: so the process has one registry.
LoRAResolverRegistry = _Registry()
