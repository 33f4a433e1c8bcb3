"""What a cached block may tell the outside: the seam between the tree and whoever listens to it.

Rule: a listener is told after the fact, in the order in which things happened, and must only take notes: it may not call the
manager, and what is costly (keys, records) is made when the notes are read, not here. What one raises is logged, and stops nothing.
"""

from __future__ import annotations

import logging
from abc import ABC, ABCMeta, abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

_log: Final = logging.getLogger(__name__)


@mypyc_attr(acyclic=True, allow_interpreted_subclasses=True)
class CachedBlock(metaclass=ABCMeta):
    """A block of tokens in the reuse tree, as a listener sees it."""

    @abstractmethod
    def block_key(self) -> bytes:
        """The 32-byte chained key; computed on the first request, then kept."""

    @abstractmethod
    def parent_block(self) -> CachedBlock | None:
        """The block before this one, or None for the first block of a scope."""

    @abstractmethod
    def token_list(self) -> list[int | bytes]:
        """The block's tokens: ids, and digests as 32 bytes."""


@mypyc_attr(allow_interpreted_subclasses=True)
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

    def item_named(self, digest: bytes, uuid: str) -> None:  # noqa: B027 (most listeners do not care)
        """Tokens of a multimodal item that the front end calls `uuid` are about to be committed."""


class ShieldedListener(CacheListener):
    """Stands before a listener that somebody else wrote: what it raises is logged, and goes no further.

    It is told in the midst of a change, which has to be finished whatever it thinks of it. While it is told, `telling` is set, so
    that a call of the manager by it can be refused.
    """

    def __init__(self, behind: CacheListener) -> None:
        self._behind = behind
        self.telling = False
        self.num_errors = 0

    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        self.telling = True
        try:
            self._behind.page_stored(block, life_cycle, level, priority, covers_block)
        except Exception as error:
            self._note("page_stored", error)
        finally:
            self.telling = False

    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        self.telling = True
        try:
            self._behind.page_removed(block, life_cycle)
        except Exception as error:
            self._note("page_removed", error)
        finally:
            self.telling = False

    def block_removed(self, block: CachedBlock) -> None:
        self.telling = True
        try:
            self._behind.block_removed(block)
        except Exception as error:
            self._note("block_removed", error)
        finally:
            self.telling = False

    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        self.telling = True
        try:
            self._behind.page_moved(block, life_cycle, source, destination)
        except Exception as error:
            self._note("page_moved", error)
        finally:
            self.telling = False

    def item_named(self, digest: bytes, uuid: str) -> None:
        self.telling = True
        try:
            self._behind.item_named(digest, uuid)
        except Exception as error:
            self._note("item_named", error)
        finally:
            self.telling = False

    def _note(self, call: str, error: Exception) -> None:
        """Log the first errors whole, then every power of two: a listener that is broken is asked for every page."""
        self.num_errors += 1
        count = self.num_errors
        if count <= 4 or count & (count - 1) == 0:
            _log.error("the cache listener raised in %s (error %d); it was told, and has missed that", call, count, exc_info=error)
