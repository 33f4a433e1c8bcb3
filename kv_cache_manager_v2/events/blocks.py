"""Queued changes of blocks, and what the event stream has announced of each block.

An `EventBlock` is made with the first change of its block, together with those of the block's ancestors. It lives until the block
has left the tree and every change of it is processed, so that a dropped block can still be named.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i16, mypyc_attr, u8

from kv_cache_manager_v2.arguments import shown
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.events.hashes import HashedBlock
from kv_cache_manager_v2.events.records import MmKey
from kv_cache_manager_v2.reuse.block import Block, RootBlock
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import unpack

# The announced state of a block in one layer group, in 16 bits: announced (1 bit), cache level (7 bits), priority (8 bits).
GROUP_BITS: Final = 16
GROUP_MASK: Final = (1 << GROUP_BITS) - 1
_ANNOUNCED: Final = 1 << 15
_LEVEL_SHIFT: Final = 8
_PRIORITY_MASK: Final = (1 << _LEVEL_SHIFT) - 1

# Kinds of changes.
STORED: Final = 0
PAGE_REMOVED: Final = 1
BLOCK_REMOVED: Final = 2
MOVED: Final = 3


@mypyc_attr(acyclic=True)
class EventBlock(HashedBlock):
    """One block, or the root of a scope, as the event stream knows it."""

    def __init__(self, parent: EventBlock | None, tokens: bytes, num_tokens: int, scope: ReuseScope) -> None:
        super().__init__(parent, tokens, num_tokens, scope)
        self.groups = 0  # announced states by layer group, GROUP_BITS each; 0 in groups where the block is not announced
        self.item: bytes | None = None  # latest multimodal digest up to the block's end; valid if `item_known`
        self.item_known = parent is None
        self.waiting = False  # another block with the same name is announced: see announced.py

    def state(self, group: int) -> int:
        """The announced state in a layer group; 0 if the block is not announced there."""
        return self.groups >> group * GROUP_BITS & GROUP_MASK

    def set_state(self, group: int, state: int) -> None:
        self.groups ^= (self.state(group) ^ state) << group * GROUP_BITS

    def predecessor(self) -> EventBlock:
        """The block before this one in the sequence, or the root."""
        parent = self.parent
        assert isinstance(parent, EventBlock), "a block lost its parent before its last change was processed"
        return parent


@mypyc_attr(acyclic=True)
class EventRecord:
    """One change of a block, queued until the next flush. It is kept small, since it is made under the manager's lock."""

    def __init__(self, kind: int, event_block: EventBlock, block: Block, group: int, level: int, priority: int) -> None:
        self.event_block = event_block
        self.tree_block = block
        # Small integers, so that the compiled class stores no object references for them.
        self.kind: u8 = kind
        self.level: u8 = level
        self.priority: u8 = priority
        self.group: i16 = group


def tree_block(block: object) -> Block:
    """The argument as a block of the tree. It may be what `introspection.make_test_block` returns."""
    found = block if isinstance(block, Block) else getattr(block, "block", None)
    if not isinstance(found, Block):
        raise ConfigError(f"block is {shown(block)}; it must be a block of the tree")
    return found


def pack_state(level: int, priority: int) -> int:
    """The state of an announced block."""
    return _ANNOUNCED | level << _LEVEL_SHIFT | priority


def level_in(state: int) -> int:
    return (state & ~_ANNOUNCED) >> _LEVEL_SHIFT


def priority_in(state: int) -> int:
    return state & _PRIORITY_MASK


def event_block_of(block: Block) -> EventBlock:
    """The EventBlock of a block. If absent, it is made, together with those of the block's ancestors."""
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
    """The EventBlock of a block that has none yet, or of a root."""
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
    """Which multimodal items a block contains: one key per run of consecutive positions of an item.

    A key is the item's digest, the position in the item at which the run begins, and the item's uuid if it has one. An id above
    `offset` is a position (plus offset) in the item of the latest digest before it, in this block or an earlier one. O(tokens).
    """
    item = _item_at_end(event_block.predecessor())
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
    """The latest digest up to the block's end. O(ancestors for which it is not known yet)."""
    missing: list[EventBlock] = []
    node = event_block
    while not node.item_known:
        missing.append(node)
        node = node.predecessor()
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
