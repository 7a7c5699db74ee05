"""A user's class as a source of adapters: `package.module:Class`, or one that was registered.

Its coroutines run on an event loop of their own, in a thread of their own, so one that blocks holds up no other source.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from adapters.errors import AdapterError, InvalidSource, SourceUnreachable
from adapters.located import Located
from adapters.resolvers.base import LoRAResolver, LoRAResolverRegistry, ResolvedLoRA

log = logging.getLogger(__name__)

TIMEOUT_S = 600.0


class CustomSource:
    """Asks one user's resolver.

    Args:
        resolver: the user's object.
        base_model_name: what it is told of the base model.
        locate: turns the address that it answers with into a folder.
        timeout_s: seconds that it may take, its own download included.
    """

    def __init__(
        self,
        resolver: LoRAResolver,
        base_model_name: str,
        locate: Callable[[str], Located],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.label = type(resolver).__name__
        self.resolver = resolver
        self._base_model_name = base_model_name
        self._locate = locate
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asking: set[concurrent.futures.Future[ResolvedLoRA | None]] = set()
        self._is_closed = False

    def find(self, lora_name: str) -> Located | None:
        """What the user's class answers; its faults are in the log, since their texts are not ours to show."""
        asking = self._start(lora_name)
        try:
            found = asking.result(self._timeout_s)
        except AdapterError:
            raise
        except FileNotFoundError:
            return None
        except (TimeoutError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as error:
            asking.cancel()
            raise SourceUnreachable(f"the adapter source {self.label} took too long; try again") from error
        except Exception as error:
            log.exception("event=resolver_failed source=%s adapter=%s", self.label, lora_name)
            fault = "cannot be reached" if isinstance(error, OSError) else "failed"
            raise SourceUnreachable(
                f"the adapter source {self.label} {fault}; the cause is in the server's log"
            ) from error
        finally:
            with self._lock:
                self._asking.discard(asking)
        return None if found is None else self._locate(str(found.lora_path))

    def close(self) -> None:
        """Cancel what the user's class is doing, and end the thread; whoever asks it hears at once, even if it hangs."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            asking = list(self._asking)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(_cancel_all, self._loop)
        for one in asking:
            one.cancel()

    def _start(self, lora_name: str) -> concurrent.futures.Future[ResolvedLoRA | None]:
        with self._lock:
            if self._is_closed:
                raise SourceUnreachable("the server is shutting down")
            asking = asyncio.run_coroutine_threadsafe(self._ask(lora_name), self._running_loop())
            self._asking.add(asking)
            return asking

    async def _ask(self, lora_name: str) -> ResolvedLoRA | None:
        found = self.resolver.resolve_lora(self._base_model_name, lora_name)
        return await found if inspect.isawaitable(found) else found

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """With the lock held: the loop, begun where there is none."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), name=f"resolver-{self.label}", daemon=True).start()
        return self._loop


def load_resolver(spec: str) -> LoRAResolver:
    """The object that `package.module:Class` names: the instance of the class that was registered, else a new
    one, or the object itself where the name is not a class's.

    Raises `InvalidSource`.
    """
    module_name, _, attribute = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
        # A module may register an instance while it is imported; a second one would be of no use.
        made = [one for one in LoRAResolverRegistry.snapshot().values() if type(one) is found]
        resolver: Any = made[0] if made else found() if inspect.isclass(found) else found
    except Exception as error:
        log.exception("event=resolver_not_loaded spec=%s", spec)
        raise InvalidSource(
            f"--lora-resolver {spec}: it cannot be loaded ({type(error).__name__}: {error}); check that the module is on "
            "PYTHONPATH and that the class takes no arguments",
            param="lora_resolver",
        ) from error
    if not callable(getattr(resolver, "resolve_lora", None)):
        raise InvalidSource(
            f"--lora-resolver {spec}: it has no method resolve_lora(base_model_name, lora_name)", param="lora_resolver"
        )
    chosen: LoRAResolver = resolver
    return chosen


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """On the loop: cancel every task, and stop once they had a turn to clean up."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    ended = asyncio.gather(*tasks, return_exceptions=True)
    ended.add_done_callback(lambda _: loop.stop())
