"""Cached blocks by their keys.

Several blocks may share a key (see the framing in keys.py), and all of them are found. Every call is O(1), plus the blocks that
share the key.
"""

from __future__ import annotations

from kv_cache_manager_v2.reuse.block import Block


class KeyIndex:
    """The blocks of a tree by key."""

    def __init__(self, blocks: list[Block]) -> None:
        self._first: dict[bytes, Block] = {}
        self._others: dict[bytes, list[Block]] = {}  # further blocks of the same key; nearly always empty
        for block in blocks:
            self.add(block)

    def find(self, key: bytes) -> list[Block]:
        """All blocks with this key, in the order in which they were added."""
        first = self._first.get(key)
        if first is None:
            return []
        if not self._others:
            return [first]
        return [first, *self._others.get(key, [])]

    def add(self, block: Block) -> None:
        key = block.block_key()
        if self._first.setdefault(key, block) is not block:
            self._others.setdefault(key, []).append(block)

    def remove(self, block: Block) -> None:
        key = block.block_key()
        others = self._others.get(key)
        if others is None:
            del self._first[key]
            return
        if self._first[key] is block:
            self._first[key] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._others[key]

    def check(self, blocks: list[Block]) -> None:
        """Assert that the index holds exactly these blocks, each under its key."""
        assert len(self._first) + sum([len(others) for others in self._others.values()]) == len(blocks), (
            "the key index is out of date"
        )
        for block in blocks:
            assert block in self.find(block.block_key()), "the key index misses a block"
        assert all(self._others.values()), "the key index keeps an empty list"
