"""numpy arrays over a layer's pages, on the emulated device.

Rule: needs numpy and nothing else; the same pages as torch tensors, on both devices, are in torch.py beside this file.
"""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from kv_cache_manager_v2.extras.pages import PageOwner
from kv_cache_manager_v2.ids import DataRole, LayerId

def pool_array(
    manager: PageOwner, layer_id: LayerId, role: DataRole, dtype: npt.DTypeLike, page_shape: Sequence[int]
) -> npt.NDArray[Any]:
    """An array of shape (pages, *page_shape) over a layer's buffer, to be indexed by converted page indices. No copy.

    Writing to it changes the pages, at once and outside of any stream's order: synchronise first. Raises ConfigError if a page
    has other bytes than the shape and type say, and on a CUDA device, whose memory numpy cannot see.
    """
