"""What a request's cache says about its page indices: the part of `KVCache` that an engine reads in each step."""

from collections.abc import Iterator, Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import IntBuffer
from kv_cache_manager_v2.ids import DEFAULT_BEAM_INDEX, PageIndexMode
from kv_cache_manager_v2.layout.page_index import ScratchDesc
from kv_cache_manager_v2.request.request import Request

class PageIndexViews:
    """Page indices, slot ids and scratch slots of one request; each request has one as its `KVCache`."""

    def __init__(self, state: Request) -> None: ...
    def get_base_page_indices(
        self, layer_group_id: SupportsIndex, beam_id: SupportsIndex = DEFAULT_BEAM_INDEX, beam_idx: SupportsIndex | None = None
    ) -> Sequence[int]:
        """The int32 array of base page indices, one a block, kept up to date: an `array`, or the buffer that was set, itself.
        BAD_PAGE_INDEX where there is no page.

        A view of the array (numpy, memoryview, torch) shows changes of entries. It keeps its old entries once the number of blocks
        has changed: take it again when `get_base_page_indices_version` has another answer.
        """

    def get_base_page_indices_version(self, layer_group_id: SupportsIndex, beam_id: SupportsIndex = DEFAULT_BEAM_INDEX) -> int:
        """A number that changes exactly when an entry of `get_base_page_indices` or the array itself does. O(1)."""

    def set_base_page_index_buf(self, beam_idx: SupportsIndex, layer_group_id: SupportsIndex, buf: IntBuffer | None) -> None:
        """Write the base page indices into `buf` from now on; None detaches the present buffer and leaves its entries.

        `buf` is one-dimensional, writable, int32, at least `num_blocks` long; entries past the last block become BAD_PAGE_INDEX.
        `suspend()` detaches too: set it again after `resume()`. Raises ConfigError for any other buffer.
        """

    def get_aggregated_page_indices(
        self,
        layer_group_id: SupportsIndex,
        beam_id: SupportsIndex = DEFAULT_BEAM_INDEX,
        valid_only: bool = False,
        beam_idx: SupportsIndex | None = None,
    ) -> Iterator[int]:
        """Slot ids by block ordinal, for the runs of `KVCacheManager.get_aggregated_pages`. Absent pages are BAD_PAGE_INDEX, or
        left out with `valid_only`. O(blocks). `beam_idx` is the old name of `beam_id`.
        """

    def get_ssm_block_base_index(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> int:
        """Slot id of the live recurrent state; BAD_PAGE_INDEX unless ACTIVE. Raises ConfigError for an attention layer group."""

    def get_scratch_desc(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> ScratchDesc | None:
        """The blocks that lie in scratch slots, and these slots, for the page-index converter; None while no block does.

        Each beam has slots of its own. Valid until a length changes.
        """

    @property
    def has_scratch_slots(self) -> bool:
        """Whether some blocks share scratch slots now."""

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether long prefill steps of this cache lend scratch slots to blocks that fall out of their windows within the step."""

    @enable_swa_scratch_reuse.setter
    def enable_swa_scratch_reuse(self, value: bool) -> None: ...
    def supports_index_mode(self, mode: PageIndexMode | SupportsIndex) -> bool:
        """Whether the page indices of this cache can be used in this mode now: SHARED only while it has no scratch slots."""
