"""The part of the service that lists, loads and changes adapters, as one caller may.

Owns the threads on which the adapter manager blocks, the order of changes to a name, and their audit. Knows nothing of
HTTP and of prompts. `service` builds on it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ParamSpec, TypeVar

from adapters.errors import AdapterNotFound
from api.audit import Audit
from api.errors import RuntimeUpdatingOff
from api.settings import ServerSettings
from api.tenants import Caller, Role
from api.turns import KeyedTurns
from engine.errors import AppError, InvalidRequest

if TYPE_CHECKING:
    from adapters.manager import AdapterManager
    from adapters.records import AdapterInfo, VersionInfo
    from adapters.resolvers import DownloadInfo
    from adapters.upload import ProbeReport, UploadReport
    from engine.engine import Engine

T = TypeVar("T")
Params = ParamSpec("Params")

MANAGER_THREADS = 8
LOAD_THREADS = 8
UploadFiles = Mapping[str, Path | bytes | BinaryIO]


class AdapterService:
    """Adapters of an engine, by the rules of this server.

    Attributes:
        engine: whose adapters they are.
        settings: the server's settings, resolved.
        caller: for whom this view works.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.caller = Caller("the server", Role.ADMIN)
        self._audit = Audit(None if settings.audit_log is None else Path(settings.audit_log))
        # What only looks or points never waits behind what reads files or fetches them.
        self._pool = ThreadPoolExecutor(MANAGER_THREADS, thread_name_prefix="adapters")
        self._load_pool = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="adapter-changes")
        self._turns = KeyedTurns()

    @property
    def adapters(self) -> AdapterManager:
        """The adapter manager."""
        return self.engine.adapters

    def require_updates(self) -> None:
        """Raise `RuntimeUpdatingOff` unless adapters may be changed while the server runs."""
        if not self.engine.config.enable_lora:
            raise InvalidRequest("This server was started with --no-enable-lora and serves no adapters.")
        if not self.settings.allow_runtime_lora_updating:
            raise RuntimeUpdatingOff(
                "Adapters cannot be changed while this server runs; start it with --allow-runtime-lora-updating."
            )

    async def _manage(self, work: Callable[Params, T], *args: Params.args, **kwargs: Params.kwargs) -> T:
        """Run a call of the manager that blocks for moments only."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))

    async def _change(
        self, action: str, name: str, work: Callable[Params, T], *args: Params.args, **kwargs: Params.kwargs
    ) -> T:
        """Run a call of the manager that may read files for a name; those who wait for the name's turn hold no thread."""
        async with self._turn(action, name):
            return await asyncio.get_running_loop().run_in_executor(self._load_pool, partial(work, *args, **kwargs))

    @asynccontextmanager
    async def _turn(self, action: str, name: str) -> AsyncIterator[None]:
        """The right to change a name: on record, and one after another."""
        with self._audit.change(self.caller.name, action, name):
            async with self._turns.hold(name):
                yield

    async def list_adapters(self) -> list[AdapterInfo]:
        """Every adapter that has a name, and exists for the caller."""
        return [info for info in await self._manage(self.adapters.list) if self.caller.may_use(info.name)]

    def _check_exists(self, name: str) -> None:
        if not self.caller.may_use(name):
            raise AdapterNotFound(f"The model `{name[:200]}` does not exist.", param="model")

    async def get_adapter(self, name: str) -> AdapterInfo:
        """One adapter; raises `AdapterNotFound`."""
        self._check_exists(name)
        return await self._manage(self.adapters.get, name)

    @property
    def default_mm_loras(self) -> dict[str, str]:
        """Modality -> the adapter that answers it by itself, as far as that exists for the caller."""
        defaults = self.engine.default_mm_loras
        return {modality: name for modality, name in defaults.items() if self.caller.may_use(name)}

    def is_on_disk(self, name: str) -> bool:
        """Whether an adapter must be read before it can answer; False for a name that does not exist."""
        return self.adapters.contains(name) and self.adapters.get(name).state == "disk"

    async def prefetch_adapter(self, name: str) -> None:
        """Begin to bring an adapter into memory, for one that will probably be asked for next; nothing for an unknown name."""
        try:
            await self.get_adapter(name)
        except AdapterNotFound:
            return
        self.engine.prefetch(name)

    async def export_adapter(self, name: str) -> Path:
        """A new zip of an adapter's files, which the caller deletes; raises `AdapterNotFound`, or that files are gone."""
        self._check_exists(name)
        return await asyncio.get_running_loop().run_in_executor(self._load_pool, self._export, name)

    def _export(self, name: str) -> Path:
        with tempfile.NamedTemporaryFile(prefix="adapter-", suffix=".zip", delete=False) as target:
            try:
                self.adapters.export(name, target)
            except BaseException:
                Path(target.name).unlink()
                raise
        return Path(target.name)

    async def load_adapter(
        self, name: str, path: str, *, load_inplace: bool = False, base_model_name: str | None = None
    ) -> AdapterInfo:
        """Load an adapter from a folder, hub id or address; raises `AppError`."""
        self.require_updates()
        return await self._change(
            "load", name, self.adapters.load, name, path, load_inplace=load_inplace, base_model_name=base_model_name
        )

    def downloads(self) -> list[DownloadInfo]:
        """Adapters that are being downloaded now."""
        return self.engine.sources.downloads.list()

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away; answers under way end on it. Raises `AdapterNotFound`."""
        self.require_updates()
        async with self._turn("unload", name):
            await self._manage(self.adapters.unload, name)

    async def delete_adapter(self, name: str) -> None:
        """Unload an adapter and delete the files of an upload; raises `AdapterNotFound`."""
        self.require_updates()
        async with self._turn("delete", name):
            await self._manage(self.adapters.delete, name)

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo:
        """Keep an adapter in CPU memory, or stop doing so; raises `AdapterNotFound`."""
        self.require_updates()
        await self._change("pin" if is_pinned else "unpin", name, self.adapters.pin, name, is_pinned)
        return await self.get_adapter(name)

    async def roll_back_adapter(self, name: str, generation: str) -> AdapterInfo:
        """Point a name to one of its versions; raises `AdapterNotFound`, or why that version cannot be had."""
        self.require_updates()
        return await self._change("roll_back", name, self.adapters.rollback, name, generation)

    async def set_default_for(self, name: str, modalities: Sequence[str]) -> AdapterInfo:
        """Let an adapter answer exactly these modalities by itself; raises `AppError`."""
        self.require_updates()
        return await self._change("set_default", name, self.engine.set_default_for, name, modalities)

    async def adapter_versions(self, name: str) -> list[VersionInfo]:
        """What a name points to and what it can be rolled back to, newest first; raises `AdapterNotFound`."""
        self._check_exists(name)
        return await self._manage(self.adapters.versions, name)

    async def inspect_upload(self, files: UploadFiles) -> UploadReport:
        """Check an upload, try it out, and keep nothing of it."""
        return await asyncio.get_running_loop().run_in_executor(self._load_pool, self.engine.inspect_upload, files)

    async def probe_adapter(self, name: str) -> ProbeReport | None:
        """How much an adapter changes the base model's answers; None where it cannot be tried any more."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._load_pool, self.engine.probe, name)
        except AppError:
            return None

    async def install_upload(self, name: str, files: UploadFiles, *, load_inplace: bool = False) -> AdapterInfo:
        """Store an uploaded adapter and list it; it is there again after a restart. Raises `AppError`."""
        self.require_updates()
        return await self._change("upload", name, self.adapters.install_upload, name, files, load_inplace=load_inplace)
