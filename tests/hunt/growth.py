"""The growth of a request: steps, commits, rewinds, received history, and several continuations."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kv_cache_manager_v2 import LogicError, OutOfMemoryError
from tests.hunt.base import MAX_BLOCKS, MAX_OPEN, Found
from tests.hunt.life import RequestLife
from tests.hunt.requests import Request


class RequestGrowth(RequestLife):
    """Steps, commits, forks and beams."""

    def write(self) -> None:
        request = self.pick(lambda r: r.active and not r.final and not r.named)
        if request is None:
            return self.resume()
        if request.committing and self.setup.min_snapshot and request.written > request.committed:
            return self._commit(request)
        rng = self.rng
        tpb = self.tpb
        left = MAX_BLOCKS * tpb - request.written
        if left <= 0:
            return self._close(request)
        count = min(left, rng.choice((1, 1, 2, tpb, tpb + 1, 3 * tpb)))
        if request.prompt and self.setup.scratch_rewind is not None and rng.random() < 0.5:
            count = len(request.prompt)
        draft = 0
        history: int | None = None
        if self.setup.scratch_rewind is not None:
            history = request.written
        else:
            draft = rng.choice((0, 0, 0, 1, tpb))
            if rng.random() < 0.2 and not (self.setup.min_snapshot and request.committing):
                history = rng.randrange(request.history, request.written + 1)
        capacity = request.written + count + draft
        if self.setup.scratch_rewind is None and rng.random() < 0.5:
            capacity = max(capacity, request.capacity)
        if self._resize(request, capacity, history):
            self.step(request, count)

    def _resize(self, request: Request, capacity: int | None, history: int | None) -> bool:
        done = self.attempt(request, request.cache.resize, capacity, history)
        if done:
            request.capacity = request.capacity if capacity is None else capacity
            request.history = request.history if history is None else history
            self.expect_lengths(request, "resized,")
            return True
        if done is False:
            self.outcomes["no pages"] += 1
            if request.cache.last_shortage is None:
                raise Found("a resize is refused without a reason")
            self.expect_lengths(request, "refused,")
            if self.rng.random() < 0.3:
                self.suspend()
        return False

    def decode(self) -> None:
        """Single tokens inside a block: the engine's most frequent step."""
        request = self.pick(lambda r: r.active and r.committing and not r.named and r.width == 1 and r.written == r.committed)
        if request is None or request.final:
            return
        for _i in range(4):
            if request.written >= MAX_BLOCKS * self.tpb:
                return
            capacity = request.written + 1
            history = request.written if self.setup.scratch_rewind is not None else None
            if not self._resize(request, capacity, history):
                return
            self.step(request, 1)
            token = request.texts[0].tokens[-1]
            self.attempt(request, request.cache.commit, [token])
            if request.named or request.cache.num_committed_tokens == request.committed:
                return
            request.committed += 1
            request.history = max(request.history, request.committed)
            self.expect_lengths(request, "decoded,")

    def commit(self) -> None:
        request = self.pick(lambda r: r.active and r.committing and not r.named and r.width == 1 and r.written > r.committed)
        if request is not None:
            self._commit(request)

    def _commit(self, request: Request) -> None:
        rng = self.rng
        width = request.width
        most = request.written - request.committed
        count = most if self.setup.min_snapshot or width > 1 or rng.random() < 0.5 else rng.randrange(1, most + 1)
        winner = int(rng.random() * width)
        tokens: Sequence[int] = request.texts[winner].tokens[request.committed : request.committed + count]
        if rng.random() < 0.3:
            tokens = array(rng.choice(("i", "q", "I")), tokens)
        ending = width == 1 and count == most and rng.random() < 0.1
        if width > 1:
            self.attempt(request, request.cache.commit, tokens, [winner] * count)
        else:
            self.attempt(request, request.cache.commit, tokens, None, ending)
        if request.named:
            return
        if request.cache.num_committed_tokens == request.committed:
            if not self.refused:
                raise Found("a commit did nothing")
            return
        request.committed += count
        request.history = max(request.history, request.committed)
        self.expect_lengths(request, "committed,")
        if ending:
            request.committing = False
            request.final = True
        if width > 1:
            request.texts.insert(0, request.texts.pop(winner))
            self._narrow(request)

    def advance(self) -> None:
        request = self.pick(lambda r: r.active and not r.named and r.history < r.written)
        if request is not None:
            history = self.rng.randrange(request.history + 1, request.written + 1)
            if self.setup.min_snapshot and request.committing:
                history = request.written
                if request.width > 1:
                    return
            self._resize(request, None, history)

    def rewind(self) -> None:
        """Take back what was speculated, or only the unused capacity."""
        request = self.pick(lambda r: r.active and not r.named and not r.final and r.capacity > r.history)
        if request is None or self.setup.scratch_rewind is not None:
            return
        length = request.written
        if self.ssm is None and self.rng.random() < 0.7:
            length = self.rng.randrange(request.history, request.written + 1)
        if self._resize(request, length, None):
            for text in request.texts:
                text.cut(length)
            request.written = min(request.written, length)
            request.state_at = request.written

    def disagg(self) -> None:
        """History that another instance computed: the pages outside of the windows never come.

        It begins at the capacity: positions below that count as written by the request itself.
        """
        request = self.pick(
            lambda r: (
                r.active and not r.named and not r.final and r.width == 1 and r.capacity == r.written == r.committed == r.history
            )
        )
        if request is None or self.setup.scratch_rewind is not None:
            return
        count = min(MAX_BLOCKS * self.tpb - request.written, self.rng.randrange(1, 4 * self.tpb + 2))
        if count > 0 and self._resize(request, request.written + count, request.written + count):
            self.step(request, count, received=True)

    # --- several continuations

    def fork(self) -> None:
        rewind = self.setup.scratch_rewind
        request = self.pick(
            lambda r: (
                not r.named
                and r.width == 1
                and (self.ssm is None or r.state_at == r.history)
                and r.cache.num_committed_tokens <= r.cache.history_length  # an interrupt may leave tokens committed ahead
            )
        )
        if request is None or len(self.open) >= MAX_OPEN:
            return
        if self.ssm is not None and not request.active and request.stream is None:
            return  # the state is copied on its stream
        number = next(self.numbers)
        try:
            cache = self.attempt(request, request.cache.fork, number)
        except Found as found:
            cause = found.__cause__
            if isinstance(cause, OutOfMemoryError) and self.ssm is not None:
                self.outcomes["no room for a fork"] += 1
            elif isinstance(cause, LogicError) and rewind is not None and request.history < request.capacity - rewind:
                self.outcomes["no fork within a scratch step"] += 1
            else:
                raise
            self.expect_lengths(request, "after a refused fork,")
            return
        if cache is None:
            return
        twin = Request(cache, number, request.scope, request.texts[0].copy(request.history))
        twin.committed = request.committed
        twin.committing = request.committing
        self.expect_lengths(twin, "forked,")
        self.open.append(twin)
        self.outcomes["forked"] += 1
        if self.rng.random() < 0.7:
            self._resume(twin)

    def widen(self) -> None:
        request = self.pick(
            lambda r: r.active and not r.named and not r.final and r.width == 1 and r.written == r.history and r.written > 0
        )
        if request is None or request.cache.has_scratch_slots:
            return
        if self.setup.min_snapshot and request.committing and request.committed != request.written:
            return
        width = self.rng.choice((2, 3))

        def change() -> bool:
            request.cache.beam_width = width
            return True

        try:
            done = self.attempt(request, change)
        except Found as found:
            if not isinstance(found.__cause__, OutOfMemoryError):
                raise
            done = None
        if done:
            request.texts += [request.texts[0].copy(request.written) for _ in range(width - 1)]
            self.outcomes["widened"] += 1
            self.step(request, 0)
        elif request.cache.beam_width != 1:
            raise Found(f"a refused widening left {request.cache.beam_width} beams")

    def converge(self) -> None:
        request = self.pick(lambda r: r.active and not r.named and r.width > 1)
        if request is None or request.cache.has_scratch_slots:
            return
        if request.committing and request.written > request.committed and self.rng.random() < 0.7:
            if not self.setup.min_snapshot or request.history in (request.committed, request.written):
                self._commit(request)
        else:
            self._narrow(request)

    def _narrow(self, request: Request) -> None:
        def change() -> bool:
            request.cache.beam_width = 1
            return True

        if self.attempt(request, change):
            del request.texts[1:]
            self.step(request, 0)
        elif not request.named:
            self._close(request)  # which beam is the first one now is the manager's secret
