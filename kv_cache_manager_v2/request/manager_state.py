"""The state that all requests of a manager share.

It is read and changed with its lock held. Its fields say whether a call may change it: not inside another call, not after
`shutdown()`, not in a forked child process, and not while it is poisoned.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.host_wait import HostWaits
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.eviction.policy import EvictionPolicy
from kv_cache_manager_v2.guarded_listener import GuardedListener
from kv_cache_manager_v2.ids import PageStatus
from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.layout.tuning import Tuner
from kv_cache_manager_v2.request.lock import Lock, make_lock
from kv_cache_manager_v2.request.pending_loads import PendingLoads
from kv_cache_manager_v2.request.reservation import Reservation
from kv_cache_manager_v2.request.statistics_ledger import StatisticsLedger
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.explain_hits import HitLosses
from kv_cache_manager_v2.reuse.live_curve import LiveCurve
from kv_cache_manager_v2.reuse.tree import RadixTree
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page

if TYPE_CHECKING:
    from kv_cache_manager_v2.request.publication import Publication
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
        eviction_policy: EvictionPolicy,
        debug: bool,
        owns_driver: bool,
    ) -> None:
        self.layout = layout
        self.driver = driver
        self.timeline = timeline
        self.waits = HostWaits(driver, timeline)
        self.hierarchy = hierarchy
        self.tree = tree
        self.tuner = tuner  # samples the lengths of requests to adjust the pool ratio
        self.ledger = ledger  # statistics
        self.eviction_policy = eviction_policy
        self.debug = debug  # audit every structure after every public call
        self.max_util_for_resume: float = config.max_util_for_resume
        self.commit_min_snapshot: bool = config.commit_min_snapshot
        self.snapshot_at_block_ends: bool = config.snapshot_at_block_ends
        self.snapshot_at_branches: bool = config.snapshot_at_branches
        self.backoff: int = config.reuse_match_backoff
        self.adopts: bool = config.allow_seq_rebasing
        self.tokens_per_block: int = layout.tokens_per_block
        self.life_cycles: list[LifeCycle] = layout.life_cycles
        self.pool_group_of: list[int] = [int(group) for group in layout.pool_group_of]
        self.attention: list[int] = [lc.index for lc in layout.life_cycles if lc.is_attention]
        self.tables_in_group: list[int] = [0] * layout.num_pool_groups  # by pool group: block tables of one beam
        for life_cycle in self.attention:
            self.tables_in_group[self.pool_group_of[life_cycle]] += 1
        self.ssm: LifeCycle | None = layout.ssm
        self.scratch: bool = layout.max_rewind is not None
        self.max_rewind: int = layout.max_rewind if layout.max_rewind is not None else 0
        self.open: dict[int, Request] = {}  # by serial number
        self.next_serial = 0
        self.publications: dict[Block, Publication] = {}  # by uncomputed block
        self.guard: GuardedListener | None = None  # the wrapper of an engine's listener
        self.losses = HitLosses(layout, hierarchy.counters, config.reuse_match_backoff, config.commit_min_snapshot)
        self.live_curve: LiveCurve | None = None  # None unless configured
        # Work for the next call.
        self.closed_loads: list[PendingLoads] = []  # loads of requests that closed before these had ended ...
        self.closed_loads_seen = -1  # ... and how many transfers had ended, and pages were lost, when these were last looked at
        self.finalized_plans: list[list[Page]] = []  # pages of planned drops whose handles were garbage collected
        self.unreleased: list[Reservation] = []  # reservations whose release the device refused; their slots are not free
        self.unclosed: list[Request] = []  # requests whose handles were dropped without close()
        self.num_active = 0  # requests that are ACTIVE
        # Which calls are allowed.
        self.mutex = threading.RLock()
        self.lock: Lock = make_lock(self.mutex)
        self.running = ""  # name of the call in progress; stays set if an exception left the call before its end
        self.calling_out = False  # whether a priority callback or an eviction policy is running, on the thread that has the lock
        self.refusal = ""  # why calls that change something are refused; empty if they are allowed
        self.poison = ""  # why the manager is poisoned; `refusal` is set too then
        self.repaired = False  # poisoned, but cleared since and audited successfully
        self.owns_driver = owns_driver
        self.torn_down = False  # all memory is free
        self.attempts_to_close = 0  # attempts since the manager was dropped without shutdown()
        self.forked = False  # inherited by a child process

    def withdraw_plan(self, pages: list[Page]) -> None:
        """Remove one planned drop from each page. Drops pages that have none left and no user."""
        for page in pages:
            page.plans -= 1
            if page.plans == 0 and page.alive() and page.owner is not None and page.status() == PageStatus.DROPPABLE:
                self.tree.drop_page(page)

    def nested_call_error(self, call: str) -> str:
        """The error text for a call inside another call of the same thread."""
        if self.calling_out:
            return (
                f"{call}: a priority callback or an eviction policy must not call the manager or its caches, since it runs inside "
                f"{self.running}"
            )
        if self.guard is not None and self.guard.telling:
            return f"{call}: a cache listener must not call the manager or its caches, since it runs inside {self.running}"
        return f"{call}: called inside {self.running} by the same thread; finalisers, signal handlers and drivers must not do that"

    def refuse_changes(self, reason: str) -> None:
        """Refuse all calls that change something from now on."""
        self.refusal = reason
        for request in self.open.values():
            request.lost = reason  # the only field that a step inside a block checks, since it takes no lock

    def corrupt(self, cause: str) -> None:
        """Poison the manager after a failed audit. Only the first cause is kept."""
        if not self.poison:
            self.poison = cause
            self.repaired = False
            self.refuse_changes("this manager is poisoned")

    def take_poison(self) -> None:
        """Clear the poison of a repaired manager."""
        self.poison = ""
        self.refusal = ""
        self.repaired = False

    def mark_forked(self, pid: int) -> None:
        """Called in a child process after `os.fork()`: memory, files and threads belong to the parent process.

        The lock is replaced, since another thread of the parent may have held it.
        """
        self.forked = True
        self.running = ""
        self.mutex = threading.RLock()
        self.lock = make_lock(self.mutex)
        self.refuse_changes(f"this manager belongs to process {pid}, from which this one was forked; create another manager here")

    def enter(self, state: Request) -> None:
        """Register a new request as open."""
        state.serial = self.next_serial
        self.next_serial += 1
        self.open[state.serial] = state
