"""Blocks are neither lost nor doubled, and the prefix cache finds exactly what was published."""

from __future__ import annotations

import random

import pytest

from engine.block_pool import BlockPool, hash_block, root_hash


def test_a_random_walk_keeps_every_block_accounted_for() -> None:
    chooser = random.Random(0)
    pool = BlockPool(40)
    held: list[list[int]] = []
    counter = 0
    for _ in range(3000):
        action = chooser.random()
        if action < 0.4:
            blocks = pool.allocate(chooser.randint(1, 6))
            if blocks is not None:
                held.append(blocks)
        elif action < 0.6 and held:
            pool.release(held.pop(chooser.randrange(len(held))), keep_content=chooser.random() < 0.8)
        elif action < 0.8 and held:
            counter += 1
            pool.publish(chooser.choice(chooser.choice(held)), hash_block(root_hash(None), [counter % 50], []))
        else:
            matched = pool.match([hash_block(root_hash(None), [chooser.randrange(50)], [])])
            if matched:
                pool.take(matched)
                held.append(matched)
        pool.check_integrity(held)
    assert pool.num_cached > 0


def test_integrity_check_sees_a_lost_block() -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(6)
    assert sorted(pool.allocate(5) or []) == [1, 2, 3, 4, 5]
    assert pool.allocate(1) is None


def test_a_released_block_is_found_until_it_is_used_again() -> None:
    pool = BlockPool(4)
    (first, second, third) = pool.allocate(3) or []
    key = hash_block(root_hash(None), [1, 2], [])
    pool.publish(first, key)
    pool.release([first])
    assert pool.match([key]) == [first]
    assert pool.allocate(1) == [first]
    assert pool.match([key]) == []
    pool.release([first, second, third])


def test_forgotten_content_is_not_found() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1) or []
    key = hash_block(root_hash(None), [1], [])
    pool.publish(blocks[0], key)
    pool.release(blocks, keep_content=False)
    assert pool.match([key]) == []


def test_hashes_differ_by_adapter_parent_tokens_media_and_media_place() -> None:
    base = root_hash(None)
    hashes = [
        hash_block(base, [1, 2], []),
        hash_block(root_hash("sha256:a"), [1, 2], []),
        hash_block(root_hash("sha256:b"), [1, 2], []),
        hash_block(base, [2, 1], []),
        hash_block(hash_block(base, [1, 2], []), [1, 2], []),
        hash_block(base, [1, 2], ["clip@0"]),
        hash_block(base, [1, 2], ["clip@1"]),
        hash_block(base, [1, 2], ["other@0"]),
    ]
    assert len(set(hashes)) == len(hashes)
