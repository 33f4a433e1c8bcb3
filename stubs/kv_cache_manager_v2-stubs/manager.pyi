from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.ids import CacheLevel
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.listener import CacheListener
from kv_cache_manager_v2.manager_views import ManagerViews
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.misses import MissReport
from kv_cache_manager_v2.sequence.state import PriorityCallback
from kv_cache_manager_v2.storage.resizing import AdjustResult, ResizeResult

DEBUG_VARIABLES: Final = ("KVCM_DEBUG", "TLLM_DEBUG_MODE")

class KVCacheManager(ManagerViews):
    def __init__(
        self,
        config: KVCacheManagerConfig,
        event_manager: CacheListener | None = None,
        cold_page_codec: object = None,
        *,
        driver: Driver | None = None,
        clock: Callable[[], float] = ...,
    ) -> None: ...
    def __enter__(self) -> KVCacheManager: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
    def create_kv_cache(
        self,
        reuse_scope: ReuseScope | None = None,
        input_tokens: object = None,
        id: int | None = None,
        custom_priority_callback: PriorityCallback | None = None,
        expected_prompt_length: int | None = None,
        text_only: bool | None = None,
        enable_request_stats: bool = False,
    ) -> KVCache: ...
    def probe_reuse(self, reuse_scope: ReuseScope | None, tokens: object) -> int: ...
    def probe_first_new_block_key(self, reuse_scope: ReuseScope | None, tokens: object) -> bytes | None: ...
    def probe_reuse_by_keys(self, reuse_scope: ReuseScope | None, block_keys: Sequence[bytes]) -> int: ...
    def explain_miss(self, reuse_scope: ReuseScope | None, tokens: object) -> MissReport: ...
    def clear_reusable_blocks(self) -> None: ...
    def shutdown(self) -> None: ...
    def resize(self, cache_level: CacheLevel, quota: int, best_efforts: bool = False) -> ResizeResult: ...
    @property
    def need_adjustment(self) -> bool: ...
    def adjust(self) -> AdjustResult: ...
    @property
    def event_manager(self) -> CacheListener | None: ...
    def check_invariants(self) -> None: ...
