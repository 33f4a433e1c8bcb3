from typing import Final

from mypy_extensions import i16, u8

from kv_cache_manager_v2.events.hashes import HashedBlock
from kv_cache_manager_v2.events.records import MmKey
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope

GROUP_BITS: Final = 16
GROUP_MASK: Final = 65535
STORED: Final = 0
PAGE_REMOVED: Final = 1
BLOCK_REMOVED: Final = 2
MOVED: Final = 3

class EventBlock(HashedBlock):
    groups: int
    item: bytes | None
    item_known: bool
    waiting: bool

    def __init__(self, parent: EventBlock | None, tokens: bytes, num_tokens: int, scope: ReuseScope) -> None: ...
    def state(self, group: int) -> int: ...
    def set_state(self, group: int, state: int) -> None: ...
    def before(self) -> EventBlock: ...

class EventRecord:
    event_block: EventBlock
    tree_block: Block
    kind: u8
    level: u8
    priority: u8
    group: i16

    def __init__(self, kind: int, event_block: EventBlock, block: Block, group: int, level: int, priority: int) -> None: ...

def pack_state(level: int, priority: int) -> int: ...
def level_in(state: int) -> int: ...
def priority_in(state: int) -> int: ...
def event_block_of(block: Block) -> EventBlock: ...
def mm_keys_of(event_block: EventBlock, offset: int, uuids: dict[bytes, str]) -> list[MmKey]: ...
