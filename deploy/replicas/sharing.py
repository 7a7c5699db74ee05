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

from adapters.name_state import DEFAULTS, NameState
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

# How often a replica says that it lives, whatever it is following.
BEAT_SECONDS = 3.0
# How soon a change that could not be followed is tried again.
AGAIN_SECONDS = 10.0
# How long a new replica waits for the ledger.
JOIN_SECONDS = 60.0

SETTLED: ContextVar[list[tuple[int, int]] | None] = ContextVar("settled", default=None)
"""Where a request's handler leaves how many replicas have its changes, for the answer's headers."""


class LedgerUnreachable(AppError):
    """The process that orders changes of adapters does not answer; it is started again by itself."""

    status = 503
    error_type = "server_error"
    code = "ledger_unreachable"
    retry_after = 5


class ChangeSuperseded(AppError):
    """While a change was made, its turn lapsed and another replica changed the same."""

    status = 409
    code = "change_superseded"


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

    async def end_turn(
        self, name: str, replica: str, epoch: str, state: NameState | None, base: int
    ) -> Change | None: ...

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
        # What was done here and the ledger has not heard: name -> (state, number of the change that it was made upon)
        self._untold: dict[str, tuple[NameState | None, int]] = {}
        self._order = asyncio.Lock()
        self._telling = asyncio.Lock()
        self._catching_up: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """`catch_up` before the first request. A ledger that cannot be reached is asked again for `JOIN_SECONDS`."""
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                return await self.catch_up()
            except LedgerUnreachable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def follow(self) -> None:
        """Follow the ledger until cancelled. A ledger that cannot be reached is asked again."""
        beating = asyncio.ensure_future(self._beat())
        try:
            while True:
                try:
                    await self._take(await self._ask(POLL_SECONDS))
                    await self._tell_untold()
                    await self._try_again()
                except LedgerUnreachable:
                    log.warning("event=ledger_unreachable")
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        """Be known to live, also while something is followed that takes long."""
        while True:
            with contextlib.suppress(LedgerUnreachable):
                await self._ask(0.0)
            await asyncio.sleep(BEAT_SECONDS)

    async def catch_up(self) -> None:
        """Follow everything that has been changed until now. Raises `LedgerUnreachable`."""
        await self._take(await self._ask(0.0))
        await self._ask(0.0)  # Tell that it is done.

    async def catch_up_soon(self, wait_s: float) -> None:
        """Wait for `catch_up`, one for all who ask meanwhile, but no longer than `wait_s` seconds; raises nothing."""
        if self._catching_up is None:
            self._catching_up = asyncio.ensure_future(self.catch_up())
            self._catching_up.add_done_callback(self._caught_up)
        await asyncio.wait({self._catching_up}, timeout=wait_s)

    def _caught_up(self, task: asyncio.Task[None]) -> None:
        self._catching_up = None
        if not task.cancelled() and task.exception() is not None:
            log.warning("event=not_caught_up reason=%r", str(task.exception()))

    @asynccontextmanager
    async def change(self, name: str) -> AsyncIterator[None]:
        """A change of a name in the block, which all replicas then follow; afterwards `SETTLED` knows how many have."""
        await self._tell_untold()
        if name in self._untold:
            raise LedgerUnreachable(f"The change of {name!r} before this one is not known everywhere yet; try again.")
        await self._ask(0.0)  # Whoever takes a turn must be known to be alive.
        state, base, is_done = None, 0, False
        try:
            if not await self.ledger.take_turn(name, self.replica, TURN_SECONDS):
                raise Overloaded(
                    f"Another change of {name!r} has been under way for {TURN_SECONDS:g} s; try again later."
                )
            await self.catch_up()
            base = self._known[name].seq if name in self._known else 0
            before = await self._state_of(name)
            try:
                yield
                is_done = True
            finally:
                # What failed may have changed something all the same.
                after = await self._state_of(name)
                state = after if is_done or after != before else None
        finally:
            seq = await self._end_turn(name, state, base)
        assert seq is not None
        await self.catch_up()
        counts = await self.ledger.settled(seq, SETTLE_SECONDS)
        log.info("event=change_followed adapter=%s change=%d replicas=%d of=%d", name, seq, *counts)
        settled = SETTLED.get()
        if settled is not None:
            settled.append(counts)

    async def _state_of(self, name: str) -> NameState:
        return await asyncio.to_thread(self._adapters.state_of, name)

    async def _end_turn(self, name: str, state: NameState | None, base: int) -> int | None:
        """What is done here must be told: where the ledger is just being started again, until it hears.

        Returns the change's number, None where `state` is. Raises `ChangeSuperseded` or, after a minute, `LedgerUnreachable`:
        `follow` then tells it.
        """
        deadline = time.monotonic() + TURN_SECONDS
        while True:
            with contextlib.suppress(LedgerUnreachable):
                seq = await self._tell(name, state, base)
                if seq is not None or state is None:
                    return seq
            if time.monotonic() > deadline:
                self._untold[name] = state, base
                raise LedgerUnreachable(
                    f"The change of {name!r} is made here, and the other replicas will hear of it later."
                )
            with contextlib.suppress(LedgerUnreachable):
                await asyncio.sleep(RETRY_SECONDS)
                await self._ask(0.0)  # A new ledger must know the changes before this one.

    async def _tell(self, name: str, state: NameState | None, base: int) -> int | None:
        """End a turn: the number of the change, or None where it is to be told again. Raises `ChangeSuperseded`."""
        latest = await self.ledger.end_turn(name, self.replica, self._epoch, state, base)
        if state is None or latest is None:
            return None
        if latest.state == state:
            self._known[name] = latest
            return latest.seq
        if latest.seq == base:
            return None
        async with self._order:
            await self._follow_one(latest)
        raise ChangeSuperseded(
            f"Another replica changed {name!r} meanwhile, and what it made of it counts; look, and try again."
        )

    async def _tell_untold(self) -> None:
        """Once more what `_end_turn` could not tell. Raises `LedgerUnreachable`."""
        async with self._telling:
            for name, (state, base) in list(self._untold.items()):
                with contextlib.suppress(ChangeSuperseded):
                    if await self._tell(name, state, base) is None and state is not None:
                        continue
                del self._untold[name]

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
        news = await self.ledger.sync(self.replica, news.epoch, self._seen, self._failed, known, wait_s=0.0)
        self._epoch = news.epoch
        return news

    async def _take(self, news: News) -> None:
        async with self._order:
            for change in news.changes:
                if change.seq > self._seen:
                    known = self._known.get(change.state.name)
                    if known is None or known.seq <= change.seq:
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
        try:
            await asyncio.to_thread(self._adapters.follow, state)
            self._failed.pop(state.name, None)
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
        async with super()._turn(action, name):
            if action == "set_default":  # One replica's adapters may not be defaults beside another's.
                async with self._turns.hold(DEFAULTS), self.catalogue.change(DEFAULTS):
                    yield
            else:
                async with self.catalogue.change(name):
                    yield


router = APIRouter(dependencies=[Depends(require_admin)])


@router.get("/v1/replicas")
async def replicas(request: Request) -> dict[str, Any]:
    """The replicas, and how many of them have each change of an adapter."""
    service = service_of(request)
    assert isinstance(service, SharedService)
    return await service.catalogue.ledger.status()
