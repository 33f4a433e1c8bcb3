"""Threads that wait for a change of a structure, in place of `threading.Condition`.

The methods of a `Condition` are Python functions. An interrupt (Ctrl-C) inside one of them can leave its lock taken for ever, or a
waiter that takes another one's wake-up. Here a thread waits without the structure's lock, and each wait has a time limit. So an
interrupted call delays other threads by that limit at most.

    while True:
        with lock:
            if is_over():
                break
            ticket = waiters.enter()
        waiters.sleep(ticket, limit_s)
"""

from __future__ import annotations

import contextlib
from threading import Lock
from typing import Final

LONGEST_SLEEP_S: Final = 5.0  # of a thread that only waits for work


class Waiters:
    """The threads that wait for a change."""

    def __init__(self) -> None:
        self._tickets: list[Lock] = []  # locked; releasing one wakes its thread

    def enter(self) -> Lock:
        """A ticket for `sleep`. The structure's lock is held, and is released before `sleep`."""
        ticket = Lock()
        ticket.acquire()
        self._tickets.append(ticket)
        return ticket

    def sleep(self, ticket: Lock, limit_s: float) -> None:
        """Block until the ticket's thread is woken, or the limit passes. The structure's lock is not held."""
        if not ticket.acquire(timeout=limit_s):
            with contextlib.suppress(ValueError):  # it was woken just now
                self._tickets.remove(ticket)

    def wake_all(self) -> None:
        """Wake all threads that wait. The structure's lock is held."""
        while self._tickets:
            self._tickets.pop().release()
