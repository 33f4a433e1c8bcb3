"""Whether this process is still the one in which something was made.

Rule: a child of `os.fork()` has the parent's objects, but none of its threads, and shares its open files and its GPU. What the
child did with them would show in the parent, or wait for ever for a thread that is not there.
"""

from __future__ import annotations

import os
from typing import Final

from kv_cache_manager_v2.errors import LogicError


class Process:
    """How often this process and its ancestors were forked off, which is a number cheaper to ask for than the process id."""

    def __init__(self) -> None:
        self.forks = 0


PROCESS: Final = Process()


def _forked() -> None:
    PROCESS.forks += 1


def forked_error(call: str) -> LogicError:
    """What a call raises in a child process that inherited the object."""
    return LogicError(f"{call}: this device belongs to the parent process; after os.fork() the child must make its own")


os.register_at_fork(after_in_child=_forked)
