"""The public handle of one request's cache. Its methods validate arguments and call `request/`.

A method takes the manager's lock if it changes more than the request's own state. A step inside a block changes a few integers and
takes no lock. A request must be used by one thread at a time; different requests may be used by different threads.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Final, SupportsIndex

from kv_cache_manager_v2.arguments import (
    Integers,
    as_given,
    at_least,
    flag,
    instance_or_none,
    renamed,
    request_id,
    text,
    unsigned,
    unsigned_or_none,
    whole,
    whole_or_none,
)
from kv_cache_manager_v2.errors import ConfigError, CorruptedError, KVCacheError, LogicError, OutOfPagesError
from kv_cache_manager_v2.eviction.policy import EXPECTATIONS
from kv_cache_manager_v2.ids import NULL_POINT, Stream
from kv_cache_manager_v2.make_room import MakeRoom, try_again
from kv_cache_manager_v2.page_index_views import PageIndexViews
from kv_cache_manager_v2.request import batch, beams, counts, planned_drop, residency
from kv_cache_manager_v2.request import commit as committing
from kv_cache_manager_v2.request import fork as forking
from kv_cache_manager_v2.request.call import Call
from kv_cache_manager_v2.request.planned_drop import PlannedDropHandle
from kv_cache_manager_v2.request.publication import check_settled
from kv_cache_manager_v2.request.request import ACTIVE, CLOSED, SUSPENDED, CacheStatus, Request
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import Tokens, pack
from kv_cache_manager_v2.statistics import KVCacheStatsDelta
from kv_cache_manager_v2.storage.planner import Shortage

if TYPE_CHECKING:
    from kv_cache_manager_v2.manager import KVCacheManager

_log: Final = logging.getLogger(__name__)


class KVCache(PageIndexViews):
    """The KV cache of one request. `KVCacheManager.create_kv_cache` makes it; `close()` or a `with` block ends it.

    It has three lengths, in tokens: committed <= history <= capacity. Committed tokens are final, and can be reused. History tokens
    have no query in the next step. The capacity covers the history and all input of the next step. Only `commit_ahead` commits
    tokens after the history.
    """

    Status: ClassVar[type[CacheStatus]] = CacheStatus

    def __init__(self, manager: KVCacheManager, state: Request) -> None:
        """Internal. `KVCacheManager.create_kv_cache` makes caches."""
        super().__init__(state)
        self._manager = manager

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the cache. If the `with` block raised, an error of `close()` is logged, so that the first error is seen."""
        try:
            self.close()
        except KVCacheError as failed:
            if kind is None:
                raise
            _log.error("a KVCache (id %s) could not be closed: %s", self._state.request_id, failed)

    def __del__(self) -> None:
        state: Request | None = getattr(self, "_state", None)  # absent if the constructor raised
        if state is not None and state.status != CLOSED:
            state.shared.unclosed.append(state)  # closed by the next public call: a finaliser must not do the work

    def __reduce__(self) -> str:
        raise LogicError("a KVCache cannot be copied or pickled: it owns its request; use fork()")

    def __repr__(self) -> str:
        state = self._state
        return (
            f"<KVCache id={state.request_id} {CacheStatus(state.status).name} committed={state.committed} "
            f"history={state.history} capacity={state.capacity}>"
        )

    # --- properties

    @property
    def state(self) -> Request:
        """Internal state of the request, for `introspection` and tests. Not part of the public interface."""
        return self._state

    @property
    def status(self) -> CacheStatus:
        """ACTIVE, SUSPENDED or CLOSED."""
        return CacheStatus(self._state.status)

    @property
    def is_active(self) -> bool:
        """Whether the cache is ACTIVE: its pages are on the GPU and locked."""
        return self._state.status == ACTIVE

    @property
    def id(self) -> Hashable:
        """The id that the engine gave the request; None if it gave none."""
        return as_given(self._state.request_id)

    @property
    def manager(self) -> KVCacheManager:
        """The manager that made this cache."""
        return self._manager

    @property
    def reuse_scope(self) -> ReuseScope:
        """The scope within which the request shares cached blocks."""
        return self._state.scope

    @property
    def tokens_per_block(self) -> int:
        """Tokens per block, as configured."""
        return self._state.tokens_per_block

    @property
    def num_blocks(self) -> int:
        """Blocks of the capacity: ceil(capacity / tokens_per_block). 0 once closed."""
        return self._state.num_blocks

    @property
    def beam_width(self) -> int:
        """Number of beams. It can be set while the cache is ACTIVE.

        Widening copies the partial last block and the recurrent state for each further beam. Full history blocks stay with beam 0:
        the index rows of other beams have BAD_PAGE_INDEX there. Narrowing loses the uncommitted tokens of the removed beams. Raises
        ConfigError for an invalid width, LogicError in a state that does not allow a change, OutOfPagesError if there are too few
        slots. Nothing has changed then.
        """
        return self._state.width

    @beam_width.setter
    def beam_width(self, width: SupportsIndex) -> None:
        wanted = at_least(width, "beam_width", 1)
        with self._shared.lock, Call(self._shared, "beam_width"):
            self._require_open("beam_width")
            beams.set_width(self._state, wanted)

    @property
    def text_only(self) -> bool:
        """Whether the engine has promised to commit no digests. Digests are refused then."""
        return self._state.text_only

    @text_only.setter
    def text_only(self, value: bool) -> None:
        """Raises ConfigError for False if the manager has text_only=True, and for True after digests were committed."""
        wanted = flag(value, "text_only")
        self._require_open("text_only")
        if not wanted and self._manager.text_only:
            raise ConfigError("text_only=False: the manager was configured with text_only=True, which applies to all caches")
        if wanted and self._state.has_digests:
            raise ConfigError("text_only=True: this cache has committed digests; set it before the first digest")
        self._state.text_only = wanted

    @property
    def allow_seq_rebasing(self) -> bool:
        """Whether a commit may exchange a page of this cache for that of an identical cached block.

        If False, page indices of an ACTIVE cache never change, except by `suspend()` and between beams: for engines that read each
        index once. Identical blocks that are computed side by side keep their own pages until their caches close.
        """
        return self._state.adopts

    @allow_seq_rebasing.setter
    def allow_seq_rebasing(self, value: bool) -> None:
        wanted = flag(value, "allow_seq_rebasing")
        self._require_open("allow_seq_rebasing")
        self._state.adopts = wanted

    @property
    def num_committed_tokens(self) -> int:
        """Number of committed tokens; directly after creation, the number of reused tokens."""
        return self._state.committed

    @property
    def committed_tokens(self) -> list[int | bytes]:
        """A copy of the committed tokens: ids, and digests as 32 bytes."""
        return self._state.committed_tokens()

    @property
    def cached_tokens_by_level(self) -> list[int]:
        """Tokens reused at creation, by the coldest cache level of each block's pages. They sum to the reused length."""
        return list(self._state.cached_tokens_by_level)

    def _get_last_cached_token_level(self) -> int | None:
        """The cache level to which the last token reused at creation is credited; None if none was reused."""
        level = self._state.last_cached_level
        return level if level >= 0 else None

    def _get_num_reusable_tokens_before_pruning(self) -> int:
        """Tokens of the longest cached path at creation, regardless of missing pages."""
        return self._state.divergence

    def _get_num_reusable_tokens_before_hybrid_pruning(self) -> int:
        """Tokens that would have been reused at creation if recurrent layers needed no snapshot."""
        return self._state.before_hybrid

    @property
    def pages_by_level(self) -> list[list[int]]:
        """Number of pages that the next step reads, by layer group and cache level. A recurrent state is one page. O(blocks)."""
        with self._shared.lock:
            return residency.pages_by_level(self._state)

    @property
    def last_shortage(self) -> Shortage | None:
        """Why the last `resize`, `resume` or `prefetch` returned False; None if it succeeded."""
        return self._state.last_shortage

    # --- lengths

    @property
    def capacity(self) -> int:
        """Tokens for which the cache has pages: the history and all input of the next step.

        Setting it is `resize(value)`, but raises OutOfPagesError for a shortage, and ConfigError with scratch reuse.
        """
        return self._state.capacity

    @capacity.setter
    def capacity(self, value: SupportsIndex) -> None:
        if self._state.scratch:
            raise ConfigError("with scratch reuse the capacity depends on the history: call resize(capacity, history_length)")
        if not self.resize(at_least(value, "capacity", 0)):
            raise OutOfPagesError(f"too few pages for capacity {value}: {self._state.last_shortage}")

    @property
    def history_length(self) -> int:
        """Tokens without a query in the next step. It alone decides which blocks leave a window. It cannot decrease.

        Setting it is `resize(None, value)`, but raises OutOfPagesError for a shortage.
        """
        return self._state.history

    @history_length.setter
    def history_length(self, value: SupportsIndex) -> None:
        if not self.resize(None, at_least(value, "history_length", 0)):
            raise OutOfPagesError(f"too few pages for history_length {value}: {self._state.last_shortage}")

    def resize(
        self, capacity: SupportsIndex | None, history_length: SupportsIndex | None = None, make_room: MakeRoom | None = None
    ) -> bool:
        """Set the capacity and the history, in tokens; None keeps a value. All or nothing.

        Returns False, with nothing changed, if there are too few pages. `last_shortage` then says what is missing: suspend another
        request and try again, or pass a policy that does so. A larger history says that its positions are computed: by this request
        below the old capacity, elsewhere beyond it, as in disaggregated serving. O(1) inside a block, else O(blocks added, removed
        or leaving a window). Raises LogicError unless ACTIVE, and where the next step would read what was written to scratch,
        ConfigError for a smaller history or a capacity below the history.
        """
        state = self._state
        if type(capacity) is int and history_length is None and make_room is None and state.stay_inside_block(capacity):
            return True
        policy = _policy(make_room)
        longest, settled = whole_or_none(capacity, "capacity"), whole_or_none(history_length, "history_length")
        if batch.resize(state, longest, settled):
            return True
        return policy is not None and try_again(policy, self, partial(batch.resize, state, longest, settled))

    # --- commit

    def commit(
        self,
        accepted_input_tokens: Tokens | None = None,
        beam_search_indices: Integers | None = None,
        is_end: bool = False,
        tokens: Tokens | None = None,
    ) -> None:
        """Append final tokens. Blocks that become full can be reused at once. The history becomes at least the committed length.

        With `commit_min_snapshot` the history must not be beyond that, and the recurrent state is copied: see
        `snapshot_at_block_ends`. Tokens are ids (0 <= id < 2**31), 32-byte digests or `MmItemContext`: a sequence, or a
        one-dimensional integer buffer. `beam_search_indices` names the beam of each token (default 0); all tokens of a block must
        come from one beam. With `is_end=True` no more tokens follow: the partial last block can be reused too. `tokens` is the old
        name of the first parameter. O(tokens). Raises LogicError unless ACTIVE and committing is allowed, ConfigError for invalid
        tokens or tokens beyond the capacity.
        """
        state = self._state
        given = accepted_input_tokens
        if type(given) is list and len(given) == 1 and is_end is False and beam_search_indices is None:
            token = given[0]
            if type(token) is int:
                batch.commit_token(state, token)
                return
        if tokens is not None:
            given = renamed("tokens", "accepted_input_tokens", tokens)
        batch.commit(state, pack(given, state.text_only), beam_search_indices, flag(is_end, "is_end"))

    def commit_ahead(self, input_tokens: Tokens) -> None:
        """Commit tokens before their step is queued: as `commit`, but the history stays, and no page is exchanged or released.

        Blocks that become full match at once, each as a whole only: nothing is copied from them. A block is computed once the
        history covers it, by `resize` or `commit`: queue its step on the cache's stream before. Until then a cache that matched it
        resumes on this stream only. `suspend()`, `close()` and a `resize` to fewer tokens take back what the history does not
        cover: the blocks leave the tree, `num_committed_tokens` becomes the history, and caches that matched them can only be
        closed. With `commit_min_snapshot` the snapshot is made when the history reaches the committed length. O(tokens). Raises
        LogicError unless ACTIVE and committing is allowed, and with several beams, ConfigError for invalid tokens or tokens beyond
        the capacity.
        """
        state = self._state
        batch.commit_ahead(state, pack(input_tokens, state.text_only))

    def prefill_end(self, prompt_length: SupportsIndex) -> int:
        """The position, in tokens, up to which the next prefill chunk may go, so that the same prompt can reuse it later.

        With `commit_min_snapshot` this is the last block boundary after which the last prompt token is still to be computed,
        until that much is committed. Then, and without snapshots, it is the end of the prompt. `snapshot_at_branches` adds,
        before it, the block boundary up to which the prompt was cached at creation: other prompts may branch off there too. Ask
        before each chunk, and commit each. O(1).
        """
        length = at_least(prompt_length, "prompt_length", 0)
        shared = self._shared
        usable = max(0, length - 1 - shared.backoff)
        boundary = usable - usable % shared.tokens_per_block
        if not shared.commit_min_snapshot or boundary <= self._state.committed:
            return length
        branch = min(boundary, self._state.divergence // shared.tokens_per_block * shared.tokens_per_block)
        return branch if shared.snapshot_at_branches and branch > self._state.committed else boundary

    def stop_committing(self) -> None:
        """Make the committed part of the last block reusable. No token can be committed afterwards. Idempotent.

        Raises LogicError once closed, and while tokens committed ahead are not computed.
        """
        with self._shared.lock, Call(self._shared, "stop_committing()"):
            self._require_open("stop_committing()")
            check_settled(self._state, "stop_committing()")
            committing.stop_committing(self._state, False, NULL_POINT)

    def plan_committed_block_drop(self) -> PlannedDropHandle | None:
        """Plan to drop the pages that only a match of exactly the committed length needs; None if there are none.

        For conversations of several turns: `drop()` of the handle drops these window pages and the snapshot, once the next turn has
        started. Raises LogicError before `stop_committing()`.
        """
        with self._shared.lock, Call(self._shared, "plan_committed_block_drop()"):
            self._require_open("plan_committed_block_drop()")
            return planned_drop.plan(self._state)

    # --- residency

    @property
    def cuda_stream(self) -> Stream:
        """The stream on which the engine uses this cache. If it is set while ACTIVE, the new stream waits for the old one.

        Raises ConfigError (a ValueError) if it is read before it was set.
        """
        if not self._state.stream_set:
            raise ConfigError("cuda_stream has not been set: pass a stream to resume()")
        return self._state.stream

    @cuda_stream.setter
    def cuda_stream(self, stream: SupportsIndex) -> None:
        state = self._state
        handle = unsigned(stream, "cuda_stream")
        with self._shared.lock, Call(self._shared, "cuda_stream"):
            self._require_open("cuda_stream")
            residency.change_stream(state, handle)

    @property
    def finish_event(self) -> object:
        """Always raises ConfigError (a ValueError). To order other work after this cache's, record an event on `cuda_stream`."""
        raise ConfigError("finish_event exists only inside a transition; record an event of your own on cuda_stream")

    def resume(self, cuda_stream: SupportsIndex | None = None, make_room: MakeRoom | None = None) -> bool:
        """Onload and lock the pages, ready for work on the stream. False, with nothing changed but `last_shortage`, on a shortage.

        A shortage is too few slots, or a GPU pool group of which other requests use more than `max_util_for_resume`. `make_room` is
        asked before that is the answer. The stream waits for the loads. Raises LogicError unless SUSPENDED, or if no stream was
        ever given.
        """
        policy = _policy(make_room)
        stream = unsigned_or_none(cuda_stream, "cuda_stream")
        if self._resume(stream):
            return True
        return policy is not None and try_again(policy, self, partial(self._resume, stream))

    def _resume(self, stream: Stream | None) -> bool:
        state = self._state
        with self._shared.lock, Call(self._shared, "resume()"):
            state.require(SUSPENDED, "resume()")
            if stream is None and not state.stream_set:
                raise LogicError("resume() needs a stream: none was ever given to this cache")
            if stream is not None:
                self._shared.timeline.record(stream)  # raises for an invalid stream, before anything changes
            done = residency.resume(state, state.stream if stream is None else stream)
        return done

    def suspend(self) -> None:
        """Hold the pages instead of locking them: they may move to colder tiers, and none is dropped.

        Detaches page-index buffers. Raises LogicError unless ACTIVE.
        """
        state = self._state
        with self._shared.lock, Call(self._shared, "suspend()"):
            state.require(ACTIVE, "suspend()")
            residency.suspend(state)

    def prefetch(self, target: SupportsIndex | None = None, level: SupportsIndex | None = None) -> bool:
        """Start moving this cache's pages from colder levels to level `target`. `level` is the old name of the parameter.

        Returns False, with nothing changed, if that level has too few slots. Raises LogicError unless SUSPENDED.
        """
        state = self._state
        number = whole(target if level is None else renamed("level", "target", level), "target")
        with self._shared.lock, Call(self._shared, "prefetch()"):
            state.require(SUSPENDED, "prefetch()")
            done = residency.prefetch(state, number)
        return done

    @property
    def is_loaded(self) -> bool:
        """Whether the bytes of all pages that the next step reads are on the GPU, so that `resume` waits for no load.

        For use after `prefetch(GPU_LEVEL)`. Never blocks. False if a load has failed: `resume` raises then.
        """
        with self._shared.lock, Call(self._shared, "is_loaded"):
            return residency.is_loaded(self._state)

    def close(self, expect: str | None = None) -> None:
        """End the request: committed blocks stay cached, all other pages are freed. Idempotent, in any state.

        `expect`: "more" if its conversation goes on, "end" if this was its last request, None if that is not known. The eviction
        policy learns how often that is right: docs/eviction_policies.md. Raises ConfigError for anything else.

        Raises PageDataLostError, with the cache closed, if the request has computed with bytes lost by a failed load and no other
        call has raised it. On a poisoned manager only the handle is closed: `shutdown()` frees the pages.
        """
        state = self._state
        if expect is not None and text(expect, "expect") not in EXPECTATIONS:
            raise ConfigError(f"expect is {expect!r}; it must be one of {', '.join(EXPECTATIONS)}, or None if that is not known")
        if state.status == CLOSED:
            return
        try:
            with self._shared.lock, Call(self._shared, "close()"):
                residency.close(state, expect)
        except CorruptedError:
            if state.status == CLOSED:
                raise
            with self._shared.lock:
                residency.close_poisoned(state)
            return
        state.report_loss()

    def fork(self, id: Hashable = None) -> KVCache:
        """Make a second, SUSPENDED cache that continues from this one's history, for parallel sampling and tree-of-thought.

        Full blocks are shared; a partial last block is copied when the fork first resumes. The fork's capacity is this cache's
        history. Both caches are closed independently. Raises, with nothing changed, LogicError if closed, while tokens committed
        ahead are not computed, and at a history where a query would read what was written to scratch, OutOfPagesError if there is
        no slot for the copy of a recurrent state.
        """
        number = request_id(id)
        with self._shared.lock, Call(self._shared, "fork()"):
            self._require_open("fork()")
            self._state.require(self._state.status, "fork()")
            twin = forking.fork(self._state, number)
            handle = KVCache(self._manager, twin)  # made first, so that its finaliser closes the request if a later line raises
            self._shared.enter(twin)
        return handle

    # --- statistics

    def commit_pending_stats(self) -> KVCacheStatsDelta:
        """Add this request's counts since the last call to the manager's statistics, and return them.

        Call it before `close()`, which loses uncommitted counts unless `commit_stats_on_close` is set. All counts are 0 for dummy
        requests, and if both `enable_stats` of the manager and `enable_request_stats` of the cache are off.
        """
        with self._shared.lock, Call(self._shared, "commit_pending_stats()"):
            return counts.commit_stats(self._state)

    def discard_pending_stats(self) -> None:
        """Set the counts since the last `commit_pending_stats()` to 0."""
        with self._shared.lock, Call(self._shared, "discard_pending_stats()"):
            counts.discard_stats(self._state)


def _policy(make_room: object) -> MakeRoom | None:
    return instance_or_none(make_room, MakeRoom, "make_room")  # type: ignore[type-abstract]


_KVCache = KVCache
