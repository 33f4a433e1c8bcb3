"""Locates the pages of one layer's buffer, for the arrays and tensors that are made over them.

Rule: a view refers to memory that the manager owns. It copies nothing and owns nothing. Page i is at base + stride * i for every
page index i below `num_pages`, in PageIndexMode.SHARED, the default of a page-index converter. A view has the size of the level
when it was made: make a new one after a resize.
"""

from __future__ import annotations

import ctypes
import math
import operator
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.extras.cuda import CudaDriver
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

    base: int  # address of page 0
    stride: int  # bytes of a page, and from one page to the next
    num_pages: int  # from page 0 to the pool's end, those of other layers in between included
    cuda_device: int | None  # ordinal of the GPU that they are on; None: on the emulated device, in this process's memory
    emulated: AddressSpace | None = None  # of the emulated device

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.stride * self.num_pages

    def host_bytes(self) -> memoryview:
        """The bytes themselves, on the emulated device only.

        After a smaller resize or `shutdown()` they are old or zero, for as long as an array over them is alive.
        """
        assert self.emulated is not None
        memory = (ctypes.c_ubyte * self.nbytes).from_address(self.base)
        number = self.emulated.add_view(self.base)
        weakref.finalize(memory, self.emulated.end_view, number).atexit = False
        return memoryview(memory).cast("B")


def locate_pages(
    manager: PageOwner, layer_id: LayerId, role: DataRole, page_shape: Sequence[int], item_bytes: int, dtype_name: str
) -> PageMemory:
    """Find the pages of a layer's buffer. Raises ConfigError if the shape and type do not make up a page exactly."""
    stride = manager.get_page_stride(layer_id, role)
    try:
        extents = tuple([operator.index(extent) for extent in page_shape])
    except TypeError:
        extents = (0,)
    if min(extents, default=1) < 1:
        raise ConfigError(f"page_shape is {page_shape}: every extent must be an int of at least 1")
    asked = math.prod(extents) * item_bytes
    if asked != stride:
        raise ConfigError(
            f"a page of layer {layer_id} {role!r} has {stride} bytes, but page_shape {extents} of {dtype_name} makes {asked}: "
            f"give a shape and dtype that make {stride}"
        )
    driver = manager.driver
    memory: AddressSpace | None = None
    if isinstance(driver, CudaDriver):
        device: int | None = driver.device
    elif isinstance(driver, EmulatedDriver):
        device = None
        memory = driver.memory
    else:
        raise ConfigError(
            f"the manager's driver is a {type(driver).__name__}: only CudaDriver and EmulatedDriver have known memory"
        )
    base = manager.get_mem_pool_base_address(layer_id, role, PageIndexMode.SHARED)
    return PageMemory(base, stride, manager.get_page_index_upper_bound(layer_id, role), device, memory)
