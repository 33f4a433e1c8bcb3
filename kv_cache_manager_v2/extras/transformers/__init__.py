"""transformers models over the manager's pages: needs torch and transformers.

`PagedStore` is the cache of one model. `PagedCache`, which it opens, is what the model takes as `cache`.
`install_continuous_batching` puts the manager under `model.generate_batch`.
"""

from __future__ import annotations

from kv_cache_manager_v2.extras.transformers.cache import PagedCache
from kv_cache_manager_v2.extras.transformers.continuous_batching import ContinuousBatching, install_continuous_batching
from kv_cache_manager_v2.extras.transformers.store import PagedStore

__all__ = ["ContinuousBatching", "PagedCache", "PagedStore", "install_continuous_batching"]
