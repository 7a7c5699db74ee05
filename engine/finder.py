"""Looks for adapters that a request names and nobody has loaded yet, in the sources that the settings list.

The wait is bounded, and holds no thread where the caller is a coroutine. Names that no source knows are left to the
routing rule, which says so. Owned by `engine/engine`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path

from adapters.errors import AdapterNotFound, SourceUnreachable
from adapters.manager import AdapterManager
from adapters.resolvers import Resolution, Sources
from engine.config import EMBEDDED_MODEL, EngineConfig
from engine.routing import RESERVED_NAMES

# What is not there by then goes on being fetched for whoever asks next.
WAIT_S = 120.0


def make_sources(config: EngineConfig, model_name: str, adapter_dir: Path) -> Sources:
    """The sources of the settings; users' classes are told `--model`, or the name of the embedded model.

    Raises `InvalidSource`.
    """
    return Sources(
        config.lora_resolver if config.enable_lora else (),
        base_model_name=model_name if Path(config.model) == EMBEDDED_MODEL else config.model,
        download_dir=adapter_dir / "downloads",
    )


class AdapterFinder:
    """Finds adapters by name.

    Args:
        sources: the engine's sources.
        adapters: lists what is found.
        base_names: names of the base model, which are never looked for.
        wait_s: seconds that a request waits for its adapter.
    """

    def __init__(
        self, sources: Sources, adapters: AdapterManager, base_names: Collection[str], *, wait_s: float = WAIT_S
    ) -> None:
        self._sources = sources
        self._adapters = adapters
        self._passed_over = {*base_names, *RESERVED_NAMES}
        self._wait_s = wait_s
        self._resolution = Resolution(
            sources.resolvers,
            load=lambda name, located: adapters.load(name, located),
            is_known=adapters.contains,
        )

    async def find(self, *names: str | None) -> None:
        """Have those of `names` listed that a source knows. Raises `SourceUnreachable`, or why one is refused."""
        for name, waiter in self._start(names):
            try:
                await asyncio.wait_for(asyncio.wrap_future(waiter), self._wait_s)
            except AdapterNotFound:
                continue
            except (asyncio.TimeoutError, TimeoutError):
                raise _too_slow(name) from None

    def find_sync(self, *names: str | None) -> None:
        """The same on the caller's thread."""
        for name, waiter in self._start(names):
            try:
                waiter.result(self._wait_s)
            except AdapterNotFound:
                continue
            except (concurrent.futures.TimeoutError, TimeoutError):
                waiter.cancel()
                raise _too_slow(name) from None

    def _start(self, names: Collection[str | None]) -> list[tuple[str, Future[None]]]:
        if not self._sources.resolvers:
            return []
        unknown = {name for name in names if name is not None and name not in self._passed_over}
        return [(name, self._resolution.start(name)) for name in unknown if not self._adapters.contains(name)]

    def check_integrity(self) -> None:
        """Assert that nothing is being looked for."""
        self._resolution.check_integrity()

    def close(self) -> None:
        """Stop looking; who waits hears that the server is shutting down."""
        self._sources.close()
        self._resolution.close()


def _too_slow(name: str) -> SourceUnreachable:
    return SourceUnreachable(f"adapter {name!r} is still being fetched; try again in a moment")
