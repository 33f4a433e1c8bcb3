"""The blocks that the event stream has announced, by name.

Rule: a name is announced for one block at a time. Blocks may share a name (see `BlockHashes.name_of`). The first one is announced;
the others wait, and the next is announced when the present one is removed. So a reader never sees one name for two blocks.
"""

from __future__ import annotations

from kv_cache_manager_v2.events.blocks import EventBlock
from kv_cache_manager_v2.events.hashes import BlockHashes, BlockName


class AnnouncedBlocks:
    """Announced blocks by name. Every call is O(1), plus the blocks that share the name."""

    def __init__(self, hashes: BlockHashes) -> None:
        self._hashes = hashes
        self._by_name: dict[BlockName, EventBlock] = {}
        self._waiting: dict[BlockName, list[EventBlock]] = {}  # nearly always empty
        self._by_key: dict[bytes, EventBlock] | None = None  # made by the first look-up, if names are not keys

    def blocks(self) -> list[EventBlock]:
        """All announced blocks, in the order of their announcement."""
        return list(self._by_name.values())

    def add(self, block: EventBlock) -> None:
        """Announce a block, or set `block.waiting` if its name is announced already."""
        name = self._hashes.name_of(block)
        if self._by_name.setdefault(name, block) is not block:
            block.waiting = True
            self._waiting.setdefault(name, []).append(block)
        elif self._by_key is not None:
            self._by_key[self._hashes.key_of(block)] = block

    def remove(self, block: EventBlock) -> EventBlock | None:
        """Remove a block. Returns the waiting block that is announced instead, if there is one."""
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
        """The announced block with a chained key. O(1), but the first look-up is O(announced blocks) if names are not keys."""
        if self._hashes.names_are_keys:
            return self._by_name.get(key)
        if self._by_key is None:
            self._by_key = {self._hashes.key_of(block): block for block in self._by_name.values()}
        return self._by_key.get(key)
