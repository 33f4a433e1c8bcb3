"""Questions about the package, and about all managers of this process. Each `KVCacheManager` has the same questions."""

from typing import Final

DEBUG_VARIABLES: Final = ("KVCM_DEBUG", "TLLM_DEBUG_MODE")

def debug_wanted() -> bool:
    """Whether the environment turns on checks of every structure after every public call."""

NDEBUG: Final[bool]

def num_live_managers() -> int:
    """Managers of this process that are not shut down yet."""

def poison_reason() -> str | None:
    """The poison reason of the oldest poisoned manager; None if none is poisoned. See `KVCacheManager.poison_reason`."""

def take_poison() -> str | None:
    """Clear the poison of the oldest poisoned manager, and return its reason; None if none is poisoned.

    Raises LogicError until `clear_reusable_blocks()` of that manager has succeeded. See `KVCacheManager.take_poison`.
    """
