"""Frees objects of a device one after the other, each once, although an interrupt may hide that a call was carried out.

An interrupt (Ctrl-C) may come after the driver has freed an object and before the caller has recorded it. The caller then tries
again, and the driver may refuse: it knows no such object any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from kv_cache_manager_v2.errors import CuError, KVCacheError, LogicError

# "invalid value", "invalid handle" and "host memory not registered" in the numbering of the CUDA driver.
_UNKNOWN_OBJECT_CODES: Final = (1, 400, 713)

_log: Final = logging.getLogger(__name__)


class Freeing:
    """The objects of one kind that the device may not know any more, mostly because they are being freed."""

    def __init__(self) -> None:
        self.doubtful: set[int] = set()  # handles or addresses

    def free(self, handle: int, call: Callable[[], None]) -> None:
        """Free an object by a call of the driver. The caller then records that the object is gone, and calls `done`.

        A refusal is raised, unless the object was in doubt and the driver says that it does not exist.
        """
        was_doubtful = handle in self.doubtful
        self.doubtful.add(handle)
        try:
            call()
        except Exception as error:
            if was_doubtful and _says_unknown(error):
                _log.info("an object (%d) whose freeing was interrupted is gone: %s", handle, error)
                return
            if not was_doubtful and isinstance(error, KVCacheError):
                self.doubtful.discard(handle)  # a driver's own error has changed nothing
            raise

    def done(self, handle: int) -> None:
        """End the doubt: the caller knows whether the object exists."""
        self.doubtful.discard(handle)


def _says_unknown(error: Exception) -> bool:
    """Whether a refusal means that the object does not exist."""
    if isinstance(error, CuError):
        return error.error_code in _UNKNOWN_OBJECT_CODES
    return isinstance(error, (LogicError, LookupError, ValueError))
