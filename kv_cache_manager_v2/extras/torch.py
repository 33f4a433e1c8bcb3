"""torch tensors over a layer's pages, on both devices, and over batch tables.

Rule: needs torch. `pool_array`, the numpy counterpart of `pool_tensor`, is importable from here too. It is loaded on first use, so
numpy is optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from kv_cache_manager_v2.arguments import at_least, flag
from kv_cache_manager_v2.batch_tables import PlainBatchTables, table_widths
from kv_cache_manager_v2.errors import ConfigError, OutOfMemoryError
from kv_cache_manager_v2.extras.pages import PageMemory, PageOwner, locate_pages
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, DataRole, LayerId
from kv_cache_manager_v2.manager import KVCacheManager

if TYPE_CHECKING:
    from kv_cache_manager_v2.extras.arrays import pool_array

__all__ = ["BatchTables", "pool_array", "pool_tensor"]


class CudaBytes:
    """Device memory in the form in which CUDA libraries pass arrays to each other (version 3 of the interface)."""

    def __init__(self, pages: PageMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (pages.nbytes,),
            "typestr": "|u1",
            "data": (pages.base, False),  # writable
            "strides": None,  # contiguous
            "version": 3,
        }


def pool_tensor(
    manager: PageOwner, layer_id: LayerId, role: DataRole, dtype: torch.dtype, page_shape: Sequence[int]
) -> torch.Tensor:
    """A tensor of shape (pages, *page_shape) over a layer's buffer, to be indexed by converted page indices. No copy.

    It lies on the manager's device: `cuda:N`, or `cpu` for the emulated one (whose streams torch does not know: synchronise first).
    Any dtype of torch will do. Raises ConfigError if the shape and dtype do not add up to the bytes of a page.
    """
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}: give a torch.dtype")
    pages = locate_pages(manager, layer_id, role, page_shape, dtype.itemsize, str(dtype))
    if pages.cuda_device is None:
        flat = torch.frombuffer(pages.host_bytes(), dtype=torch.uint8)
    else:
        flat = torch.as_tensor(CudaBytes(pages), device=f"cuda:{pages.cuda_device}")
    return flat.view(dtype).view(pages.num_pages, *page_shape)


class BatchTables(PlainBatchTables):
    """`PlainBatchTables` with tensors in host memory, pinned if asked for, so that copies to a GPU need no wait.

    Raises ConfigError for pinned memory without a GPU, OutOfMemoryError if torch cannot allocate or pin them.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        max_requests: SupportsIndex,
        max_blocks: SupportsIndex,
        pin_memory: bool = False,
        pad_value: SupportsIndex = BAD_PAGE_INDEX,
        offset: SupportsIndex = 0,
        int64: bool = False,
    ) -> None:
        rows, blocks = at_least(max_requests, "max_requests", 1), at_least(max_blocks, "max_blocks", 1)
        pinned = flag(pin_memory, "pin_memory")
        dtype = torch.int64 if flag(int64, "int64") else torch.int32
        widths = table_widths(manager, blocks)
        try:
            tensors = [torch.empty((rows, width), dtype=dtype, pin_memory=pinned) for width in widths]
        except RuntimeError as error:  # also for too little memory
            if pinned and not torch.cuda.is_available():
                raise ConfigError(
                    "pin_memory is True, but torch finds no GPU, and pins memory for none; leave pin_memory out"
                ) from error
            raise OutOfMemoryError(f"no memory for batch tables, pin_memory={pinned}: {error}") from error
        super().__init__(manager, rows, blocks, tensors, pad_value, offset)

    def table(self, layer_group_id: SupportsIndex) -> torch.Tensor:
        """The tensor of a layer group, of shape (max_requests, max_blocks); (max_requests, 1) for the recurrent one."""
        found: torch.Tensor = super().table(layer_group_id)
        return found


def __getattr__(name: str) -> Any:
    if name == "pool_array":
        from kv_cache_manager_v2.extras.arrays import pool_array

        return pool_array
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
