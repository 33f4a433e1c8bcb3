"""Detects use of a device in a child process of the one that created it.

A child of `os.fork()` has the parent's objects and shares its open files and its GPU, but has none of its threads. Using them would
change the parent's data, or wait for ever for a thread that does not exist.
"""

from __future__ import annotations

import os
from typing import Final

from kv_cache_manager_v2.errors import LogicError


class Process:
    """The number of forks that led to this process. Reading it is cheaper than asking for the process id."""

    def __init__(self) -> None:
        self.forks = 0


PROCESS: Final = Process()


def _forked() -> None:
    PROCESS.forks += 1


def forked_error(call: str) -> LogicError:
    """The error of a call in a child process that inherited the device."""
    return LogicError(f"{call}: this device belongs to the parent process; after os.fork() the child must create its own")


os.register_at_fork(after_in_child=_forked)
