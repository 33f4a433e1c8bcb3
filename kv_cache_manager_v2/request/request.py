"""What the manager owns of one request: three lengths, its pages, and its place in the reuse tree.

Rule: a request never refers to the user's handle or to the manager. So a handle that is dropped is noticed, and nothing here
depends on when Python frees an object.

    committed <= history <= capacity,   num_blocks = ceil(capacity / tokens_per_block)

    blocks      0        1        2        3        4
    full        P        P        P        P        P        P: a page of the request: locked while ACTIVE, held while SUSPENDED
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

from librt.strings import BytesWriter, write_i32_le
from mypy_extensions import i32

from kv_cache_manager_v2.errors import LogicError, PageDataLostError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, TOKEN_ID_LIMIT, Point, Stream
from kv_cache_manager_v2.layout.life_cycle import NEVER, LifeCycle
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.pending_loads import PendingLoads, log_loss
from kv_cache_manager_v2.request.recurrent_state import RecurrentState
from kv_cache_manager_v2.request.statistics_ledger import PendingStats
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import unpack
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.planner import Shortage


class CacheStatus(IntEnum):
    """SUSPENDED at creation, ACTIVE between resume and suspend, CLOSED for good."""

    ACTIVE = 0
    SUSPENDED = 1
    CLOSED = 2


ACTIVE: Final = 0
SUSPENDED: Final = 1
CLOSED: Final = 2

PriorityCallback = Callable[[int, LifeCycle], int]


class Request:
    """One request. Calls marked "install" are plain assignments: they cannot fail, and come after all device work of a call."""

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
        self.next_stale = 0  # smallest history at which some window's stale range grows
        # pages
        hierarchy = shared.hierarchy
        self.tables: list[BlockTable] = [
            BlockTable(shared.life_cycles[index], shared.pool_group_of[index], hierarchy) for index in shared.attention
        ]  # beam by beam; within a beam by life cycle
        self.main_tables: list[BlockTable] = self.tables  # those of beam 0
        self.width = 1  # beams
        self.tail_beam = -1  # beam whose tokens are committed in the last, partial block; -1 if all beams share them
        self.last_beam = 0  # beam that the last committed token was taken from: the one that goes on from there
        self.recurrent: RecurrentState | None = None  # of beam 0, with SSM layers
        self.more_recurrent: list[RecurrentState] = []  # of the further beams
        if shared.ssm is not None:
            self.recurrent = RecurrentState(shared.ssm, shared.pool_group_of[shared.ssm.index])
        self.loads: PendingLoads | None = None  # while file transfers still carry bytes that the request builds on
        self.lost = ""  # why the request can only be closed
        self.loss_told = False  # whether a call has raised PageDataLostError
        # reuse
        self.tip: Block | None = None  # deepest tree block of the path, pinned; None before the first full block
        self.path: list[Block] = []  # the full committed blocks; some may have left the tree
        self.tail = BytesWriter()  # packed tokens of the committed part of the block after those
        self.commit_allowed = True
        self.text_only = False  # a promise: no digest will come
        self.has_digests = False  # whether digests are committed
        self.scratch = shared.scratch  # whether long prefill steps borrow scratch slots
        self.borrowed_tail = False  # the last block is a partly matched page of the tree: the first resume copies it
        self.divergence = 0  # tokens of the longest cached path at creation, before back-off and missing pages cut it
        self.before_hybrid = 0  # what would have been reused if recurrent layers needed no snapshot
        self.cached_tokens_by_level: list[int] = [0] * hierarchy.num_levels
        # stream
        self.stream = Stream(0)
        self.stream_set = False
        self.last_shortage: Shortage | None = None
        # sums over all resizes, for the means of the lengths
        self.capacity_sum = 0
        self.history_sum = 0
        self.num_samples = 0
        self.pending: PendingStats | None = (
            None  # counts that the engine has not committed; None if neither manager nor request counts
        )
        self.started = False  # whether it was ever resumed
        self.set_history(0)

    # --- pages

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

    def last_recurrent(self) -> RecurrentState | None:
        """The recurrent state of the beam that goes on."""
        return self.recurrent_states()[self.last_beam] if self.recurrent is not None else None

    def live_pages(self) -> list[Page]:
        """The pages that the next step may read, the last block's first, recurrent states at the end. O(live blocks).

        Pages become evictable in this order, so that the tail of a path is evicted before its head.
        """
        live: list[Page] = []
        tables = self.tables
        if len(tables) == 1:  # the common case: a plain loop over one list
            tables[0].add_live_pages(live)
            live.reverse()
        else:
            self._add_live_pages(live)
        for recurrent in self.recurrent_states():
            if recurrent.page is not None:
                live.append(recurrent.page)
        return live

    def _add_live_pages(self, live: list[Page]) -> None:
        """Of several tables, block by block."""
        tables = self.tables
        start, end = 0, NEVER  # blocks that are stale in every table
        for table in tables:
            start = max(start, table.stale_start)
            end = min(end, table.stale_end)
        ordinal = self.num_blocks - 1
        while ordinal >= 0:
            if start <= ordinal < end:
                ordinal = start - 1
                continue
            for table in tables:
                page = table.pages[ordinal]
                if page is not None and not table.stale_start <= ordinal < table.stale_end:
                    live.append(page)
            ordinal -= 1

    def holds_scratch(self) -> bool:
        for table in self.main_tables:  # noqa: SIM110 (as a loop: any() would make a generator)
            if table.scratch:
                return True
        return False

    def waits_for_commit(self, ordinal: int) -> bool:
        """Whether a block's page, once stale, is kept until the block's commit publishes it."""
        return self.commit_allowed and not self.shared.commit_min_snapshot and ordinal >= len(self.path)

    # --- lengths: install

    def set_capacity(self, capacity: int) -> None:
        size = self.tokens_per_block
        self.capacity = capacity
        self.num_blocks = -(-capacity // size)
        self.block_end = self.num_blocks * size
        self.block_start = self.block_end - size

    def set_history(self, history: int) -> None:
        """Move the history. Pages that fall out of a window have been dealt with."""
        self.history = history
        if history >= self.next_stale:
            soonest = NEVER
            for table in self.tables:
                table.set_history(history)
                soonest = min(soonest, table.life_cycle.next_stale_change(history))
            self.next_stale = soonest
        if self.scratch:
            self.scratch_from = self._scratch_from(history)
        else:
            self.scratch_from = NEVER

    def _scratch_from(self, history: int) -> int:
        """See `scratch_from`: stale(capacity - rewind) must reach beyond the block in which the history ends."""
        block = -(-history // self.tokens_per_block)
        least = NEVER
        for table in self.main_tables:
            least = min(least, table.life_cycle.scratch_from(block, self.shared.max_rewind))
        return least

    def sample(self) -> None:
        """Add the present lengths to the request's means, which guide the split of the memory: once per resize."""
        self.capacity_sum += self.capacity
        self.history_sum += self.history
        self.num_samples += 1

    def mean_lengths(self) -> tuple[float, float]:
        """Mean capacity and mean history over the request's steps, its last lengths included."""
        count = self.num_samples + 1
        return (self.capacity_sum + self.capacity) / count, (self.history_sum + self.history) / count

    # --- the decode step inside a block: no lock, nothing allocated

    def stay_inside_block(self, capacity: int) -> bool:
        """Set a capacity that needs the blocks that there are. False, nothing changed, if it is not that simple."""
        if (
            self.block_start < capacity <= self.block_end
            and capacity >= self.history
            and self.status == ACTIVE
            and self.loads is None
            and not self.lost
            and (not self.scratch or (capacity < self.scratch_from and not self.holds_scratch()))
        ):
            self.capacity = capacity
            self.last_shortage = None
            self.capacity_sum += capacity
            self.history_sum += self.history
            self.num_samples += 1
            return True
        return False

    def append_inside_block(self, token: int) -> bool:
        """Commit one id that fills no block, moves no window and frees no scratch slot. False, nothing changed, if it is not that
        simple."""
        after = self.committed + 1
        if after % self.tokens_per_block == 0 or not self.takes_one(token):
            return False
        word = i32(token)
        if after > self.history:
            if after >= self.next_stale or (self.scratch and self.holds_scratch()):
                return False
            self.history = after
        self.committed = after
        write_i32_le(self.tail, word)  # last: from here to the end no signal can be handled
        return True

    def takes_one(self, token: int) -> bool:
        """Whether this id can be committed by `commit_one`: no beams, no snapshots, nothing in doubt, and no error to report."""
        return (
            self.status == ACTIVE
            and 0 <= token < TOKEN_ID_LIMIT
            and self.committed < self.capacity
            and self.width == 1
            and self.commit_allowed
            and self.loads is None
            and not self.lost
            and not self.shared.commit_min_snapshot
        )

    # --- beams: install

    def exchange_beams(self, beam: int) -> None:
        """Beam 0 and the beam that the last committed token came from swap all that is not committed in full blocks."""
        for ordinal in range(len(self.path), self.num_blocks):
            self.exchange_pages(ordinal, beam)
        recurrent = self.recurrent
        if recurrent is not None:
            other = self.more_recurrent[beam - 1]
            recurrent.page, other.page = other.page, recurrent.page
        if self.tail_beam == beam:
            self.tail_beam = 0
        self.last_beam = 0

    def exchange_pages(self, ordinal: int, beam: int) -> None:
        """Beam 0 and another one swap their pages of one block."""
        count = len(self.main_tables)
        for number, table in enumerate(self.main_tables):
            table.exchange(self.tables[beam * count + number], ordinal, self.status == ACTIVE)

    def settle_beams(self, ordinal: int, beam: int, point: Point) -> None:
        """A block is committed from one beam: that beam's pages become beam 0's, the other beams' are unlocked."""
        if beam > 0:
            self.exchange_pages(ordinal, beam)
        for table in self.tables[len(self.main_tables) :]:
            table.end_page(ordinal, True, point)
            table.row.set(ordinal, BAD_PAGE_INDEX)

    # --- statistics

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
        """The request builds on this page's bytes while a file transfer carries them."""
        loads = self.loads
        if loads is None:
            loads = self.loads = PendingLoads(self.request_id)
        loads.awaited.append(page)

    def lose(self, page: Page) -> None:
        """A page that the next step reads was lost: the request can only be closed."""
        if self.lost:
            return
        log_loss(self.request_id, page)
        self.lost = f"a page of life cycle {page.life_cycle} was lost by a failed file transfer"

    def check_transfers(self) -> None:
        """Take note of file transfers that ended: show the blocks that waited for them, or mark the request lost."""
        self.shared.hierarchy.settle()
        loads = self.loads
        if loads is None or not loads.settle(self.shared.tree):
            return
        self.loads = None
        if loads.lost is not None:
            self.lose(loads.lost)

    def require_bytes(self, call: str) -> None:
        """Raise PageDataLostError if bytes of the request were lost."""
        if self.loads is not None:
            self.check_transfers()
        if self.lost:
            self.loss_told = True
            raise PageDataLostError(f"{call}: {self.lost}; close this cache and start the request again")

    def report_loss(self) -> None:
        """After the close: raise PageDataLostError if the request computed on bytes that never came and no call has said so."""
        if self.lost and self.started and not self.loss_told and not self.shared.refusal:
            self.loss_told = True
            raise PageDataLostError(f"close(): {self.lost}; the cache is closed, but what was computed with it is wrong")

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
        self.require_bytes(call)
