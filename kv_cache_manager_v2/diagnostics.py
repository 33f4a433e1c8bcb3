"""What can be asked of the package, and of all managers of this process together.

Rule: each call asks every living manager in turn; the same questions exist on each manager.
"""

from __future__ import annotations

import os
from typing import Final

from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.request.call import poison_of, take_poison_of
from kv_cache_manager_v2.request.live_managers import LIVE

BACKEND: Final[str] = "mypyc" if COMPILED else "python"  # what runs this package
DEBUG_VARIABLES: Final = ("KVCM_DEBUG", "TLLM_DEBUG_MODE")  # either set to 1: check every structure after every public call


def debug_wanted() -> bool:
    """Whether the environment asks for checks of every structure after every public call."""
    return any(os.environ.get(name) == "1" for name in DEBUG_VARIABLES)


NDEBUG: Final[bool] = not debug_wanted()  # as of the import; a manager looks when it is made


def num_live_managers() -> int:
    """Managers of this process that were made and not yet shut down."""
    return len(LIVE)


def poison_reason() -> str | None:
    """Why a manager of this process is poisoned, the oldest one first; None if none is. See `KVCacheManager.poison_reason`."""
    for shared in list(LIVE):
        reason = poison_of(shared)
        if reason is not None:
            return reason
    return None


def take_poison() -> str | None:
    """End the poison of the oldest poisoned manager, and return its reason; None if none is. See `KVCacheManager.take_poison`.

    Raises LogicError until its `clear_reusable_blocks()` has succeeded.
    """
    for shared in list(LIVE):
        reason = take_poison_of(shared)
        if reason is not None:
            return reason
    return None
