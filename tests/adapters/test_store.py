"""The CPU tier keeps what is borrowed or pinned, and lets everything else go in the order of its last use."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.generation import Generation
from adapters.intake import read_generation
from adapters.store import GenerationStore
from adapters.surface import ModelSurface


@pytest.fixture
def make(reference: Path, surface: ModelSurface):  # type: ignore[no-untyped-def]
    """Generations that differ by digest and size only."""
    real = read_generation(reference, surface)

    def generation(digest: str, num_bytes: int = 10) -> Generation:
        return Generation(digest, real.spec, real.pairs, replace(real.report, num_bytes=num_bytes))

    return generation


def test_the_least_recently_used_leaves_first(make) -> None:  # type: ignore[no-untyped-def]
    store = GenerationStore(2)
    for digest in ("a", "b"):
        store.add(make(digest), digest).release()
    handle = store.borrow("a", "a")
    assert handle is not None
    handle.release()
    store.add(make("c"), "c").release()
    assert [store.contains(digest) for digest in "abc"] == [True, False, True] and store.evictions == 1


def test_what_is_borrowed_or_pinned_is_never_evicted(make) -> None:  # type: ignore[no-untyped-def]
    store = GenerationStore(1)
    borrowed = store.add(make("a"), "a")
    store.add(make("b"), "b").release()
    assert store.contains("a") and not store.contains("b")
    store.revive("a", is_pinned=True)
    borrowed.release()
    store.add(make("c"), "c").release()
    assert store.contains("a") and not store.contains("c")
    store.revive("a", is_pinned=False)
    store.add(make("d"), "d").release()
    assert not store.contains("a") and store.contains("d")


def test_bytes_are_bounded_too_and_the_least_recently_used_leaves_first(make) -> None:  # type: ignore[no-untyped-def]
    store = GenerationStore(9, max_bytes=100)
    for digest, num_bytes in (("a", 40), ("b", 40), ("c", 20)):
        store.add(make(digest, num_bytes), digest).release()
    assert (store.usage().num_bytes, store.evictions) == (100, 0)
    store.add(make("d", 30), "d").release()
    assert [store.contains(digest) for digest in "abcd"] == [False, True, True, True] and store.usage().num_bytes == 90
    held = store.add(make("e", 90), "e")
    assert store.usage().num_bytes == 90 and not any(map(store.contains, "bcd"))
    store.add(make("f", 30), "f").release()
    assert not store.contains("f"), "there is no room beside what is in use"
    held.release()
    assert store.contains("e")


def test_what_never_fits_is_kept_while_it_is_used_and_takes_nothing_else_along(make) -> None:  # type: ignore[no-untyped-def]
    store = GenerationStore(9, max_bytes=100)
    store.add(make("small", 60), "small").release()
    huge = store.add(make("huge", 101), "huge")
    assert store.contains("huge") and not store.contains("small")
    huge.release()
    assert not store.contains("huge")
    pinned = store.add(make("huge", 101), "huge")
    store.revive("huge", is_pinned=True)
    pinned.release()
    assert store.contains("huge") and store.usage().num_pinned == 1
    store.revive("huge", is_pinned=False)
    assert not store.contains("huge") and store.usage().num_bytes == 0


def test_equal_content_is_kept_once(make) -> None:  # type: ignore[no-untyped-def]
    store = GenerationStore(4)
    first, second = store.add(make("a"), "x"), store.add(make("a"), "y")
    assert first.generation is second.generation and (first.name, second.name) == ("x", "y")
    assert store.usage().num_resident == 1 and store.num_refs("a") == 2


def test_retired_content_is_freed_with_its_last_handle(make) -> None:  # type: ignore[no-untyped-def]
    store = GenerationStore(4)
    handle = store.add(make("a"), "a")
    fork = handle.fork()
    alive = weakref.ref(handle.generation)
    store.retire("a")
    handle.release()
    handle.release()
    assert store.contains("a") and store.num_refs("a") == 1
    fork.release()
    assert not store.contains("a")
    del handle, fork
    gc.collect()
    assert alive() is None


def test_a_released_handle_cannot_be_forked(make) -> None:  # type: ignore[no-untyped-def]
    handle = GenerationStore(1).add(make("a"), "a")
    with handle:
        pass
    with pytest.raises(AssertionError):
        handle.fork()


def test_a_generation_cannot_be_changed(make) -> None:  # type: ignore[no-untyped-def]
    generation = make("a")
    with pytest.raises(AttributeError):
        generation.digest = "b"
    with pytest.raises(TypeError):
        generation.pairs["x"] = None


@pytest.mark.parametrize("seed", range(20))
def test_random_use_never_breaks_the_books(make, seed: int) -> None:  # type: ignore[no-untyped-def]
    store, chance, handles = GenerationStore(3, max_bytes=45), random.Random(seed), []
    num_bytes = dict(zip("abcdef", (5, 10, 15, 20, 30, 50), strict=True))
    for _ in range(200):
        digest = chance.choice("abcdef")
        action = chance.choice(["add", "borrow", "release", "release", "retire", "pin", "unpin"])
        if action == "add":
            handles.append(store.add(make(digest, num_bytes[digest]), digest))
        elif action == "borrow":
            handle = store.borrow(digest, digest)
            assert (handle is not None) == store.contains(digest)
            handles += [handle] if handle else []
        elif action == "release" and handles:
            handles.pop(chance.randrange(len(handles))).release()
        elif action == "retire":
            store.retire(digest)
        else:
            store.revive(digest, is_pinned=action == "pin")
        store.check_integrity()
        assert all(store.contains(handle.generation.digest) for handle in handles)
