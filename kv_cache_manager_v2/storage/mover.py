"""Executes plans: drops pages, notifies their owners, then moves pages in batches, coldest level first.

A move reserves slots, queues copies, and then installs the whole batch. After a device error, pages that have not moved are
unchanged, also in the eviction order. Owners are notified one after the other, never from within each other.

To exchange pages between full levels, moves go in rounds: each moves what fits, which frees slots for the next round. If nothing
fits, pages of the target level go to swap slots, a few slots of host memory, until their new level has free slots. A page in a
swap slot counts as one of its new level. After a device error it keeps its bytes there until it moves on or is loaded.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import KVCacheError
from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, Point
from kv_cache_manager_v2.statistics import MovementCounters
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.cells import Cells
from kv_cache_manager_v2.storage.clean_copy import CleanCopy, add_copy, copy_in, discard, discard_from, leaves_copy, remove_copy
from kv_cache_manager_v2.storage.copier import Copier
from kv_cache_manager_v2.storage.copy_batch import CopyBatch
from kv_cache_manager_v2.storage.in_flight import TransfersInFlight
from kv_cache_manager_v2.storage.leaving import tell_loaded
from kv_cache_manager_v2.storage.page import PINNED, Page
from kv_cache_manager_v2.storage.planner import GroupPlan, exchange_stalls
from kv_cache_manager_v2.storage.tiers import HostTier

SWAP_SLOTS: Final = 64  # the most pages in swap slots; more would only make rounds longer
SWAP_BYTES: Final = 8 << 20  # the most bytes of swap slots of a cell, which has at least one slot


class Mover:
    """Moves and drops pages, as plans demand."""

    def __init__(
        self,
        driver: Driver,
        timeline: Timeline,
        cells: Cells,
        copier: Copier,
        in_flight: TransfersInFlight,
        counters: MovementCounters,
    ) -> None:
        self._driver = driver
        self._timeline = timeline
        self._cells = cells.by_group  # by pool group and level
        self._copier = copier
        self._in_flight = in_flight
        self._counters = counters
        self._swaps = cells.swaps  # cells of swap slots, created when first needed
        self._gone: list[Page] = []  # dropped or lost pages whose owners must be notified
        self._notifying = False
        self._moved: list[Page] = []  # moved pages whose owners must be notified ...
        self._moved_from: list[int] = []  # ... and their previous levels

    # --- notifying owners

    def drop(self, page: Page) -> None:
        """Drop a droppable page. `notify_gone` notifies its owner."""
        assert page.locks + page.holds == 0, "a page that is needed was to be dropped"
        cell = page.cell
        self._counters.dropped[page.life_cycle][cell.level] += 1
        cell.free_page(page)
        self.add_gone(page)

    def add_gone(self, page: Page) -> None:
        """Add a page that was dropped or lost. `notify_gone` notifies its owner."""
        if page.owner is not None:
            self._gone.append(page)

    @property
    def unnotified(self) -> int:
        """Pages of which an interrupted call has not notified the owners."""
        return len(self._gone) + len(self._moved)

    def notify(self) -> None:
        """Notify the owners of all pages that are gone or have moved."""
        self.notify_gone()
        self.notify_moved()

    def notify_gone(self) -> None:
        """Notify the owners of dropped and lost pages, in order. An owner may drop further pages."""
        if self._notifying:
            return  # the outer call notifies these owners too
        self._notifying = True
        index = 0
        try:
            while index < len(self._gone):
                page = self._gone[index]
                index += 1
                owner = page.owner
                page.owner = None
                if owner is not None:
                    owner.page_gone(page)
        finally:
            del self._gone[:index]
            self._notifying = False

    def notify_moved(self) -> None:
        """Notify the owners of pages that have moved to another level."""
        moved = self._moved
        sources = self._moved_from
        if not moved:
            return
        self._moved = []
        self._moved_from = []
        for index in range(len(moved)):
            page = moved[index]
            owner = page.owner
            if owner is not None:
                owner.page_relocated(page, sources[index], page.level)

    # --- plans

    def execute(self, plans: list[GroupPlan], target: int) -> None:
        """Execute a plan. After a device error, what was done remains, and the error is raised."""
        for plan in plans:
            self._prepare_swap(plan, target)
        for plan in plans:
            for copy in plan.discards:
                if copy.slot != NO_SLOT:
                    discard(copy)
            for page in plan.drops:
                self.drop(page)
        if self._gone:
            self.notify_gone()
        try:
            for plan in plans:
                self._run_rounds(plan, target)
        finally:
            self.notify_moved()

    def _run_rounds(self, plan: GroupPlan, target: int) -> None:
        cells = self._cells[plan.pool_group]
        for level in range(target + 1, len(cells)):
            if plan.offloads[level]:  # notified owners may have dropped some
                plan.offloads[level] = [page for page in plan.offloads[level] if page.slot != NO_SLOT]
            for page in plan.returns[level]:
                copy = copy_in(page, cells[level])
                if copy is not None:
                    self._return_page(page, copy)
                elif page.slot != NO_SLOT:  # its owner has left it
                    plan.offloads[level].append(page)
        plan.loads = [page for page in plan.loads if page.slot != NO_SLOT]
        while True:
            moved = 0
            left = 0
            for level in range(len(cells) - 1, target, -1):
                moved += self._offload_some(plan.offloads[level], cells[level])
                left += len(plan.offloads[level])
            moved += self._move_some(plan.loads, cells[target])
            left += len(plan.loads)
            if left == 0:
                break
            if moved == 0:
                self._swap_out(plan, target)
        for level in range(target + 1, len(cells)):
            if plan.returns[level]:
                for page in plan.arrivals[level]:  # pages that returned have arrived before the others
                    if page.slot != NO_SLOT and page.cell is cells[level] and page.list != PINNED:
                        page.cell.renew(page)

    def _return_page(self, page: Page, copy: CleanCopy) -> None:
        """Give a page the slot of its clean copy. Nothing is copied; copies on warmer levels are discarded."""
        source = page.cell
        cell = copy.cell
        slot = copy.slot
        discard_from(page, cell.level - 1)
        source.free_slot(page.slot, page.ready)
        source.leave(page)
        remove_copy(copy)
        page.cell = cell
        page.slot = slot
        page.ready = copy.ready
        cell.enter(page)
        self._counters.returned[page.life_cycle][cell.level] += 1
        self._arrive(page, source)

    def _offload_some(self, pages: list[Page], cell: Cell) -> int:
        """As `_move_some`, to a colder level. If slots are missing, clean copies of this plan's loads are discarded."""
        missing = len(pages) - cell.allocator.free
        if missing > 0 and cell.num_copies > 0:
            cell.discard_copies(missing)
        return self._move_some(pages, cell)

    def _move_some(self, pages: list[Page], cell: Cell) -> int:
        """Move the first pages of the list, as many as there are free slots, and remove them from the list."""
        if not pages:
            return 0
        total = min(cell.allocator.free, len(pages))
        done = 0
        try:
            while done < total:
                end = done + 1
                while end < total and pages[end].cell is pages[done].cell:
                    end += 1
                self.move(pages[done:end], cell)
                done = end
        finally:
            del pages[:done]
        return done

    # --- swap slots

    def _prepare_swap(self, plan: GroupPlan, target: int) -> None:
        """Allocate swap slots before anything changes, if the rounds would stall without them."""
        if not plan.loads or not any(plan.offloads):
            return
        cells = self._cells[plan.pool_group]
        free = [cell.allocator.free for cell in cells]
        loads = [0] * len(cells)
        for page in plan.drops:
            free[page.level] += 1
        leaves_none = False  # whether some page to load frees no slot of its level, as a transfer writes to it or it is a swap slot
        for page in plan.loads:
            loads[page.level] += 1
            leaves_none = leaves_none or page.transfers > 0 or page.cell.pins_all
        for copy in plan.discards:
            free[copy.level] += 1
        for returns in plan.returns:
            for page in returns:
                free[page.level] += 1
        offloads = [[page.level for page in pages] for pages in plan.offloads]
        if leaves_none or exchange_stalls(target, free, loads, offloads):
            for level in range(target + 1, len(cells)):
                if plan.offloads[level]:
                    self._open_swap(cells[level])

    def _open_swap(self, cell: Cell) -> None:
        swap = cell.swap
        if swap is None:
            tier = HostTier(self._driver)
            swap = Cell(self._timeline, cell.level, cell.pool_group, tier, True, cell.eviction)
            swap.pins_all = True
            swap.arenas.extend([tier.make_arena(arena.slot_bytes) for arena in cell.arenas])
            self._swaps.append(swap)
            cell.swap = swap
        if swap.total == 0:
            slot_bytes = sum([arena.slot_bytes for arena in swap.arenas])
            slots = max(1, min(SWAP_SLOTS, SWAP_BYTES // slot_bytes))
            swap.resize_memory(slots)
            swap.allocator.expand(slots)

    def _swap_out(self, plan: GroupPlan, target: int) -> None:
        """Move pages of the target level without a free slot on their new level to swap slots. They stay in the plan."""
        cells = self._cells[plan.pool_group]
        moved = 0
        for level in range(len(cells) - 1, target, -1):
            swap = cells[level].swap
            if swap is None:
                continue
            leaving = [page for page in plan.offloads[level] if page.level == target][: swap.allocator.free]
            if leaving:
                self.move(leaving, swap)
                moved += len(leaving)
        assert moved > 0, "pages must be exchanged, and none of them can be moved"

    @property
    def swapped(self) -> int:
        """Pages in swap slots; 0 unless a device error has interrupted an exchange."""
        count = 0
        for swap in self._swaps:
            count += swap.allocator.num_taken()
        return count

    def drain_swaps(self) -> None:
        """Move pages from swap slots to free slots of their level. After a device error the next call tries again."""
        for swap in self._swaps:
            pages = swap.pinned.pages()
            if pages:
                try:
                    self._offload_some(pages, self._cells[swap.pool_group][swap.level])
                except KVCacheError as error:
                    self._in_flight.last_error = str(error)

    # --- one batch

    def move(self, pages: list[Page], cell: Cell) -> None:
        """Move pages of one cell to free slots of another or the same cell. After a device error no page has moved."""
        source = pages[0].cell
        loads = cell.level < source.level
        if loads and source.admission is not None:
            tell_loaded(source.admission, pages)  # first: the user's code may be interrupted
        batch = self.queue_move(pages, cell, NULL_POINT)
        for index in range(len(pages)):
            page = pages[index]
            slot = page.slot
            page.ready = batch.ready
            if source is cell:
                page.slot = batch.slots[index]
                source.free_slot(slot, batch.source_free)
                continue  # compaction: the page keeps its age and is not counted as moved
            copy = CleanCopy(page, source, slot, batch.source_free) if loads and leaves_copy(page) else None
            if page.copy is not None and not loads:
                discard_from(page, cell.level)
            source.leave(page)
            page.cell = cell
            page.slot = batch.slots[index]
            cell.enter(page)
            if copy is None:
                source.free_slot(slot, batch.source_free)
            else:
                add_copy(copy)
        self._in_flight.install(batch, pages)
        for page in pages:
            if source is not cell:
                if source.level != cell.level:
                    self._counters.moved[page.life_cycle][source.level][cell.level] += 1
                self._arrive(page, source)
            elif page.list != PINNED:
                cell.requeue(page)

    def queue_move(self, pages: list[Page], cell: Cell, after: Point) -> CopyBatch:
        """Queue copies of pages of one cell to free slots of another (or the same); they run after `after`, too.

        After a device error no slot is reserved. The caller installs the batch, or cancels it.
        """
        batch = CopyBatch(pages[0].cell, cell)
        if after != NULL_POINT:
            batch.waits.append(after)
        try:
            for page in pages:
                batch.reserve(page)
            self._copier.queue(batch)
        except BaseException:
            self._in_flight.cancel(batch)
            raise
        return batch

    def install_handed_over(self, page: Page, batch: CopyBatch) -> None:
        """Install a page that has handed over its slot: it moves to the slot to which its queued batch copies it."""
        source = page.cell
        page.ready = batch.ready
        page.cell = batch.cell
        page.slot = batch.slots[0]
        batch.cell.enter(page)
        self._in_flight.install(batch, [page])
        self._counters.moved[page.life_cycle][source.level][batch.cell.level] += 1
        self._arrive(page, source)

    def drop_handed_over(self, page: Page) -> None:
        """Drop a page that has handed over its slot. `notify_gone` notifies its owner."""
        page.slot = NO_SLOT
        if page.owner is not None:
            self._counters.dropped[page.life_cycle][page.level] += 1
            self.add_gone(page)

    def _arrive(self, page: Page, source: Cell) -> None:
        cell = page.cell
        cell.requeue(page)
        if cell.level != source.level and page.owner is not None:
            self._moved_from.append(source.level)  # first: an interrupt here must not leave a page without a level
            self._moved.append(page)
