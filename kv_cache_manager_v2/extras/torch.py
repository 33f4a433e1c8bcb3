"""torch tensors over a layer's pages, on both devices.

Rule: needs torch. `pool_array`, the same with numpy, can be had from here too, and is looked up only when asked for: numpy need not
be installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.extras.pages import PageMemory, PageOwner, locate_pages
from kv_cache_manager_v2.ids import DataRole, LayerId

if TYPE_CHECKING:
    from kv_cache_manager_v2.extras.arrays import pool_array

__all__ = ["pool_array", "pool_tensor"]


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
    Any dtype of torch will do. Raises ConfigError if a page has other bytes than the shape and type say.
    """
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}: give a torch.dtype")
    pages = locate_pages(manager, layer_id, role, page_shape, dtype.itemsize, str(dtype))
    if pages.cuda_device is None:
        flat = torch.frombuffer(pages.host_bytes(), dtype=torch.uint8)
    else:
        flat = torch.as_tensor(CudaBytes(pages), device=f"cuda:{pages.cuda_device}")
    return flat.view(dtype).view(pages.num_pages, *page_shape)


def __getattr__(name: str) -> Any:
    if name == "pool_array":
        from kv_cache_manager_v2.extras.arrays import pool_array

        return pool_array
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
