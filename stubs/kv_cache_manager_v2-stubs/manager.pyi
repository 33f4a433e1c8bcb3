"""The manager of one engine's KV cache: it constructs the parts, and owns the open requests.

It decides nothing itself. `layout/sizing` divides memory, `storage/` moves pages, `reuse/` finds cached blocks, and `request/` has
the state of requests. Every call that changes more than a request's own state first closes caches whose handles were dropped, and
settles file transfers that have ended. A question only settles transfers.
"""

from collections.abc import Callable, Hashable
from types import TracebackType
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.cold_pages import IKvCacheColdPageCodec
from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.listener import CacheListener
from kv_cache_manager_v2.manager_reuse import ManagerReuse
from kv_cache_manager_v2.request.request import PriorityCallback
from kv_cache_manager_v2.reuse.keys import ScopeLike
from kv_cache_manager_v2.reuse.limits import MatchLimits
from kv_cache_manager_v2.reuse.tokens import Tokens
from kv_cache_manager_v2.reuse_match import ReuseMatch
from kv_cache_manager_v2.storage.resize import AdjustResult, ResizeResult

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
    ) -> None: ...
    def __enter__(self) -> KVCacheManager: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Call `shutdown()`. If the `with` block raised, close open caches too, and only log further errors."""

    def __reduce__(self) -> str: ...
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

    def clear_reusable_blocks(self) -> None:
        """Drop every cached block. O(blocks). Raises LogicError, with nothing changed, while a cache is open.

        A poisoned manager is audited afterwards. If it is still inconsistent, CorruptedError is raised; else call `take_poison()`.
        """

    def drop_cached_pages(self, layer_group_id: SupportsIndex, page_indices: Integers) -> int:
        """Drop the cached pages with these base page indices, for example after the engine failed to load them. Returns their
        number.

        The blocks that cannot match without them leave the tree, with all that follows them. A page that a cache uses stays with
        it. Indices without a cached page of the layer group are ignored. O(pages of the pool group on the GPU). Raises ConfigError,
        with nothing changed, for an index out of range.
        """

    def poison_reason(self) -> str | None:
        """Why this manager is poisoned; None if it is not.

        A manager is poisoned if an unexpected exception (an interrupt, a bug) left its structures inconsistent. Then every call
        raises CorruptedError, except questions, `KVCache.close()`, `clear_reusable_blocks()` and `shutdown()`.
        """

    def take_poison(self) -> str | None:
        """Clear the poison and return its reason; None if the manager is not poisoned.

        Raises LogicError until `clear_reusable_blocks()` has succeeded.
        """

    def forget_stream(self, cuda_stream: SupportsIndex) -> None:
        """Free what the manager keeps for a stream that is, or will be, destroyed. Never necessary. O(1).

        Suspend or close caches that are ACTIVE on the stream first. Work already queued on it is still waited for.
        """

    def shutdown(self) -> None:
        """Free all memory. Idempotent. Raises LogicError, with nothing changed, while a cache is open.

        Waits for file transfers first, without the lock, so other threads can still call the manager. If the device refuses a
        call, its error is raised; call `shutdown()` again. A poisoned manager shuts down even with open caches. Raises LogicError
        also while `resize` or `adjust` waits on another thread.
        """

    def resize(self, cache_level: SupportsIndex, quota: SupportsIndex, best_efforts: bool = False) -> bool:
        """Change the quota of a level, in bytes. All or nothing: if it is False, `last_resize` says why.

        Every cache must be suspended. Pages that no longer fit move to a colder level or are dropped, in eviction order; pages of
        suspended caches are kept. `best_efforts` selects the largest feasible quota not above the requested one; for host memory it
        leaves the larger of 1 GiB and 5 % of the available memory free. Waits while the device still uses slots of the level, but
        without the lock: other threads can call the manager, and keep the pages that they use meanwhile. Raises LogicError while a
        cache is ACTIVE, ConfigError for an unknown level.
        """

    @property
    def last_resize(self) -> ResizeResult | None:
        """What the last `resize` did, or why it was refused; None before the first."""

    @property
    def need_adjustment(self) -> bool:
        """Whether `adjust()` is due: suspend every cache and call it.

        It is due if enough requests were sampled, the cooldown is over, and the pool ratio differs too much from the target. Ranks
        with equal histories of requests get equal answers.
        """

    def adjust(self) -> None:
        """Divide each level between the pool groups according to the sampled lengths. Every cache must be suspended.

        Restarts the cooldown. Raises OutOfPagesError, with every level as it was, if pages of suspended caches do not fit. If the
        device or another call refuses a level later, the levels that are done, the coldest first, keep their new sizes: try again
        for the rest. `last_adjustment` says what was done. Waits as `resize` does. Raises LogicError while a cache is ACTIVE.
        """

    @property
    def last_adjustment(self) -> AdjustResult | None:
        """What the last `adjust` did on each level, or why it was refused; None before the first."""

    @property
    def event_manager(self) -> CacheListener | None:
        """The listener that receives every change of the cached pages; None if there is none."""

    def check_invariants(self) -> None:
        """Assert every invariant of every structure. O(pages + blocks + requests)."""
