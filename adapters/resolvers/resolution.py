"""Unknown names become adapters: sources asked in order, once for all who want the same name, with a memory of failures.

Each source has threads of its own, so one that is slow holds up nothing but names that it is asked for; whoever waits
holds no thread. The first source that knows a name decides: an adapter that it has but that is refused, or a source that
cannot be asked, ends the search, because the answer must not depend on which sources happen to be up. Knows nothing of
requests. Called by the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from adapters.errors import AdapterError, AdapterExists, AdapterNotFound, InvalidAdapterName, SourceUnreachable
from adapters.located import Located
from adapters.names import check_name
from adapters.resolvers.base import Source

log = logging.getLogger(__name__)

NUM_THREADS = 4  # of each source
MAX_FLIGHTS = 256
MAX_FAILURES = 1024
# how long a failure is answered from memory
NOT_FOUND_S = 10.0
UNREACHABLE_S = 5.0

Waiter = Future[None]


class Resolution:
    """Finds and loads adapters by name.

    Args:
        sources: asked in this order.
        load: lists an adapter under a name; raises `AdapterError` where it is refused.
        is_known: whether a name is listed already.
        clock: seconds, for the memory of failures.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        load: Callable[[str, Located], object],
        is_known: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = tuple(sources)
        self._load = load
        self._is_known = is_known
        self._clock = clock
        self._pools = [
            ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"source-{index}") for index in range(len(self._sources))
        ]
        self._lock = threading.Lock()
        # name -> who waits for it
        self._flights: dict[str, list[Waiter]] = {}
        # name -> what to answer, and until when; the oldest first
        self._failures: OrderedDict[str, tuple[AdapterError, float]] = OrderedDict()
        self._is_closed = False

    def start(self, name: str) -> Waiter:
        """A future of one's own that is done once `name` is listed; never blocks.

        It ends with `AdapterNotFound` where no source knows the name, with what `load` raises where it is refused, and
        with `SourceUnreachable` where a source cannot be asked. Cancelling it harms nobody else who waits.
        """
        waiter: Waiter = Future()
        failure = self._join(name, waiter)
        if failure is not None:
            waiter.set_exception(failure.with_traceback(None))
        return waiter

    def _join(self, name: str, waiter: Waiter) -> AdapterError | None:
        """Add a waiter to the name's flight, which is begun where there is none; or the reason not to."""
        try:
            check_name(name)
        except InvalidAdapterName:
            return _not_found(name)
        with self._lock:
            if name in self._flights:
                self._flights[name].append(waiter)
                return None
            if self._is_known(name):  # Its flight landed since the caller looked.
                waiter.set_result(None)
                return None
            failure = self._remembered(name)
            if failure is not None:
                return failure
            if self._is_closed:
                return SourceUnreachable("the server is shutting down")
            if len(self._flights) >= MAX_FLIGHTS:
                return SourceUnreachable(f"{MAX_FLIGHTS} adapters are being looked for already; try again")
            self._flights[name] = [waiter]
        self._ask(name, 0)
        return None

    def close(self) -> None:
        """Ask nobody any more; who waits hears that the server is shutting down."""
        with self._lock:
            self._is_closed = True
            names = list(self._flights)
        for source in self._sources:
            source.close()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for name in names:
            self._land(name, SourceUnreachable("the server is shutting down"))

    def check_integrity(self) -> None:
        """Nothing outlives its waiters, and what is remembered is bounded; for when nothing is being looked for."""
        with self._lock:
            assert not self._flights, f"still being looked for: {list(self._flights)}"
            assert len(self._failures) <= MAX_FAILURES, "too many failures are remembered"

    def _ask(self, name: str, index: int) -> None:
        """Have the next source asked on a thread of its own."""
        if index == len(self._sources):
            self._land(name, _not_found(name))
            return
        try:
            self._pools[index].submit(self._try, name, index)
        except RuntimeError:  # The pools were shut down meanwhile.
            self._land(name, SourceUnreachable("the server is shutting down"))

    def _try(self, name: str, index: int) -> None:
        """Thread border: whatever a source does wrong becomes the answer of those who wait."""
        source = self._sources[index]
        started = time.perf_counter()
        try:
            located = source.find(name)
            if located is not None:
                self._take(name, located)
        except AdapterError as error:
            log.warning("event=resolve_failed adapter=%s source=%r reason=%r", name, source.label, error.message)
            self._land(name, error)
            return
        except Exception:
            log.exception("event=resolver_failed adapter=%s source=%r", name, source.label)
            fault = f"the adapter source {source.label} failed; the cause is in the server's log"
            self._land(name, SourceUnreachable(fault))
            return
        if located is None:
            self._ask(name, index + 1)
            return
        log.info("event=resolved adapter=%s source=%r seconds=%.3f", name, source.label, time.perf_counter() - started)
        self._land(name, None)

    def _take(self, name: str, located: Located) -> None:
        try:
            self._load(name, located)
        except AdapterExists:  # Somebody loaded another under this name meanwhile, which is as good.
            _release(located)
        except BaseException:
            _release(located)
            raise

    def _land(self, name: str, failure: AdapterError | None) -> None:
        """Tell all who wait, and remember a failure for a while."""
        with self._lock:
            waiters = self._flights.pop(name, [])
            if failure is None:
                self._failures.pop(name, None)
            elif not self._is_closed:
                seconds = UNREACHABLE_S if isinstance(failure, SourceUnreachable) else NOT_FOUND_S
                self._failures[name] = (failure, self._clock() + seconds)
                self._failures.move_to_end(name)
                while len(self._failures) > MAX_FAILURES:
                    self._failures.popitem(last=False)
        for waiter in waiters:
            if not waiter.set_running_or_notify_cancel():
                continue
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure.with_traceback(None))

    def _remembered(self, name: str) -> AdapterError | None:
        """With the lock held: the failure that still holds for a name."""
        found = self._failures.get(name)
        if found is None:
            return None
        failure, until = found
        if self._clock() < until:
            return failure
        del self._failures[name]
        return None


def _not_found(name: str) -> AdapterNotFound:
    return AdapterNotFound(f"The model `{str(name)[:200]}` does not exist.", param="model")


def _release(located: Located) -> None:
    if located.lease is not None:
        located.lease.release()
