"""The manager: wires the rooms of one engine's KV cache together and owns the open requests.

Rule: it decides nothing itself. Memory is split by `layout/sizing`, moved by `storage/`, found again by `reuse/`; a request's
life is in `request/`. Every call that leaves a request's own state first closes the caches whose handles were dropped, and
settles file transfers that ended; one that only looks settles them alone.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import SupportsIndex

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.listener import CacheListener
from kv_cache_manager_v2.manager_statistics import ManagerStatistics
from kv_cache_manager_v2.request.request import PriorityCallback
from kv_cache_manager_v2.reuse.explain import MissReport
from kv_cache_manager_v2.reuse.keys import ScopeLike
from kv_cache_manager_v2.reuse.tokens import Tokens
from kv_cache_manager_v2.storage.resize import AdjustResult, ResizeResult

class KVCacheManager(ManagerStatistics):
    """The KV cache of one engine: pages of GPU memory, shared by prefix, with host memory and disk behind them.

    `driver` is the device; by default CUDA, or the emulated device if KVCM_DEVICE=emulated. Raises ConfigError for a
    configuration that can never work, DeviceUnavailableError without a device, OutOfMemoryError or HostRegistrationError if a
    tier cannot be had; nothing is left behind then. Close every cache, then `shutdown()`.
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        event_manager: CacheListener | None = None,
        cold_page_codec: object = None,
        *,
        driver: Driver | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None: ...
    def __enter__(self) -> KVCacheManager: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """`shutdown()`. After an exception it ends open requests too, and logs its own errors, so that the first one is seen."""

    def __reduce__(self) -> str: ...
    def create_kv_cache(
        self,
        reuse_scope: ScopeLike | None = None,
        input_tokens: Tokens | None = None,
        id: SupportsIndex | None = None,
        custom_priority_callback: PriorityCallback | None = None,
        expected_prompt_length: SupportsIndex | None = None,
        text_only: bool | None = None,
        enable_request_stats: bool = False,
    ) -> KVCache:
        """A cache for a new request, SUSPENDED, that already holds the longest reusable prefix of `input_tokens`.

        Takes no GPU memory. `input_tokens`: see `KVCache.commit`; None skips the match. Leave out the last prompt token if its
        output has to be computed. `id` is any unsigned 64-bit number. The callback gives the priority (0..100, lower is
        evicted earlier) of the page of (block ordinal, life cycle). Raises ConfigError for bad tokens, an id or a scope out of
        range.
        """

    def probe_reuse(
        self, reuse_scope: ScopeLike | None = None, input_tokens: Tokens | None = None, tokens: Tokens | None = None
    ) -> int:
        """How many leading tokens a cache created now would reuse. Changes nothing; advice only, since others may evict
        meanwhile."""

    def probe_first_new_block_key(
        self, reuse_scope: ScopeLike | None = None, input_tokens: Tokens | None = None, tokens: Tokens | None = None
    ) -> bytes | None:
        """The key of the first full block of this prompt that is not reusable: what a request created now would add first.

        None if the rest of the prompt fills no block. Two prompts with the same key are about to compute the same block.
        """

    def probe_reuse_by_keys(self, reuse_scope: ScopeLike | None, block_keys: Sequence[bytes]) -> int:
        """As `probe_reuse`, for a prompt known by the chained keys of its blocks (without the root's); matches whole blocks only.

        The first call computes the keys of all cached blocks; from then on they are kept.
        """

    def explain_miss(self, reuse_scope: ScopeLike | None, tokens: Tokens) -> MissReport:
        """Why `probe_reuse` finds no more than it does: print it. Changes nothing. What was dropped is known only with
        `miss_history` in the configuration. O(prompt), and a probe of each other scope."""

    def clear_reusable_blocks(self) -> None:
        """Drop every cached block. O(blocks). Raises LogicError, nothing changed, while a cache is open.

        A poisoned manager is audited afterwards: CorruptedError if it is still inconsistent, else `take_poison()` ends its poison.
        """

    def poison_reason(self) -> str | None:
        """Why this manager is poisoned: the first cause; None if it is not.

        An unexpected exception (an interrupt, a fault of ours) that left the structures inconsistent poisons it. Only questions,
        `clear_reusable_blocks()` and `shutdown()` are answered then, all else raises CorruptedError.
        """

    def take_poison(self) -> str | None:
        """End the poison, once `clear_reusable_blocks()` has succeeded, and return its reason; None if there is none.

        Raises LogicError before that.
        """

    def forget_stream(self, cuda_stream: SupportsIndex) -> None:
        """Tell the manager that a stream is destroyed, or about to be, so that nothing is kept of it. Never necessary. O(1).

        Suspend or close what is ACTIVE on the stream first. Work already queued on it is still waited for.
        """

    def shutdown(self) -> None:
        """Free all memory. Raises LogicError, nothing changed, while a cache is open. Idempotent.

        Waits for the device first, while other threads are served. If the device refuses a call, its error is raised; call
        `shutdown()` again. A poisoned manager shuts down whatever is open.
        """

    def resize(self, cache_level: SupportsIndex, quota: SupportsIndex, best_efforts: bool = False) -> ResizeResult:
        """Give a level another quota, in bytes; every cache must be suspended. All or nothing: the result is true, or says why not.

        Pages that no longer fit move down or are dropped, in eviction order; those of suspended caches survive. `best_efforts`: the
        largest feasible quota not above the asked one instead of a refusal; of host memory, the larger of 1 GiB and 5 % of what
        is available stays free then. Raises LogicError while a cache is ACTIVE, ConfigError for a level that there is not.
        """

    @property
    def need_adjustment(self) -> bool:
        """Whether enough requests were sampled, the cooldown is over and the pools no longer have the shares that the lengths
        ask for.

        Then suspend every cache and call `adjust()`. Equal histories give equal answers, so ranks agree.
        """

    def adjust(self) -> AdjustResult:
        """Divide each level anew between the pool groups, by the sampled lengths; every cache must be suspended.

        All levels or none: the result is true, or says why not. Restarts the cooldown. Raises LogicError while a cache is ACTIVE.
        """

    @property
    def event_manager(self) -> CacheListener | None:
        """Who is told about every change of what is cached."""

    def check_invariants(self) -> None:
        """Assert every invariant of every structure. O(everything)."""
