"""The state of one request: three lengths, its pages, and its path in the radix tree.

A request never refers to the user's handle or to the manager. So a dropped handle is noticed, and nothing here depends on when
Python deallocates an object.

    committed <= history <= capacity,   num_blocks = ceil(capacity / tokens_per_block)

Only tokens that are committed ahead are after the history: see publication.py.

    blocks      0        1        2        3        4
    full        P        P        P        P        P        P: a page of the request, locked while ACTIVE, held while SUSPENDED
    window      P(sink)  -        -        P        P        -: stale; no page, or one held until its block is committed
                |--------- committed --------|                full blocks are in `path`, the rest in `tail`
                |------------- history -----------|
                |------------------ capacity -----------|
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from operator import index
from typing import TYPE_CHECKING, Final, SupportsIndex, cast

from librt.strings import BytesWriter, write_i32_le
from mypy_extensions import i32

from kv_cache_manager_v2.arguments import is_bool
from kv_cache_manager_v2.errors import LogicError, PageDataLostError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, TOKEN_ID_LIMIT, Point, Stream
from kv_cache_manager_v2.layout.life_cycle import NEVER, LifeCycle
from kv_cache_manager_v2.planning.sampled_curve import SampledPath
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

if TYPE_CHECKING:
    from kv_cache_manager_v2.request.publication import Publication

if TYPE_CHECKING:
    from kv_cache_manager_v2.request.batch_rows import BatchRows


class CacheStatus(IntEnum):
    """SUSPENDED at creation, ACTIVE between resume and suspend, CLOSED after close."""

    ACTIVE = 0
    SUSPENDED = 1
    CLOSED = 2


ACTIVE: Final = 0
SUSPENDED: Final = 1
CLOSED: Final = 2

PriorityCallback = Callable[[int, LifeCycle], int]


class Request:
    """One request. Methods under "install" are plain assignments: they cannot fail, and run after all device work of a call."""

    def __init__(self, shared: ManagerState, scope: ReuseScope, request_id: object, priority: PriorityCallback | None) -> None:
        self.shared = shared
        self.serial = -1  # key in ManagerState.open
        self.scope = scope
        self.request_id = request_id
        self.priority = priority  # None: PRIORITY_DEFAULT for every page
        self.status: int = SUSPENDED
        self.tokens_per_block = shared.tokens_per_block
        # Lengths, in tokens.
        self.capacity = 0
        self.history = 0
        self.committed = 0
        self.num_blocks = 0
        self.block_start = 0  # a capacity in (block_start, block_end] needs exactly num_blocks blocks
        self.block_end = 0
        self.scratch_from = NEVER  # a smaller capacity needs no scratch slots, at this or any later history
        self.next_stale = 0  # a smaller history makes no further block stale, computes none, and needs no snapshot
        # Pages.
        hierarchy = shared.hierarchy
        self.tables: list[BlockTable] = [
            BlockTable(shared.life_cycles[index], shared.pool_group_of[index], hierarchy) for index in shared.attention
        ]  # ordered by beam, then by life cycle
        self.main_tables: list[BlockTable] = self.tables  # tables of beam 0
        self.width = 1  # number of beams
        self.tail_beam = -1  # the beam from which the partial last block is committed; -1 if all beams share its tokens
        self.last_beam = 0  # the beam of the last committed token, which continues after it
        self.recurrent: RecurrentState | None = None  # of beam 0, with SSM layers
        self.more_recurrent: list[RecurrentState] = []  # of the further beams
        if shared.ssm is not None:
            self.recurrent = RecurrentState(shared.ssm, shared.pool_group_of[shared.ssm.index])
        self.batch_rows: BatchRows | None = None  # the batch tables in which the request has a row
        self.batch_row = -1  # its number
        self.loads: PendingLoads | None = None  # file transfers in flight on which the request depends; None if there are none
        self.lost = ""  # why the request can only be closed; empty if its bytes are complete
        self.loss_reported = False  # whether a call has raised PageDataLostError
        # Reuse.
        self.tip: Block | None = None  # deepest tree block of the path, pinned; None before the first full block
        self.path: list[Block] = []  # full committed blocks; some may have left the tree
        self.tail = BytesWriter()  # packed committed tokens of the block after `path`
        self.published: Publication | None = None  # blocks committed ahead; None if the history covers all committed tokens
        self.counts_on: list[Publication] = []  # others' uncomputed blocks that it has matched
        self.commit_allowed = True
        self.adopts = shared.adopts  # whether a commit may exchange a page for that of an identical cached block
        self.text_only = False  # the user has promised not to commit digests
        self.has_digests = False  # whether digests are committed
        self.scratch = shared.scratch  # whether long prefill steps use scratch slots
        self.borrowed_tail = False  # whether the last block is a partly matched page of the tree, which the first resume copies
        self.divergence = 0  # tokens of the longest cached path at creation, regardless of back-off and missing pages
        self.before_hybrid = 0  # tokens that would have been reused if recurrent layers needed no snapshot
        self.sampled: SampledPath | None = None  # the prompt's sampled blocks, for the live hit curve
        self.cached_tokens_by_level: list[int] = [0] * hierarchy.num_levels
        self.last_cached_level = -1  # the level to which the last reused token is credited; -1: none was reused
        # Stream.
        self.stream = Stream(0)
        self.stream_set = False
        self.last_shortage: Shortage | None = None
        # Sums over all resizes, for mean lengths.
        self.capacity_sum = 0
        self.history_sum = 0
        self.num_samples = 0
        self.pending: PendingStats | None = (
            None  # counts that the engine has not committed; None if statistics are off for manager and request
        )
        self.started = False  # whether the request has been resumed before
        self.seen_by: object = None  # the latest batch call in whose list it was
        self.set_history(0)

    # --- pages

    def table(self, life_cycle: int, beam: int) -> BlockTable | None:
        """The table of an attention life cycle and beam; None for a recurrent life cycle."""
        count = len(self.main_tables)
        for number in range(beam * count, (beam + 1) * count):
            if self.tables[number].index == life_cycle:
                return self.tables[number]
        return None

    def recurrent_states(self) -> list[RecurrentState]:
        """The live recurrent states, by beam; empty without recurrent layers."""
        if self.recurrent is None:
            return []
        return [self.recurrent, *self.more_recurrent]

    def recurrent_of(self, beam: int) -> RecurrentState | None:
        """The recurrent state of a beam; None without recurrent layers."""
        return self.recurrent if beam == 0 or self.recurrent is None else self.more_recurrent[beam - 1]

    def live_pages(self) -> list[Page]:
        """The pages that the next step may read, from the last block to the first, then recurrent states. O(live blocks).

        Pages become evictable in this order, so that the tail of a path is evicted before its head.
        """
        live: list[Page] = []
        tables = self.tables
        if len(tables) == 1 and tables[0].stale_start >= tables[0].stale_end:  # the common case: one run
            self._add_run(live, tables[0].pages, 0, self.num_blocks)
        else:
            self._add_live_pages(live)
        for recurrent in self.recurrent_states():
            if recurrent.page is not None:
                live.append(recurrent.page)
        return live

    def _add_live_pages(self, live: list[Page]) -> None:
        """Add the live pages of all tables, from the last block to the first.

        Between two ends of stale ranges the same tables are live. A run with one live table is a slice of its pages: most of a long
        prompt where the other tables have windows.
        """
        ends: set[int] = {0, self.num_blocks}
        for table in self.tables:
            ends.add(min(table.stale_start, self.num_blocks))
            ends.add(min(table.stale_end, self.num_blocks))
        after = self.num_blocks
        for first in sorted(ends, reverse=True):
            columns: list[list[Page | None]] = []
            for table in self.tables:
                if not table.stale_start <= first < table.stale_end:
                    columns.append(table.pages)
            if len(columns) == 1:
                self._add_run(live, columns[0], first, after)
            elif columns:  # a run that is stale in every table costs nothing
                for ordinal in range(after - 1, first - 1, -1):
                    for pages in columns:
                        page = pages[ordinal]
                        if page is not None:
                            live.append(page)
            after = first

    def _add_run(self, live: list[Page], pages: list[Page | None], first: int, after: int) -> None:
        """Add the pages of blocks first .. after - 1 of one table, the last one first."""
        run = pages[first:after]
        run.reverse()
        if self.has_gaps():
            live.extend([page for page in run if page is not None])
        else:
            live.extend(cast("list[Page]", run))  # without a look at each page: a fifth of the time of suspend and resume

    def has_gaps(self) -> bool:
        """Whether live blocks may have no page: scratch blocks, and blocks that further beams share with beam 0."""
        return self.shared.scratch or len(self.tables) > len(self.main_tables)

    def holds_scratch(self) -> bool:
        for table in self.main_tables:  # noqa: SIM110 (as a loop: any() would make a generator)
            if table.scratch:
                return True
        return False

    def waits_for_commit(self, ordinal: int) -> bool:
        """Whether the page of a block that becomes stale is held until the block is committed."""
        return self.commit_allowed and not self.shared.commit_min_snapshot and ordinal >= len(self.path)

    # --- lengths: install

    def set_capacity(self, capacity: int) -> None:
        size = self.tokens_per_block
        self.capacity = capacity
        self.num_blocks = -(-capacity // size)
        self.block_end = self.num_blocks * size
        self.block_start = self.block_end - size
        if self.committed > self.history:
            self.block_start = max(self.block_start, self.committed - 1)

    def set_history(self, history: int) -> None:
        """Set the history. The caller has unlocked the pages that leave a window."""
        self.history = history
        if history >= self.next_stale:
            soonest = NEVER
            for table in self.tables:
                table.set_history(history)
                soonest = min(soonest, table.life_cycle.next_stale_change(history))
            self.next_stale = min(soonest, self.next_computed())
        if self.scratch:
            self.scratch_from = self._scratch_from(history)
        else:
            self.scratch_from = NEVER

    def next_computed(self) -> int:
        """The smallest history that covers an uncomputed block, or at which a snapshot is due; NEVER if nothing is uncomputed."""
        if self.published is None:
            return NEVER
        end = self.published.next_end(self.tokens_per_block)
        return min(end, self.committed) if self.shared.commit_min_snapshot else end

    def _scratch_from(self, history: int) -> int:
        """Compute `scratch_from`: the stale range at (capacity - rewind) must reach beyond the block in which the history ends.

        It is 0 if the next step may read what was written to scratch: `scratch.check_capacity_change` decides that.
        """
        if history < self.capacity - self.shared.max_rewind:
            return 0
        block = -(-history // self.tokens_per_block)
        least = NEVER
        for table in self.main_tables:
            least = min(least, table.life_cycle.scratch_from(block, self.shared.max_rewind))
        return least

    def sample(self) -> None:
        """Add the present lengths to the request's means, which guide the pool ratio. Called once per resize."""
        self.capacity_sum += self.capacity
        self.history_sum += self.history
        self.num_samples += 1

    def mean_lengths(self) -> tuple[float, float]:
        """Mean capacity and mean history over the request's steps, including its present lengths."""
        count = self.num_samples + 1
        return (self.capacity_sum + self.capacity) / count, (self.history_sum + self.history) / count

    # --- the decode step inside a block: no lock, nothing allocated

    def stay_inside_block(self, capacity: int) -> bool:
        """The fast form of `resize` that adds no block. Returns False, with nothing changed, if it does not apply."""
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
        """The fast form of `commit` for one id. Returns False, with nothing changed, if it does not apply.

        It applies if the id fills no block, moves no window and frees no scratch slot.
        """
        after = self.committed + 1
        if after == self.block_end or (after <= self.block_start and after % self.tokens_per_block == 0):
            return False  # fills a block; in the last one a comparison saves the division, 2 % of a decode step
        if not self.takes_one(token):
            return False
        word = i32(token)
        if after > self.history:
            if after >= self.next_stale or (self.scratch and self.holds_scratch()):
                return False
            self.history = after
        self.committed = after
        write_i32_le(self.tail, word)  # last, since no signal is handled from here to the end
        return True

    def takes_one(self, token: int) -> bool:
        """Whether `commit_one` can commit this id: no beams, no snapshot, no transfers in flight, and no error to report."""
        return (
            self.status == ACTIVE
            and 0 <= token < TOKEN_ID_LIMIT
            and self.committed < self.capacity
            and self.width == 1
            and self.commit_allowed
            and self.loads is None
            and not self.lost
            and (not self.shared.commit_min_snapshot or not self.makes_snapshot(self.committed + 1))
        )

    def makes_snapshot(self, committed: int) -> bool:
        """Whether a commit up to this length, with `commit_min_snapshot`, has to make a snapshot, or has to be refused."""
        return not self.shared.snapshot_at_block_ends or committed % self.tokens_per_block == 0 or committed < self.history

    # --- beams: install

    def exchange_beams(self, beam: int) -> None:
        """Swap beam 0 with the beam of the last committed token, except for full committed blocks."""
        for ordinal in range(len(self.path), self.num_blocks):
            self.exchange_pages(ordinal, beam)
        recurrent = self.recurrent
        if recurrent is not None:
            other = self.more_recurrent[beam - 1]
            recurrent.page, other.page = other.page, recurrent.page
            if self.batch_rows is not None:
                self.batch_rows.publish_state(self)
        if self.tail_beam == beam:
            self.tail_beam = 0
        self.last_beam = 0

    def exchange_pages(self, ordinal: int, beam: int) -> None:
        """Swap the pages of one block between beam 0 and another beam."""
        count = len(self.main_tables)
        for number, table in enumerate(self.main_tables):
            table.exchange(self.tables[beam * count + number], ordinal, self.status == ACTIVE)

    def keep_beam(self, ordinal: int, beam: int, point: Point) -> None:
        """Keep only the given beam's pages of a committed block: they become beam 0's, those of the other beams are unlocked."""
        self.exchange_pages(ordinal, beam)
        for table in self.tables[len(self.main_tables) :]:
            table.end_page(ordinal, True, point)
            table.row.set(ordinal, BAD_PAGE_INDEX)

    # --- statistics

    def excluded(self) -> bool:
        """Whether this is a dummy request, which neither statistics nor the tuner count."""
        return self.request_id is not None and self.request_id in self.shared.ledger.excluded

    def mark_dirty(self) -> None:
        """Record that the request has counts that the engine has not committed."""
        if self.request_id is not None and self.pending is not None and self.pending.dirty:
            self.shared.ledger.mark_dirty(self.request_id, self)

    def clear_dirty(self) -> None:
        """Record that the request has no uncommitted counts. Another open request with the same id may have some."""
        if self.request_id is None:
            return
        ledger = self.shared.ledger
        ledger.clear_dirty(self.request_id)
        if self.request_id in ledger.shared_ids:
            ledger.shared_ids.discard(self.request_id)
            for other in self.shared.open.values():
                if other is not self and other.request_id == self.request_id:
                    other.mark_dirty()

    def count_allocated(self, table: BlockTable, first: int, count: int) -> None:
        """Count the pages allocated for a table from this ordinal on."""
        pending = self.pending
        if pending is not None:
            pending.grown(table.index, count)
            if pending.generating:
                table.generated_from = min(table.generated_from, first)

    def uncount_page(self, table: BlockTable, ordinal: int) -> None:
        """Undo the count of a page that shrinking removes, if that count is not committed."""
        pending = self.pending
        if pending is not None and ordinal >= table.pending_from:
            pending.uncount(table.index, ordinal >= table.generated_from)

    def mark_counted(self) -> None:
        """Mark the present pages as counted: they are committed to the statistics, or must not be counted."""
        for table in self.tables:
            table.pending_from = len(table.pages)
            table.generated_from = NEVER

    def clear_dirty_if_undone(self) -> None:
        """Clear the mark of uncommitted counts if shrinking has undone all of them."""
        pending = self.pending
        if pending is not None and pending.dirty and pending.empty():
            pending.dirty = False
            self.clear_dirty()

    # --- tokens

    def tail_length(self) -> int:
        """Committed tokens after the last full committed block."""
        return self.committed - len(self.path) * self.tokens_per_block

    def committed_tokens(self) -> list[int | bytes]:
        tokens: list[int | bytes] = []
        for block in self.path:
            tokens.extend(unpack(block.tokens))
        tokens.extend(unpack(self.tail.getvalue()))
        return tokens

    # --- file transfers

    def await_page(self, page: Page) -> None:
        """Record that the request depends on a page whose file transfer is in flight."""
        loads = self.loads
        if loads is None:
            loads = self.loads = PendingLoads(self.request_id)
        loads.awaited.append(page)

    def lose(self, page: Page) -> None:
        """Record that a page that the next step reads was lost: the request can only be closed."""
        if self.lost:
            return
        log_loss(self.request_id, page)
        self.lost = f"a page of life cycle {page.life_cycle} was lost by a failed file transfer"

    def check_transfers(self) -> None:
        """Settle file transfers that have ended: show the hidden blocks, or mark the request as lost."""
        self.shared.hierarchy.settle()
        loads = self.loads
        if loads is None or not loads.settle(self.shared.tree, self.shared.hierarchy.in_flight.losses):
            return
        self.loads = None
        if loads.lost is not None:
            self.lose(loads.lost)

    def require_bytes(self, call: str) -> None:
        """Raise PageDataLostError if bytes of the request were lost."""
        if self.loads is not None:
            self.check_transfers()
        if self.lost:
            self.loss_reported = True
            raise PageDataLostError(f"{call}: {self.lost}; close this cache and start the request again")

    def report_loss(self) -> None:
        """Called after the close: raise PageDataLostError if the request has computed with lost bytes and no call has raised it."""
        if self.lost and self.started and not self.loss_reported and not self.shared.refusal:
            self.loss_reported = True
            raise PageDataLostError(f"close(): {self.lost}; the cache is closed, but what was computed with it is wrong")

    # --- checks

    def page_priority(self, ordinal: int, life_cycle: LifeCycle) -> int:
        """Priority of a page, from the request's callback. Called before anything changes, since the callback may raise.

        Raises LogicError for a priority out of range.
        """
        callback: Callable[[int, LifeCycle], object] | None = self.priority  # a user's function: its result is unchecked
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
            raise LogicError("the priority callback changed its cache; it must only return a priority")
        if is_bool(answer) or not isinstance(answer, SupportsIndex):
            raise LogicError(f"the priority callback returned {answer!r}; it must be an integer in {PRIORITY_MIN}..{PRIORITY_MAX}")
        priority = index(answer)
        if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
            raise LogicError(f"the priority callback returned {priority}; it must be in {PRIORITY_MIN}..{PRIORITY_MAX}")
        return priority

    def require(self, status: int, call: str) -> None:
        """Raise LogicError unless the request is in this status, PageDataLostError if its bytes were lost."""
        if self.status != status:
            raise LogicError(
                f"{call} needs a cache that is {CacheStatus(status).name}; this one is {CacheStatus(self.status).name}"
            )
        self.require_bytes(call)
