from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.ids import DataRole, LayerId, PageIndexMode

class PageOwner(Protocol):
    @property
    def driver(self) -> Driver: ...
    def get_mem_pool_base_address(
        self, layer_id: LayerId, data_role: DataRole, index_mode: PageIndexMode | None = None, /
    ) -> int: ...
    def get_page_stride(self, layer_id: LayerId, data_role: DataRole, /) -> int: ...
    def get_page_index_upper_bound(self, layer_id: LayerId, data_role: DataRole, /) -> int: ...

class PageMemory(NamedTuple):
    base: int
    stride: int
    num_pages: int
    cuda_device: int | None

    @property
    def nbytes(self) -> int: ...
    def host_bytes(self) -> memoryview: ...

def locate_pages(
    manager: PageOwner, layer_id: LayerId, role: DataRole, page_shape: Sequence[int], item_bytes: int, dtype_name: str
) -> PageMemory: ...
