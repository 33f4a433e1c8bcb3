"""A shield between the cache and a listener that somebody else wrote.

Rule: a listener is told in the midst of a change, which is finished whatever the listener does. What it raises is logged and goes
no further; a call of the manager by it is refused.
"""

from __future__ import annotations

import logging
from typing import Final

from kv_cache_manager_v2.listener import CachedBlock, CacheListener

_log: Final = logging.getLogger(__name__)


class GuardedListener(CacheListener):
    """Passes everything on, one call at a time: the manager's lock is held."""

    def __init__(self, behind: CacheListener) -> None:
        self._behind = behind
        self.telling = False  # `behind` is being told: whoever calls the manager now is it
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
