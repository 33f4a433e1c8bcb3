"""A model of a hierarchy: eviction orders are lists of entries, levels are numbers, and the bytes of a page are one value.

Rule: nothing here is fast, shared with the package, or asynchronous. The one definition is `make_room`; the rest is bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_cache_manager_v2.storage.page import Page


class Entry:
    """A page as the model sees it."""

    def __init__(self, page: Page, group: int, priority: int, value: int) -> None:
        self.page = page
        self.group = group
        self.priority = priority
        self.value = value  # what its bytes say
        self.level = 0
        self.owned = False
        self.holds = 0
        self.locks = 1
        self.gone = False


class Model:
    """Levels of slots, and the pages in them."""

    def __init__(self, slots: list[list[int]], disk: list[bool]) -> None:
        self.slots = [list(row) for row in slots]
        self.disk = disk  # by level
        self.last = len(slots) - 1
        self.groups = len(slots[0])
        self.entries: list[Entry] = []  # alive
        self.queues: dict[tuple[int, int], list[Entry]] = {
            (level, group): [] for level in range(len(slots)) for group in range(self.groups)
        }
        self.kept: Callable[[int, int], int] = lambda _level, _group: 0  # slots that a file transfer keeps after their page left
        self.dropped = 0
        self.inclusive = False  # loaded pages leave clean copies

    def free(self, level: int, group: int) -> int:
        used = sum(1 for entry in self.entries if (entry.level, entry.group) == (level, group))
        return self.slots[level][group] - used - self.kept(level, group)

    def evictable(self, entry: Entry) -> bool:
        if entry.locks:
            return False
        return entry.level != self.last if entry.holds else entry.owned

    def settle(self, entry: Entry) -> None:
        """After any change: in the queue or not, or gone."""
        queue = self.queues[entry.level, entry.group]
        if entry in queue and not self.evictable(entry):
            queue.remove(entry)
        elif entry not in queue and self.evictable(entry):
            older = [i for i, other in enumerate(queue) if other.priority <= entry.priority]
            queue.insert(older[-1] + 1 if older else 0, entry)
        if not (entry.locks or entry.holds or entry.owned):
            self.remove(entry)

    def remove(self, entry: Entry) -> None:
        if entry in self.queues[entry.level, entry.group]:
            self.queues[entry.level, entry.group].remove(entry)
        self.entries.remove(entry)
        entry.gone = True

    def move(self, entry: Entry, level: int) -> None:
        if entry in self.queues[entry.level, entry.group]:
            self.queues[entry.level, entry.group].remove(entry)
        entry.level = level
        self.settle(entry)

    def make_room(
        self, target: int, need: list[int], load: list[Entry], spared: list[Entry], move_held: bool = True
    ) -> tuple[int, int] | None:
        """(pool group, slots short) if it does not fit, and nothing changes; else None, and it is done.

        With clean copies, whose slots count as free, only the answer is given: which pages move depends on the copies.
        """
        work = []
        for group in range(self.groups):
            coming = [entry for entry in load if entry.group == group and entry.level > target]
            opened, candidates = self._offer(target, group, coming, [*load, *spared])
            room = [0] * (self.last + 2)
            if move_held:
                for level in range(self.last, target, -1):
                    room[level] = opened[level] + sum(1 for e in candidates[level] if not e.holds) + room[level + 1]
            goal = need[group] + len(coming)
            held = sum(1 for e in candidates[target] if e.holds)
            short = goal - self.free(target, group) - (len(candidates[target]) - held) - min(held, room[target + 1])
            if goal > 0 and short > 0:
                return group, short
            work.append((goal, coming, opened, candidates, room))
        for goal, coming, opened, candidates, room in [] if self.inclusive else work:
            self._carry_out(target, goal, coming, opened, candidates, room)
        return None

    def _offer(self, target: int, group: int, coming: list[Entry], spared: list[Entry]) -> tuple[list[int], list[list[Entry]]]:
        opened = []
        candidates = []
        for level in range(self.last + 1):
            leaving = [e for e in coming if e.level == level and e.page.transfers == 0 and not self.disk[target]]
            opened.append(self.free(level, group) + len(leaving))
            candidates.append([e for e in self.queues[level, group] if e not in spared])
        return opened, candidates

    def _carry_out(
        self, target: int, goal: int, coming: list[Entry], opened: list[int], candidates: list[list[Entry]], room: list[int]
    ) -> None:
        arriving: list[Entry] = []
        stay: list[tuple[Entry, int]] = []
        for level in range(target, self.last + 1):
            short = max(0, goal + len(arriving) - opened[level])
            goal = 0
            leaving: list[Entry] = []
            held = 0
            for entry in candidates[level] + arriving:
                if len(leaving) < short and (not entry.holds or held < room[level + 1]):
                    held += 1 if entry.holds else 0
                    leaving.append(entry)
            stay += [(entry, level) for entry in arriving if entry not in leaving]
            arriving = leaving
        for entry in arriving:
            self.remove(entry)
            self.dropped += 1
        for entry, level in sorted(stay, key=lambda pair: -pair[1]):  # stable: the order of joining within a level
            self.move(entry, level)
        for entry in sorted(coming, key=lambda e: e.level):
            self.move(entry, target)
