"""The public handle of one request's cache: a thin state machine over the rooms of `request/`.

Rule: a method checks, takes the manager's lock if it leaves the request's own state, and calls one room. A step that stays
inside a block touches a few integers and takes no lock. A request is used by one thread at a time; different requests may be
used by different threads.
"""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import ClassVar, SupportsIndex

from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.ids import DEFAULT_BEAM_INDEX, PageIndexMode, Stream
from kv_cache_manager_v2.layout.page_index import ScratchDesc
from kv_cache_manager_v2.manager import KVCacheManager
from kv_cache_manager_v2.request.planned_drop import PlannedDropHandle
from kv_cache_manager_v2.request.request import CacheStatus, Request
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import Tokens
from kv_cache_manager_v2.statistics import KVCacheStatsDelta
from kv_cache_manager_v2.storage.planner import Shortage

class KVCache:
    """Where one request's keys and values live; made by `KVCacheManager.create_kv_cache`, closed by `close()` or a `with` block.

    Three lengths, in tokens: committed <= history <= capacity. *Committed* tokens are final and offered for reuse. *History* tokens
    have no query in the next step; only they decide what falls out of a window. *Capacity* covers the history and all input
    positions of the next step.
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
    def status(self) -> CacheStatus: ...
    @property
    def is_active(self) -> bool: ...
    @property
    def id(self) -> int | None:
        """The engine's own number of the request."""

    @property
    def manager(self) -> KVCacheManager: ...
    @property
    def reuse_scope(self) -> ReuseScope: ...
    @property
    def tokens_per_block(self) -> int: ...
    @property
    def num_blocks(self) -> int:
        """ceil(capacity / tokens_per_block); 0 once closed."""

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
    def num_committed_tokens(self) -> int: ...
    @property
    def committed_tokens(self) -> list[int | bytes]:
        """A copy of the committed tokens: ids, and digests as 32 bytes."""

    @property
    def cached_tokens_by_level(self) -> list[int]:
        """Tokens that the creation reused, by the cache level that they had to be brought from; sums to the reuse length."""

    def _get_num_reusable_tokens_before_pruning(self) -> int:
        """Length of the longest cached path at creation, whatever its pages: reused <= before hybrid pruning <= this. The
        reference's name."""

    def _get_num_reusable_tokens_before_hybrid_pruning(self) -> int:
        """What the creation would have reused if recurrent layers needed no snapshot. The reference's name."""

    @property
    def pages_by_level(self) -> list[list[int]]:
        """Pages that the next step reads, counted by layer group, then by the cache level that they are on now. O(blocks).

        Right after creation they are those of the match; a recurrent layer group counts its state as one page.
        """

    @property
    def last_shortage(self) -> Shortage | None:
        """Why the latest resize, resume or prefetch returned False; None after one that succeeded."""

    @property
    def capacity(self) -> int: ...
    @capacity.setter
    def capacity(self, value: SupportsIndex) -> None:
        """`resize(value)`, raising OutOfPagesError where that returns False."""

    @property
    def history_length(self) -> int: ...
    @history_length.setter
    def history_length(self, value: SupportsIndex) -> None: ...
    def resize(self, capacity: SupportsIndex | None, history_length: SupportsIndex | None = None) -> bool:
        """Set the capacity and the history, in tokens; None keeps a value. All or nothing.

        False means a shortage of pages: nothing changed, `last_shortage` says what is missing; suspend another request and retry.
        Raises LogicError unless ACTIVE, ConfigError for a history that goes back or a capacity below the history.
        O(1) inside a block, else O(blocks that come, go or fall out of a window).
        """

    def commit(self, tokens: Tokens, beam_search_indices: Integers | None = None, is_end: bool = False) -> None:
        """Append final tokens: ids (0 <= id < 2**31), digests (32 bytes) or `MmItemContext`, as a sequence or a one-dimensional
        int32, uint32 or int64 buffer. Blocks that become full are offered for reuse at once. Raises the history to the
        committed count.

        `beam_search_indices` names the beam of each token (beam 0 without it); the tokens of one block must all name the same.
        `is_end=True`: no token follows and nothing will be written any more; publishes the partial last block too.
        Raises LogicError unless ACTIVE and committing is allowed, ConfigError for bad tokens or past the capacity; nothing
        changed then.
        """

    def stop_committing(self) -> None:
        """No token will be committed any more: publishes the committed part of the last block. Idempotent; not after close."""

    def plan_committed_block_drop(self) -> PlannedDropHandle | None:
        """For multi-turn chat: a handle on the window pages and the SSM snapshot that only a request starting at exactly the
        committed length needs; its `drop()`, once the next turn has started, frees them. None if no request could start there.

        Raises LogicError before `stop_committing()`.
        """

    @property
    def cuda_stream(self) -> Stream:
        """The stream on which the engine uses this cache. Setting it while ACTIVE makes the new stream wait for the old one.

        Raises ConfigError (a ValueError) when read before it was ever set.
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

    def prefetch(self, level: SupportsIndex) -> bool:
        """Start to move this cache's pages from colder levels to `level`; False, nothing changed, if it has no room. SUSPENDED
        only."""

    @property
    def is_loaded(self) -> bool:
        """Whether every page that the next step reads is on the GPU with its bytes in place, so that no stream will wait for a
        load.

        After `prefetch(GPU_LEVEL)`, ask before `resume`. Never blocks.
        """

    def close(self) -> None:
        """End of the request: what was committed stays cached, all else is given up. Idempotent, from any state."""

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

    def get_base_page_indices(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> Sequence[int]:
        """The int32 array of base page indices, one a block, kept up to date: an `array`, or the buffer that was set, itself.
        BAD_PAGE_INDEX where there is no page.

        A view of the array (numpy, memoryview, torch) shows changes of entries. It keeps its old entries once the number of blocks
        has changed: take it again when `get_base_page_indices_version` has another answer.
        """

    def get_base_page_indices_version(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> int:
        """A number that changes exactly when an entry of `get_base_page_indices` or the array itself does. O(1)."""

    def set_base_page_index_buf(self, beam_idx: SupportsIndex, layer_group_id: SupportsIndex, buf: object) -> None:
        """Have the base page indices written in place into `buf`: one-dimensional, writable int32, at least `num_blocks` long;
        entries past the last block become BAD. None detaches, leaving the buffer as it is. `suspend()` detaches too: set it
        again after `resume()`."""

    def get_aggregated_page_indices(
        self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX, valid_only: bool = False
    ) -> Iterator[int]:
        """Slot ids, one a block, to be used with `KVCacheManager.get_aggregated_pages`; absent pages are BAD, or left out if
        `valid_only`."""

    def get_ssm_block_base_index(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> int:
        """Slot id of the live SSM state; BAD_PAGE_INDEX while it has none or is not ACTIVE."""

    def get_scratch_desc(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> ScratchDesc | None:
        """The blocks that lie in scratch slots, and these slots, for the page-index converter; None while scratch reuse is off.

        Each beam has slots of its own. Valid until a length changes.
        """

    @property
    def has_scratch_slots(self) -> bool: ...
    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether long prefill steps of this cache lend scratch slots to blocks that fall out of their windows within the step."""

    @enable_swa_scratch_reuse.setter
    def enable_swa_scratch_reuse(self, value: bool) -> None: ...
    def supports_index_mode(self, mode: PageIndexMode | SupportsIndex) -> bool:
        """Whether the page indices of this cache can be used in this mode now: SHARED only while it has no scratch slots."""

_KVCache = KVCache
