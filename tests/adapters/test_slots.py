"""GPU rows: a reference model of an LRU with references, against the pool, and a writer that checks what it is told."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from adapters.generation import Generation
from adapters.intake import read_generation
from adapters.slots import SlotPool
from adapters.surface import ModelSurface


class Rows:
    """What the rows would hold."""

    def __init__(self, num_slots: int) -> None:
        self.rows: list[str | None] = [None] * num_slots
        self.fails = False

    def write(self, lora_slot: int, generation: Generation) -> None:
        if self.fails:
            raise RuntimeError("copy failed")
        self.rows[lora_slot] = generation.digest

    def clear(self, lora_slot: int) -> None:
        assert self.rows[lora_slot] is not None, "cleared twice"
        self.rows[lora_slot] = None


@pytest.fixture
def make(reference: Path, surface: ModelSurface):  # type: ignore[no-untyped-def]
    real = read_generation(reference, surface)
    return lambda digest: Generation(digest, real.spec, real.pairs, real.report)


def test_a_resident_generation_is_not_written_again(make) -> None:  # type: ignore[no-untyped-def]
    rows = Rows(2)
    pool = SlotPool(2, rows)
    assert pool.acquire(make("a")) == pool.acquire(make("a")) == pool.lookup("a") == 0
    assert pool.loads == 1 and pool.num_refs("a") == 2 and rows.rows == ["a", None]


def test_rows_in_use_are_never_taken(make) -> None:  # type: ignore[no-untyped-def]
    pool = SlotPool(2, Rows(2))
    pool.acquire(make("a"))
    pool.acquire(make("b"))
    assert not pool.can_acquire(make("c")) and pool.acquire(make("c")) is None
    pool.release(make("b"))
    assert pool.can_acquire(make("c")) and pool.acquire(make("c")) == 1
    assert pool.resident() == {"a": 0, "c": 1} and pool.evictions == 1


def test_the_least_recently_released_row_is_taken_first(make) -> None:  # type: ignore[no-untyped-def]
    pool = SlotPool(3, Rows(3))
    for digest in "abc":
        pool.acquire(make(digest))
    for digest in "bca":
        pool.release(make(digest))
    pool.acquire(make("d"))
    assert set(pool.resident()) == {"a", "c", "d"}


def test_a_dropped_row_is_cleared_once_nobody_refers_to_it(make) -> None:  # type: ignore[no-untyped-def]
    rows = Rows(2)
    pool = SlotPool(2, rows)
    pool.acquire(make("a"))
    pool.drop("a")
    pool.drop("unknown")
    assert rows.rows == ["a", None]
    pool.collect()
    assert rows.rows == ["a", None] and pool.lookup("a") == 0
    pool.release(make("a"))
    assert rows.rows == [None, None] and pool.lookup("a") is None
    pool.acquire(make("b"))
    pool.release(make("b"))
    pool.drop("b")
    pool.collect()
    assert rows.rows == [None, None] and pool.resident() == {}


def test_content_that_comes_back_after_a_drop_stays(make) -> None:  # type: ignore[no-untyped-def]
    pool = SlotPool(1, Rows(1))
    pool.acquire(make("a"))
    pool.drop("a")
    pool.collect()
    pool.acquire(make("a"))
    pool.release(make("a"))
    pool.release(make("a"))
    assert pool.lookup("a") == 0


def test_a_copy_that_fails_leaves_the_row_free(make) -> None:  # type: ignore[no-untyped-def]
    rows = Rows(1)
    pool = SlotPool(1, rows)
    rows.fails = True
    with pytest.raises(RuntimeError):
        pool.acquire(make("a"))
    pool.check_integrity()
    rows.fails = False
    assert pool.acquire(make("b")) == 0


def test_releasing_too_often_is_our_own_mistake(make) -> None:  # type: ignore[no-untyped-def]
    pool = SlotPool(1, Rows(1))
    pool.acquire(make("a"))
    pool.release(make("a"))
    with pytest.raises(AssertionError):
        pool.release(make("a"))


@pytest.mark.parametrize("seed", range(20))
def test_random_use_agrees_with_a_simple_model(make, seed: int) -> None:  # type: ignore[no-untyped-def]
    chance, rows = random.Random(seed), Rows(3)
    pool = SlotPool(3, rows)
    held: list[str] = []
    for _ in range(300):
        digest = chance.choice("abcdef")
        action = chance.choice(["acquire", "acquire", "release", "release", "drop"])
        if action == "acquire":
            can = pool.can_acquire(make(digest))
            lora_slot = pool.acquire(make(digest))
            assert (lora_slot is not None) == can == (digest in held or len(set(held)) < 3)
            if lora_slot is not None:
                held.append(digest)
                assert rows.rows[lora_slot] == digest
        elif action == "release" and held:
            pool.release(make(held.pop(chance.randrange(len(held)))))
        elif action == "drop":
            pool.drop(digest)
            pool.collect()
        pool.check_integrity()
        assert all(rows.rows[lora_slot] == name for name, lora_slot in pool.resident().items())
        assert set(held) <= set(pool.resident())


def test_drops_may_come_from_other_threads(make) -> None:  # type: ignore[no-untyped-def]
    pool = SlotPool(8, Rows(8))
    digests = "abcdefgh"
    for digest in digests:
        pool.acquire(make(digest))
        pool.release(make(digest))
    threads = [threading.Thread(target=pool.drop, args=(digest,)) for digest in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.collect()
    assert pool.resident() == {}


class Copy:
    """A copy that ends when the test says so."""

    def __init__(self) -> None:
        self.state = "running"

    def is_ready(self) -> bool:
        if self.state == "failed":
            raise RuntimeError("copy failed")
        return self.state == "ready"

    def has_failed(self) -> bool:
        return self.state == "failed"

    def wait(self) -> None:
        if not self.is_ready():
            self.state = "ready"


class SlowRows(Rows):
    """Rows that are filled in the background."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.copies: dict[str, Copy] = {}

    def write(self, lora_slot: int, generation: Generation) -> Copy:
        super().write(lora_slot, generation)
        self.copies[generation.digest] = Copy()
        return self.copies[generation.digest]


