"""Gate words: words of pinned memory that streams wait for until the host writes them.

A gate is one 32-bit word and a target. It is open once the word has reached the target, in cyclic order. A word never decreases,
and its next gate has the next target. So a word can be reused as soon as its gate is open, even if a stream still has to read it.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Final

from kv_cache_manager_v2.extras.cuda_memory import CudaMemory

WORD_BYTES: Final = 4
BLOCK_BYTES: Final = 16 << 10  # one allocation of pinned memory: words for 4096 gates
WORD_LIMIT: Final = 1 << 32


class Word:
    """One gate word."""

    __slots__ = ("device_address", "last_target", "value")

    def __init__(self, address: int, device_address: int) -> None:
        self.value: Final = ctypes.c_uint32.from_address(address)
        self.device_address: Final = device_address  # for the waits of streams
        self.last_target = 0  # of the latest gate of this word

    def open(self, target: int) -> None:
        """Open the gate with this target, and all earlier gates of the word."""
        self.value.value = target


class GateWords:
    """A pool of gate words. Thread safe."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory: Final = memory
        self._blocks: list[int] = []  # host addresses
        self._idle: list[Word] = []  # their gates are open and released
        self._lock = threading.Lock()
        self._grow()  # now: a later allocation might wait for queued work

    def take(self) -> tuple[Word, int]:
        """A closed gate: a word, and a target that it has not reached."""
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

    def free(self, word: Word) -> None:
        """Make a word with an open gate available again."""
        with self._lock:
            self._idle.append(word)

    def close(self) -> None:
        """Free the memory. No stream may wait for a gate."""
        with self._lock:
            blocks, self._blocks = self._blocks, []
            self._idle.clear()
        for address in blocks:
            self._memory.free_pinned(address)
