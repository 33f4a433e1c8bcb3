"""What happened to blocks, and what the event stream has announced of each.

Rule: an `EventBlock` lives as long as its block, or as an event record of it that is not processed yet. It is made at the first
record, together with those of the blocks before it, and names its block even after that has left the tree.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i16, mypyc_attr, u8

from kv_cache_manager_v2.events.hashes import HashedBlock
from kv_cache_manager_v2.events.records import MmKey
from kv_cache_manager_v2.reuse.block import Block, RootBlock
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import unpack

# What is known of a block in one layer group is a state of 16 bits: announced, cache level (7 bits), priority (8 bits).
GROUP_BITS: Final = 16
GROUP_MASK: Final = (1 << GROUP_BITS) - 1
_ANNOUNCED: Final = 1 << 15
_LEVEL_SHIFT: Final = 8
_PRIORITY_MASK: Final = (1 << _LEVEL_SHIFT) - 1

STORED: Final = 0
PAGE_REMOVED: Final = 1
BLOCK_REMOVED: Final = 2
MOVED: Final = 3


@mypyc_attr(acyclic=True)
class EventBlock(HashedBlock):
    """One block, or a scope's root."""

    def __init__(self, parent: EventBlock | None, tokens: bytes, num_tokens: int, scope: ReuseScope) -> None:
        super().__init__(parent, tokens, num_tokens, scope)
        self.groups = 0  # states by layer group, GROUP_BITS each; 0 where the block is not announced
        self.item: bytes | None = None  # digest of the multimodal item that the block's end belongs to ...
        self.item_known = parent is None  # ... once looked for
        self.waiting = False  # another block of the same name is announced: see announced.py

    def state(self, group: int) -> int:
        """What is known in a layer group; 0 if it is not announced there."""
        return self.groups >> group * GROUP_BITS & GROUP_MASK

    def set_state(self, group: int, state: int) -> None:
        self.groups ^= (self.state(group) ^ state) << group * GROUP_BITS

    def before(self) -> EventBlock:
        """The block before it."""
        parent = self.parent
        assert isinstance(parent, EventBlock), "a block lost its parent before the stream was done with it"
        return parent


@mypyc_attr(acyclic=True)
class EventRecord:
    """One change of a block, queued until the next flush. As small as can be: it is made under the manager's lock."""

    def __init__(self, kind: int, event_block: EventBlock, block: Block, group: int, level: int, priority: int) -> None:
        self.event_block = event_block
        self.tree_block = block
        # bytes and half words: nothing to count references of
        self.kind: u8 = kind
        self.level: u8 = level
        self.priority: u8 = priority
        self.group: i16 = group


def pack_state(level: int, priority: int) -> int:
    """The state of an announced block."""
    return _ANNOUNCED | level << _LEVEL_SHIFT | priority


def level_in(state: int) -> int:
    return (state & ~_ANNOUNCED) >> _LEVEL_SHIFT


def priority_in(state: int) -> int:
    return state & _PRIORITY_MASK


def event_block_of(block: Block) -> EventBlock:
    """The stream's view of a block, made if absent together with those of the blocks before it."""
    state = block.event_state
    if state is not None:
        assert isinstance(state, EventBlock)
        return state
    parent = block.parent
    assert parent is not None, "a page was stored in a block that has left the tree"
    before = parent.event_state
    event_block = before if isinstance(before, EventBlock) else _event_block_deep(parent)
    event_block = EventBlock(event_block, block.tokens, block.num_tokens, event_block.scope)
    block.event_state = event_block
    return event_block


def _event_block_deep(block: Block) -> EventBlock:
    """The same for a block that has none yet, or a root."""
    missing: list[Block] = []
    node = block
    state = node.event_state
    while state is None and node.parent is not None:
        missing.append(node)
        node = node.parent
        state = node.event_state
    if state is None:
        assert isinstance(node, RootBlock), "a page was stored in a block that has left the tree"
        state = node.event_state = EventBlock(None, b"", 0, node.scope)
    assert isinstance(state, EventBlock)
    event_block = state
    while missing:
        node = missing.pop()
        event_block = EventBlock(event_block, node.tokens, node.num_tokens, event_block.scope)
        node.event_state = event_block
    return event_block


def mm_keys_of(event_block: EventBlock, offset: int, uuids: dict[bytes, str]) -> list[MmKey]:
    """Where multimodal items lie in a block: for each run of an item's positions the item's digest, the first position, and the
    item's uuid if it has one.

    Ids above `offset` count positions of the latest digest before them, in this block or before it. O(tokens).
    """
    item = _item_at_end(event_block.before())
    keys: list[MmKey] = []
    if item is None and event_block.is_text:
        return keys
    running = False
    for token in unpack(event_block.tokens):
        if isinstance(token, bytes):
            item = token
            keys.append(_mm_key(token, 0, uuids))
            running = True
        elif item is not None and token > offset:
            if not running:
                keys.append(_mm_key(item, token - offset, uuids))
            running = True
        else:
            running = False
    return keys


def _mm_key(digest: bytes, position: int, uuids: dict[bytes, str]) -> MmKey:
    uuid = uuids.get(digest)
    return (digest, position) if uuid is None else (digest, position, uuid)


def _item_at_end(event_block: EventBlock) -> bytes | None:
    """The latest digest up to the block's end; O(blocks before it that were never looked at)."""
    missing: list[EventBlock] = []
    node = event_block
    while not node.item_known:
        missing.append(node)
        node = node.before()
    item = node.item
    while missing:
        node = missing.pop()
        if not node.is_text:
            for token in unpack(node.tokens):
                if isinstance(token, bytes):
                    item = token
        node.item = item
        node.item_known = True
    return item
