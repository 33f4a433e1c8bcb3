"""One request of the hunting engine: what it has asked for, written and heard.

Rule: lengths here are the engine's own; the cache's answers are compared with them, never copied.
"""

from __future__ import annotations

from kv_cache_manager_v2 import KVCache, PlannedDropHandle
from tests.hunt.memory import Mismatch, Text


class Request:
    def __init__(self, cache: KVCache, number: int, scope: int, text: Text) -> None:
        self.cache = cache
        self.number = number
        self.scope = scope
        self.texts = [text]  # by beam
        self.active = False
        self.stream: int | None = None
        self.owns_stream = False
        self.spare_stream: int | None = None  # of its own too, while it moves from one to another
        length = len(text.tokens)
        self.written = length  # positions whose bytes have been computed
        self.state_at = length  # position of the recurrent state
        self.history = length
        self.capacity = length
        self.committed = length
        self.committing = True
        self.final = False  # nothing may be written any more
        self.named = ""  # the error that told of lost bytes
        self.mismatches: list[Mismatch] = []
        self.plans: list[PlannedDropHandle] = []
        self.views: list[memoryview] = []
        self.row = -1  # of the batch tables; -1: it has none
        self.prompt: list[int] = []  # what is still to be computed of the prompt

    @property
    def width(self) -> int:
        return len(self.texts)

    def lengths(self) -> tuple[int, int, int]:
        return self.committed, self.history, self.capacity

    def agrees(self) -> bool:
        cache = self.cache
        return (cache.num_committed_tokens, cache.history_length, cache.capacity) == self.lengths()

    def __repr__(self) -> str:
        state = "active" if self.active else "suspended"
        return (
            f"<request {self.number} {state} committed {self.committed} history {self.history} written {self.written} "
            f"capacity {self.capacity} width {self.width}{' final' if self.final else ''}{' named' if self.named else ''}>"
        )
