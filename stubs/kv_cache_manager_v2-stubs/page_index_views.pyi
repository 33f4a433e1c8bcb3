"""The part of `KVCache` that an engine reads in each step: page indices, slot ids and scratch slots."""

from collections.abc import Iterator, Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import IntBuffer
from kv_cache_manager_v2.ids import DEFAULT_BEAM_INDEX, PageIndexMode
from kv_cache_manager_v2.layout.page_index import ScratchDesc
from kv_cache_manager_v2.request.request import Request

class PageIndexViews:
    """The page indices, slot ids and scratch slots of one request. The base class of `KVCache`."""

    def __init__(self, state: Request) -> None: ...
    def get_base_page_indices(
        self, layer_group_id: SupportsIndex, beam_id: SupportsIndex = DEFAULT_BEAM_INDEX, beam_idx: SupportsIndex | None = None
    ) -> Sequence[int]:
        """The int32 array of base page indices, one per block: the buffer that was set, or an `array` of the manager.

        Entries are kept up to date; a block without a page has BAD_PAGE_INDEX. A view of the array (numpy, memoryview, torch) shows
        changes of entries, but keeps old entries once the number of blocks changes. Take a new view when
        `get_base_page_indices_version` has changed.
        """

    def get_base_page_indices_version(self, layer_group_id: SupportsIndex, beam_id: SupportsIndex = DEFAULT_BEAM_INDEX) -> int:
        """A number that changes exactly when an entry of `get_base_page_indices` or the array itself changes. O(1)."""

    def set_base_page_index_buf(self, beam_idx: SupportsIndex, layer_group_id: SupportsIndex, buf: IntBuffer | None) -> None:
        """Write the base page indices into `buf` from now on. None detaches the present buffer, which keeps its entries.

        `buf` is one-dimensional, writable, int32, and has at least `num_blocks` entries; those after the last block become
        BAD_PAGE_INDEX. `suspend()` detaches it: set it again after `resume()`, or use batch tables, whose rows stay. Raises
        ConfigError for any other buffer, and for a cache that has a row of batch tables.
        """

    def get_aggregated_page_indices(
        self,
        layer_group_id: SupportsIndex,
        beam_id: SupportsIndex = DEFAULT_BEAM_INDEX,
        valid_only: bool = False,
        beam_idx: SupportsIndex | None = None,
    ) -> Iterator[int]:
        """Slot ids by block ordinal, for the runs of `KVCacheManager.get_aggregated_pages`. O(blocks).

        Absent pages are BAD_PAGE_INDEX, or omitted with `valid_only`. `beam_idx` is the old name of `beam_id`.
        """

    def get_gpu_page_indices(self, layer_group_id: SupportsIndex, beam_id: SupportsIndex = DEFAULT_BEAM_INDEX) -> list[int]:
        """The base page index of each block whose page is needed and on the GPU, in any state; BAD_PAGE_INDEX for the others.

        While SUSPENDED, these are the indices that `resume` leaves as they are, unless pages are moved before; only the page of a
        partly matched last block is copied. O(blocks).
        """

    def get_ssm_block_base_index(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> int:
        """Slot id of the live recurrent state; BAD_PAGE_INDEX unless ACTIVE. Raises ConfigError for an attention layer group."""

    def get_scratch_desc(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> ScratchDesc | None:
        """The scratch blocks and scratch slots, for the page-index converter; None if there are no scratch blocks.

        Each beam has its own slots. Valid until a length changes.
        """

    @property
    def has_scratch_slots(self) -> bool:
        """Whether there are scratch blocks now."""

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether blocks that leave their window within one long prefill step share scratch slots."""

    @enable_swa_scratch_reuse.setter
    def enable_swa_scratch_reuse(self, value: bool) -> None: ...
    def supports_index_mode(self, mode: PageIndexMode | SupportsIndex) -> bool:
        """Whether page indices can be used in this mode now. SHARED is supported while there are no scratch blocks."""
