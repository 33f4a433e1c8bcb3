from collections.abc import Callable

from transformers.generation.continuous_batching.cache import PagedAttentionCache as _PagedAttentionCache

PagedAttentionCache: Callable[..., _PagedAttentionCache]
