"""What all requests of a manager share.

Rule: it is read and changed under its lock. Whether it may change at all is decided here: not in the middle of another call, not
after `shutdown()`, not in a forked child, and not once it is poisoned.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.guarded_listener import GuardedListener
from kv_cache_manager_v2.ids import PageStatus
from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.layout.tuning import Tuner
from kv_cache_manager_v2.request.lock import Lock, make_lock
from kv_cache_manager_v2.request.pending_loads import PendingLoads
from kv_cache_manager_v2.request.reservation import Reservation
from kv_cache_manager_v2.request.statistics_ledger import StatisticsLedger
from kv_cache_manager_v2.reuse.tree import RadixTree
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page

if TYPE_CHECKING:
    from kv_cache_manager_v2.request.request import Request


class ManagerState:
    """The parts of a manager, the lock that guards them, and its open requests."""

    def __init__(
        self,
        config: KVCacheManagerConfig,
        layout: StorageLayout,
        driver: Driver,
        timeline: Timeline,
        hierarchy: Hierarchy,
        tree: RadixTree,
        tuner: Tuner,
        ledger: StatisticsLedger,
        debug: bool,
        owns_driver: bool,
    ) -> None:
        self.layout = layout
        self.driver = driver
        self.timeline = timeline
        self.hierarchy = hierarchy
        self.tree = tree
        self.tuner = tuner  # learns from the lengths of requests how to divide the memory
        self.ledger = ledger  # statistics
        self.debug = debug  # audit every structure after every public call
        self.max_util_for_resume: float = config.max_util_for_resume
        self.commit_min_snapshot: bool = config.commit_min_snapshot
        self.tokens_per_block: int = layout.tokens_per_block
        self.life_cycles: list[LifeCycle] = layout.life_cycles
        self.pool_group_of: list[int] = [int(group) for group in layout.pool_group_of]
        self.attention: list[int] = [lc.index for lc in layout.life_cycles if lc.is_attention]
        self.tables_in_group: list[int] = [0] * layout.num_pool_groups  # attention life cycles by pool group: tables of one beam
        for life_cycle in self.attention:
            self.tables_in_group[self.pool_group_of[life_cycle]] += 1
        self.ssm: LifeCycle | None = layout.ssm
        self.scratch: bool = layout.max_rewind is not None
        self.max_rewind: int = layout.max_rewind if layout.max_rewind is not None else 0
        self.open: dict[int, Request] = {}  # by serial number
        self.next_serial = 0
        self.guard: GuardedListener | None = None  # in front of a listener that an engine wrote
        # what the next call has to do
        self.closed_loads: list[PendingLoads] = []  # of requests that closed before their file transfers ended
        self.discarded_plans: list[list[Page]] = []  # of drop handles that were never used
        self.unreleased: list[Reservation] = []  # whose slots stay taken until the device answers
        self.abandoned: list[Request] = []  # handles dropped without close
        self.num_active = 0  # requests that are ACTIVE
        # who may call
        self.mutex = threading.RLock()
        self.lock: Lock = make_lock(self.mutex)
        self.running = ""  # the call that is changing this; one that an exception cut short leaves its name
        self.calling_out = False  # a priority callback is running, on the thread that has the lock
        self.refusal = ""  # why no call that changes something is taken any more
        self.poison = ""  # first cause of the failed audit; then `refusal` is set too
        self.repaired = False  # poisoned, but cleared since, and found consistent
        self.owns_driver = owns_driver
        self.torn_down = False  # all memory is free
        self.attempts_to_close = 0  # since the manager was dropped without shutdown()
        self.forked = False  # inherited by a child process

    def withdraw_plan(self, pages: list[Page]) -> None:
        """One planned drop less for each page; drops those that have none left and no user."""
        for page in pages:
            page.plans -= 1
            if page.plans == 0 and page.alive() and page.owner is not None and page.status() == PageStatus.DROPPABLE:
                self.tree.drop_page(page)

    def why_nested(self, call: str) -> str:
        """What to say to a call from inside another one of the same thread."""
        if self.calling_out:
            return "a priority callback must not call the manager or its caches: it is asked in the midst of a call"
        if self.guard is not None and self.guard.telling:
            return "a cache listener must not call the manager or its caches: it is told in the midst of a call"
        return f"{call}: called inside {self.running} by the same thread; no finaliser, signal handler or driver may do that"

    def refuse_changes(self, reason: str) -> None:
        """Take no call that changes something from now on."""
        self.refusal = reason
        for request in self.open.values():
            request.lost = reason  # steps inside a block take no lock and ask for nothing else

    def corrupt(self, cause: str) -> None:
        """The audit failed. Only the first cause counts."""
        if not self.poison:
            self.poison = cause
            self.repaired = False
            self.refuse_changes("this manager is poisoned")

    def take_poison(self) -> None:
        """Go on: the manager was cleared and is consistent."""
        self.poison = ""
        self.refusal = ""
        self.repaired = False

    def leave_to_parent(self, pid: int) -> None:
        """In a child after `os.fork()`: the memory, files and threads are the parent's. Another thread may have held the lock."""
        self.forked = True
        self.running = ""
        self.mutex = threading.RLock()
        self.lock = make_lock(self.mutex)
        self.refuse_changes(f"this manager belongs to process {pid}, which this one was forked from; make another manager here")

    def enter(self, state: Request) -> None:
        """A new request is open."""
        state.serial = self.next_serial
        self.next_serial += 1
        self.open[state.serial] = state
