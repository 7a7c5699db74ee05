"""A random walk over everything that can happen to adapters, beside a plain model of what must hold after each step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.errors import AdapterError, AdapterNotFound, DefaultStaysPinned
from adapters.generation import Generation, GenerationHandle
from adapters.manager import AdapterManager
from adapters.slots import SlotPool
from adapters.surface import ModelSurface
from tests.adapters.world import edit

NAMES = ("a", "b", "c", "d")
NUM_ROWS = 2


class Rows:
    """What the LoRA rows hold."""

    def __init__(self) -> None:
        self.digests: list[str | None] = [None] * NUM_ROWS

    def write(self, lora_slot: int, generation: Generation) -> None:
        self.digests[lora_slot] = generation.digest

    def clear(self, lora_slot: int) -> None:
        self.digests[lora_slot] = None


@pytest.fixture(scope="module")
def folders(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("contents")
    return [edit(reference, root / str(alpha), config={"lora_alpha": alpha}) for alpha in range(1, 7)]


class Walk:
    """The manager and a pool of rows as the engine joins them, and what they should know."""

    def __init__(self, seed: int, surface: ModelSurface, folders: list[Path], root: Path) -> None:
        self.chance, self.surface, self.folders, self.root = random.Random(seed), surface, folders, root
        self.rows = Rows()
        self.digest_of: dict[Path, str] = {}
        # name -> digest, and the same for what a restart would find
        self.current: dict[str, str] = {}
        self.stored: dict[str, str] = {}
        self.pinned: set[str] = set()
        self.stored_pins: set[str] = set()
        self.defaults: dict[str, str] = {}
        self.running: list[GenerationHandle] = []
        self.waiting: list[GenerationHandle] = []
        self.start()

    def start(self) -> None:
        self.pool = pool = SlotPool(NUM_ROWS, self.rows)
        self.manager = AdapterManager(
            self.surface, adapter_dir=self.root, max_cpu_loras=3, max_cpu_bytes=9_000, on_retire=pool.drop
        )
        self.manager.residency = lambda digest: pool.lookup(digest) is not None
        self.manager.restore()

    # Actions, by name

    def load(self) -> None:
        name, folder = self.chance.choice(NAMES), self.chance.choice(self.folders)
        is_taken = name in self.current
        try:
            info = self.manager.load(name, folder, load_inplace=self.chance.random() < 0.7)
        except AdapterError:
            assert is_taken
            return
        self.current[name] = str(info.generation)
        self.digest_of[folder] = str(info.generation)

    def upload(self) -> None:
        name, folder = self.chance.choice(NAMES), self.chance.choice(self.folders)
        files = {path.name: path for path in folder.iterdir()}
        info = self.manager.install_upload(name, files, load_inplace=True)
        self.current[name] = self.stored[name] = str(info.generation)
        self.stored_pins -= {name}
        self.stored_pins |= {name} & self.pinned

    def unload(self) -> None:
        name = self.chance.choice(NAMES)
        try:
            is_stored = self.manager.get(name).is_stored
            self.manager.unload(name)
        except AdapterNotFound:
            assert name not in self.current
            return
        del self.current[name]
        self.pinned.discard(name)
        if is_stored:
            self.stored.pop(name)
            self.stored_pins.discard(name)

    def pin(self) -> None:
        name, is_pinned = self.chance.choice(NAMES), self.chance.random() < 0.5
        try:
            self.manager.pin(name, is_pinned)
        except AdapterNotFound:
            assert name not in self.current
            return
        except DefaultStaysPinned:
            assert name in self.defaults.values() and not is_pinned
            return
        self.pinned = self.pinned | {name} if is_pinned else self.pinned - {name}
        if name in self.stored:
            self.stored_pins = self.stored_pins | {name} if is_pinned else self.stored_pins - {name}

    def roll_back(self) -> None:
        if self.current:
            name = self.chance.choice([*self.current])
            version = self.chance.choice(self.manager.versions(name))
            info = self.manager.rollback(name, version.generation)
            assert info.generation == version.generation
            self.current[name] = version.generation
            if version.is_stored:
                self.stored[name] = version.generation

    def set_default(self) -> None:
        modality, name = self.chance.choice(["audio", "image"]), self.chance.choice([None, *NAMES])
        try:
            self.manager.set_default(modality, name)
        except AdapterNotFound:
            assert name not in self.current
            return
        self.defaults.pop(modality, None)
        self.defaults |= {} if name is None else {modality: name}

    def request(self) -> None:
        name = self.chance.choice(NAMES)
        try:
            handle = self.manager.acquire(name)
        except AdapterNotFound:
            assert name not in self.current
            return
        assert handle.generation.digest == self.current[name]
        self.waiting.append(handle)

    def end(self) -> None:
        if self.running:
            handle = self.running.pop(self.chance.randrange(len(self.running)))
            self.pool.release(handle.generation)
            handle.release()
        elif self.waiting:
            self.waiting.pop(self.chance.randrange(len(self.waiting))).release()

    def restart(self) -> None:
        while self.running or self.waiting:
            self.end()
        self.manager.check_integrity()
        self.manager.close()
        self.current, self.pinned, self.defaults = dict(self.stored), set(self.stored_pins), {}
        self.rows.digests = [None] * NUM_ROWS
        self.start()

    def step(self) -> None:
        actions = [self.load, self.upload, self.unload, self.pin, self.roll_back, self.set_default, self.request]
        weights = [4, 2, 2, 3, 3, 2, 8]
        self.chance.choices([*actions, self.end, self.restart], [*weights, 7, 0.3])[0]()
        self.pool.collect()
        for handle in list(self.waiting):
            if self.pool.acquire(handle.generation) is not None:
                self.waiting.remove(handle)
                self.running.append(handle)

    def check(self) -> None:
        self.manager.check_integrity()
        self.pool.check_integrity()
        infos = {info.name: info for info in self.manager.list()}
        assert {name: info.generation for name, info in infos.items()} == self.current
        kept = self.pinned | set(self.defaults.values())
        assert {name for name, info in infos.items() if info.pinned} == kept & self.current.keys()
        # What was restored with a pin is read when it is first needed, and stays from then on.
        assert all(infos[name].state != "disk" or infos[name].num_loads == 0 for name in kept & self.current.keys())
        assert self.manager.defaults() == self.defaults
        held = {handle.generation.digest for handle in self.running + self.waiting}
        known = held | set(self.current.values())
        assert set(self.pool.resident()) <= known, "a row of content that is gone"
        assert self.manager.stats().num_cpu <= len(known), "memory of content that is gone"
        for handle in self.running:
            assert self.rows.digests[self.pool.resident()[handle.generation.digest]] == handle.generation.digest
        for name in self.current:
            versions = self.manager.versions(name)
            assert [version.generation for version in versions if version.is_current] == [self.current[name]]
            assert len({version.generation for version in versions}) == len(versions) <= 5


@pytest.fixture
def walk(request: pytest.FixtureRequest, surface: ModelSurface, folders: list[Path], tmp_path: Path) -> Iterator[Walk]:
    walk = Walk(request.param, surface, folders, tmp_path / "own")
    yield walk
    walk.manager.close()


@pytest.mark.parametrize("walk", range(4), indirect=True)
def test_whatever_happens_names_content_rows_and_pins_agree(walk: Walk) -> None:
    for _ in range(250):
        walk.step()
        walk.check()
    while walk.running or walk.waiting:
        walk.end()
    for name in list(walk.current):
        walk.manager.unload(name)
    walk.pool.collect()
    assert walk.manager.stats().num_cpu == 0 and walk.pool.resident() == {} and walk.rows.digests == [None] * NUM_ROWS
