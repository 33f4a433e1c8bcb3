"""A serving engine without a model, which serves the requests of a trace with the real manager.

Open requests are kept in order of admission, and the running ones are a prefix of that order. If a request cannot get its pages,
the newest running request is suspended, which may be the same one. Suspended requests resume oldest first, once another request has
ended. So the oldest request always advances.

A request's prompt is looked up, "computed" (its pages are allocated, but nothing is calculated) and committed. With `decode`, its
output follows token by token, in turn with all running requests. Without, a request stays open until `concurrency` requests are
open. If recurrent layers need snapshots, tokens are committed up to each multiple of `Layers.snapshot_every` and at the end, or up
to where `KVCache.prefill_end` says.
Arrival times are ignored: requests are served in the order of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kv_cache_manager_v2 import EmulatedDriver, KVCache, KVCacheManager
from kv_cache_manager_v2.cli.capacity import Capacity
from kv_cache_manager_v2.cli.contents import TokenSource
from kv_cache_manager_v2.cli.recording import Recorder
from kv_cache_manager_v2.cli.stamps import PageStamps
from kv_cache_manager_v2.cli.trace_lines import TraceRecord

if TYPE_CHECKING:
    from kv_cache_manager_v2.cli.contents import TokenBuffer

NEVER: Final = 1 << 60  # a position that no request reaches


@dataclass
class Outcome:
    """The counts of a replay. `hit_tokens[i]` is the match length of request i at its first look-up; 0 if it was skipped."""

    hit_tokens: list[int]
    hit_tokens_by_level: list[int]
    computed_tokens: int = 0  # prompt tokens not matched, summed over all look-ups
    generated_tokens: int = 0
    suspensions: int = 0
    restarts: int = 0  # suspended requests closed and served again from the start, to free even their suspended pages
    hit_pages: list[list[int]] = field(default_factory=list)  # pages that the matches need, by kind of layer, then level
    skipped: list[int] = field(default_factory=list)  # requests that do not fit an otherwise empty cache
    pages_moved: list[list[int]] = field(default_factory=list)  # by source level, then destination level
    pages_returned: list[int] = field(default_factory=list)  # to clean copies, by level
    pages_dropped: list[int] = field(default_factory=list)  # by level
    pages_checked: int = 0  # with verification: comparisons of a page
    num_mismatches: int = 0  # with verification: comparisons that failed
    mismatches: list[str] = field(default_factory=list)  # descriptions of the first ones


class OpenRequest:
    """A request of the trace between its first admission and its end."""

    def __init__(self, index: int, prompt: TokenBuffer, output: TokenBuffer) -> None:
        self.index = index  # position in the trace
        self.prompt = prompt  # tokens to look up and compute; after a restart, the tokens generated before too
        self.output = output  # tokens to generate after admission
        self.generated = 0  # tokens of `output` that are committed
        self.prefilled = False  # the prompt is committed
        self.fingerprints = b""  # of prompt and output, with verification
        self.hits_by_level: list[int] | None = None  # matched tokens of the first look-up; None before it
        self.hit_pages: list[list[int]] = []  # pages that the first match needs, by kind of layer, then level


class Engine:
    """Serves the records of a trace through one manager on one emulated device."""

    def __init__(
        self,
        capacity: Capacity,
        source: TokenSource,
        *,
        concurrency: int,
        decode: bool,
        verify: bool,
        recorder: Recorder | None = None,
        expects: Sequence[str] = (),
    ) -> None:
        """`expects`: for each record, "more" or "end": what the engine says when it is done; empty if it says nothing."""
        self._driver = EmulatedDriver()
        self._manager = KVCacheManager(capacity.config, recorder, driver=self._driver)
        self._recorder = recorder
        self._stream = self._driver.create_stream()
        self._source = source
        self._expects = expects
        self._concurrency = concurrency  # most requests open at once
        self._decode = decode
        self._snapshot_every = capacity.layers.snapshot_every  # tokens; None: no layer needs snapshots, or they are taken by prompt
        self._snapshots_by_prompt = capacity.layers.snapshots_by_prompt
        self._stamps = PageStamps(self._manager, self._driver, self._stream, capacity.layers) if verify else None
        self._restarting: list[OpenRequest] = []  # to be admitted again, the oldest last
        self._open: list[OpenRequest] = []  # in order of admission
        self._caches: list[KVCache] = []  # of the open requests
        self._num_running = 0  # _open[:_num_running] run, the others are suspended
        self._crowded = False  # a request was suspended and none has ended since: resuming one would suspend another
        self._outcome = Outcome([], [0] * len(capacity.num_blocks))
        self._outcome.hit_pages = [[0] * len(capacity.num_blocks) for _kind in capacity.layers.kinds]

    @property
    def manager(self) -> KVCacheManager:
        """The manager that the engine uses."""
        return self._manager

    def run(self, records: Sequence[TraceRecord], progress: Callable[[int], None]) -> Outcome:
        """Serve all records. `progress` is called with the number of finished requests."""
        outcome = self._outcome
        outcome.hit_tokens = [0] * len(records)
        admitted = 0
        while self._open or self._restarting or admitted < len(records):
            while len(self._open) == self._num_running < self._concurrency and (self._restarting or admitted < len(records)):
                if self._restarting:
                    self._admit(self._restarting.pop())
                else:
                    self._admit(self._make_request(admitted, records[admitted]))
                    admitted += 1
                self._resume_suspended()
                self._prefill_running()
            self._resume_suspended()
            self._prefill_running()
            if self._decode:
                self._decode_step()
            self._finish(more=bool(self._restarting) or admitted < len(records))
            progress(admitted - len(self._open) - len(self._restarting))
            if self._recorder is not None:
                self._recorder.sample(admitted, outcome, self._manager, last=admitted == len(records))
        self._count_movement()
        if self._recorder is not None:
            self._recorder.stop()
        return outcome

    def close(self) -> None:
        """Close open requests, the manager and the device."""
        for cache in self._caches:
            cache.close()
        self._caches.clear()
        self._open.clear()
        self._num_running = 0
        self._manager.shutdown()
        self._driver.destroy_stream(self._stream)
        self._driver.close()

    # --- admission and end

    def _make_request(self, index: int, record: TraceRecord) -> OpenRequest:
        output = self._source.output(record.output_length if self._decode else 0)
        return OpenRequest(index, self._source.prompt(record.block_ids, record.input_length), output)

    def _admit(self, request: OpenRequest) -> None:
        """Look up a request's prompt, and append the request, suspended, to the open ones."""
        if self._recorder is not None:
            self._recorder.admit(request.index, request.prompt)
        cache = self._manager.create_kv_cache(None, request.prompt, id=request.index)
        request.prefilled = False
        if self._stamps is not None:
            request.fingerprints = self._source.fingerprints(self._source.joined([request.prompt, request.output]))
        outcome = self._outcome
        outcome.computed_tokens += len(request.prompt) - cache.num_committed_tokens
        if request.hits_by_level is None:
            request.hits_by_level = list(cache.cached_tokens_by_level)
            outcome.hit_tokens[request.index] = cache.num_committed_tokens
            for level, num_tokens in enumerate(request.hits_by_level):
                outcome.hit_tokens_by_level[level] += num_tokens
            if cache.num_committed_tokens > 0:
                request.hit_pages = cache.pages_by_level
                self._count_pages(request, 1)
        self._open.append(request)
        self._caches.append(cache)

    def _finish(self, *, more: bool) -> None:
        """Close finished requests. All of them are running: a suspended request is not finished."""
        if self._decode:
            for position in reversed(range(self._num_running)):
                request = self._open[position]
                if request.prefilled and request.generated == len(request.output):
                    self._end(position)
            return
        full = len(self._open) >= self._concurrency or len(self._open) > self._num_running
        if self._num_running and (full or not more):
            self._end(0)

    def _end(self, position: int) -> None:
        """Close one running request. Its pages stay cached."""
        self._check(position)
        request = self._open.pop(position)
        self._num_running -= 1
        self._crowded = False
        self._caches.pop(position).close(self._expects[request.index] if self._expects else None)

    # --- the work of a step

    def _resume_suspended(self) -> None:
        """Resume suspended requests, the oldest first, while their pages fit without suspending another request."""
        while self._num_running < len(self._open) and not (self._crowded and self._num_running):
            if self._caches[self._num_running].resume(self._stream):
                self._num_running += 1
                self._check(self._num_running - 1)
            elif self._num_running or not self._close_newest():
                return

    def _prefill_running(self) -> None:
        """Compute and commit the prompts of running requests that are not prefilled."""
        position = 0
        while position < self._num_running:
            request = self._open[position]
            if not request.prefilled:
                if not self._grow(position, len(request.prompt)):
                    continue  # it was suspended or closed: another request may be at this position now
                self._prefill(position)
                request.prefilled = True
                if not self._decode:
                    self._caches[position].stop_committing()  # commits the partial last block too
            position += 1

    def _prefill(self, position: int) -> None:
        """Compute and commit the unmatched part of a prompt, at once or from snapshot to snapshot."""
        prompt, cache = self._open[position].prompt, self._caches[position]
        beg = cache.num_committed_tokens
        while beg < len(prompt):
            end = cache.prefill_end(len(prompt)) if self._snapshots_by_prompt else min(self._next_snapshot(beg), len(prompt))
            self._compute(position, beg, end)
            is_end = not self._decode and not self._snapshots_by_prompt and end == len(prompt)
            cache.commit(prompt[beg:end], is_end=is_end)
            beg = end

    def _next_snapshot(self, position: int) -> int:
        """The position of the next snapshot; NEVER if no layer needs snapshots."""
        every = self._snapshot_every
        return NEVER if every is None else (position // every + 1) * every

    def _decode_step(self) -> None:
        """Generate one token for every running request that has output left."""
        position = 0
        while position < self._num_running:
            request = self._open[position]
            if request.prefilled and request.generated < len(request.output):
                if not self._grow(position, len(request.prompt) + request.generated + 1):
                    continue
                length = len(request.prompt) + request.generated
                self._compute(position, length, length + 1)
                self._commit_output(position)
                request.generated += 1
                self._outcome.generated_tokens += 1
            position += 1

    def _commit_output(self, position: int) -> None:
        """Commit the generated token. With snapshots, commit only when one is due, and then all tokens since the last one."""
        request, cache = self._open[position], self._caches[position]
        end = request.generated + 1
        length = len(request.prompt) + end
        if self._snapshot_every is None:
            cache.commit(request.output[request.generated : end])
            return
        cache.history_length = length  # the token is computed, but not committed yet
        if end == len(request.output) or length % self._snapshot_every == 0:
            cache.commit(request.output[cache.num_committed_tokens - len(request.prompt) : end])

    def _compute(self, position: int, beg: int, end: int) -> None:
        """Write the pages of tokens [beg, end), as a model would. Does nothing without verification."""
        if self._stamps is not None:
            self._stamps.write(self._caches[position], self._open[position].fingerprints, beg, end)

    def _check(self, position: int) -> None:
        """With verification, compare all pages of a running request."""
        if self._stamps is not None:
            request = self._open[position]
            cache = self._caches[position]
            self._stamps.check(cache, request.index, request.fingerprints, cache.history_length)

    # --- pressure

    def _grow(self, position: int, length: int) -> bool:
        """Allocate pages for `length` tokens of the request at `position`, suspending newer requests if needed.

        Returns False if the request itself is no longer running.
        """
        cache = self._caches[position]
        while not cache.resize(length):
            if self._num_running > 1:
                self._num_running -= 1
                self._caches[self._num_running].suspend()
                self._outcome.suspensions += 1
                self._crowded = True
                if self._num_running == position:
                    return False
            elif not self._close_newest():
                return False
        return True

    def _close_newest(self) -> bool:
        """Close the newest open request, since the pages of the oldest do not fit. Returns False if that is the oldest itself.

        The closed request is served again later. If it was the only open request, it can never fit and is skipped.
        """
        newest = self._open.pop()
        self._caches.pop().close()
        if not self._open:  # it had the whole cache for itself: it can never fit
            self._num_running = 0
            self._skip(newest)
            return False
        self._outcome.restarts += 1
        newest.prompt = self._source.joined([newest.prompt, newest.output[: newest.generated]])
        newest.output = newest.output[newest.generated :]
        newest.generated = 0
        self._restarting.append(newest)
        return True

    def _skip(self, request: OpenRequest) -> None:
        """Count a request as skipped, and subtract its match from the totals."""
        outcome = self._outcome
        outcome.skipped.append(request.index)
        outcome.hit_tokens[request.index] = 0
        for level, num_tokens in enumerate(request.hits_by_level or ()):
            outcome.hit_tokens_by_level[level] -= num_tokens
        self._count_pages(request, -1)

    def _count_pages(self, request: OpenRequest, sign: int) -> None:
        """Add (sign 1) or subtract (sign -1) the pages of a request's match to or from the totals."""
        for total, found in zip(self._outcome.hit_pages, request.hit_pages, strict=False):  # empty for a miss
            for level, num_pages in enumerate(found):
                total[level] += sign * num_pages

    def _count_movement(self) -> None:
        outcome = self._outcome
        levels = range(len(outcome.hit_tokens_by_level))
        movement = self._manager.movement
        outcome.pages_moved = [[movement.pages_moved(source, destination) for destination in levels] for source in levels]
        outcome.pages_returned = [movement.pages_returned(level) for level in levels]
        outcome.pages_dropped = [movement.pages_dropped(level) for level in levels]
        if self._stamps is not None:
            self._driver.synchronize()
            outcome.pages_checked = self._stamps.pages_checked
            outcome.num_mismatches = self._stamps.num_mismatches
            outcome.mismatches = self._stamps.mismatches
