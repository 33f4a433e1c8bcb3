from collections.abc import Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.kv_cache import KVCache

def resize_batch(
    caches: Sequence[KVCache], capacities: Sequence[SupportsIndex], histories: Sequence[SupportsIndex] | None = None
) -> int: ...
def commit_batch(caches: Sequence[KVCache], tokens: Sequence[object]) -> None: ...
