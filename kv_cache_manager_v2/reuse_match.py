"""A match that an engine keeps from the query for cached tokens until it creates the request."""

from __future__ import annotations

from typing import SupportsIndex

from kv_cache_manager_v2.arguments import whole
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.reuse.search import Search
from kv_cache_manager_v2.storage.page import Page, gpu_slots


class ReuseMatch:
    """The reusable prefix of a prompt, as `KVCacheManager.find_reuse` found it. It holds no page.

    Pass it to `create_kv_cache`, again each time an admission is tried: the tree is searched again only if it has changed.
    """

    def __init__(self, shared: ManagerState, search: Search) -> None:
        """Internal. `KVCacheManager.find_reuse` makes matches."""
        self._shared = shared
        self._search = search

    def __reduce__(self) -> str:
        raise LogicError("a match cannot be copied or pickled: it refers to the blocks of its manager")

    def __repr__(self) -> str:
        age = "" if self.is_current else ", out of date"
        return f"<ReuseMatch {self.num_tokens} of {self._search.tokens.num_tokens} tokens{age}>"

    @property
    def search(self) -> Search:
        """Internal state of the match, for the manager. Not part of the public interface."""
        return self._search

    @property
    def num_tokens(self) -> int:
        """How many of the first tokens could be reused when the match was found."""
        return self._search.found.num_tokens

    @property
    def is_current(self) -> bool:
        """Whether the tree has not changed since: then a cache created with this match reuses `num_tokens`. O(1)."""
        return self._search.is_current()

    def get_gpu_page_indices(self, layer_group_id: SupportsIndex) -> list[int]:
        """The base page index of each block whose page is needed and on the GPU; BAD_PAGE_INDEX for every other block.

        A cache has these indices after `resume`, unless pages are moved before; the page of a partly matched last block is copied
        then. O(blocks). Raises LogicError for a match that is not current, ConfigError for a layer group without pages per block.
        """
        index = whole(layer_group_id, "layer_group_id")
        shared = self._shared
        if index not in shared.attention:
            raise ConfigError(f"layer group {index} has no page per block; it must be one of {shared.attention}")
        with shared.lock:
            if not self.is_current:
                raise LogicError("get_gpu_page_indices(): the tree has changed since this match was found; find it again")
            start, end = shared.life_cycles[index].stale(self.num_tokens)
            pages: list[Page | None] = []
            for ordinal, block in enumerate(self._search.found.blocks):
                pages.append(None if start <= ordinal < end else block.page(index))
            return gpu_slots(pages)
