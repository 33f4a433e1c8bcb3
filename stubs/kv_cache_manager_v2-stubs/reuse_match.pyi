"""A match that an engine keeps from the query for cached tokens until it creates the request."""

from typing import SupportsIndex

from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.reuse.search import Search

class ReuseMatch:
    """The reusable prefix of a prompt, as `KVCacheManager.find_reuse` found it. It holds no page.

    Pass it to `create_kv_cache`, again each time an admission is tried: the tree is searched again only if it has changed.
    """

    def __init__(self, shared: ManagerState, search: Search) -> None:
        """Internal. `KVCacheManager.find_reuse` makes matches."""

    def __reduce__(self) -> str: ...
    @property
    def search(self) -> Search:
        """Internal state of the match, for the manager. Not part of the public interface."""

    @property
    def num_tokens(self) -> int:
        """How many of the first tokens could be reused when the match was found."""

    @property
    def is_current(self) -> bool:
        """Whether the tree has not changed since: then a cache created with this match reuses `num_tokens`. O(1)."""

    def get_gpu_page_indices(self, layer_group_id: SupportsIndex) -> list[int]:
        """The base page index of each block whose page is needed and on the GPU; BAD_PAGE_INDEX for every other block.

        A cache has these indices after `resume`, unless pages are moved before; the page of a partly matched last block is copied
        then. O(blocks). Raises LogicError for a match that is not current, ConfigError for a layer group without pages per block.
        """
