"""Blocks of the paged KV cache: who holds them, and which hold a prompt beginning that can be used again.

Owns ids, reference counts and content hashes; the tensors are `engine/kv_cache`'s. A block that nobody holds keeps its
content until it is needed, oldest first, so a later prompt with the same beginning finds it. Called by the scheduler on
the engine thread only.

Block 0 is never handed out: padded reads of shorter requests point at it, so it must stay zero.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from kernels import NULL_BLOCK


def hash_block(parent: bytes, token_ids: Sequence[int], media_keys: Sequence[str]) -> bytes:
    """Content hash of a full block: its tokens, the media that its placeholders stand for, and all that came before.

    `parent` is the previous block's hash, or `root_hash` of the adapter for the first block.
    """
    digest = hashlib.sha256(parent)
    digest.update(b"".join(token_id.to_bytes(4, "little") for token_id in token_ids))
    for key in media_keys:
        digest.update(key.encode())
    return digest.digest()


def root_hash(generation_digest: str | None, *, is_long: bool = False) -> bytes:
    """Start of the hash chain: KV computed under one adapter's content is never used for another's.

    Nor is KV under the frequencies of long contexts (`is_long`) used for short ones.
    """
    return hashlib.sha256(((generation_digest or "base") + "|long" * is_long).encode()).digest()


class BlockPool:
    """Hands out KV blocks and finds cached ones.

    Args:
        num_blocks: blocks in the pool, block 0 included.
        enable_prefix_caching: False makes `match` find nothing.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._num_refs = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found by hash."""
        return len(self._block_of)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest run of `hashes` from the first on; not taken yet (see `take`)."""
        matched: list[int] = []
        if self.enable_prefix_caching:
            for block_hash in hashes:
                block = self._block_of.get(block_hash)
                if block is None:
                    break
                matched.append(block)
        return matched

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` count as free today and would stop doing so when taken."""
        return sum(1 for block in blocks if self._num_refs[block] == 0)

    def take(self, blocks: Sequence[int]) -> None:
        """Hold matched blocks once more."""
        for block in blocks:
            if self._num_refs[block] == 0:
                del self._free[block]
            self._num_refs[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with unspecified content, or None (and no change) when so many are not free."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._num_refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int], *, keep_content: bool = True) -> None:
        """Let go of blocks; the last of a chain becomes the first to be used again, since it is the least shared.

        `keep_content=False` also forgets what they hold (a request whose numbers went wrong).
        """
        for block in reversed(blocks):
            assert self._num_refs[block] > 0, f"block {block} is released more often than taken"
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                self._free[block] = None
                if not keep_content:
                    self._forget(block)

    def exclusive(self, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that only one request holds."""
        return [block for block in blocks if self._num_refs[block] == 1]

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make a held, fully written block findable. Call after its keys and values are written."""
        assert self._num_refs[block] > 0, f"block {block} is published by nobody"
        if self.enable_prefix_caching and block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Assert that counts agree with `held`, the block lists of all requests, and that nothing is lost or doubled."""
        expected = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                expected[block] += 1
        assert expected == self._num_refs, "reference counts differ from the blocks that requests hold"
        free = set(self._free)
        assert NULL_BLOCK not in free and self._num_refs[NULL_BLOCK] == 0, "the null block was handed out"
        for block in range(1, self.num_blocks):
            assert (self._num_refs[block] == 0) == (block in free), f"block {block} is neither free nor held, or both"
        assert self._block_of == {block_hash: block for block, block_hash in self._hash_of.items()}
