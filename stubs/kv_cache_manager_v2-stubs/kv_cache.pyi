"""The public handle of one request's cache. Its methods validate arguments and call `request/`.

A method takes the manager's lock if it changes more than the request's own state. A step inside a block changes a few integers and
takes no lock. A request must be used by one thread at a time; different requests may be used by different threads.
"""

from collections.abc import Hashable
from types import TracebackType
from typing import ClassVar, SupportsIndex

from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.ids import Stream
from kv_cache_manager_v2.make_room import MakeRoom
from kv_cache_manager_v2.manager import KVCacheManager
from kv_cache_manager_v2.page_index_views import PageIndexViews
from kv_cache_manager_v2.request.planned_drop import PlannedDropHandle
from kv_cache_manager_v2.request.request import CacheStatus, Request
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import Tokens
from kv_cache_manager_v2.statistics import KVCacheStatsDelta
from kv_cache_manager_v2.storage.planner import Shortage

class KVCache(PageIndexViews):
    """The KV cache of one request. `KVCacheManager.create_kv_cache` makes it; `close()` or a `with` block ends it.

    It has three lengths, in tokens: committed <= history <= capacity. Committed tokens are final, and can be reused. History tokens
    have no query in the next step. The capacity covers the history and all input of the next step. Only `commit_ahead` commits
    tokens after the history.
    """

    Status: ClassVar[type[CacheStatus]]

    def __init__(self, manager: KVCacheManager, state: Request) -> None:
        """Internal. `KVCacheManager.create_kv_cache` makes caches."""

    def __enter__(self) -> KVCache: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the cache. If the `with` block raised, an error of `close()` is logged, so that the first error is seen."""

    def __reduce__(self) -> str: ...
    @property
    def state(self) -> Request:
        """Internal state of the request, for `introspection` and tests. Not part of the public interface."""

    @property
    def status(self) -> CacheStatus:
        """ACTIVE, SUSPENDED or CLOSED."""

    @property
    def is_active(self) -> bool:
        """Whether the cache is ACTIVE: its pages are on the GPU and locked."""

    @property
    def id(self) -> Hashable:
        """The id that the engine gave the request; None if it gave none."""

    @property
    def manager(self) -> KVCacheManager:
        """The manager that made this cache."""

    @property
    def reuse_scope(self) -> ReuseScope:
        """The scope within which the request shares cached blocks."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens per block, as configured."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the capacity: ceil(capacity / tokens_per_block). 0 once closed."""

    @property
    def beam_width(self) -> int:
        """Number of beams. It can be set while the cache is ACTIVE.

        Widening copies the partial last block and the recurrent state for each further beam. Full history blocks stay with beam 0:
        the index rows of other beams have BAD_PAGE_INDEX there. Narrowing loses the uncommitted tokens of the removed beams. Raises
        ConfigError for an invalid width, LogicError in a state that does not allow a change, OutOfPagesError if there are too few
        slots. Nothing has changed then.
        """

    @beam_width.setter
    def beam_width(self, width: SupportsIndex) -> None: ...
    @property
    def text_only(self) -> bool:
        """Whether the engine has promised to commit no digests. Digests are refused then."""

    @text_only.setter
    def text_only(self, value: bool) -> None:
        """Raises ConfigError for False if the manager has text_only=True, and for True after digests were committed."""

    @property
    def allow_seq_rebasing(self) -> bool:
        """Whether a commit may exchange a page of this cache for that of an identical cached block.

        If False, page indices of an ACTIVE cache never change, except by `suspend()` and between beams: for engines that read each
        index once. Identical blocks that are computed side by side keep their own pages until their caches close.
        """

    @allow_seq_rebasing.setter
    def allow_seq_rebasing(self, value: bool) -> None: ...
    @property
    def num_committed_tokens(self) -> int:
        """Number of committed tokens; directly after creation, the number of reused tokens."""

    @property
    def committed_tokens(self) -> list[int | bytes]:
        """A copy of the committed tokens: ids, and digests as 32 bytes."""

    @property
    def cached_tokens_by_level(self) -> list[int]:
        """Tokens reused at creation, by the coldest cache level of each block's pages. They sum to the reused length."""

    def _get_last_cached_token_level(self) -> int | None:
        """The cache level to which the last token reused at creation is credited; None if none was reused."""

    def _get_num_reusable_tokens_before_pruning(self) -> int:
        """Tokens of the longest cached path at creation, regardless of missing pages."""

    def _get_num_reusable_tokens_before_hybrid_pruning(self) -> int:
        """Tokens that would have been reused at creation if recurrent layers needed no snapshot."""

    @property
    def pages_by_level(self) -> list[list[int]]:
        """Number of pages that the next step reads, by layer group and cache level. A recurrent state is one page. O(blocks)."""

    @property
    def last_shortage(self) -> Shortage | None:
        """Why the last `resize`, `resume` or `prefetch` returned False; None if it succeeded."""

    @property
    def capacity(self) -> int:
        """Tokens for which the cache has pages: the history and all input of the next step.

        Setting it is `resize(value)`, but raises OutOfPagesError for a shortage, and ConfigError with scratch reuse.
        """

    @capacity.setter
    def capacity(self, value: SupportsIndex) -> None: ...
    @property
    def history_length(self) -> int:
        """Tokens without a query in the next step. It alone decides which blocks leave a window. It cannot decrease.

        Setting it is `resize(None, value)`, but raises OutOfPagesError for a shortage.
        """

    @history_length.setter
    def history_length(self, value: SupportsIndex) -> None: ...
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

    def prefill_end(self, prompt_length: SupportsIndex) -> int:
        """The position, in tokens, up to which the next prefill chunk may go, so that the same prompt can reuse it later.

        With `commit_min_snapshot` this is the last block boundary after which the last prompt token is still to be computed,
        until that much is committed. Then, and without snapshots, it is the end of the prompt. `snapshot_at_branches` adds,
        before it, the block boundary up to which the prompt was cached at creation: other prompts may branch off there too. Ask
        before each chunk, and commit each. O(1).
        """

    def stop_committing(self) -> None:
        """Make the committed part of the last block reusable. No token can be committed afterwards. Idempotent.

        Raises LogicError once closed, and while tokens committed ahead are not computed.
        """

    def plan_committed_block_drop(self) -> PlannedDropHandle | None:
        """Plan to drop the pages that only a match of exactly the committed length needs; None if there are none.

        For conversations of several turns: `drop()` of the handle drops these window pages and the snapshot, once the next turn has
        started. Raises LogicError before `stop_committing()`.
        """

    @property
    def cuda_stream(self) -> Stream:
        """The stream on which the engine uses this cache. If it is set while ACTIVE, the new stream waits for the old one.

        Raises ConfigError (a ValueError) if it is read before it was set.
        """

    @cuda_stream.setter
    def cuda_stream(self, stream: SupportsIndex) -> None: ...
    @property
    def finish_event(self) -> object:
        """Always raises ConfigError (a ValueError). To order other work after this cache's, record an event on `cuda_stream`."""

    def resume(self, cuda_stream: SupportsIndex | None = None, make_room: MakeRoom | None = None) -> bool:
        """Onload and lock the pages, ready for work on the stream. False, with nothing changed but `last_shortage`, on a shortage.

        A shortage is too few slots, or a GPU pool group of which other requests use more than `max_util_for_resume`. `make_room` is
        asked before that is the answer. The stream waits for the loads. Raises LogicError unless SUSPENDED, or if no stream was
        ever given.
        """

    def suspend(self) -> None:
        """Hold the pages instead of locking them: they may move to colder tiers, and none is dropped.

        Detaches page-index buffers. Raises LogicError unless ACTIVE.
        """

    def prefetch(self, target: SupportsIndex | None = None, level: SupportsIndex | None = None) -> bool:
        """Start moving this cache's pages from colder levels to level `target`. `level` is the old name of the parameter.

        Returns False, with nothing changed, if that level has too few slots. Raises LogicError unless SUSPENDED.
        """

    @property
    def is_loaded(self) -> bool:
        """Whether the bytes of all pages that the next step reads are on the GPU, so that `resume` waits for no load.

        For use after `prefetch(GPU_LEVEL)`. Never blocks. False if a load has failed: `resume` raises then.
        """

    def close(self, expect: str | None = None) -> None:
        """End the request: committed blocks stay cached, all other pages are freed. Idempotent, in any state.

        `expect`: "more" if its conversation goes on, "end" if this was its last request, None if that is not known. The eviction
        policy learns how often that is right: docs/eviction_policies.md. Raises ConfigError for anything else.

        Raises PageDataLostError, with the cache closed, if the request has computed with bytes lost by a failed load and no other
        call has raised it. On a poisoned manager only the handle is closed: `shutdown()` frees the pages.
        """

    def fork(self, id: Hashable = None) -> KVCache:
        """Make a second, SUSPENDED cache that continues from this one's history, for parallel sampling and tree-of-thought.

        Full blocks are shared; a partial last block is copied when the fork first resumes. The fork's capacity is this cache's
        history. Both caches are closed independently. Raises, with nothing changed, LogicError if closed, while tokens committed
        ahead are not computed, and at a history where a query would read what was written to scratch, OutOfPagesError if there is
        no slot for the copy of a recurrent state.
        """

    def commit_pending_stats(self) -> KVCacheStatsDelta:
        """Add this request's counts since the last call to the manager's statistics, and return them.

        Call it before `close()`, which loses uncommitted counts unless `commit_stats_on_close` is set. All counts are 0 for dummy
        requests, and if both `enable_stats` of the manager and `enable_request_stats` of the cache are off.
        """

    def discard_pending_stats(self) -> None:
        """Set the counts since the last `commit_pending_stats()` to 0."""

_KVCache = KVCache
