"""One catalogue for all replicas: changes made here are told to the others, theirs are made here.

Owns a replica's side of the `Ledger`, the service layer that changes adapters through it, and the route that shows who has
what. Knows nothing of Ray: the ledger is a `Protocol`. Called by `replica`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter, Depends, Request

from adapters.name_state import NameState
from api.auth import require_admin
from api.body import service_of
from api.service import Service
from deploy.replicas.ledger import POLL_SECONDS, Change, News
from engine.errors import AppError, Overloaded

if TYPE_CHECKING:
    from adapters.manager import AdapterManager
    from api.settings import ServerSettings
    from engine.engine import Engine

log = logging.getLogger("switchboard.replicas")

TURN_SECONDS = 60.0
# How long an answer to a change waits for the other replicas.
SETTLE_SECONDS = 30.0
RETRY_SECONDS = 0.5

# How soon a change that could not be followed is tried again.
AGAIN_SECONDS = 10.0

SETTLED: ContextVar[list[tuple[int, int]] | None] = ContextVar("settled", default=None)
"""Where a request's handler leaves how many replicas have its changes, for the answer's headers."""


class LedgerUnreachable(AppError):
    """The process that orders changes of adapters does not answer; it is started again by itself."""

    status = 503
    error_type = "server_error"
    code = "ledger_unreachable"
    retry_after = 5


class LedgerDoor(Protocol):
    """`Ledger`, wherever it runs. Each call may raise `LedgerUnreachable`."""

    async def sync(
        self,
        replica: str,
        epoch: str,
        seen: int,
        failed: Mapping[str, tuple[int, str]],
        known: Sequence[Change] = (),
        wait_s: float = POLL_SECONDS,
    ) -> News: ...

    async def leave(self, replica: str) -> None: ...

    async def take_turn(self, name: str, replica: str, wait_s: float) -> bool: ...

    async def end_turn(self, name: str, replica: str, state: NameState | None) -> int | None: ...

    async def settled(self, seq: int, wait_s: float) -> tuple[int, int]: ...

    async def status(self) -> dict[str, Any]: ...


class SharedCatalogue:
    """One replica's view of the ledger.

    Args:
        ledger: the ledger.
        adapters: the replica's adapters, which follow it.
        replica: the replica's id.
    """

    def __init__(self, ledger: LedgerDoor, adapters: AdapterManager, replica: str) -> None:
        self.ledger = ledger
        self.replica = replica
        self._adapters = adapters
        self._epoch = ""
        self._seen = 0
        self._known: dict[str, Change] = {}
        self._failed: dict[str, tuple[int, str]] = {}
        self._tried_at = 0.0
        self._order = asyncio.Lock()

    async def follow(self) -> None:
        """Follow the ledger until cancelled. A ledger that cannot be reached is asked again."""
        while True:
            try:
                await self._take(await self._ask(POLL_SECONDS))
                await self._try_again()
            except LedgerUnreachable:
                log.warning("event=ledger_unreachable")
                await asyncio.sleep(RETRY_SECONDS)

    async def catch_up(self) -> None:
        """Follow everything that has been changed until now. Raises `LedgerUnreachable`."""
        await self._take(await self._ask(0.0))
        await self._ask(0.0)  # Tell that it is done.

    @asynccontextmanager
    async def change(self, name: str) -> AsyncIterator[None]:
        """A change of a name in the block, which all replicas then follow; afterwards `SETTLED` knows how many have."""
        await self._ask(0.0)  # Whoever takes a turn must be known to be alive.
        if not await self.ledger.take_turn(name, self.replica, TURN_SECONDS):
            raise Overloaded(f"Another change of {name!r} has been under way for {TURN_SECONDS:g} s; try again later.")
        state = None
        try:
            await self.catch_up()
            yield
            state = await asyncio.to_thread(self._adapters.state_of, name)
        finally:
            seq = await self._end_turn(name, state)
        assert seq is not None
        await self.catch_up()
        counts = await self.ledger.settled(seq, SETTLE_SECONDS)
        log.info("event=change_followed adapter=%s change=%d replicas=%d of=%d", name, seq, *counts)
        settled = SETTLED.get()
        if settled is not None:
            settled.append(counts)

    async def _end_turn(self, name: str, state: NameState | None) -> int | None:
        """What is done here must be told: where the ledger is just being started again, until it hears."""
        deadline = time.monotonic() + TURN_SECONDS
        while True:
            try:
                return await self.ledger.end_turn(name, self.replica, state)
            except LedgerUnreachable:
                if time.monotonic() > deadline:
                    raise
            with contextlib.suppress(LedgerUnreachable):
                await asyncio.sleep(RETRY_SECONDS)
                await self._ask(0.0)  # A new ledger must know the changes before this one.

    async def leave(self) -> None:
        """Tell the ledger that this replica ends."""
        with contextlib.suppress(LedgerUnreachable):
            await self.ledger.leave(self.replica)

    async def _ask(self, wait_s: float) -> News:
        news = await self.ledger.sync(self.replica, self._epoch, self._seen, self._failed, wait_s=wait_s)
        if news.epoch == self._epoch:
            return news
        # Another process holds the ledger: it hears all that is known here, and says what others have told it.
        known = list(self._known.values())
        self._epoch = news.epoch
        return await self.ledger.sync(self.replica, self._epoch, self._seen, self._failed, known, wait_s=0.0)

    async def _take(self, news: News) -> None:
        async with self._order:
            for change in news.changes:
                if change.seq > self._seen:
                    await self._follow_one(change)
                    self._seen = change.seq

    async def _try_again(self) -> None:
        """Changes that could not be followed, every `AGAIN_SECONDS`: their files may be there by now."""
        if not self._failed or time.monotonic() - self._tried_at < AGAIN_SECONDS:
            return
        async with self._order:
            self._tried_at = time.monotonic()
            for name in list(self._failed):
                await self._follow_one(self._known[name])

    async def _follow_one(self, change: Change) -> None:
        state = change.state
        self._known[state.name] = change
        self._failed.pop(state.name, None)
        try:
            await asyncio.to_thread(self._adapters.follow, state)
        except AppError as error:
            self._failed[state.name] = (change.seq, error.message)
            log.warning("event=change_not_followed adapter=%s reason=%r", state.name, error.message)
        except Exception as error:
            self._failed[state.name] = (change.seq, "the cause is in this replica's log")
            log.error("event=change_not_followed adapter=%s", state.name, exc_info=error)


class SharedService(Service):
    """The service layer of a replica: what it changes, it changes everywhere."""

    def __init__(self, engine: Engine, settings: ServerSettings, catalogue: SharedCatalogue) -> None:
        super().__init__(engine, settings)
        self.catalogue = catalogue

    @asynccontextmanager
    async def _turn(self, action: str, name: str) -> AsyncIterator[None]:
        async with super()._turn(action, name), self.catalogue.change(name):
            yield


router = APIRouter(dependencies=[Depends(require_admin)])


@router.get("/v1/replicas")
async def replicas(request: Request) -> dict[str, Any]:
    """The replicas, and how many of them have each change of an adapter."""
    service = service_of(request)
    assert isinstance(service, SharedService)
    return await service.catalogue.ledger.status()
