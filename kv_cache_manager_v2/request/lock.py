"""The lock of a manager.

Rule: one thread at a time is inside a manager. A thread may enter again, so that a callback that calls back gets an error and no
deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Lock:
    """A re-entrant lock. `with` on a native class is a plain call; on the standard library's it looks two methods up each time."""

    def __init__(self) -> None:
        lock = threading.RLock()
        self._acquire: Callable[[], bool] = lock.acquire
        self._release: Callable[[], None] = lock.release

    def __enter__(self) -> None:
        self._acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._release()
