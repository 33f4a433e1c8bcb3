"""numpy arrays over a layer's pages, on the emulated device, and over batch tables.

Rule: needs only numpy. torch.py beside this file has the same views as torch tensors, on both devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from kv_cache_manager_v2.batch_tables import PlainBatchTables
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.extras.pages import PageOwner, locate_pages
from kv_cache_manager_v2.ids import DataRole, LayerId


def pool_array(
    manager: PageOwner, layer_id: LayerId, role: DataRole, dtype: npt.DTypeLike, page_shape: Sequence[int]
) -> npt.NDArray[Any]:
    """An array of shape (pages, *page_shape) over a layer's buffer, to be indexed by converted page indices. No copy.

    Writing to it changes the pages, at once and outside of any stream's order: synchronise first. Raises ConfigError if the shape
    and dtype do not add up to the bytes of a page, and on a CUDA device, whose memory numpy cannot access.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise ConfigError(f"dtype {kind} holds Python objects: pages hold plain bytes, give a numeric dtype")
    pages = locate_pages(manager, layer_id, role, page_shape, kind.itemsize, str(kind))
    if pages.cuda_device is not None:
        raise ConfigError(f"the pages are on CUDA device {pages.cuda_device}: numpy cannot see them, use extras.torch.pool_tensor")
    return np.ndarray((pages.num_pages, *page_shape), kind, buffer=pages.host_bytes())


class BatchTables(PlainBatchTables):
    """`PlainBatchTables` with numpy arrays."""

    def table(self, layer_group_id: SupportsIndex) -> npt.NDArray[np.int32 | np.int64]:
        """The array of a layer group, of shape (max_requests, max_blocks); (max_requests, 1) for the recurrent one. No copy."""
        return np.asarray(super().table(layer_group_id))
