"""What can be asked of the package, and of all managers of this process together.

Rule: each call asks every living manager in turn; the same questions exist on each manager.
"""

from typing import Final

from kv_cache_manager_v2.build import COMPILED

BACKEND: Final[str] = "mypyc" if COMPILED else "python"
DEBUG_VARIABLES: Final = ("KVCM_DEBUG", "TLLM_DEBUG_MODE")

def debug_wanted() -> bool:
    """Whether the environment asks for checks of every structure after every public call."""

NDEBUG: Final[bool] = not debug_wanted()

def num_live_managers() -> int:
    """Managers of this process that were made and not yet shut down."""

def poison_reason() -> str | None:
    """Why a manager of this process is poisoned, the oldest one first; None if none is. See `KVCacheManager.poison_reason`."""

def take_poison() -> str | None:
    """End the poison of the oldest poisoned manager, and return its reason; None if none is. See `KVCacheManager.take_poison`.

    Raises LogicError until its `clear_reusable_blocks()` has succeeded.
    """
