"""The public handle of one request's cache: a thin state machine over the rooms of `request/`.

Rule: a method checks, takes the manager's lock if it leaves the request's own state, and calls one room. A step that stays
inside a block touches a few integers and takes no lock. A request is used by one thread at a time; different requests may be
used by different threads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Final, SupportsIndex

from kv_cache_manager_v2.arguments import (
    Integers,
    at_least,
    flag,
    page_index_mode,
    request_id,
    unsigned,
    unsigned_or_none,
    whole,
    whole_or_none,
)
from kv_cache_manager_v2.errors import ConfigError, KVCacheError, LogicError, OutOfPagesError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, DEFAULT_BEAM_INDEX, NULL_POINT, PageIndexMode, Stream
from kv_cache_manager_v2.layout.page_index import ScratchDesc
from kv_cache_manager_v2.request import batch, beams, counts, growth, planned_drop, residency, scratch
from kv_cache_manager_v2.request import commit as committing
from kv_cache_manager_v2.request import fork as forking
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.call import Call
from kv_cache_manager_v2.request.page_index_row import PageIndexRow
from kv_cache_manager_v2.request.planned_drop import PlannedDropHandle
from kv_cache_manager_v2.request.request import ACTIVE, CLOSED, SUSPENDED, CacheStatus, Request
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import Tokens, pack
from kv_cache_manager_v2.statistics import KVCacheStatsDelta
from kv_cache_manager_v2.storage.planner import Shortage

if TYPE_CHECKING:
    from kv_cache_manager_v2.manager import KVCacheManager

_log: Final = logging.getLogger(__name__)


class KVCache:
    """Where one request's keys and values live; made by `KVCacheManager.create_kv_cache`, closed by `close()` or a `with` block.

    Three lengths, in tokens: committed <= history <= capacity. *Committed* tokens are final and offered for reuse. *History* tokens
    have no query in the next step; only they decide what falls out of a window. *Capacity* covers the history and all input
    positions of the next step.
    """

    Status: ClassVar[type[CacheStatus]] = CacheStatus

    def __init__(self, manager: KVCacheManager, state: Request) -> None:
        """Not for users: `KVCacheManager.create_kv_cache` makes caches."""
        self._manager = manager
        self._state = state
        self._shared = state.shared

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close. An error of the `with` block is the one that is seen: one of `close()` is logged then."""
        try:
            self.close()
        except KVCacheError as failed:
            if kind is None:
                raise
            _log.error("a KVCache (id %s) could not be closed: %s", self._state.request_id, failed)

    def __del__(self) -> None:
        state: Request | None = getattr(self, "_state", None)  # nothing is there yet where the construction failed
        if state is not None and state.status != CLOSED:
            state.shared.abandoned.append(state)  # the next public call closes it: no work in a finaliser

    def __reduce__(self) -> str:
        raise LogicError("a KVCache cannot be copied or pickled: whoever drops the copy would end the request; use fork()")

    def __repr__(self) -> str:
        state = self._state
        return (
            f"<KVCache id={state.request_id} {CacheStatus(state.status).name} committed={state.committed} "
            f"history={state.history} capacity={state.capacity}>"
        )

    # --- what it is

    @property
    def state(self) -> Request:
        """Internal: what the manager owns of this request, for `introspection` and tests; no part of the interface."""
        return self._state

    @property
    def status(self) -> CacheStatus:
        return CacheStatus(self._state.status)

    @property
    def is_active(self) -> bool:
        return self._state.status == ACTIVE

    @property
    def id(self) -> int | None:
        """The engine's own number of the request."""
        return self._state.request_id

    @property
    def manager(self) -> KVCacheManager:
        return self._manager

    @property
    def reuse_scope(self) -> ReuseScope:
        return self._state.scope

    @property
    def tokens_per_block(self) -> int:
        return self._state.tokens_per_block

    @property
    def num_blocks(self) -> int:
        """ceil(capacity / tokens_per_block); 0 once closed."""
        return self._state.num_blocks

    @property
    def beam_width(self) -> int:
        """Beams. Widening, while ACTIVE, shares the full history blocks (further beams read BAD there) and copies the partial
        last block and the recurrent state for each further beam; narrowing loses the others' uncommitted data.

        Setting it raises ConfigError or LogicError for a width that cannot be, OutOfPagesError if there is no room: nothing
        changed then.
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
        """A promise that no digest will be committed: digests are refused then."""
        return self._state.text_only

    @text_only.setter
    def text_only(self, value: bool) -> None:
        """Raises ConfigError to relax what the manager demands, or to promise it after digests were committed."""
        wanted = flag(value, "text_only")
        self._require_open("text_only")
        if not wanted and self._manager.text_only:
            raise ConfigError("text_only=False: the manager was configured text_only=True, which no cache may relax")
        if wanted and self._state.has_digests:
            raise ConfigError("text_only=True: this cache has committed digests")
        self._state.text_only = wanted

    @property
    def num_committed_tokens(self) -> int:
        return self._state.committed

    @property
    def committed_tokens(self) -> list[int | bytes]:
        """A copy of the committed tokens: ids, and digests as 32 bytes."""
        return self._state.committed_tokens()

    @property
    def cached_tokens_by_level(self) -> list[int]:
        """Tokens that the creation reused, by the cache level that they had to be brought from; sums to the reuse length."""
        return list(self._state.cached_tokens_by_level)

    def _get_num_reusable_tokens_before_pruning(self) -> int:
        """Length of the longest cached path at creation, whatever its pages: reused <= before hybrid pruning <= this. The
        reference's name."""
        return self._state.divergence

    def _get_num_reusable_tokens_before_hybrid_pruning(self) -> int:
        """What the creation would have reused if recurrent layers needed no snapshot. The reference's name."""
        return self._state.before_hybrid

    @property
    def pages_by_level(self) -> list[list[int]]:
        """Pages that the next step reads, counted by layer group, then by the cache level that they are on now. O(blocks).

        Right after creation they are those of the match; a recurrent layer group counts its state as one page.
        """
        with self._shared.lock:
            return residency.pages_by_level(self._state)

    @property
    def last_shortage(self) -> Shortage | None:
        """Why the latest resize, resume or prefetch returned False; None after one that succeeded."""
        return self._state.last_shortage

    # --- lengths

    @property
    def capacity(self) -> int:
        return self._state.capacity

    @capacity.setter
    def capacity(self, value: SupportsIndex) -> None:
        """`resize(value)`, raising OutOfPagesError where that returns False."""
        if self._state.scratch:
            raise ConfigError("with scratch reuse the capacity depends on the history: call resize(capacity, history_length)")
        if not self.resize(at_least(value, "capacity", 0)):
            raise OutOfPagesError(f"no pages for capacity {value}: {self._state.last_shortage}")

    @property
    def history_length(self) -> int:
        return self._state.history

    @history_length.setter
    def history_length(self, value: SupportsIndex) -> None:
        if not self.resize(None, at_least(value, "history_length", 0)):
            raise OutOfPagesError(f"no pages for history_length {value}: {self._state.last_shortage}")

    def resize(self, capacity: SupportsIndex | None, history_length: SupportsIndex | None = None) -> bool:
        """Set the capacity and the history, in tokens; None keeps a value. All or nothing.

        False means a shortage of pages: nothing changed, `last_shortage` says what is missing; suspend another request and retry.
        Raises LogicError unless ACTIVE, ConfigError for a history that goes back or a capacity below the history.
        O(1) inside a block, else O(blocks that come, go or fall out of a window).
        """
        state = self._state
        if type(capacity) is int and history_length is None and growth.stay_inside_block(state, capacity):
            return True
        return batch.resize(state, whole_or_none(capacity, "capacity"), whole_or_none(history_length, "history_length"))

    # --- commit

    def commit(self, tokens: Tokens, beam_search_indices: Integers | None = None, is_end: bool = False) -> None:
        """Append final tokens: ids (0 <= id < 2**31), digests (32 bytes) or `MmItemContext`, as a sequence or a one-dimensional
        int32, uint32 or int64 buffer. Blocks that become full are offered for reuse at once. Raises the history to the
        committed count.

        `beam_search_indices` names the beam of each token (beam 0 without it); the tokens of one block must all name the same.
        `is_end=True`: no token follows and nothing will be written any more; publishes the partial last block too.
        Raises LogicError unless ACTIVE and committing is allowed, ConfigError for bad tokens or past the capacity; nothing
        changed then.
        """
        state = self._state
        if type(tokens) is list and len(tokens) == 1 and is_end is False and beam_search_indices is None:
            token = tokens[0]
            if type(token) is int:
                batch.commit_token(state, token)
                return
        batch.commit(state, pack(tokens, state.text_only), beam_search_indices, flag(is_end, "is_end"))

    def stop_committing(self) -> None:
        """No token will be committed any more: publishes the committed part of the last block. Idempotent; not after close."""
        with self._shared.lock, Call(self._shared, "stop_committing()"):
            self._require_open("stop_committing()")
            committing.stop_committing(self._state, False, NULL_POINT)

    def plan_committed_block_drop(self) -> PlannedDropHandle | None:
        """For multi-turn chat: a handle on the window pages and the SSM snapshot that only a request starting at exactly the
        committed length needs; its `drop()`, once the next turn has started, frees them. None if no request could start there.

        Raises LogicError before `stop_committing()`.
        """
        with self._shared.lock, Call(self._shared, "plan_committed_block_drop()"):
            self._require_open("plan_committed_block_drop()")
            return planned_drop.plan(self._state)

    # --- residency

    @property
    def cuda_stream(self) -> Stream:
        """The stream on which the engine uses this cache. Setting it while ACTIVE makes the new stream wait for the old one.

        Raises ConfigError (a ValueError) when read before it was ever set.
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
        """Of the reference, which has one only inside its own transitions; to order other work behind this cache's, record an
        event on its stream. Raises ConfigError, which is a ValueError, always."""
        raise ConfigError("finish_event exists only inside a transition; record an event of your own on cuda_stream")

    def resume(self, cuda_stream: SupportsIndex | None = None) -> bool:
        """Bring the cache to the GPU, ready for work on the stream. False: it stays SUSPENDED, nothing changed but `last_shortage`.

        Refused (False) while any GPU pool group is used beyond `max_util_for_resume`, or if its pages cannot all be had.
        Raises LogicError unless SUSPENDED, or if no stream was ever given.
        """
        state = self._state
        stream = unsigned_or_none(cuda_stream, "cuda_stream")
        with self._shared.lock, Call(self._shared, "resume()"):
            state.require(SUSPENDED, "resume()")
            if stream is None and not state.stream_set:
                raise LogicError("resume() needs a stream: none was ever given to this cache")
            before = state.stream
            if stream is not None:
                self._shared.timeline.record(stream)  # raises, before anything changes, for a stream that there is not
                state.stream = stream
            done = False
            try:
                done = residency.resume(state)
            finally:
                if done:
                    state.stream_set = True
                else:
                    state.stream = before
        return done

    def suspend(self) -> None:
        """Let others have the GPU: pages may move to colder tiers, none is dropped. Detaches page-index buffers. Raises unless
        ACTIVE."""
        state = self._state
        with self._shared.lock, Call(self._shared, "suspend()"):
            state.require(ACTIVE, "suspend()")
            residency.suspend(state)

    def prefetch(self, level: SupportsIndex) -> bool:
        """Start to move this cache's pages from colder levels to `level`; False, nothing changed, if it has no room. SUSPENDED
        only."""
        state = self._state
        target = whole(level, "level")
        with self._shared.lock, Call(self._shared, "prefetch()"):
            state.require(SUSPENDED, "prefetch()")
            done = residency.prefetch(state, target)
        return done

    @property
    def is_loaded(self) -> bool:
        """Whether every page that the next step reads is on the GPU with its bytes in place, so that no stream will wait for a
        load.

        After `prefetch(GPU_LEVEL)`, ask before `resume`. Never blocks.
        """
        with self._shared.lock, Call(self._shared, "is_loaded"):
            return residency.is_loaded(self._state)

    def close(self) -> None:
        """End of the request: what was committed stays cached, all else is given up. Idempotent, from any state."""
        if self._state.status == CLOSED:
            return
        with self._shared.lock, Call(self._shared, "close()"):
            residency.close(self._state)

    def fork(self, id: SupportsIndex | None = None) -> KVCache:
        """A second cache, SUSPENDED, that goes on from this one's history: full blocks shared, the last one copied on its
        first resume.

        For parallel sampling and tree-of-thought: closing either leaves the other whole. Its capacity is this cache's history.
        Raises LogicError when closed, OutOfPagesError, nothing changed, if a recurrent state has to be copied and has no room.
        """
        number = request_id(id)
        with self._shared.lock, Call(self._shared, "fork()"):
            self._require_open("fork()")
            self._state.require(self._state.status, "fork()")
            twin = forking.fork(self._state, number)
            handle = KVCache(self._manager, twin)  # before it is open: a handle that is dropped is noticed
            self._shared.enter(twin)
        return handle

    # --- statistics

    def commit_pending_stats(self) -> KVCacheStatsDelta:
        """Add what this request took and found since the last call to the manager's statistics, and return it; before `close()`,
        which forgets what was not committed.

        Zero for dummies, and while nobody counts: `enable_stats` of the manager and `enable_request_stats` of the cache are off.
        """
        with self._shared.lock, Call(self._shared, "commit_pending_stats()"):
            return counts.commit_stats(self._state)

    def discard_pending_stats(self) -> None:
        """Forget what was counted since the last commit."""
        with self._shared.lock, Call(self._shared, "discard_pending_stats()"):
            counts.discard_stats(self._state)

    # --- page indices

    def get_base_page_indices(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> Sequence[int]:
        """The int32 array of base page indices, one a block, kept up to date: an `array`, or the buffer that was set, itself.
        BAD_PAGE_INDEX where there is no page.

        A view of the array (numpy, memoryview, torch) shows changes of entries. It keeps its old entries once the number of blocks
        has changed: take it again when `get_base_page_indices_version` has another answer.
        """
        return self._row(layer_group_id, beam_idx).live()

    def get_base_page_indices_version(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> int:
        """A number that changes exactly when an entry of `get_base_page_indices` or the array itself does. O(1)."""
        return self._row(layer_group_id, beam_idx).version

    def set_base_page_index_buf(self, beam_idx: SupportsIndex, layer_group_id: SupportsIndex, buf: object) -> None:
        """Have the base page indices written in place into `buf`: one-dimensional, writable int32, at least `num_blocks` long;
        entries past the last block become BAD. None detaches, leaving the buffer as it is. `suspend()` detaches too: set it
        again after `resume()`."""
        row = self._row(layer_group_id, beam_idx)
        self._require_open("set_base_page_index_buf()")
        if buf is None:
            row.detach()
        else:
            row.attach(buf)

    def get_aggregated_page_indices(
        self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX, valid_only: bool = False
    ) -> Iterator[int]:
        """Slot ids, one a block, to be used with `KVCacheManager.get_aggregated_pages`; absent pages are BAD, or left out if
        `valid_only`."""
        only = flag(valid_only, "valid_only")
        values = self._row(layer_group_id, beam_idx).values()
        if only:
            return iter([value for value in values if value != BAD_PAGE_INDEX])
        return iter(values)

    def get_ssm_block_base_index(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> int:
        """Slot id of the live SSM state; BAD_PAGE_INDEX while it has none or is not ACTIVE."""
        beam = self._beam(beam_idx)
        index = whole(layer_group_id, "layer_group_id")
        state = self._state
        recurrent_states = state.recurrent_states()
        if not recurrent_states or index != recurrent_states[0].index:
            raise ConfigError(f"layer group {index} is not recurrent")
        page = recurrent_states[beam].page
        return page.slot if page is not None and state.status == ACTIVE else BAD_PAGE_INDEX

    def get_scratch_desc(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> ScratchDesc | None:
        """The blocks that lie in scratch slots, and these slots, for the page-index converter; None while scratch reuse is off.

        Each beam has slots of its own. Valid until a length changes.
        """
        table = self._table(layer_group_id, beam_idx)
        return scratch.describe(table) if self._state.scratch else None

    @property
    def has_scratch_slots(self) -> bool:
        return self._state.holds_scratch()

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether long prefill steps of this cache lend scratch slots to blocks that fall out of their windows within the step."""
        return self._state.scratch

    @enable_swa_scratch_reuse.setter
    def enable_swa_scratch_reuse(self, value: bool) -> None:
        wanted = flag(value, "enable_swa_scratch_reuse")
        self._require_open("enable_swa_scratch_reuse")
        scratch.switch(self._state, wanted)

    def supports_index_mode(self, mode: PageIndexMode | SupportsIndex) -> bool:
        """Whether the page indices of this cache can be used in this mode now: SHARED only while it has no scratch slots."""
        return page_index_mode(mode, "mode") is PageIndexMode.PER_LAYER or not self.has_scratch_slots

    def _row(self, layer_group_id: object, beam_idx: object) -> PageIndexRow:
        return self._table(layer_group_id, beam_idx).row

    def _table(self, layer_group_id: object, beam_idx: object) -> BlockTable:
        beam = self._beam(beam_idx)
        index = whole(layer_group_id, "layer_group_id")
        count = len(self._shared.life_cycles)
        if not 0 <= index < count:
            raise ConfigError(f"layer group {index} is out of range: this manager has {count}")
        table = self._state.table(index, beam)
        if table is None:
            raise ConfigError(f"layer group {index} is recurrent: it has no page for each block")
        return table

    def _beam(self, beam_idx: object) -> int:
        beam = whole(beam_idx, "beam_idx")
        width = self._state.width
        if not 0 <= beam < width:
            raise ConfigError(f"beam {beam} is out of range: the beam width is {width}")
        return beam

    def _require_open(self, call: str) -> None:
        if self._state.status == CLOSED:
            raise LogicError(f"{call}: this cache is closed")


_KVCache = KVCache
