"""Unknown names: asked in order, once for all who want one, with bounded memory of failures, and nobody else waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.errors import (
    AdapterError,
    AdapterExists,
    AdapterFilesNotFound,
    AdapterNotFound,
    AdapterRefused,
    InvalidSource,
    SourceUnreachable,
)
from adapters.located import Lease, Located
from adapters.resolvers import LoRAResolver, LoRAResolverRegistry, Resolution, Sources, check_spec
from adapters.resolvers import resolution as resolution_module
from adapters.resolvers.custom import CustomSource
from adapters.resolvers.local import LocalSource


class Fake:
    """A source that knows some names, fails on others, and can be made to wait."""

    label = "fake"

    def __init__(self, *known: str, faults: dict[str, Exception] | None = None) -> None:
        self.known, self.faults = known, faults or {}
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_closed = False

    def find(self, lora_name: str) -> Located | None:
        self.asked.append(lora_name)
        assert self.gate.wait(120)
        if lora_name in self.faults:
            raise self.faults[lora_name]
        return Located(Path(lora_name), f"fake:{lora_name}") if lora_name in self.known else None

    def close(self) -> None:
        self.is_closed = True
        self.gate.set()


class World:
    """A resolution over fake sources, with what was loaded and a clock that stands still."""

    def __init__(self, *sources: Fake) -> None:
        self.loaded: dict[str, str] = {}
        self.refusals: dict[str, AdapterError] = {}
        self.now = 0.0
        self.resolution = Resolution(sources, load=self.load, is_known=self.loaded.__contains__, clock=lambda: self.now)

    def load(self, name: str, located: Located) -> None:
        if name in self.refusals:
            raise self.refusals[name]
        self.loaded[name] = located.source

    def ask(self, name: str) -> None:
        self.resolution.start(name).result(120)


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make_world(*sources: Fake) -> World:
        worlds.append(World(*sources))
        return worlds[-1]

    yield make_world
    for world in worlds:
        world.resolution.check_integrity()
        world.resolution.close()


def test_sources_are_asked_in_order_and_the_first_that_knows_wins(make: Callable[..., World]) -> None:
    first, second, third = Fake("a"), Fake("b"), Fake("a", "b")
    world = make(first, second, third)
    world.ask("a")
    world.ask("b")
    assert world.loaded == {"a": "fake:a", "b": "fake:b"}
    assert (first.asked, second.asked, third.asked) == (["a", "b"], ["b"], [])


def test_many_who_want_one_name_cause_one_resolution(make: Callable[..., World]) -> None:
    source = Fake("a")
    source.gate.clear()
    world = make(source)
    waiters = [world.resolution.start("a") for _ in range(32)]
    assert waiters[5].cancel()
    source.gate.set()
    for waiter in waiters[:5] + waiters[6:]:
        waiter.result(120)
    assert source.asked == ["a"] and world.loaded == {"a": "fake:a"}


def test_a_name_that_nobody_knows_is_remembered_for_a_while(make: Callable[..., World]) -> None:
    source = Fake()
    world = make(source)
    for _ in range(3):
        with pytest.raises(AdapterNotFound, match="`x` does not exist"):
            world.ask("x")
    assert source.asked == ["x"]
    source.known = ("x",)
    world.now = resolution_module.NOT_FOUND_S
    world.ask("x")
    assert source.asked == ["x", "x"] and "x" in world.loaded


def test_what_is_remembered_is_bounded(make: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution_module, "MAX_FAILURES", 8)
    source = Fake()
    world = make(source)
    for number in range(20):
        with pytest.raises(AdapterNotFound):
            world.ask(f"x{number}")
    world.resolution.check_integrity()
    with pytest.raises(AdapterNotFound):
        world.ask("x0")
    assert source.asked.count("x0") == 2 and source.asked.count("x19") == 1


def test_names_in_flight_are_bounded(make: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution_module, "MAX_FLIGHTS", 6)
    source = Fake()
    source.gate.clear()
    world = make(source)
    waiting = [world.resolution.start(f"x{number}") for number in range(6)]
    with pytest.raises(SourceUnreachable, match="6 adapters are being looked for"):
        world.ask("y")
    source.gate.set()
    assert all(isinstance(waiter.exception(20), AdapterNotFound) for waiter in waiting)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../b", "a\0b", "..", "~", "a//b", "C:\\x", "x" * 200, "", "auto"]
)
def test_names_that_could_lead_astray_reach_no_source(name: str, make: Callable[..., World]) -> None:
    source = Fake(name)
    world = make(source)
    with pytest.raises(AdapterNotFound):
        world.ask(name)
    assert source.asked == [] and world.loaded == {}


@pytest.mark.parametrize(
    ("fault", "kind", "status"),
    [
        (SourceUnreachable("down"), SourceUnreachable, 503),
        (AdapterFilesNotFound("gated"), AdapterFilesNotFound, 404),
        (KeyError("our own mistake"), SourceUnreachable, 503),
    ],
)
def test_a_source_that_fails_ends_the_search(
    fault: Exception, kind: type[AdapterError], status: int, make: Callable[..., World]
) -> None:
    later = Fake("a")
    world = make(Fake(faults={"a": fault}), later)
    with pytest.raises(kind) as caught:
        world.ask("a")
    assert caught.value.status == status and later.asked == [] and "our own mistake" not in caught.value.message


def test_what_is_found_but_refused_says_why_and_goes_to_no_later_source(make: Callable[..., World]) -> None:
    first, later = Fake("a"), Fake("a")
    world = make(first, later)
    world.refusals["a"] = AdapterRefused(["rank 512 is over the limit"], name="a")
    for _ in range(2):
        with pytest.raises(AdapterRefused, match="rank 512") as caught:
            world.ask("a")
    assert caught.value.status == 400 and (first.asked, later.asked) == (["a"], [])


def test_a_name_that_is_taken_meanwhile_is_found_and_the_download_given_back(make: Callable[..., World]) -> None:
    given_back: list[str] = []
    source = Fake()
    source.find = lambda name: Located(Path("x"), "x", lease=Lease(lambda: given_back.append(name)))  # type: ignore[method-assign]
    world = make(source)
    world.refusals["a"] = AdapterExists("taken")
    world.ask("a")
    world.refusals["b"] = AdapterRefused(["bad"])
    with pytest.raises(AdapterRefused):
        world.ask("b")
    assert given_back == ["a", "b"]


def test_a_slow_source_holds_up_no_other(make: Callable[..., World]) -> None:
    slow, quick = Fake("slow"), Fake("quick")
    slow.gate.clear()
    world = make(quick, slow)
    waiting = [world.resolution.start(f"slow-{number}") for number in range(resolution_module.NUM_THREADS + 4)]
    world.ask("quick")
    assert not any(waiter.done() for waiter in waiting)
    slow.gate.set()
    assert all(isinstance(waiter.exception(20), AdapterNotFound) for waiter in waiting)


def test_closing_answers_who_waits_and_tells_the_sources() -> None:
    source = Fake("a")
    source.gate.clear()
    world = World(source)
    waiters: list[Future[None]] = [world.resolution.start(name) for name in ("a", "b", "c", "d", "e", "f")]
    world.resolution.close()
    assert all(isinstance(waiter.exception(20), SourceUnreachable) for waiter in waiters) and source.is_closed
    with pytest.raises(SourceUnreachable, match="shutting down"):
        world.ask("g")


# Folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("root/sql", "root/team/sql", "root/empty", "outside"):
        (tmp_path / name).mkdir(parents=True)
        if not name.endswith("empty"):
            (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "root"


def test_a_folder_knows_the_adapters_below_it_and_no_others(folder: Path) -> None:
    source = LocalSource(folder)
    for name in ("sql", "team/sql"):
        found = source.find(name)
        assert found is not None and (found.folder, found.source) == (folder / name, str(folder / name))
    assert [source.find(name) for name in ("nope", "empty", "team", "link")] == [None] * 4


def test_a_folder_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidSource, match="there is no such folder"):
        Sources([f"local:{tmp_path / 'none'}"], base_model_name="base", download_dir=tmp_path)


# Users' classes


class Mine(LoRAResolver):
    """A resolver with every kind of answer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.told: list[tuple[str, str]] = []
        self.cancelled = threading.Event()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        self.told.append((base_model_name, lora_name))
        if lora_name == "hangs":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        faults = {"gone": FileNotFoundError(), "down": ConnectionError("secret-host"), "bug": KeyError("secret")}
        if lora_name in faults:
            raise faults[lora_name]
        found = SimpleNamespace(lora_name=lora_name, lora_path=str(self.root / lora_name), lora_int_id=1)
        return found if lora_name == "sql" else None


