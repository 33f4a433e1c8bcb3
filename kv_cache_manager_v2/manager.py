"""The manager of one engine's KV cache: it constructs the parts, and owns the open requests.

It decides nothing itself. `layout/sizing` divides memory, `storage/` moves pages, `reuse/` finds cached blocks, and `request/` has
the state of requests. Every call that changes more than a request's own state first closes caches whose handles were dropped, and
settles file transfers that have ended. A question only settles transfers.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Final, SupportsIndex, cast

from kv_cache_manager_v2.arguments import (
    Integers,
    at_least,
    at_least_or_none,
    flag,
    function,
    instance,
    instance_or_none,
    request_id,
    unsigned,
    whole,
    wholes,
)
from kv_cache_manager_v2.cold_pages import IKvCacheColdPageCodec, require_plain_pages
from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.default_device import default_driver
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.diagnostics import debug_wanted
from kv_cache_manager_v2.errors import ConfigError, CorruptedError, LogicError, OutOfPagesError
from kv_cache_manager_v2.events.manager import KVCacheEventManager
from kv_cache_manager_v2.eviction.choose import make_policy
from kv_cache_manager_v2.guarded_listener import GuardedListener
from kv_cache_manager_v2.ids import CacheLevel, Point
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import size_levels
from kv_cache_manager_v2.layout.tuning import Tuner
from kv_cache_manager_v2.listener import CacheListener
from kv_cache_manager_v2.manager_reuse import ManagerReuse
from kv_cache_manager_v2.request import creation
from kv_cache_manager_v2.request.audit import check_everything
from kv_cache_manager_v2.request.call import Call, audit_cut_call, clear_poisoned, look, poison_of, take_poison_of
from kv_cache_manager_v2.request.live_managers import abandon, begin_construction, close_unused, drop, end_construction, tear_down
from kv_cache_manager_v2.request.lock import held_twice
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.request import ACTIVE, PriorityCallback, Request
from kv_cache_manager_v2.request.statistics_ledger import PendingStats, StatisticsLedger
from kv_cache_manager_v2.reuse.explain import MissHistory
from kv_cache_manager_v2.reuse.keys import ScopeLike, make_block_keys, scope_of
from kv_cache_manager_v2.reuse.limits import MatchLimits
from kv_cache_manager_v2.reuse.live_curve import LiveCurve
from kv_cache_manager_v2.reuse.search import Search
from kv_cache_manager_v2.reuse.tokens import Tokens, pack_unchecked
from kv_cache_manager_v2.reuse.tree import RadixTree
from kv_cache_manager_v2.reuse_match import ReuseMatch
from kv_cache_manager_v2.statistics import (
    MovementCounters,
)
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.resize import AdjustResult, ResizeResult
from kv_cache_manager_v2.storage.resizing import LevelsResize, QuotaResize

_log: Final = logging.getLogger(__name__)


class KVCacheManager(ManagerReuse):
    """The KV cache of one engine: pages on the GPU, in host memory and on disk, shared by requests with the same prefix.

    `driver` is the device: by default CUDA, or the emulated device if KVCM_DEVICE=emulated. Close every cache, then call
    `shutdown()`. The constructor raises ConfigError for an invalid configuration, DeviceUnavailableError without a device, and
    OutOfMemoryError or HostRegistrationError if the memory of a tier cannot be allocated. All memory is freed then.
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        event_manager: CacheListener | None = None,
        cold_page_codec: IKvCacheColdPageCodec | None = None,
        *,
        driver: Driver | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        require_plain_pages(cold_page_codec)
        listener = instance_or_none(event_manager, CacheListener, "event_manager")  # type: ignore[type-abstract]  # asked, not made
        given = instance_or_none(driver, Driver, "driver")  # type: ignore[type-abstract]
        now = time.monotonic if clock is None else cast("Callable[[], float]", function(clock, "clock"))
        config = instance(config, KVCacheManagerConfig, "config").copy()
        if listener is not None:
            listener.attached(config.block_key_hash)
        layout = build_layout(config)
        sizings = size_levels(layout, config)
        policy = make_policy(config.eviction_policy)
        device = given if given is not None else default_driver()
        begin_construction(device)
        timeline = Timeline(device)
        try:
            counters = MovementCounters(len(layout.life_cycles), len(sizings))
            hierarchy = Hierarchy(device, timeline, layout, sizings, config.cache_tiers, counters, policy.order)
            guard: GuardedListener | None = None
            if listener is not None and type(listener) is not KVCacheEventManager:  # an engine's class may raise
                guard = GuardedListener(listener)
            guarded = listener if guard is None else guard
            history = MissHistory(config.miss_history, guarded) if config.miss_history > 0 else None
            keys = make_block_keys(config.block_key_hash)
            tree = RadixTree(layout.life_cycles, layout.tokens_per_block, hierarchy, guarded if history is None else history, keys)
            tuner = Tuner(layout, config, sizings, now)
            ledger = StatisticsLedger(config.enable_stats, config.commit_stats_on_close, layout, hierarchy)
            debug = debug_wanted()
            shared = ManagerState(config, layout, device, timeline, hierarchy, tree, tuner, ledger, policy, debug, given is None)
        except BaseException:
            abandon(device, given is None)
            raise
        shared.guard = guard
        if config.hit_curve_rate > 0:
            num_blocks = sum([layout.blocks_in(sizing.slots) for sizing in sizings])
            shared.live_curve = LiveCurve(layout.tokens_per_block, config.hit_curve_rate, num_blocks)
        self._event_manager = listener
        self._last_resize: ResizeResult | None = None
        self._last_adjustment: AdjustResult | None = None
        self._tuner = tuner
        super().__init__(config, device, hierarchy, shared, history)
        end_construction(shared)

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Call `shutdown()`. If the `with` block raised, close open caches too, and only log further errors."""
        if kind is None:
            self.shutdown()
            return
        shared = self._shared
        try:
            with shared.lock:
                self._require_ours("shutdown()")
                audit_cut_call(shared)
                if not shared.torn_down:
                    tear_down(shared)
        except Exception as failed:
            _log.error("a KVCacheManager could not be shut down: %s", failed)

    def __del__(self) -> None:
        shared: ManagerState | None = getattr(self, "_shared", None)  # absent if the constructor raised
        if shared is None or shared.torn_down or shared.forked or sys.is_finalizing():
            return  # at interpreter exit, threads that the device needs no longer exist; the process frees the memory
        drop(shared)

    def __reduce__(self) -> str:
        raise LogicError("a KVCacheManager cannot be copied or pickled: it owns its memory; construct another from `init_config`")

    # --- requests

    def create_kv_cache(
        self,
        reuse_scope: ScopeLike | None = None,
        input_tokens: Tokens | None = None,
        id: Hashable = None,
        custom_priority_callback: PriorityCallback | None = None,
        expected_prompt_length: SupportsIndex | None = None,
        text_only: bool | None = None,
        enable_request_stats: bool = False,
        limits: MatchLimits | None = None,
        reuse_match: ReuseMatch | None = None,
    ) -> KVCache:
        """Make a SUSPENDED cache for a new request. It holds the longest reusable prefix of `input_tokens`.

        Allocates no GPU memory. `input_tokens`: see `KVCache.commit`; None skips the match. Omit the last prompt token if its
        output has to be computed. `id` is the engine's own: any object that has a hash. The callback returns the priority (0..100,
        lower is evicted earlier) of the page of (block ordinal, life cycle). Raises ConfigError for invalid tokens, an id without a
        hash, and a scope out of range.

        `limits` bounds the match. `reuse_match`, from `find_reuse`, replaces the scope, the tokens and the limits: omit those.
        """
        number = request_id(id)
        expected = at_least_or_none(expected_prompt_length, "expected_prompt_length", 0)
        callback: PriorityCallback | None = None
        if custom_priority_callback is not None:
            callback = cast("PriorityCallback", function(custom_priority_callback, "custom_priority_callback"))
        counted = flag(enable_request_stats, "enable_request_stats") or self._config.enable_stats
        plain = self._text_only(text_only)
        shared = self._shared
        search = self._search_of(reuse_match, reuse_scope is None and input_tokens is None and limits is None)
        scope = scope_of(reuse_scope) if search is None else search.scope
        tokens = pack_unchecked(input_tokens, plain) if input_tokens is not None else None  # the match checks unmatched tokens
        bounds = instance_or_none(limits, MatchLimits, "limits")
        layout = shared.layout
        with shared.lock, Call(shared, "create_kv_cache()"):
            state = Request(shared, scope, number, callback)
            state.text_only = plain
            if counted:
                prompt = tokens if search is None else search.tokens
                if expected is None and prompt is not None:
                    expected = prompt.num_tokens
                state.pending = PendingStats(len(layout.life_cycles), self._hierarchy.num_levels, expected)
            if search is not None:
                creation.start(state, search.result(), search.tokens)
            elif tokens is not None:
                creation.start(state, self._match(scope, tokens, bounds), tokens)
            handle = KVCache(self, state)  # made first, so that its finaliser closes the request if a later line raises
            shared.enter(state)
        return handle

    def clear_reusable_blocks(self) -> None:
        """Drop every cached block. O(blocks). Raises LogicError, with nothing changed, while a cache is open.

        A poisoned manager is audited afterwards. If it is still inconsistent, CorruptedError is raised; else call `take_poison()`.
        """
        shared = self._shared
        with shared.lock:
            audit_cut_call(shared)
            if shared.poison:
                self._require_none_open("clear_reusable_blocks()")
                clear_poisoned(shared)
                return
            with Call(shared, "clear_reusable_blocks()"):
                self._require_none_open("clear_reusable_blocks()")
                self._tree.clear()

    def drop_cached_pages(self, layer_group_id: SupportsIndex, page_indices: Integers) -> int:
        """Drop the cached pages with these base page indices, for example after the engine failed to load them. Returns their
        number.

        The blocks that cannot match without them leave the tree, with all that follows them. A page that a cache uses stays with
        it. Indices without a cached page of the layer group are ignored. O(pages of the pool group on the GPU). Raises ConfigError,
        with nothing changed, for an index out of range.
        """
        shared = self._shared
        group = whole(layer_group_id, "layer_group_id")
        if not 0 <= group < len(shared.life_cycles):
            raise ConfigError(f"layer group {group} is out of range: this manager has {len(shared.life_cycles)}")
        slots = wholes(page_indices, "page_indices", 0)
        with shared.lock, Call(shared, "drop_cached_pages()"):
            cell = self._hierarchy.gpu[shared.pool_group_of[group]]
            for slot in slots:
                if slot >= cell.total:
                    raise ConfigError(f"page_indices has {slot}; layer group {group} has page indices below {cell.total}")
            wanted = set(slots)
            pages = [page for page in cell.pages() if page.slot in wanted and page.life_cycle == group and page.owner is not None]
            for page in pages:
                self._tree.drop_page(page)
        return len(pages)

    def poison_reason(self) -> str | None:
        """Why this manager is poisoned; None if it is not.

        A manager is poisoned if an unexpected exception (an interrupt, a bug) left its structures inconsistent. Then every call
        raises CorruptedError, except questions, `KVCache.close()`, `clear_reusable_blocks()` and `shutdown()`.
        """
        return poison_of(self._shared)

    def take_poison(self) -> str | None:
        """Clear the poison and return its reason; None if the manager is not poisoned.

        Raises LogicError until `clear_reusable_blocks()` has succeeded.
        """
        return take_poison_of(self._shared)

    def forget_stream(self, cuda_stream: SupportsIndex) -> None:
        """Free what the manager keeps for a stream that is, or will be, destroyed. Never necessary. O(1).

        Suspend or close caches that are ACTIVE on the stream first. Work already queued on it is still waited for.
        """
        stream = unsigned(cuda_stream, "cuda_stream")
        with self._shared.lock, Call(self._shared, "forget_stream()"):
            self._shared.timeline.forget(stream)

    def shutdown(self) -> None:
        """Free all memory. Idempotent. Raises LogicError, with nothing changed, while a cache is open.

        Waits for file transfers first, without the lock, so other threads can still call the manager. If the device refuses a
        call, its error is raised; call `shutdown()` again. A poisoned manager shuts down even with open caches. Raises LogicError
        also while `resize` or `adjust` waits on another thread.
        """
        shared = self._shared
        with shared.lock:
            if not self._can_shut_down():
                return
        shared.driver.synchronize()
        with shared.lock:
            if self._can_shut_down():
                tear_down(shared)
        close_unused()
        if shared.guard is not None:
            shared.guard.raise_interrupt()

    # --- memory

    def resize(self, cache_level: SupportsIndex, quota: SupportsIndex, best_efforts: bool = False) -> bool:
        """Change the quota of a level, in bytes. All or nothing: if it is False, `last_resize` says why.

        Every cache must be suspended. Pages that no longer fit move to a colder level or are dropped, in eviction order; pages of
        suspended caches are kept. `best_efforts` selects the largest feasible quota not above the requested one; for host memory it
        leaves the larger of 1 GiB and 5 % of the available memory free. Waits while the device still uses slots of the level, but
        without the lock: other threads can call the manager, and keep the pages that they use meanwhile. Raises LogicError while a
        cache is ACTIVE, ConfigError for an unknown level.
        """
        level = self._level(cache_level)
        size = at_least(quota, "quota", 1)
        yielding = flag(best_efforts, "best_efforts")
        with self._shared.lock, Call(self._shared, "resize()"):
            self._require_all_suspended("resize()")
            change = QuotaResize(self._hierarchy, level, size, self._tuner.target_weights(CacheLevel(level)), yielding)
        result = self._attempt_resize(change, level)
        while result is None:
            self._wait("resize()", change.pending)
            result = self._attempt_resize(change, level)
        return result.ok

    def _attempt_resize(self, change: QuotaResize, level: int) -> ResizeResult | None:
        with self._shared.lock, Call(self._shared, "resize()"):
            try:
                result = change.attempt()
            finally:
                self._follow_sizings()
            if result is not None:
                self._last_resize = result
        return result

    def _follow_sizings(self) -> None:
        """Let the tuner know the sizes that the levels have now, also after an error."""
        for level, sizing in enumerate(self._hierarchy.sizings):
            if sizing is not self._tuner.sizings[level]:
                self._tuner.set_sizing(CacheLevel(level), sizing)

    @property
    def last_resize(self) -> ResizeResult | None:
        """What the last `resize` did, or why it was refused; None before the first."""
        return self._last_resize

    @property
    def need_adjustment(self) -> bool:
        """Whether `adjust()` is due: suspend every cache and call it.

        It is due if enough requests were sampled, the cooldown is over, and the pool ratio differs too much from the target. Ranks
        with equal histories of requests get equal answers.
        """
        with self._shared.lock:
            return self._tuner.need_adjustment()

    def adjust(self) -> None:
        """Divide each level between the pool groups according to the sampled lengths. Every cache must be suspended.

        Restarts the cooldown. Raises OutOfPagesError, with every level as it was, if pages of suspended caches do not fit. If the
        device or another call refuses a level later, the levels that are done, the coldest first, keep their new sizes: try again
        for the rest. `last_adjustment` says what was done. Waits as `resize` does. Raises LogicError while a cache is ACTIVE.
        """
        with self._shared.lock, Call(self._shared, "adjust()"):
            self._require_all_suspended("adjust()")
            now = self._tuner.clock()  # first: an engine's clock may raise
            targets = [
                self._tuner.target_sizing(level) if self._tuner.mismatched(level) else self._hierarchy.sizings[level]
                for level in [CacheLevel(level) for level in range(self._hierarchy.num_levels)]
            ]
            change = LevelsResize(self._hierarchy, targets)
        result = self._attempt_adjust(change, now)
        while result is None:
            self._wait("adjust()", change.pending)
            result = self._attempt_adjust(change, now)
        if not result.ok:
            raise OutOfPagesError(f"adjust(): {result.levels[-1].reason}")

    def _attempt_adjust(self, change: LevelsResize, now: float) -> AdjustResult | None:
        with self._shared.lock, Call(self._shared, "adjust()"):
            try:
                results = change.attempt()
            finally:
                self._follow_sizings()
            if results is None:
                return None
            result = AdjustResult(results)
            self._tuner.adjusted(now)
            self._last_adjustment = result
        return result

    @property
    def last_adjustment(self) -> AdjustResult | None:
        """What the last `adjust` did on each level, or why it was refused; None before the first."""
        return self._last_adjustment

    @property
    def event_manager(self) -> CacheListener | None:
        """The listener that receives every change of the cached pages; None if there is none."""
        return self._event_manager

    # --- internal

    def check_invariants(self) -> None:
        """Assert every invariant of every structure. O(pages + blocks + requests)."""
        with self._shared.lock:
            look(self._shared, "check_invariants()")
            if self._shared.poison:
                raise CorruptedError(f"check_invariants(): this manager is poisoned: {self._shared.poison}")
            check_everything(self._shared)

    def _search_of(self, value: object, alone: bool) -> Search | None:
        """Check a match from which a cache is created."""
        found = instance_or_none(value, ReuseMatch, "reuse_match")
        if found is None:
            return None
        if not alone:
            raise ConfigError("reuse_match replaces reuse_scope, input_tokens and limits; omit them")
        if found.search.tree is not self._tree:
            raise ConfigError("reuse_match was found by another manager; find it with this one")
        return found.search

    def _text_only(self, wanted: object) -> bool:
        if wanted is None:
            return self._config.text_only
        promised = flag(wanted, "text_only")
        if self._config.text_only and not promised:
            raise ConfigError("text_only=False: the manager was configured with text_only=True, which applies to all caches")
        return promised

    def _can_shut_down(self) -> bool:
        """Whether the manager still has to be shut down. Raises LogicError while a cache is open. The lock is held."""
        shared = self._shared
        if shared.torn_down:
            return False
        self._require_ours("shutdown()")
        audit_cut_call(shared)
        if not shared.refusal:
            with Call(shared, "shutdown()"):
                self._require_none_open("shutdown()")
        return True

    def _require_ours(self, call: str) -> None:
        """Raise LogicError in a child process, and inside another call of this thread. The lock is held."""
        shared = self._shared
        if shared.forked:
            raise LogicError(f"{call}: {shared.refusal}")
        if held_twice(shared.mutex):
            raise LogicError(shared.nested_call_error(call))

    def _wait(self, call: str, points: list[Point]) -> None:
        """Wait for points without the lock, so that other threads can call the manager."""
        shared = self._shared
        with shared.lock, Call(shared, call):
            wait = shared.waits.begin(points)
        try:
            wait.block()
        finally:
            with shared.lock:
                shared.waits.end(wait)

    def _require_all_suspended(self, call: str) -> None:
        count = 0
        for state in self._shared.open.values():
            if state.status == ACTIVE:
                count += 1
        if count > 0:
            raise LogicError(f"{call}: {count} KV cache(s) are ACTIVE; suspend them first")

    def _require_none_open(self, call: str) -> None:
        count = len(self._shared.open)
        if count > 0:
            ids = [str(state.request_id) for state in self._shared.open.values() if state.request_id is not None]
            named = f" (ids {', '.join(ids[:8])}{', ...' if len(ids) > 8 else ''})" if ids else ""
            raise LogicError(f"{call}: {count} KV cache(s) still open{named}; close them first")
