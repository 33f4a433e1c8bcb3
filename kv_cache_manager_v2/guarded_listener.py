"""Protects the cache from exceptions of an engine's listener.

A listener is called in the middle of a change, which must be completed whatever the listener raises. An error is logged. An
interrupt (KeyboardInterrupt, SystemExit) is kept, and raised at the end of the public call.
"""

from __future__ import annotations

import logging
from typing import Final

from kv_cache_manager_v2.listener import CachedBlock, CacheListener

_log: Final = logging.getLogger(__name__)


class GuardedListener(CacheListener):
    """Passes every call on to the engine's listener. All calls are made with the manager's lock held."""

    def __init__(self, listener: CacheListener) -> None:
        self._listener = listener
        self.telling = False  # the listener is being called: a call of the manager on this thread comes from the listener
        self.keeps = False  # an interrupt is not raised yet: the call in progress is one of a batch
        self.num_errors = 0
        self._interrupt: BaseException | None = None  # the first interrupt that is not raised yet

    def attached(self, block_key_hash: str) -> None:
        self._listener.attached(block_key_hash)

    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        self.telling = True
        try:
            self._listener.page_stored(block, life_cycle, level, priority, covers_block)
        except BaseException as error:
            self._keep("page_stored", error)
        finally:
            self.telling = False

    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        self.telling = True
        try:
            self._listener.page_removed(block, life_cycle)
        except BaseException as error:
            self._keep("page_removed", error)
        finally:
            self.telling = False

    def block_removed(self, block: CachedBlock) -> None:
        self.telling = True
        try:
            self._listener.block_removed(block)
        except BaseException as error:
            self._keep("block_removed", error)
        finally:
            self.telling = False

    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        self.telling = True
        try:
            self._listener.page_moved(block, life_cycle, source, destination)
        except BaseException as error:
            self._keep("page_moved", error)
        finally:
            self.telling = False

    def item_named(self, digest: bytes, uuid: str) -> None:
        self.telling = True
        try:
            self._listener.item_named(digest, uuid)
        except BaseException as error:
            self._keep("item_named", error)
        finally:
            self.telling = False

    def raise_interrupt(self) -> None:
        """Raise the interrupt that the listener raised, if any. Called at the end of each public call."""
        interrupt = self._interrupt
        if interrupt is not None and not self.keeps:
            self._interrupt = None
            raise interrupt

    def _keep(self, call: str, error: BaseException) -> None:
        """Log the first errors, then every power of two, since a broken listener raises for every page."""
        if not isinstance(error, Exception):
            if self._interrupt is None:
                self._interrupt = error
            return
        self.num_errors += 1
        count = self.num_errors
        if count <= 4 or count & (count - 1) == 0:
            _log.error(
                "the cache listener raised an exception in %s (error %d) and has missed that change", call, count, exc_info=error
            )
