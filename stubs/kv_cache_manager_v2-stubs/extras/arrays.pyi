from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from kv_cache_manager_v2.extras.pages import PageOwner
from kv_cache_manager_v2.ids import DataRole, LayerId

def pool_array(
    manager: PageOwner, layer_id: LayerId, role: DataRole, dtype: npt.DTypeLike, page_shape: Sequence[int]
) -> npt.NDArray[Any]: ...
