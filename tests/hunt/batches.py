"""Habits of engines that work in steps: tokens committed ahead, steps as one object, policies, batch tables, matches kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kv_cache_manager_v2 import (
    BAD_PAGE_INDEX,
    KVCache,
    MakeRoom,
    PageDataLostError,
    PlainBatchTables,
    ReuseMatch,
    SuspendCheapest,
    SuspendYoungest,
)
from tests.hunt.base import MAX_BLOCKS, MAX_OPEN, SCOPES, Found
from tests.hunt.memory import Text
from tests.hunt.requests import Request
from tests.hunt.setups import Setup
from tests.hunt.whole import WholeManager
from tests.support.drivers import RefusingDevice

ROWS = 3
SHOWN = ((-1, 0, False), (0, 1, False), (-9, 1 << 33, True))  # pad value, offset, int64


class Batches(WholeManager):
    """Steps of several requests, and what engines keep between them."""

    def __init__(self, setup: Setup, folder: str, refusing: RefusingDevice | None = None) -> None:
        super().__init__(setup, folder, refusing)
        self.pad, self.offset, wide = SHOWN[setup.seed % len(SHOWN)]
        self.matches: list[tuple[ReuseMatch, int, list[int]]] = []
        self.tables = PlainBatchTables(self.manager, ROWS, MAX_BLOCKS + 8, None, self.pad, self.offset, wide)

    # --- batch tables

    def table(self) -> None:
        """A request gets a row, or gives it back. The step then reads its pages there."""
        request = self.pick(lambda r: r.active and not r.named)
        if request is None:
            return
        request.views = []
        if request.row >= 0:
            self.attempt(request, self.tables.remove, request.cache)
            if not self.refused:
                request.row = -1
        elif self.tables.num_unused_rows > 0 and self.alone:
            row = self.attempt(request, self.tables.add, request.cache)
            if row is not None:
                request.row = row
                self.outcomes["rows of batch tables"] += 1

    def pages_of(self, request: Request, index: int) -> Any:
        if request.row < 0:
            return super().pages_of(request, index)
        entries = np.asarray(self.tables.table(index))[request.row].tolist()
        pages = [BAD_PAGE_INDEX if entry == self.pad else entry - self.offset for entry in entries]
        if any(page != BAD_PAGE_INDEX for page in pages[request.cache.num_blocks :]):
            raise Found(f"the row of {request} goes on after its last block: {entries}")
        return pages[: request.cache.num_blocks]

    # --- policies

    def _policy(self) -> MakeRoom | None:
        also = [r.cache for r in self.open if r.active and not r.named]
        kind = self.rng.random()
        return SuspendYoungest(also) if kind < 0.3 else SuspendCheapest(also) if kind < 0.6 else None

    def _note_suspended(self) -> None:
        """What a policy has suspended."""
        for request in self.open:
            if request.active and not request.cache.is_active:
                request.active = False
                request.views = []
                self.outcomes["suspended by a policy"] += 1

    def ask_for_room(self) -> None:
        """A resume that asks a policy."""
        request = self.pick(lambda r: not r.active and not r.named)
        policy = self._policy()
        if request is None or policy is None:
            return
        before = request.stream
        stream = self.give_stream(request)
        done = self.attempt(request, request.cache.resume, stream, policy)
        self._note_suspended()
        if done:
            request.active = True
            self.step(request, 0)
        elif before is None and not request.cache.is_active:
            self.drop_stream(request)

    # --- tokens committed ahead

    def ahead(self) -> None:
        """Pages, a commit, another request that matches it, and only then the step.

        Not beside other threads: their requests would match it too, on streams of their own.
        """
        request = self.pick(
            lambda r: (
                r.active
                and r.committing
                and not r.named
                and not r.final
                and r.width == 1
                and r.written == r.committed == r.history < (MAX_BLOCKS - 2) * self.tpb
            )
        )
        if request is None or self.setup.scratch_rewind is not None or self.armed or not self.alone:
            return
        count = self.rng.randrange(1, 2 * self.tpb + 1)
        tokens = [*request.prompt[:count], *self._tokens(count - len(request.prompt))]
        request.prompt = [*tokens, *request.prompt[count:]]
        if not self._resize(request, max(request.capacity, request.written + count), None):
            return
        self.attempt(request, request.cache.commit_ahead, tokens)
        if self.refused:
            return
        request.committed += count
        self.expect_lengths(request, "committed ahead,")
        if self.rng.random() < 0.1:
            self._suspend(request)
            request.committed = request.history
            self.expect_lengths(request, "taken back,")
            return
        follower = self._follow(request, tokens) if self.rng.random() < 0.5 else None
        self.step(request, count)
        self._resize(request, None, request.written)
        self.outcomes["committed ahead"] += 1
        if follower is not None and self.attempt(follower, follower.cache.resume, follower.stream):
            follower.active = True
            self.step(follower, 0)

    def _follow(self, request: Request, tokens: list[int]) -> Request | None:
        """A request that matches what is not computed yet."""
        if len(self.open) >= MAX_OPEN or request.owns_stream:
            return None
        number = next(self.numbers)
        prompt = [*request.texts[0].tokens, *tokens, *self._tokens(2)]
        cache = self.attempt(None, self.manager.create_kv_cache, SCOPES[request.scope], prompt[:-1], number)
        if cache is None:
            return None
        found = cache.num_committed_tokens
        text = Text(len(self.memory), 1000 + request.scope)
        text.extend(prompt[:found])
        follower = Request(cache, number, request.scope, text)
        follower.prompt = prompt[found:]
        follower.stream = request.stream
        self.open.append(follower)
        if found > request.history:
            self.outcomes["matched before it was computed"] += 1
        return follower

    # --- steps

    def whole_step(self) -> None:
        """A step as one object, with a policy, whatever it ends with."""
        if self.setup.scratch_rewind is not None or self.armed:
            return
        most = MAX_BLOCKS * self.tpb
        chosen = [
            r
            for r in self.open
            if r.active
            and r.committing
            and not r.named
            and not r.final
            and r.width == 1
            and r.written == r.committed == r.history < most
        ]
        if not chosen:
            return
        self.rng.shuffle(chosen)
        self.operations += len(chosen)
        counts = [min(most - r.written, self.rng.choice((1, 1, 1, self.tpb + 1))) for r in chosen]
        ahead = self.alone and self.rng.random() < 0.4
        taken = list(chosen)
        lengths = [r.written for r in chosen]

        def run() -> bool:
            with self.manager.step([r.cache for r in chosen], counts, make_room=self._policy()) as step:
                self._note_suspended()
                taken[:] = [chosen[position] for position in step.positions]
                for position, count in zip(step.positions, [counts[p] for p in step.positions], strict=True):
                    r = chosen[position]
                    r.prompt = [*r.prompt[:count], *self._tokens(count - len(r.prompt)), *r.prompt[count:]]
                    r.capacity = r.written + count
                new = [chosen[p].prompt[: counts[p]] for p in step.positions]
                if ahead:
                    step.commit_ahead(new)
                for r, tokens in zip(taken, new, strict=True):
                    self.step(r, len(tokens))
                if not ahead:
                    step.commit(new)
            return True

        try:
            done = self.attempt(None, run)
        except Found as found:
            if not isinstance(found.__cause__, PageDataLostError) or not (self.disturbed or self.interrupted):
                raise
            done = None
        if done is None:
            self._note_suspended()
            for r in chosen:
                r.committed, r.history, r.capacity = r.cache.num_committed_tokens, r.cache.history_length, r.cache.capacity
            return
        self.outcomes["steps"] += 1
        for r in taken:
            r.committed = r.history = r.written
        for r, before, count in zip(chosen, lengths, counts, strict=True):
            if not r.active and r.cache.capacity == before + count:
                r.capacity = before + count  # suspended after it had got its pages
            self.expect_lengths(r, "in a step,")

    # --- matches that are kept

    def find(self) -> None:
        """A match, from which a request is created some operations later."""
        scope = int(self.rng.random() * len(SCOPES))
        base = self.prompts[scope][int(self.rng.random() * 4)]
        prompt = base[: self.rng.randrange(2, len(base) + 1)]
        match = self.attempt(None, self.manager.find_reuse, SCOPES[scope], prompt[:-1])
        if match is not None:
            self.matches = [*self.matches[-3:], (match, scope, prompt)]

    def create_from_match(self) -> None:
        if not self.matches or len(self.open) >= MAX_OPEN:
            return
        match, scope, prompt = self.matches[int(self.rng.random() * len(self.matches))]
        number = next(self.numbers)
        create: Callable[[], KVCache] = lambda: self.manager.create_kv_cache(id=number, reuse_match=match)  # noqa: E731
        current = match.is_current and self.alone and self.manager.num_open_caches == len(self.open)
        expected = match.num_tokens
        cache = self.attempt(None, create)
        if cache is None:
            return
        found = cache.num_committed_tokens
        if found > len(prompt) - 1 or (current and not self.disturbed and self.setup.schedule == "eager" and found != expected):
            raise Found(f"a match of {expected} tokens, {'current' if current else 'old'}, became {found} of {len(prompt) - 1}")
        text = Text(len(self.memory), 1000 + scope)
        text.extend(prompt[:found])
        request = Request(cache, number, scope, text)
        request.prompt = prompt[found:]
        self.outcomes["created from a match"] += 1
        self.expect_lengths(request, "created,")
        self.open.append(request)
