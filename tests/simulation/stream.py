"""The event stream beside the simulation: a mirror that follows it must show what the tree holds.

Rule: a page that covers its block is announced, on its level, from the moment at which it can be matched; a block that waits for
loads in flight may have been announced before it began to wait.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kv_cache_manager_v2 import EventMirror, KVCacheEventManager
from kv_cache_manager_v2.events.records import BlockHash
from kv_cache_manager_v2.reuse.tree import RadixTree
from tests.simulation.model import Token


class StreamWatch:
    """The listener to give to the manager, and a mirror of what it says."""

    def __init__(self, alphabet: Sequence[Token]) -> None:
        ids = {token for token in alphabet if isinstance(token, int)}
        words = [struct.unpack("<8I", token) for token in alphabet if isinstance(token, bytes)]
        self.told_apart = not any(ids.issuperset(word) for word in words)
        # else two blocks may have one key, and the stream one name for both
        self.events = KVCacheEventManager(1 << 20, hash_algo="v2_blake3")
        self.mirror = EventMirror()
        self.num_checks = 0

    def check(self, tree: RadixTree) -> None:
        """Take in what was said since the last check, and compare. Every tenth time a new mirror begins from a snapshot."""
        self.events.flush_iteration_events()
        events = self.events.get_latest_events(0)
        if not self.told_apart:
            return
        assert self.mirror.apply(events), "events are missing"
        self._compare(self.mirror, tree)
        self.num_checks += 1
        if self.num_checks % 10 == 0:
            self.mirror = EventMirror(self.events.snapshot_events())
            self._compare(self.mirror, tree)

    def end(self) -> None:
        """After the manager's shutdown nothing is announced any more."""
        self.events.flush_iteration_events()
        if not self.told_apart:
            return
        assert self.mirror.apply(self.events.get_latest_events(0)), "events are missing"
        assert not self.mirror.blocks, "blocks outlived the manager"

    def _compare(self, mirror: EventMirror, tree: RadixTree) -> None:
        told: dict[tuple[BlockHash, int], int] = {}
        for name, mirrored in mirror.blocks.items():
            for group, level in mirrored.levels.items():
                told[name, group] = level
        for block in tree.all_blocks():
            key = block.block_key().hex()
            for life_cycle in tree.life_cycles:
                page = block.pages[life_cycle.index]
                level = told.pop((key, life_cycle.index), -1)
                covers = page is not None and life_cycle.usable_tokens(page.coverage, block.num_tokens) >= block.num_tokens
                if level == -1 and (block.num_pending_loads or block.uncomputed):
                    continue
                expected = page.level if page is not None and covers else -1
                assert level == expected, f"layer group {life_cycle.index} of {block.tokens!r}"
        assert not told, f"announced, but not in the tree: {told}"