def located(address: str) -> Located:
    return Located(Path(address), address)


def test_a_users_class_is_told_base_and_name_and_its_answer_is_used(folder: Path) -> None:
    mine = Mine(folder)
    source = CustomSource(mine, "base-model", located)
    found = source.find("sql")
    assert found is not None and found.folder == folder / "sql" and mine.told == [("base-model", "sql")]
    assert source.find("nope") is None and source.find("gone") is None
    for name, said in (("down", "source Mine cannot be reached"), ("bug", "source Mine failed")):
        with pytest.raises(SourceUnreachable, match=said) as caught:
            source.find(name)
        assert "secret" not in caught.value.message
    source.close()


def test_a_users_class_that_hangs_is_cancelled(folder: Path) -> None:
    mine = Mine(folder)
    source = CustomSource(mine, "base", located, timeout_s=0.1)
    while not mine.told:  # its thread may not have begun within the time
        with pytest.raises(SourceUnreachable, match="took too long"):
            source.find("hangs")
    assert mine.cancelled.wait(120)
    source.close()


def test_closing_twice_while_a_users_class_holds_its_thread_frees_who_asks_at_once(folder: Path) -> None:
    gate, is_asked = threading.Event(), threading.Event()

    class Blocking(LoRAResolver):
        """Never gives its event loop a chance."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            is_asked.set()
            gate.wait(120)

    source = CustomSource(Blocking(), "base", located)
    faults: list[Exception] = []

    def ask() -> None:
        try:
            source.find("any")
        except SourceUnreachable as fault:
            faults.append(fault)

    asking = threading.Thread(target=ask)
    asking.start()
    assert is_asked.wait(120)
    source.close()
    asking.join(60)
    is_free = not asking.is_alive()
    gate.set()
    asking.join(20)
    assert is_free and len(faults) == 1
    thread = next(each for each in threading.enumerate() if each.name == "resolver-Blocking")
    thread.join(20)
    source.close()


def test_registered_resolvers_come_after_those_of_the_flag_and_are_asked_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = (
        "from adapters.resolvers import LoRAResolver, LoRAResolverRegistry\n"
        "class Plugin(LoRAResolver):\n    async def resolve_lora(self, base_model_name, lora_name): return None\n"
        "made = Plugin()\nLoRAResolverRegistry.register_resolver('plugin', made)\nnot_one = 3\n"
    )
    (tmp_path / "my_plugin_module.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))

    def sources(*specs: str) -> list[Any]:
        return Sources(specs, base_model_name="base", download_dir=tmp_path).resolvers

    try:
        (asked,) = sources("my_plugin_module:Plugin")
        assert asked.resolver is LoRAResolverRegistry.get_resolver("plugin")
        assert [type(source) for source in sources(f"local:{folder}")] == [LocalSource, CustomSource]
        assert len(sources("my_plugin_module:made")) == 1
        for spec, said in (("my_plugin_module:not_one", "no method resolve_lora"), ("no_such:Class", "PYTHONPATH")):
            with pytest.raises(InvalidSource, match=said):
                sources(spec)
    finally:
        LoRAResolverRegistry.unregister_resolver("plugin")
    assert LoRAResolverRegistry.get_supported_resolvers() == set()


@pytest.mark.parametrize(
    "spec", ["local:/x", "hub:a/b", "hub:a/b@v1, c/d", "s3://bucket", "s3://b-1/a/b", "a.b:C", "m:obj"]
)
def test_good_items_pass_without_being_opened(spec: str) -> None:
    check_spec(spec)


@pytest.mark.parametrize(
    "spec", ["", "local:", "hub:", "hub:a", "hub:a/b/c", "hub:a/b,../c", "s3://", "s3:x", "/x", "a.b", "a:b.c", "a-b:C"]
)
def test_malformed_items_are_refused_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(InvalidSource, match=r"local:DIR, hub:OWNER/REPO"):
        check_spec(spec)