def test_a_row_is_ready_when_its_copy_is(make) -> None:  # type: ignore[no-untyped-def]
    rows = SlowRows(1)
    pool = SlotPool(1, rows)
    assert pool.acquire(make("a")) == 0 and not pool.is_ready(make("a")) and not pool.can_acquire(make("b"))
    rows.copies["a"].state = "ready"
    assert pool.is_ready(make("a"))
    pool.release(make("a"))
    pool.acquire(make("b"))
    pool.wait(make("b"))
    assert rows.copies["b"].state == "ready" and pool.is_ready(make("b"))
    synchronous = SlotPool(1, Rows(1))
    synchronous.acquire(make("a"))
    assert synchronous.is_ready(make("a"))


@pytest.mark.parametrize("ask", ["is_ready", "wait"])
def test_a_copy_that_fails_later_frees_the_row_after_its_last_reference(make, ask: str) -> None:  # type: ignore[no-untyped-def]
    rows = SlowRows(1)
    pool = SlotPool(1, rows)
    pool.acquire(make("a"))
    pool.acquire(make("a"))
    rows.copies["a"].state = "failed"
    for num_left in (1, 0):
        with pytest.raises(RuntimeError, match="copy failed"):
            getattr(pool, ask)(make("a"))
        pool.release(make("a"))
        assert pool.num_refs("a") == num_left
        pool.check_integrity()
    assert pool.resident() == {} and rows.rows == [None]
    pool.acquire(make("a"))
    assert not pool.is_ready(make("a")) and pool.loads == 2


def test_prefetch_fills_a_free_or_idle_row_and_leaves_rows_in_use(make) -> None:  # type: ignore[no-untyped-def]
    rows = SlowRows(1)
    pool = SlotPool(1, rows)
    pool.prefetch(make("a"))
    pool.prefetch(make("a"))
    assert pool.resident() == {"a": 0} and pool.num_refs("a") == 0 and pool.loads == 1
    pool.prefetch(make("b"))  # While the copy of "a" is under way: the later write counts.
    assert pool.resident() == {"b": 0} and rows.rows == ["b"]
    pool.acquire(make("b"))
    pool.prefetch(make("c"))
    assert pool.resident() == {"b": 0}
    pool.check_integrity()


def test_a_prefetch_that_failed_is_tried_again_by_the_request(make) -> None:  # type: ignore[no-untyped-def]
    rows = SlowRows(1)
    pool = SlotPool(1, rows)
    pool.prefetch(make("a"))
    rows.copies["a"].state = "failed"
    assert pool.acquire(make("a")) == 0 and pool.loads == 2 and not pool.is_ready(make("a"))
    pool.check_integrity()
