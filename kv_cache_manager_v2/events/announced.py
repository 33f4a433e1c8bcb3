"""The blocks that the stream has announced, by name.

Rule: a name is announced for one block at a time. Blocks can share a name (see `BlockHashes.name_of`); the later ones wait, and the
first of them is announced when the one before it is removed. So every stream can be read, whatever the names.
"""

from __future__ import annotations

from kv_cache_manager_v2.events.blocks import EventBlock
from kv_cache_manager_v2.events.hashes import BlockHashes, BlockName


class AnnouncedBlocks:
    """Announced blocks, each under its name. O(1) a call, plus the blocks that share the name."""

    def __init__(self, hashes: BlockHashes) -> None:
        self._hashes = hashes
        self._by_name: dict[BlockName, EventBlock] = {}
        self._waiting: dict[BlockName, list[EventBlock]] = {}  # nearly always empty
        self._by_key: dict[bytes, EventBlock] | None = None  # kept from the first look-up on, where names are not keys

    def blocks(self) -> list[EventBlock]:
        """All announced blocks, in the order of their announcement."""
        return list(self._by_name.values())

    def add(self, block: EventBlock) -> None:
        """Announce a block, or have it wait: then `block.waiting` is set."""
        name = self._hashes.name_of(block)
        if self._by_name.setdefault(name, block) is not block:
            block.waiting = True
            self._waiting.setdefault(name, []).append(block)
        elif self._by_key is not None:
            self._by_key[self._hashes.key_of(block)] = block

    def remove(self, block: EventBlock) -> EventBlock | None:
        """Remove a block. Returns the block that is announced in its place, which no longer waits."""
        name = self._hashes.name_of(block)
        waiting = self._waiting.get(name)
        if block.waiting:
            assert waiting is not None, "a waiting block is not listed"
            block.waiting = False
            waiting.remove(block)
            successor = None
        else:
            del self._by_name[name]
            if self._by_key is not None:
                self._by_key.pop(self._hashes.key_of(block), None)
            successor = waiting.pop(0) if waiting else None
        if waiting is not None and not waiting:
            del self._waiting[name]
        if successor is not None:
            successor.waiting = False
            self.add(successor)
        return successor

    def find(self, key: bytes) -> EventBlock | None:
        """The announced block of a chained key. O(1); where names are not keys the first look-up is O(announced blocks)."""
        if self._hashes.names_are_keys:
            return self._by_name.get(key)
        if self._by_key is None:
            self._by_key = {self._hashes.key_of(block): block for block in self._by_name.values()}
        return self._by_key.get(key)
