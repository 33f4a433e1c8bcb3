"""Locates the pages of one layer's buffer, for the arrays and tensors that are made over them.

Rule: a view refers to memory that the manager owns. It copies nothing and owns nothing. Page i is at base + stride * i for every
page index i below `num_pages`, in PageIndexMode.SHARED, the default of a page-index converter. A view has the size of the level
when it was made: make a new one after a resize.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.ids import DataRole, LayerId, PageIndexMode

class PageOwner(Protocol):
    """The part of a KVCacheManager that says where pages are."""

    @property
    def driver(self) -> Driver: ...
    def get_mem_pool_base_address(
        self, layer_id: LayerId, data_role: DataRole, index_mode: PageIndexMode | None = None, /
    ) -> int: ...
    def get_page_stride(self, layer_id: LayerId, data_role: DataRole, /) -> int: ...
    def get_page_index_upper_bound(self, layer_id: LayerId, data_role: DataRole, /) -> int: ...

class PageMemory(NamedTuple):
    """The pages of one buffer on the GPU level."""

    base: int
    stride: int
    num_pages: int
    cuda_device: int | None
    emulated: AddressSpace | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""

    def host_bytes(self) -> memoryview:
        """The bytes themselves, on the emulated device only.

        After a smaller resize or `shutdown()` they are old or zero, for as long as an array over them is alive.
        """

def locate_pages(
    manager: PageOwner, layer_id: LayerId, role: DataRole, page_shape: Sequence[int], item_bytes: int, dtype_name: str
) -> PageMemory:
    """Find the pages of a layer's buffer. Raises ConfigError if the shape and type do not make up a page exactly."""
