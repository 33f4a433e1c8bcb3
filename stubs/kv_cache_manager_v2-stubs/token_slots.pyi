"""Token slots for the steps of a batch: one array for all requests, as attention kernels and gathers take it.

A token slot is page index * tokens_per_block + position in the block, an index into a buffer seen as (pages * tokens_per_block,
...). It does not depend on the smaller blocks that a buffer may have.
"""

from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

from kv_cache_manager_v2.arguments import IntBuffer, Integers
from kv_cache_manager_v2.ids import PageIndexMode
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.layout.page_index import PageIndexConverter

class TokenSlots(NamedTuple):
    """The token slots of a batch. Those of caches[i] are slots[offsets[i]] .. slots[offsets[i + 1] - 1]."""

    slots: IntBuffer
    offsets: IntBuffer
    total: int

def slots_to_write(
    caches: Sequence[KVCache],
    layer_group_id: SupportsIndex,
    begins: Integers | None = None,
    ends: Integers | None = None,
    converter: PageIndexConverter | None = None,
    index_mode: PageIndexMode | SupportsIndex | None = None,
    out: IntBuffer | None = None,
    offsets: IntBuffer | None = None,
) -> TokenSlots:
    """Where the tokens at positions begins[i] .. ends[i] - 1 of each cache lie, of beam 0. By default from history to capacity.

    `converter` is that of a buffer; without it, slots count base page indices. `out` and `offsets` are int32 or int64 memory of the
    caller's (arrays, numpy arrays, torch tensors in host memory), of which the first entries are written. O(tokens); long runs are
    written at the speed of memory, with numpy installed. Raises LogicError unless all caches are ACTIVE, ConfigError for positions
    beyond the capacity, for buffers that are too short, and where slots do not fit int32. Nothing is written then.
    """

def slots_to_read(
    caches: Sequence[KVCache],
    layer_group_id: SupportsIndex,
    begins: Integers | None = None,
    ends: Integers | None = None,
    converter: PageIndexConverter | None = None,
    index_mode: PageIndexMode | SupportsIndex | None = None,
    out: IntBuffer | None = None,
    offsets: IntBuffer | None = None,
) -> TokenSlots:
    """As `slots_to_write`, for all tokens that the queries at positions begins[i] .. ends[i] - 1 read, in ascending order.

    These are the sinks, and the positions from the first one in the window of the query at begins[i] on; without a window, all.
    Nothing is read for a cache without queries. A layer with fewer sinks than others of its group masks the rest.
    """
