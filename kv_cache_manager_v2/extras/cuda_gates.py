"""Gate words: where a stream stands and waits until the host lets it through.

Rule: a gate is one 32-bit word of pinned memory and a target; it is open once the word has reached the target, cyclically. The word
never goes back: the next user's target is one more. So a word may be used again as soon as its gate is open, even while a slow
stream has not looked yet.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Final

from kv_cache_manager_v2.extras.cuda_memory import CudaMemory

WORD_BYTES: Final = 4
BLOCK_BYTES: Final = 16 << 10  # of pinned memory, taken as gates are needed: enough for 4096 at once
WORD_LIMIT: Final = 1 << 32


class Word:
    """One gate word."""

    __slots__ = ("device_address", "last_target", "value")

    def __init__(self, address: int, device_address: int) -> None:
        self.value: Final = ctypes.c_uint32.from_address(address)
        self.device_address: Final = device_address  # as a stream's wait names it
        self.last_target = 0  # of the latest gate made of this word

    def open(self, target: int) -> None:
        """Let every stream through that waits for this target or an earlier one."""
        self.value.value = target


class GateWords:
    """A pool of gate words. Thread safe."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory: Final = memory
        self._blocks: list[int] = []  # host addresses
        self._idle: list[Word] = []  # their gates are open and forgotten
        self._lock = threading.Lock()
        self._grow()  # now: later the driver might have to wait for work that is queued

    def take(self) -> tuple[Word, int]:
        """A word and the target that it has not reached: a closed gate."""
        with self._lock:
            if not self._idle:
                self._grow()
            word = self._idle.pop()
        word.last_target = (word.last_target + 1) % WORD_LIMIT
        return word, word.last_target

    def _grow(self) -> None:
        address, device_address = self._memory.allocate_pinned(BLOCK_BYTES)
        ctypes.memset(address, 0, BLOCK_BYTES)
        self._blocks.append(address)
        self._idle += [Word(address + at, device_address + at) for at in range(0, BLOCK_BYTES, WORD_BYTES)]

    def give_back(self, word: Word) -> None:
        """Return a word whose gate is open."""
        with self._lock:
            self._idle.append(word)

    def close(self) -> None:
        """Free the memory; no stream waits any more."""
        with self._lock:
            blocks, self._blocks = self._blocks, []
            self._idle.clear()
        for address in blocks:
            self._memory.free_pinned(address)
