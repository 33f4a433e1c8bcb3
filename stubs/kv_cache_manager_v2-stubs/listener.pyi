"""What a cached block may tell the outside: the seam between the tree and whoever listens to it.

Rule: a listener is told after the fact, in the order in which things happened, and must only take notes: it may not call the
manager, and what is costly (keys, records) is made when the notes are read, not here. What one raises is logged, and stops nothing.
"""

from abc import ABC, ABCMeta, abstractmethod

class CachedBlock(metaclass=ABCMeta):
    """A block of tokens in the reuse tree, as a listener sees it."""

    def __reduce__(self) -> str: ...
    @abstractmethod
    def block_key(self) -> bytes:
        """The 32-byte chained key; computed on the first request, then kept."""

    @abstractmethod
    def parent_block(self) -> CachedBlock | None:
        """The block before this one, or None for the first block of a scope."""

    @abstractmethod
    def token_list(self) -> list[int | bytes]:
        """The block's tokens: ids, and digests as 32 bytes."""

class CacheListener(ABC):
    """Told about every change of what is cached. A page is named by its block and its life cycle (layer group)."""

    @abstractmethod
    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        """A page became matchable: a new block's, or a wider one for a block that exists.

        A block that was hidden while loads were in flight tells its pages when it is shown, those told before once more.
        """

    @abstractmethod
    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        """One life cycle's page, told or not, left a block that stays in the tree."""

    @abstractmethod
    def block_removed(self, block: CachedBlock) -> None:
        """The block leaves the tree with all its pages; descendants follow, each with a call of its own, parents first.

        During this call its key can still be made, afterwards only if somebody asked before.
        """

    @abstractmethod
    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        """A page of an attached block changed its cache level; moves within a level are not told."""

    def attached(self, block_key_hash: str) -> None:
        """A manager takes the listener, before anything else is told. `block_key_hash` names the hash of its block keys."""

    def item_named(self, digest: bytes, uuid: str) -> None:
        """Tokens of a multimodal item that the front end calls `uuid` are about to be committed."""
