"""Questions about the package, and about all managers of this process. Each `KVCacheManager` has the same questions."""

from __future__ import annotations

import os
from typing import Final

from kv_cache_manager_v2.request.call import poison_of, take_poison_of
from kv_cache_manager_v2.request.live_managers import LIVE

DEBUG_VARIABLES: Final = ("KVCM_DEBUG", "TLLM_DEBUG_MODE")  # if one is set to 1, every public call checks every structure


def debug_wanted() -> bool:
    """Whether the environment turns on checks of every structure after every public call."""
    return any(os.environ.get(name) == "1" for name in DEBUG_VARIABLES)


NDEBUG: Final[bool] = not debug_wanted()  # value at import; a manager reads the environment when it is constructed


def num_live_managers() -> int:
    """Managers of this process that are not shut down yet."""
    return len(LIVE)


def poison_reason() -> str | None:
    """The poison reason of the oldest poisoned manager; None if none is poisoned. See `KVCacheManager.poison_reason`."""
    for shared in list(LIVE):
        reason = poison_of(shared)
        if reason is not None:
            return reason
    return None


def take_poison() -> str | None:
    """Clear the poison of the oldest poisoned manager, and return its reason; None if none is poisoned.

    Raises LogicError until `clear_reusable_blocks()` of that manager has succeeded. See `KVCacheManager.take_poison`.
    """
    for shared in list(LIVE):
        reason = take_poison_of(shared)
        if reason is not None:
            return reason
    return None
