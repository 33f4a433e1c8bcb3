"""Making room, as arithmetic: what fits on which level, before anything changes.

Rule: planning reads and never writes. It counts, per pool group and level, what is free, what loading pages leave behind, and what
may be evicted; a plan that does not fit leaves no trace but the number of the plan in some pages' marks.

A held page may sink but not be dropped, so what a level can do for the one above it in held pages is its *room*:
room[l] = open[l] + droppable[l] + room[l + 1], with room[last + 1] = 0. Droppable pages always have somewhere to go: away.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.ids import GPU_LEVEL
from kv_cache_manager_v2.storage.levels import Levels
from kv_cache_manager_v2.storage.page import Page


class Shortage:
    """Why something did not fit; falsy nowhere: a missing shortage is None."""

    def __init__(self, pool_group: int, level: int, missing: int, permanent: bool, gate: bool = False) -> None:
        self.pool_group = pool_group
        self.level = level  # the cache level on which slots were wanted
        self.missing = missing  # slots short
        self.gate = gate  # refused before looking for room: the pool group is used beyond max_util_for_resume, by `missing` slots
        self.permanent = permanent  # no eviction could ever make it fit: the level has fewer slots in all

    def __reduce__(self) -> tuple[object, ...]:
        return Shortage, (self.pool_group, self.level, self.missing, self.permanent, self.gate)

    def __repr__(self) -> str:
        kind = "permanent" if self.permanent else "used beyond max_util_for_resume" if self.gate else "for now"
        return f"Shortage(pool group {self.pool_group}, level {self.level}: {self.missing} slots short, {kind})"


def rooms(target: int, open_slots: list[int], droppable: list[int]) -> list[int]:
    """Held pages that each level and those below it can take in, by level, with a 0 after the last; 0 above the target."""
    last = len(open_slots) - 1
    room = [0] * (last + 2)
    for level in range(last, target, -1):
        room[level] = open_slots[level] + droppable[level] + room[level + 1]
    return room


def shortfall(goal: int, open_slots: int, droppable: int, held: int, room_below: int) -> int:
    """Slots that cannot be had on a level even by evicting all that may be evicted; 0 if the goal can be met."""
    return max(0, goal - open_slots - droppable - min(held, room_below))


def exchange_stalls(target: int, free: list[int], rising: list[int], sinking: list[list[int]]) -> bool:
    """Whether moves in rounds come to a point at which no destination has a free slot.

    rising[l] pages go from level l up to the target; sinking[l] lists the source levels of the pages that go down to level l, in
    order. Mirrors the rounds of `Mover`: deepest destination first, then upwards; a page leaves a free slot where it was. Pure
    counts.
    """
    free = free.copy()
    rising = rising.copy()
    last = len(free) - 1
    position = [0] * (last + 1)
    while True:
        left = 0
        moved = 0
        for level in range(last, target, -1):
            sources = sinking[level]
            take = min(free[level], len(sources) - position[level])
            for index in range(position[level], position[level] + take):
                free[sources[index]] += 1
            position[level] += take
            free[level] -= take
            moved += take
            left += len(sources) - position[level]
        for level in range(target + 1, last + 1):
            take = min(free[target], rising[level])
            rising[level] -= take
            free[level] += take
            free[target] -= take
            moved += take
            left += rising[level]
        if left == 0:
            return False
        if moved == 0:
            return True


class GroupPlan:
    """What one pool group does: who is dropped, who sinks where, who comes up to the target."""

    def __init__(self, pool_group: int, num_levels: int) -> None:
        self.pool_group = pool_group
        self.rising: list[Page] = []  # pages to load, nearest level first
        self.sinking: list[list[Page]] = [[] for _level in range(num_levels)]  # by destination, in the order of joining its queue
        self.drops: list[Page] = []  # in the order of eviction


class Planner:
    """Plans for one target level at a time; the lists it leaves behind belong to the latest plan."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self.number = 0  # of the latest plan; pages marked with it are nobody's victims
        cells = levels.num_levels * levels.num_groups
        self._rising = [0] * cells  # slots that pages to load leave behind, by level and group
        self._marked_held = [0] * cells  # queued pages that are no victims, by level and group
        self._marked_droppable = [0] * cells
        self._goals = [0] * levels.num_groups
        self._wanted = [0] * levels.num_groups  # slots at the target that the asking request has or gets through the plan
        self._loads: list[list[Page]] = [[] for _group in range(levels.num_groups)]
        self._move_held = True
        self._counted = -1  # the pool group that the next three lists, by level, describe
        self._open = [0] * levels.num_levels  # slots free once the pages to load have left
        self._droppable = [0] * levels.num_levels  # pages that may be dropped
        self._room: list[int] = []  # see `rooms`
        self.plans: list[GroupPlan] = []

    def plan(
        self, target: int, need: list[int], load: list[Page], keep: list[Page], exchange: bool, move_held: bool
    ) -> Shortage | None:
        """Plan `need[g]` free slots and all of `load` on the target level; neither `load` nor `keep` are victims.

        exchange: slots that loading pages leave behind count as room for what they displace. move_held: whether held pages may be
        moved down at all. O(groups x levels + pages touched).
        """
        self._start(need)
        self._move_held = move_held
        for page in load:
            self._count_load(page, target, exchange)
        for page in keep:
            self._mark(page)
        levels = self._levels
        num_groups = levels.num_groups
        for group in range(num_groups):
            goal = self._goals[group]
            if goal > 0:
                missing = self._missing(target, group, goal)
                if missing > 0:
                    permanent = self._wanted[group] > levels.total(target, group)
                    return Shortage(group, target, missing, permanent)
        for group in range(num_groups):
            if self._goals[group] > levels.free(target, group) or self._loads[group]:
                self.plans.append(self._choose(target, group))
        return None

    def foresee(self, need: list[int], given: Sequence[Page], parked: Sequence[Page], keep: Sequence[Page]) -> Shortage | None:
        """Whether `need[g]` GPU slots could be had once the caller has unlocked `given` and turned its locks on `parked` into
        holds.

        Changes nothing; each of these pages is locked by the caller. `keep` are no victims. O(groups x levels + pages named).
        """
        self._start(need)
        levels = self._levels
        for page in keep:
            self._mark(page)
        freed = [0] * levels.num_groups
        held = [0] * levels.num_groups
        for page in given:
            if page.locks > 1 or page.mark == self.number:
                continue
            if page.holds > 0:
                held[page.pool_group] += 1
            else:  # free at once, or droppable and queued
                freed[page.pool_group] += 1
        for page in parked:
            if page.locks == 1 and page.mark != self.number:
                held[page.pool_group] += 1
        for group in range(levels.num_groups):
            goal = need[group] - freed[group]
            missing = self._missing(GPU_LEVEL, group, goal, held[group]) if goal > 0 else 0
            if missing > 0:
                return Shortage(group, GPU_LEVEL, missing, need[group] > levels.total(GPU_LEVEL, group))
        return None

    def _start(self, need: list[int]) -> None:
        self.number += 1
        self._move_held = True
        self._counted = -1
        self.plans = []
        for cell in range(len(self._rising)):
            self._rising[cell] = 0
            self._marked_held[cell] = 0
            self._marked_droppable[cell] = 0
        for group in range(self._levels.num_groups):
            self._goals[group] = need[group]
            self._wanted[group] = need[group]
            if self._loads[group]:
                self._loads[group] = []

    def _count_load(self, page: Page, target: int, exchange: bool) -> None:
        if not self._mark(page):
            return  # named twice
        group = page.pool_group
        self._wanted[group] += 1
        if page.level <= target:
            return
        self._goals[group] += 1
        self._loads[group].append(page)
        if exchange and page.transfers == 0:  # a slot that a file transfer still writes to is not free when its page leaves
            self._rising[page.level * self._levels.num_groups + group] += 1

    def _mark(self, page: Page) -> bool:
        """Take a page out of the victims; False if it was already."""
        if page.mark == self.number:
            return False
        page.mark = self.number
        if page.queued:
            cell = page.level * self._levels.num_groups + page.pool_group
            if page.holds > 0:
                self._marked_held[cell] += 1
            else:
                self._marked_droppable[cell] += 1
        return True

    def _count(self, target: int, group: int) -> None:
        """Fill in what a pool group has on each level, as this plan sees it."""
        if self._counted == group:
            return
        self._counted = group
        levels = self._levels
        cell = group
        for level in range(levels.num_levels):
            queue = levels.queues[cell]
            self._open[level] = levels.allocators[cell].free + self._rising[cell]
            self._droppable[level] = queue.length - queue.held - self._marked_droppable[cell]
            cell += levels.num_groups
        if self._move_held:
            self._room = rooms(target, self._open, self._droppable)
        else:
            self._room = [0] * (levels.num_levels + 1)

    def _missing(self, target: int, group: int, goal: int, more_held: int = 0) -> int:
        levels = self._levels
        cell = target * levels.num_groups + group
        free = levels.allocators[cell].free
        if goal <= free:
            return 0
        self._count(target, group)
        held = levels.queues[cell].held - self._marked_held[cell] + more_held
        return shortfall(goal, free, self._droppable[target], held, self._room[target + 1])

    def _choose(self, target: int, group: int) -> GroupPlan:
        """Walk down from the target: who has to leave each level, and who of those from above stays there."""
        levels = self._levels
        plan = GroupPlan(group, levels.num_levels)
        if self._loads[group]:
            plan.rising = self._nearest_first(self._loads[group], target)
        self._count(target, group)
        arriving: list[Page] = []
        goal = self._goals[group]
        for level in range(target, levels.num_levels):
            short = goal + len(arriving) - self._open[level]
            goal = 0
            if short <= 0:
                plan.sinking[level] = arriving
                arriving = []
                break
            arriving = self._evict(plan, level, arriving, short, self._room[level + 1])
        plan.drops = arriving
        return plan

    def _evict(self, plan: GroupPlan, level: int, arriving: list[Page], short: int, room: int) -> list[Page]:
        """Choose `short` pages to leave the level, at most `room` of them held: residents first, then the oldest of those
        arriving."""
        queue = self._levels.queues[level * self._levels.num_groups + plan.pool_group]
        leaving: list[Page] = []
        page = queue.first()
        while short > 0 and page is not None:
            if page.mark != self.number and (page.holds == 0 or room > 0):
                if page.holds > 0:
                    room -= 1
                leaving.append(page)
                short -= 1
            page = queue.next(page)
        if short == 0:
            plan.sinking[level] = arriving
            return leaving
        for page in arriving:
            if short > 0 and (page.holds == 0 or room > 0):
                if page.holds > 0:
                    room -= 1
                leaving.append(page)
                short -= 1
            else:
                plan.sinking[level].append(page)
        assert short == 0, "a plan that fits by count has too few victims"
        return leaving

    def _nearest_first(self, load: list[Page], target: int) -> list[Page]:
        ordered: list[Page] = []
        for level in range(target + 1, self._levels.num_levels):
            for page in load:
                if page.level == level:
                    ordered.append(page)
        return ordered
