"""The interface through which the radix tree reports changes to a listener.

A listener is called after each change, in the order of the changes, while the manager's lock is held. It must not call the manager,
and should only record the change: compute keys and other costly things later. An exception that it raises is logged, and the change
is completed.
"""

from abc import ABC, ABCMeta, abstractmethod

class CachedBlock(metaclass=ABCMeta):
    """A block of the radix tree, as a listener sees it."""

    def __reduce__(self) -> str: ...
    @abstractmethod
    def block_key(self) -> bytes:
        """The 32-byte chained key. Computed by the first call, then kept."""

    @abstractmethod
    def parent_block(self) -> CachedBlock | None:
        """The block before this one, or None for the first block of a scope."""

    @abstractmethod
    def token_list(self) -> list[int | bytes]:
        """The block's tokens: ids, and digests as 32 bytes."""

class CacheListener(ABC):
    """Receives every change of the cached pages. A page is identified by its block and its life cycle (layer group)."""

    @abstractmethod
    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        """A page can be matched now: the page of a new block, or one with more coverage for an existing block.

        A block that cannot match while loads are in flight reports all its pages afterwards, including those reported before.
        """

    @abstractmethod
    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        """A block that stays in the tree lost its page in one life cycle, whether or not the page was reported as stored."""

    @abstractmethod
    def block_removed(self, block: CachedBlock) -> None:
        """A block leaves the tree with all its pages. Its descendants follow, each with its own call, parents first.

        `block_key` works during this call; afterwards, only if it was called before.
        """

    @abstractmethod
    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        """A page of a block in the tree moved to another cache level. Moves within a level are not reported."""

    def attached(self, block_key_hash: str) -> None:
        """A manager was constructed with this listener: the first call. `block_key_hash` names the hash of its block keys."""

    def item_named(self, digest: bytes, uuid: str) -> None:
        """Tokens of a multimodal item, to which the front end gave the id `uuid`, are about to be committed."""
