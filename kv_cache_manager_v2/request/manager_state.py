"""What all requests of a manager share.

Rule: whoever reads or changes it holds its lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.guarded_listener import GuardedListener
from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.layout.tuning import Tuner
from kv_cache_manager_v2.request.lock import Lock
from kv_cache_manager_v2.request.pending_loads import PendingLoads
from kv_cache_manager_v2.request.statistics_ledger import StatisticsLedger
from kv_cache_manager_v2.reuse.tree import RadixTree
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page

if TYPE_CHECKING:
    from kv_cache_manager_v2.request.request import Request


class ManagerState:
    """What all requests of a manager share: the rooms below, the lock that guards them, and the list of open requests."""

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
        self.lock = Lock()
        self.open: dict[int, Request] = {}  # by serial number
        self.closed_loads: list[PendingLoads] = []  # of requests that closed before their file transfers ended
        self.discarded_plans: list[list[Page]] = []  # of drop handles that were never used
        self.abandoned: list[Request] = []  # handles dropped without close; the next public call closes them
        self.calling_out = False  # a priority callback is running, on the thread that has the lock
        self.shield: GuardedListener | None = None  # before a listener that somebody else wrote
        self.next_serial = 0

    def require_outside(self) -> None:
        """Raise LogicError if a priority callback or a listener called the manager that called it: its books are in use. Lock
        held."""
        if self.calling_out:
            raise LogicError("a priority callback must not call the manager or its caches: it is asked in the midst of a call")
        if self.shield is not None and self.shield.telling:
            raise LogicError("a cache listener must not call the manager or its caches: it is told in the midst of a call")

    def enter(self, state: Request) -> None:
        """A new request is open."""
        state.serial = self.next_serial
        self.next_serial += 1
        self.open[state.serial] = state
