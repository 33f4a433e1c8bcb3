"""What the manager owns of one request: its three lengths, its pages, and its place in the reuse tree.

Rule: the state never refers to the user's handle or to the manager, so a handle that is dropped is noticed, and nothing here
depends on when Python frees an object.

    committed <= history <= capacity,   num_blocks = ceil(capacity / tokens_per_block)

    blocks      0        1        2        3        4
    full        P        P        P        P        P        P: a page of ours: locked while ACTIVE, held while SUSPENDED
    window      P(sink)  -        -        P        P        -: stale, no page (or one held until its block is committed)
                |--------- committed --------|                path of tree blocks up to `tip`, then `tail`
                |------------- history -----------|
                |------------------ capacity -----------|
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from operator import index
from typing import Final, SupportsIndex

from librt.strings import BytesWriter

from kv_cache_manager_v2.errors import LogicError, PageDataLostError
from kv_cache_manager_v2.ids import PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, Stream
from kv_cache_manager_v2.layout.life_cycle import NEVER, LifeCycle
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.pending_loads import PendingLoads
from kv_cache_manager_v2.request.recurrent_state import RecurrentState
from kv_cache_manager_v2.request.statistics_ledger import PendingStats
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import unpack
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.planner import Shortage


class CacheStatus(IntEnum):
    """Where a request stands: SUSPENDED at creation, ACTIVE between resume and suspend, CLOSED for good."""

    ACTIVE = 0
    SUSPENDED = 1
    CLOSED = 2


ACTIVE: Final = 0
SUSPENDED: Final = 1
CLOSED: Final = 2

PriorityCallback = Callable[[int, LifeCycle], int]


class Request:
    """One request. Only the functions of this package change it."""

    def __init__(self, shared: ManagerState, scope: ReuseScope, request_id: int | None, priority: PriorityCallback | None) -> None:
        self.shared = shared
        self.serial = -1  # key in ManagerState.open
        self.scope = scope
        self.request_id = request_id
        self.priority = priority  # None: PRIORITY_DEFAULT for every page
        self.status: int = SUSPENDED
        self.tokens_per_block = shared.tokens_per_block
        # lengths, in tokens
        self.capacity = 0
        self.history = 0
        self.committed = 0
        self.num_blocks = 0
        self.block_start = 0  # a capacity in (block_start, block_end] needs exactly num_blocks blocks
        self.block_end = 0
        self.scratch_from = NEVER  # smallest capacity at which some table needs scratch slots, at this history or a later one
        self.next_stale = NEVER  # smallest history at which some window's stale range grows
        # pages
        self.tables: list[BlockTable] = [
            BlockTable(shared.life_cycles[index], shared.pool_group_of[index]) for index in shared.attention
        ]
        self.main_tables: list[BlockTable] = (
            self.tables
        )  # those of beam 0; the tables of further beams follow in `tables`, beam by beam
        self.width = 1  # beams
        self.tail_beam = -1  # beam whose tokens are committed in the last, partial block; -1 if all beams share them
        self.last_beam = 0  # beam that the last committed token was taken from: the one that goes on from there
        self.recurrent: RecurrentState | None = None  # with SSM layers; beam 0's
        self.more_recurrent: list[RecurrentState] = []  # of the further beams
        if shared.ssm is not None:
            self.recurrent = RecurrentState(shared.ssm, shared.pool_group_of[shared.ssm.index])
        self.loads: PendingLoads | None = None  # while file transfers still carry bytes that we build on
        self.lost = ""  # why the request can only be closed
        # reuse
        self.tip: Block | None = None  # deepest tree block of our path, pinned; None before the first full block
        self.path: list[Block] = []  # our full committed blocks; some may have left the tree
        self.tail = BytesWriter()  # packed tokens of the committed part of the block after those
        self.commit_allowed = True
        self.text_only = False  # a promise: no digest will come
        self.has_digests = False  # whether digests are committed
        self.scratch = shared.scratch  # whether long prefill steps borrow scratch slots
        self.borrowed_tail = False  # the last block is a partly matched page of the tree: copied on the first resume
        self.divergence = 0  # tokens of the longest cached path at creation, before back-off and missing pages cut it
        self.before_hybrid = 0  # what would have been reused if recurrent layers needed no snapshot
        self.cached_tokens_by_level: list[int] = [0] * shared.hierarchy.num_levels
        # stream
        self.stream = Stream(0)
        self.stream_set = False
        self.last_shortage: Shortage | None = None
        # sums over all resizes, for the means of the lengths
        self.capacity_sum = 0
        self.history_sum = 0
        self.num_samples = 0
        self.pending: PendingStats | None = None  # counts that the engine has not committed; None while nobody wants them
        self.started = False  # whether it was ever resumed
        self.set_history(0)

    def table(self, life_cycle: int, beam: int) -> BlockTable | None:
        """The table of an attention life cycle and beam; None for a recurrent one."""
        count = len(self.main_tables)
        for number in range(beam * count, (beam + 1) * count):
            if self.tables[number].index == life_cycle:
                return self.tables[number]
        return None

    def recurrent_states(self) -> list[RecurrentState]:
        """The live recurrent states, by beam; none without SSM layers."""
        if self.recurrent is None:
            return []
        return [self.recurrent, *self.more_recurrent]

    # --- lengths

    def set_capacity(self, capacity: int) -> None:
        size = self.tokens_per_block
        self.capacity = capacity
        self.num_blocks = -(-capacity // size)
        self.block_end = self.num_blocks * size
        self.block_start = self.block_end - size

    def set_history(self, history: int) -> None:
        self.history = history
        soonest = NEVER
        for table in self.main_tables:
            change = table.life_cycle.next_stale_change(history)
            if change < soonest:
                soonest = change
        self.next_stale = soonest
        self.scratch_from = self._scratch_from(history) if self.scratch else NEVER

    def _scratch_from(self, history: int) -> int:
        """See `scratch_from`: stale(capacity - rewind) must reach beyond the block in which the history ends."""
        block = -(-history // self.tokens_per_block)
        least = NEVER
        for table in self.main_tables:
            window = table.life_cycle.window_size
            if window is not None:
                first = max(block, table.life_cycle.num_sink_blocks) + 1
                least = min(least, first * self.tokens_per_block + window - 1 + self.shared.max_rewind)
        return least

    def holds_scratch(self) -> bool:
        return any(table.scratch for table in self.main_tables)

    def sample(self) -> None:
        """Add the present lengths to the request's means, which guide the split of the memory: once per resize."""
        self.capacity_sum += self.capacity
        self.history_sum += self.history
        self.num_samples += 1

    def mean_lengths(self) -> tuple[float, float]:
        """Mean capacity and mean history over the request's steps, its last lengths included."""
        count = self.num_samples + 1
        return (self.capacity_sum + self.capacity) / count, (self.history_sum + self.history) / count

    def excluded(self) -> bool:
        """Whether this is a dummy, which counts nowhere and teaches the tuner nothing."""
        return self.request_id is not None and self.request_id in self.shared.ledger.excluded

    def mark_dirty(self) -> None:
        """Something was counted that the engine has yet to commit."""
        if self.request_id is not None and self.pending is not None and self.pending.dirty:
            self.shared.ledger.mark_dirty(self.request_id, self)

    def clear_dirty(self) -> None:
        """Nothing of this request is left to commit; another open request of the same id may have counts."""
        if self.request_id is None:
            return
        ledger = self.shared.ledger
        ledger.clear_dirty(self.request_id)
        if self.request_id in ledger.shared_ids:
            ledger.shared_ids.discard(self.request_id)
            for other in self.shared.open.values():
                if other is not self and other.request_id == self.request_id:
                    other.mark_dirty()

    def count_taken(self, table: BlockTable, first: int, count: int) -> None:
        """Count the pages that a table took from this ordinal on."""
        pending = self.pending
        if pending is not None:
            pending.grown(table.index, count)
            if pending.generating:
                table.generated_from = min(table.generated_from, first)

    def count_given_back(self, table: BlockTable, ordinal: int) -> None:
        """Undo the count of a page that shrinking takes away, if it is not committed."""
        pending = self.pending
        if pending is not None and ordinal >= table.pending_from:
            pending.taken_back(table.index, ordinal >= table.generated_from)

    def settle_counts(self) -> None:
        """All that is counted up to now was committed, or is not to be counted."""
        for table in self.tables:
            table.pending_from = len(table.pages)
            table.generated_from = NEVER

    def unmark_if_undone(self) -> None:
        """If shrinking took back all that was counted, there is nothing to commit."""
        pending = self.pending
        if pending is not None and pending.dirty and pending.empty():
            pending.dirty = False
            self.clear_dirty()

    # --- tokens

    def tail_length(self) -> int:
        """Tokens committed past the last full committed block."""
        return self.committed - len(self.path) * self.tokens_per_block

    def committed_tokens(self) -> list[int | bytes]:
        tokens: list[int | bytes] = []
        for block in self.path:
            tokens.extend(unpack(block.tokens))
        tokens.extend(unpack(self.tail.getvalue()))
        return tokens

    # --- file transfers

    def await_page(self, page: Page) -> None:
        """We build on this page's bytes while a file transfer carries them."""
        loads = self.loads
        if loads is None:
            loads = self.loads = PendingLoads()
        loads.awaited.append(page)

    # --- checks

    def page_priority(self, ordinal: int, life_cycle: LifeCycle) -> int:
        """Priority of a page, from the request's callback; asked before anything changes, since the callback may raise.

        Raises LogicError for one out of range.
        """
        callback: Callable[[int, LifeCycle], object] | None = self.priority  # whatever the user's function returns
        if callback is None:
            return PRIORITY_DEFAULT
        shared = self.shared
        before = (self.committed, self.history, self.capacity)
        shared.calling_out = True
        try:
            answer = callback(ordinal, life_cycle)
        finally:
            shared.calling_out = False
        if (self.committed, self.history, self.capacity) != before:
            raise LogicError("the priority callback changed the cache that it was asked for; it must only answer")
        if isinstance(answer, bool) or not isinstance(answer, SupportsIndex):
            raise LogicError(f"the priority callback returned {answer!r}; it must be an integer in {PRIORITY_MIN}..{PRIORITY_MAX}")
        priority = index(answer)
        if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
            raise LogicError(f"the priority callback returned {priority}; it must be in {PRIORITY_MIN}..{PRIORITY_MAX}")
        return priority

    def require(self, status: int, call: str) -> None:
        """Raise LogicError unless the request is in this status, PageDataLostError if its bytes were lost."""
        if self.status != status:
            raise LogicError(f"{call} needs a cache that is {CacheStatus(status).name}; it is {CacheStatus(self.status).name}")
        if self.loads is not None:
            self.check_transfers()
        if self.lost:
            raise PageDataLostError(f"{call}: {self.lost}; close this cache and start the request again")

    def check_transfers(self) -> None:
        """Take note of file transfers that ended: publish what waited for them, or mark the request lost."""
        self.shared.hierarchy.settle()
        loads = self.loads
        if loads is None or not loads.settle(self.shared.tree):
            return
        self.loads = None
        if loads.lost:
            self.lost = f"a page of life cycle {loads.lost.life_cycle} was lost by a failed file transfer"
