"""The public handle of one request's cache: a thin state machine over the rooms of `request/`.

Rule: a method checks, takes the manager's lock if it leaves the request's own state, and calls one room. A step that stays
inside a block touches a few integers and takes no lock. A request is used by one thread at a time; different requests may be
used by different threads.
"""

from types import TracebackType
from typing import ClassVar, SupportsIndex

from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.ids import Stream
from kv_cache_manager_v2.manager import KVCacheManager
from kv_cache_manager_v2.page_index_views import PageIndexViews
from kv_cache_manager_v2.request.planned_drop import PlannedDropHandle
from kv_cache_manager_v2.request.request import CacheStatus, Request
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import Tokens
from kv_cache_manager_v2.statistics import KVCacheStatsDelta
from kv_cache_manager_v2.storage.planner import Shortage

class KVCache(PageIndexViews):
    """The keys and values of one request. `KVCacheManager.create_kv_cache` makes it; `close()` or a `with` block ends it.

    Three lengths, in tokens: committed <= history <= capacity. Committed tokens are final and offered for reuse. History tokens
    have no query in the next step. The capacity covers the history and all input positions of the next step.
    """

    Status: ClassVar[type[CacheStatus]]

    def __init__(self, manager: KVCacheManager, state: Request) -> None:
        """Not for users: `KVCacheManager.create_kv_cache` makes caches."""

    def __enter__(self) -> KVCache: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close. An error of the `with` block is the one that is seen: one of `close()` is logged then."""

    def __reduce__(self) -> str: ...
    @property
    def state(self) -> Request:
        """Internal: what the manager owns of this request, for `introspection` and tests; no part of the interface."""

    @property
    def status(self) -> CacheStatus:
        """ACTIVE, SUSPENDED or CLOSED."""

    @property
    def is_active(self) -> bool:
        """Whether the cache is ACTIVE: its pages are on the GPU and locked."""

    @property
    def id(self) -> int | None:
        """The number by which the engine knows the request; None if it gave none."""

    @property
    def manager(self) -> KVCacheManager:
        """The manager that made this cache."""

    @property
    def reuse_scope(self) -> ReuseScope:
        """The scope whose cached blocks the request shares."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens in one block, as configured."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the capacity takes: ceil(capacity / tokens_per_block); 0 once closed."""

    @property
    def beam_width(self) -> int:
        """Beams. Widening, while ACTIVE, shares the full history blocks (further beams read BAD there) and copies the partial
        last block and the recurrent state for each further beam; narrowing loses the others' uncommitted data.

        Setting it raises ConfigError or LogicError for a width that cannot be, OutOfPagesError if there is no room: nothing
        changed then.
        """

    @beam_width.setter
    def beam_width(self, width: SupportsIndex) -> None: ...
    @property
    def text_only(self) -> bool:
        """A promise that no digest will be committed: digests are refused then."""

    @text_only.setter
    def text_only(self, value: bool) -> None:
        """Raises ConfigError to relax what the manager demands, or to promise it after digests were committed."""

    @property
    def num_committed_tokens(self) -> int:
        """How many tokens are committed; right after creation, how many were reused."""

    @property
    def committed_tokens(self) -> list[int | bytes]:
        """A copy of the committed tokens: ids, and digests as 32 bytes."""

    @property
    def cached_tokens_by_level(self) -> list[int]:
        """How many tokens the creation reused, by the coldest cache level that held them. Sums to the reused length."""

    def _get_num_reusable_tokens_before_pruning(self) -> int:
        """Length of the longest cached path at creation, in tokens, whichever of its pages were there. A name of the reference."""

    def _get_num_reusable_tokens_before_hybrid_pruning(self) -> int:
        """Tokens that the creation would have reused without regard to recurrent layers. A name of the reference."""

    @property
    def pages_by_level(self) -> list[list[int]]:
        """Pages that the next step reads: counts by layer group and cache level. A recurrent state counts as one. O(blocks)."""

    @property
    def last_shortage(self) -> Shortage | None:
        """Why the last `resize`, `resume` or `prefetch` returned False; None if it succeeded."""

    @property
    def capacity(self) -> int:
        """Tokens that have pages: the history and all input positions of the next step.

        Setting it is `resize(value)`, but raises OutOfPagesError for a shortage, and ConfigError with scratch reuse.
        """

    @capacity.setter
    def capacity(self, value: SupportsIndex) -> None: ...
    @property
    def history_length(self) -> int:
        """Tokens without a query in the next step. It alone decides what falls out of a window, and never goes back.

        Setting it is `resize(None, value)`, but raises OutOfPagesError for a shortage.
        """

    @history_length.setter
    def history_length(self, value: SupportsIndex) -> None: ...
    def resize(self, capacity: SupportsIndex | None, history_length: SupportsIndex | None = None) -> bool:
        """Set the capacity and the history, in tokens; None keeps a value. All or nothing.

        False: too few pages. Nothing changed and `last_shortage` says what is missing; suspend another request and try again.
        O(1) inside a block, else O(blocks that come, go or leave a window).
        Raises LogicError unless ACTIVE, ConfigError for a history that goes back or a capacity below the history.
        """

    def commit(
        self,
        accepted_input_tokens: Tokens | None = None,
        beam_search_indices: Integers | None = None,
        is_end: bool = False,
        tokens: Tokens | None = None,
    ) -> None:
        """Append final tokens; the history rises to the committed count. Blocks that become full are offered for reuse at once.

        Tokens are ids (0 <= id < 2**31), 32-byte digests or `MmItemContext`: a sequence, or a one-dimensional integer buffer.
        `beam_search_indices` names the beam of each token (default 0); a block takes all its tokens from one beam. `is_end=True`
        ends the request: the partial last block is offered too. O(tokens). `tokens` is the old name of the first parameter.
        Raises LogicError unless ACTIVE and committing is allowed, ConfigError for bad tokens or tokens past the capacity.
        """

    def stop_committing(self) -> None:
        """Offer the committed part of the last block for reuse; no token can be committed afterwards. Idempotent.

        Raises LogicError once closed.
        """

    def plan_committed_block_drop(self) -> PlannedDropHandle | None:
        """A handle on pages that only a request of exactly the committed length needs; None if there are none.

        For chats of several turns: `drop()` frees these window pages and the snapshot once the next turn has started.
        Raises LogicError before `stop_committing()`.
        """

    @property
    def cuda_stream(self) -> Stream:
        """The stream on which the engine uses this cache. Set while ACTIVE, the new stream waits for the old one.

        Raises ConfigError (a ValueError) if read before it was set.
        """

    @cuda_stream.setter
    def cuda_stream(self, stream: SupportsIndex) -> None: ...
    @property
    def finish_event(self) -> object:
        """Of the reference, which has one only inside its own transitions; to order other work behind this cache's, record an
        event on its stream. Raises ConfigError, which is a ValueError, always."""

    def resume(self, cuda_stream: SupportsIndex | None = None) -> bool:
        """Bring the cache to the GPU, ready for work on the stream. False: it stays SUSPENDED, nothing changed but `last_shortage`.

        Refused (False) while any GPU pool group is used beyond `max_util_for_resume`, or if its pages cannot all be had.
        Raises LogicError unless SUSPENDED, or if no stream was ever given.
        """

    def suspend(self) -> None:
        """Let others have the GPU: pages may move to colder tiers, none is dropped. Detaches page-index buffers. Raises unless
        ACTIVE."""

    def prefetch(self, target: SupportsIndex | None = None, level: SupportsIndex | None = None) -> bool:
        """Start to move the pages of this cache from colder levels to level `target`. `level` is the old parameter name.

        False: that level has too few free pages, and nothing changed. Raises LogicError unless SUSPENDED.
        """

    @property
    def is_loaded(self) -> bool:
        """Whether every page that the next step reads is on the GPU with its bytes in place, so that no stream will wait for a
        load.

        After `prefetch(GPU_LEVEL)`, ask before `resume`. Never blocks. False if a load has failed: `resume` raises then.
        """

    def close(self) -> None:
        """End of the request: what was committed stays cached, all other pages are freed. Idempotent, from any state.

        Raises PageDataLostError, with the cache closed, if the request computed on bytes that a failed load never brought and no
        other call has said so.
        """

    def fork(self, id: SupportsIndex | None = None) -> KVCache:
        """A second cache, SUSPENDED, that goes on from this one's history: full blocks shared, the last one copied on its
        first resume.

        For parallel sampling and tree-of-thought: closing either leaves the other whole. Its capacity is this cache's history.
        Raises LogicError when closed, OutOfPagesError, nothing changed, if a recurrent state has to be copied and has no room.
        """

    def commit_pending_stats(self) -> KVCacheStatsDelta:
        """Add what this request took and found since the last call to the manager's statistics, and return it; before `close()`,
        which forgets what was not committed.

        Zero for dummies, and while nobody counts: `enable_stats` of the manager and `enable_request_stats` of the cache are off.
        """

    def discard_pending_stats(self) -> None:
        """Forget what was counted since the last commit."""

_KVCache = KVCache
