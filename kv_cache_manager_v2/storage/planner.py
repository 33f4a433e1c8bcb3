"""Plans evictions and loads over all levels, before anything changes.

For each cell it counts the free slots, the slots that the pages to load will free, and the evictable pages. Planning changes only
the plan numbers in marks of pages, and the list of pages that were just held.

Held pages can be offloaded but not dropped. The number of held pages that a level can receive from the level above is its *intake*:
intake[l] = open[l] + droppable[l] + intake[l + 1], with intake[last + 1] = 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.arguments import deprecated
from kv_cache_manager_v2.eviction.admission import DiskAdmission
from kv_cache_manager_v2.ids import GPU_LEVEL
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.clean_copy import CleanCopy, copy_in, leaves_copy
from kv_cache_manager_v2.storage.leaving import admits
from kv_cache_manager_v2.storage.page import DROPPABLE, HELD, JUST_HELD, Page


class Shortage:
    """Why slots could not be had: the pool group, the level, and how many slots are missing. Where nothing is missing, None."""

    def __init__(
        self, pool_group: int, level: int, missing: int, permanent: bool, over_limit: bool = False, in_transfer: int = 0
    ) -> None:
        self.pool_group = pool_group
        self.level = level  # the level on which slots are missing
        self.missing = missing  # slots short
        self.over_limit = over_limit  # other requests use more than max_util_for_resume of the pool group, by `missing` slots
        self.permanent = permanent  # no eviction could ever make it fit: the level has fewer slots in all
        self.in_transfer = in_transfer  # slots of the pool group, on all levels, that file transfers in flight keep: then try again

    @property
    def gate(self) -> bool:
        """The old name of `over_limit`, for one release."""
        deprecated("Shortage.gate is now Shortage.over_limit; the next release removes the old name")
        return self.over_limit

    def __reduce__(self) -> tuple[object, ...]:
        return Shortage, (self.pool_group, self.level, self.missing, self.permanent, self.over_limit, self.in_transfer)

    def __repr__(self) -> str:
        kind = "permanent" if self.permanent else "used beyond max_util_for_resume" if self.over_limit else "for now"
        if self.in_transfer > 0 and not self.permanent:
            kind += f"; file transfers in flight keep {self.in_transfer} slots: try again when they have ended"
        return f"Shortage(pool group {self.pool_group}, level {self.level}: {self.missing} slots short, {kind})"


def intakes(target: int, open_slots: list[int], droppable: list[int]) -> list[int]:
    """The intake of each level below the target; 0 for the others and after the last."""
    last = len(open_slots) - 1
    intake = [0] * (last + 2)
    for level in range(last, target, -1):
        intake[level] = open_slots[level] + droppable[level] + intake[level + 1]
    return intake


def shortfall(goal: int, open_slots: int, droppable: int, held: int, intake_below: int) -> int:
    """Slots that are missing on a level even after evicting all evictable pages; 0 if the goal can be met."""
    return max(0, goal - open_slots - droppable - min(held, intake_below))


def exchange_stalls(target: int, free: list[int], loads: list[int], offloads: list[list[int]]) -> bool:
    """Whether the rounds of `Mover` stall because no destination has a free slot.

    loads[l] pages move from level l to the target. offloads[l] has the source levels of the pages that move to level l, in order.
    Counts as `Mover` moves: coldest destination first, and each move frees a slot at its source.
    """
    free = free.copy()
    loads = loads.copy()
    last = len(free) - 1
    position = [0] * (last + 1)
    while True:
        left = 0
        moved = 0
        for level in range(last, target, -1):
            sources = offloads[level]
            take = min(free[level], len(sources) - position[level])
            for index in range(position[level], position[level] + take):
                free[sources[index]] += 1
            position[level] += take
            free[level] -= take
            moved += take
            left += len(sources) - position[level]
        for level in range(target + 1, last + 1):
            take = min(free[target], loads[level])
            loads[level] -= take
            free[level] += take
            free[target] -= take
            moved += take
            left += loads[level]
        if left == 0:
            return False
        if moved == 0:
            return True


class GroupPlan:
    """The plan of one pool group: the pages to drop, to offload and to load."""

    def __init__(self, pool_group: int, num_levels: int) -> None:
        self.pool_group = pool_group
        self.loads: list[Page] = []  # pages to move to the target, nearest level first
        self.offloads: list[list[Page]] = [[] for _level in range(num_levels)]  # by destination, in the order of their arrival
        self.drops: list[Page] = []  # in eviction order
        self.returns: list[list[Page]] = [[] for _level in range(num_levels)]  # by destination: they get their copies' slots there
        self.arrivals: list[list[Page]] = [[] for _level in range(num_levels)]  # where there are returns: all pages, in order
        self.discards: list[CleanCopy] = []  # clean copies whose slots other pages get


class EvictionCursor:
    """Iterates over the pages and clean copies of a cell in eviction order, without those that the plan must not evict.

    Skipping all held pages costs nothing; once they are skipped, they are skipped for the rest of the iteration.
    """

    def __init__(self, cell: Cell, plan_number: int) -> None:
        self._cell = cell
        self._plan_number = plan_number
        self._droppable = cell.droppable.first()
        self._held = cell.held.first() if cell.held.length > 0 else None
        self._fronts: list[Page] = []  # see `PageQueue.next`
        self._held_fronts: list[Page] = []
        self._copy = cell.copies.end.after if cell.num_copies > 0 else None  # the oldest clean copy left

    def next(self, held_too: bool) -> Page | None:
        """The next page to evict, or clean copy to discard; None if there is none."""
        cell = self._cell
        while True:
            page = self._droppable
            held = self._held
            held_first = held_too and held is not None and (page is None or _goes_first(held, page))
            copy = self._copy
            if copy is not None and _copy_goes_first(copy, held if held_first else page):
                page = copy
                after = copy.after
                self._copy = None if after is None or after is cell.copies.end else after
            elif held_first and held is not None:
                page = held
                self._held = cell.held.next(held, self._held_fronts)
            elif page is not None:
                self._droppable = cell.droppable.next(page, self._fronts)
                if page.list == JUST_HELD and not held_too:
                    cell.move_to_held(page)
                    continue
            else:
                return None
            if page.mark != self._plan_number:
                return page


def _goes_first(page: Page, other: Page) -> bool:
    """Whether a page is evicted before another page of its cell."""
    if page.priority != other.priority:
        return page.priority < other.priority
    credits = page.cell.eviction.credits
    rank = page.age + credits[page.worth]
    other_rank = other.age + credits[other.worth]
    return rank < other_rank or (rank == other_rank and page.worth < other.worth)


def _copy_goes_first(copy: Page, page: Page | None) -> bool:
    """Whether a clean copy is discarded before a page of its cell is evicted: it has a smaller rank, or a lower priority."""
    if page is None or copy.priority < page.priority:
        return True
    credits = copy.cell.eviction.credits
    return copy.age + credits[copy.worth] < page.age + credits[page.worth]


class GroupCounts:
    """The counts of one pool group in the latest plan. Lists are by level."""

    def __init__(self, cells: list[Cell]) -> None:
        levels = len(cells)
        self.cells = cells
        self.goal = 0  # slots to free at the target, including those for loads
        self.wanted = 0  # slots at the target that the request has or gets by the plan
        self.loads: list[Page] = []
        self.leaving = [0] * levels  # slots that the pages to load will free
        self.copied = [0] * levels  # slots in which they will leave clean copies, unless other pages need them
        self.spared_held = [0] * levels  # evictable pages that the plan must not evict
        self.spared_droppable = [0] * levels
        self.open = [0] * levels  # free slots, including those that the pages to load will free
        self.droppable = [0] * levels  # pages that can be dropped, and clean copies that can be discarded
        self.intake: list[int] = []  # see `intakes`
        self._counted = False  # whether the three lists above are up to date

    def start(self, need: int) -> None:
        """Begin a plan that needs this many slots at the target."""
        self.goal = need
        self.wanted = need
        self._counted = False
        if self.loads:
            self.loads = []
        for level in range(len(self.cells)):
            self.leaving[level] = 0
            self.copied[level] = 0
            self.spared_held[level] = 0
            self.spared_droppable[level] = 0

    def spare(self, page: Page) -> None:
        """Exclude a page from eviction."""
        if page.list == DROPPABLE:
            self.spared_droppable[page.cell.level] += 1
        elif page.list == HELD or page.list == JUST_HELD:
            self.spared_held[page.cell.level] += 1

    def missing(self, target: int, goal: int, move_held: bool, more_held: int = 0) -> int:
        """Slots that are missing at the target, after evicting all evictable pages."""
        cell = self.cells[target]
        free = max(0, cell.free)
        if goal <= free:
            return 0
        self.count(target, move_held)
        held = cell.num_held - self.spared_held[target] + more_held
        return shortfall(goal, free, self.droppable[target], held, self.intake[target + 1])

    def in_transfer(self) -> int:
        """Slots of all levels that file transfers in flight keep. O(levels)."""
        return sum([cell.in_transfer for cell in self.cells])

    def count(self, target: int, move_held: bool) -> None:
        """Count `open`, `droppable` and `intake`, once for each plan. O(levels)."""
        if self._counted:
            return
        self._counted = True
        for level in range(len(self.cells)):
            cell = self.cells[level]
            self.open[level] = max(0, cell.free + self.leaving[level])
            copies = cell.num_copies + self.copied[level]
            self.droppable[level] = cell.num_droppable - self.spared_droppable[level] + copies
        self.intake = intakes(target, self.open, self.droppable) if move_held else [0] * (len(self.cells) + 1)


class Planner:
    """Makes plans for one target level. `plans` has those of the latest call."""

    def __init__(self, cells: list[list[Cell]]) -> None:
        self.number = 0  # of the latest plan; it does not evict pages marked with this number
        self._groups = [GroupCounts(column) for column in cells]  # by pool group
        self._move_held = True
        self.plans: list[GroupPlan] = []

    def plan(
        self, target: int, need: list[int], load: list[Page], keep: Sequence[Page], exchange: bool, move_held: bool
    ) -> Shortage | None:
        """Plan `need[g]` free slots and all of `load` on the target level; neither `load` nor `keep` are evicted.

        `exchange`: evicted pages may use the slots that loaded pages free. `move_held`: held pages may be offloaded. O(groups x
        levels + pages named, moved or dropped).
        """
        self._start(need)
        self._move_held = move_held
        for page in load:
            self._count_load(page, target, exchange)
        for page in keep:
            self._spare(page)
        for counts in self._groups:
            if counts.goal > 0:
                missing = counts.missing(target, counts.goal, move_held)
                if missing > 0:
                    cell = counts.cells[target]
                    return Shortage(cell.pool_group, target, missing, counts.wanted > cell.total, False, counts.in_transfer())
        for counts in self._groups:
            if counts.goal > 0 and (counts.goal > counts.cells[target].free or counts.loads):
                self.plans.append(self._choose(counts, target, []))
        return None

    def plan_trade(self, need: list[int], given: Sequence[Page], held_on: Sequence[Page]) -> Shortage | None:
        """Plan `need[g]` free GPU slots for a caller that will unlock `given` and turn its locks on `held_on` into holds.

        These pages are evicted after all others, in this order, and only if no other request locks them. O(groups x levels + pages
        named, moved or dropped).
        """
        self._start(need)
        leaving: list[list[Page]] = [[] for _counts in self._groups]
        freed = [0] * len(self._groups)  # by pages that need no place on a colder level
        held = [0] * len(self._groups)
        for page in given:
            if page.locks == 1 and page.transfers == 0:
                leaving[page.pool_group].append(page)
                if page.holds > 0:
                    held[page.pool_group] += 1
                else:
                    freed[page.pool_group] += 1
        for page in held_on:
            if page.locks == 1 and page.transfers == 0:
                page.mark = self.number  # see `_is_kept`
                leaving[page.pool_group].append(page)
                held[page.pool_group] += 1
        for group in range(len(self._groups)):
            counts = self._groups[group]
            goal = need[group] - freed[group]
            missing = counts.missing(GPU_LEVEL, goal, True, held[group]) if goal > 0 else 0
            if missing > 0:
                return Shortage(group, GPU_LEVEL, missing, need[group] > counts.cells[GPU_LEVEL].total)
        for group in range(len(self._groups)):
            counts = self._groups[group]
            if counts.goal > counts.cells[GPU_LEVEL].free:
                self.plans.append(self._choose(counts, GPU_LEVEL, leaving[group]))
        return None

    def _start(self, need: list[int]) -> None:
        self.number += 1
        self._move_held = True
        self.plans = []
        for group in range(len(self._groups)):
            self._groups[group].start(need[group])

    def _count_load(self, page: Page, target: int, exchange: bool) -> None:
        if page.mark == self.number:
            return  # it is twice in the list
        self._spare(page)
        cell = page.cell
        counts = self._groups[cell.pool_group]
        counts.wanted += 1
        if cell.level <= target or (page.lost and not cell.has_memory(page)):
            return
        counts.goal += 1
        counts.loads.append(page)
        if exchange and page.transfers == 0:  # else a file transfer may still write to the slot
            if leaves_copy(page):
                counts.copied[cell.level] += 1
            else:
                counts.leaving[cell.level] += 1

    def _spare(self, page: Page) -> None:
        if page.mark != self.number:
            page.mark = self.number
            self._groups[page.cell.pool_group].spare(page)

    def _choose(self, counts: GroupCounts, target: int, last: list[Page]) -> GroupPlan:
        """Choose, from the target down, the pages that leave each level, and those that stay on it.

        `last`: pages of the target level that are evicted after all others.
        """
        levels = len(counts.cells)
        plan = GroupPlan(counts.cells[target].pool_group, levels)
        if counts.loads:
            plan.loads = _nearest_first(counts.loads, target, levels)
        counts.count(target, self._move_held)
        arriving = last
        goal = counts.goal - len(last)  # they have slots there
        for level in range(target, levels):
            cell = counts.cells[level]
            if cell.num_copies > 0:
                arriving = self._choose_returns(plan, cell, arriving)
            if cell.admission is not None and level > target:
                arriving = self._admit(plan, cell.admission, arriving)
            short = goal + len(arriving) - counts.open[level]
            goal = 0
            if short <= 0:
                plan.offloads[level] = arriving
                arriving = []
                break
            arriving = self._evict(plan, cell, arriving, short, counts.intake[level + 1], counts.copied[level])
        plan.drops += arriving
        return plan

    def _admit(self, plan: GroupPlan, admission: DiskAdmission, arriving: list[Page]) -> list[Page]:
        """The arriving pages that the level's admission admits, or that must be kept. The others are dropped."""
        admitted: list[Page] = []
        for page in arriving:
            if self._is_kept(page) or page.owner is None or admits(admission, page):
                admitted.append(page)
            else:
                plan.drops.append(page)
        return admitted

    def _choose_returns(self, plan: GroupPlan, cell: Cell, arriving: list[Page]) -> list[Page]:
        """Choose the arriving pages that get the slots of their clean copies. The result is the others, which need slots.

        A page that hands over its slot while it is locked is copied in any case.
        """
        others: list[Page] = []
        plan.arrivals[cell.level] = arriving
        for page in arriving:
            copy = copy_in(page, cell) if page.locks == 0 else None
            if copy is None:
                others.append(page)
            else:
                copy.mark = self.number
                plan.returns[cell.level].append(page)
        return others

    def _evict(self, plan: GroupPlan, cell: Cell, arriving: list[Page], short: int, intake: int, copied: int) -> list[Page]:
        """Choose `short` pages to leave the level, at most `intake` of them held: first pages on it, then arriving ones.

        Clean copies on the level count as pages on it. Those that the pages to load would leave (`copied`) are given up next.
        """
        candidates = EvictionCursor(cell, self.number)
        leaving: list[Page] = []
        while short > 0:
            page = candidates.next(intake > 0)
            if page is None:
                short -= min(short, copied)
                break
            if page.holds > 0:
                intake -= 1
            if isinstance(page, CleanCopy):
                plan.discards.append(page)
            else:
                leaving.append(page)
            short -= 1
        if short == 0:
            plan.offloads[cell.level] = arriving
            return leaving
        for page in arriving:
            if short > 0 and (intake > 0 or not self._is_kept(page)):
                if self._is_kept(page):
                    intake -= 1
                leaving.append(page)
                short -= 1
            else:
                plan.offloads[cell.level].append(page)
        if short > 0:
            short = self._pass_returns_on(plan, cell, leaving, short, intake)
        assert short == 0, "a plan that fits by count has too few pages to evict"
        return leaving

    def _pass_returns_on(self, plan: GroupPlan, cell: Cell, leaving: list[Page], short: int, intake: int) -> int:
        """Let pages that were to return leave the level, too: others need the slots of their copies. Returns what is short then."""
        returns = plan.returns[cell.level]
        plan.returns[cell.level] = []
        for page in returns:
            copy = copy_in(page, cell)
            if short > 0 and copy is not None and (intake > 0 or page.holds == 0):
                if page.holds > 0:
                    intake -= 1
                plan.discards.append(copy)
                leaving.append(page)
                short -= 1
            else:
                plan.returns[cell.level].append(page)
        arrivals = plan.arrivals[cell.level]
        passing = {page for page in leaving if page.cell is not cell}
        own = len(leaving) - len(passing)  # pages of the level itself come first
        leaving[own:] = [page for page in arrivals if page in passing]  # in eviction order again
        return short

    def _is_kept(self, page: Page) -> bool:
        """Whether a page that leaves its level must not be dropped."""
        return page.holds > 0 or page.mark == self.number


def _nearest_first(load: list[Page], target: int, levels: int) -> list[Page]:
    ordered: list[Page] = []
    for level in range(target + 1, levels):
        for page in load:
            if page.cell.level == level:
                ordered.append(page)
    return ordered
