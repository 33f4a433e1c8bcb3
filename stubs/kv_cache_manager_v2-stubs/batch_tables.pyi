"""Batch tables: the page indices of many requests as one array per layer group, kept up to date by the manager."""

from collections.abc import Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import IntBuffer
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.manager import KVCacheManager

class PlainBatchTables:
    """One array per layer group, with a row of base page indices for each cache that was added.

    The manager writes entries in place as pages come and go: a step copies nothing. A row stays with its cache through `suspend()`,
    when its entries are `pad_value`, and `resume()`, until `remove()` or `close()` of the cache. An array has shape
    (max_requests, max_blocks); that of the recurrent layer group (max_requests, 1), with the slot of the live state. Rows are of
    beam 0. The manager does not write to unused rows. Entries are int32, or with `int64` of 64 bits. `offset` is added to each base
    page index, and `pad_value` stands for a page that is not there: 1 and 0 for an engine whose block 0 is a null block.

    A copy to the GPU reads the rows when it runs: let it end before the next call that changes pages, or copy in that call's order.

    `arrays` has the memory of each layer group, such as pinned memory: contiguous two-dimensional buffers of these shapes, int32 or
    int64, whatever `int64` says. Raises ConfigError for others, and where entries do not fit int32. `extras.arrays.BatchTables` and
    `extras.torch.BatchTables` are these tables as numpy arrays and as tensors, which `table()` returns.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        max_requests: SupportsIndex,
        max_blocks: SupportsIndex,
        arrays: Sequence[IntBuffer] | None = None,
        pad_value: SupportsIndex = BAD_PAGE_INDEX,
        offset: SupportsIndex = 0,
        int64: bool = False,
    ) -> None: ...
    def add(self, cache: KVCache) -> int:
        """Give the cache a row, and return its number. A buffer that was set for the cache is detached. O(blocks of the cache).

        Raises ConfigError, with nothing changed, for a closed cache or one of another manager, for one that has a row already or
        more than `max_blocks` blocks, and if all rows are in use.
        """

    def remove(self, cache: KVCache) -> None:
        """Free the row of a cache. The manager then keeps the cache's page indices in arrays of its own. `close()` of the cache
        does it too. O(blocks).

        Raises ConfigError if the cache has no row here.
        """

    def row(self, cache: KVCache) -> int:
        """The row of a cache. O(1). Raises ConfigError if it has none here."""

    def rows(self, caches: Sequence[KVCache], out: IntBuffer | None = None) -> IntBuffer:
        """The row of each cache, as an int32 array, or in the first entries of `out`: int32 or int64 memory of the caller's.

        Raises ConfigError, with nothing written, if one has none here, or if `out` is too short.
        """

    def table(self, layer_group_id: SupportsIndex) -> IntBuffer:
        """The array of a layer group: the one that was passed, else a two-dimensional memoryview. Never replaced by another."""

    def version(self, layer_group_id: SupportsIndex) -> int:
        """A number that changes whenever an entry of the table of this layer group, or a row's length, changes. O(1).

        The version of one row is `cache.get_base_page_indices_version(layer_group_id)`.
        """

    @property
    def num_unused_rows(self) -> int:
        """How many more caches can be added."""

def table_widths(manager: KVCacheManager, max_blocks: int) -> list[int]:
    """Entries of a row, by layer group: `max_blocks`, or 1 for the recurrent layer group."""
