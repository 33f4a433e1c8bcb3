"""Asks the admission of a level about the pages that come to it, and tells it of those that are loaded from it."""

from __future__ import annotations

import logging
from typing import Final

from kv_cache_manager_v2.eviction.admission import DiskAdmission, LeavingPage
from kv_cache_manager_v2.storage.page import Page

_log: Final = logging.getLogger(__name__)


def admits(admission: DiskAdmission, page: Page) -> bool:
    """Whether a droppable page is written to the level. After an exception of the user's it is."""
    try:
        return bool(admission.admits(_record(page)))
    except Exception as error:
        _log.error("an admission raised an exception in admits(); the page is written", exc_info=error)
        return True


def tell_loaded(admission: DiskAdmission, pages: list[Page]) -> None:
    """Tell the admission of cached pages that are loaded from the level."""
    for page in pages:
        if page.owner is not None:
            try:
                admission.loaded(_record(page))
            except Exception as error:
                _log.error("an admission raised an exception in loaded()", exc_info=error)


def _record(page: Page) -> LeavingPage:
    owner = page.owner
    nbytes = sum([arena.slot_bytes for arena in page.cell.arenas])
    blocks = 1 << page.reused_class >> 1
    return LeavingPage(page.uses, blocks, owner is not None and owner.is_final(page), page.priority, page.life_cycle, nbytes)
