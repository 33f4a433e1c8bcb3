"""The part of `KVCache` that an engine reads in each step: page indices, slot ids and scratch slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, SupportsIndex

from kv_cache_manager_v2.arguments import (
    IntBuffer,
    flag,
    page_index_mode,
    renamed,
    whole,
)
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, DEFAULT_BEAM_INDEX, PageIndexMode
from kv_cache_manager_v2.layout.page_index import ScratchDesc
from kv_cache_manager_v2.request import scratch
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.page_index_row import PageIndexRow
from kv_cache_manager_v2.request.request import ACTIVE, CLOSED, Request
from kv_cache_manager_v2.storage.page import gpu_slots

if TYPE_CHECKING:
    pass


class PageIndexViews:
    """The page indices, slot ids and scratch slots of one request. The base class of `KVCache`."""

    def __init__(self, state: Request) -> None:
        self._state = state
        self._shared = state.shared

    def get_base_page_indices(
        self, layer_group_id: SupportsIndex, beam_id: SupportsIndex = DEFAULT_BEAM_INDEX, beam_idx: SupportsIndex | None = None
    ) -> Sequence[int]:
        """The int32 array of base page indices, one per block: the buffer that was set, or an `array` of the manager.

        Entries are kept up to date; a block without a page has BAD_PAGE_INDEX. A view of the array (numpy, memoryview, torch) shows
        changes of entries, but keeps old entries once the number of blocks changes. Take a new view when
        `get_base_page_indices_version` has changed.
        """
        return self._row(layer_group_id, beam_id if beam_idx is None else renamed("beam_idx", "beam_id", beam_idx)).live()

    def get_base_page_indices_version(self, layer_group_id: SupportsIndex, beam_id: SupportsIndex = DEFAULT_BEAM_INDEX) -> int:
        """A number that changes exactly when an entry of `get_base_page_indices` or the array itself changes. O(1)."""
        return self._row(layer_group_id, beam_id).version

    def set_base_page_index_buf(self, beam_idx: SupportsIndex, layer_group_id: SupportsIndex, buf: IntBuffer | None) -> None:
        """Write the base page indices into `buf` from now on. None detaches the present buffer, which keeps its entries.

        `buf` is one-dimensional, writable, int32, and has at least `num_blocks` entries; those after the last block become
        BAD_PAGE_INDEX. `suspend()` detaches it: set it again after `resume()`, or use batch tables, whose rows stay. Raises
        ConfigError for any other buffer, and for a cache that has a row of batch tables.
        """
        row = self._row(layer_group_id, beam_idx)
        self._require_open("set_base_page_index_buf()")
        if buf is None:
            if row.table is not None:
                raise ConfigError("buf is None, but this cache has a row of a batch table; remove it there")
            row.detach()
        else:
            row.attach(buf)

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
        only = flag(valid_only, "valid_only")
        values = self._row(layer_group_id, beam_id if beam_idx is None else renamed("beam_idx", "beam_id", beam_idx)).values()
        if only:
            return iter([value for value in values if value != BAD_PAGE_INDEX])
        return iter(values)

    def get_gpu_page_indices(self, layer_group_id: SupportsIndex, beam_id: SupportsIndex = DEFAULT_BEAM_INDEX) -> list[int]:
        """The base page index of each block whose page is needed and on the GPU, in any state; BAD_PAGE_INDEX for the others.

        While SUSPENDED, these are the indices that `resume` leaves as they are, unless pages are moved before; only the page of a
        partly matched last block is copied. O(blocks).
        """
        table = self._table(layer_group_id, beam_id)
        with self._shared.lock:
            return gpu_slots([page if table.is_live(ordinal) else None for ordinal, page in enumerate(table.pages)])

    def get_ssm_block_base_index(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> int:
        """Slot id of the live recurrent state; BAD_PAGE_INDEX unless ACTIVE. Raises ConfigError for an attention layer group."""
        beam = self._beam(beam_idx)
        index = whole(layer_group_id, "layer_group_id")
        state = self._state
        recurrent_states = state.recurrent_states()
        if not recurrent_states or index != recurrent_states[0].index:
            raise ConfigError(f"layer group {index} is not recurrent; use get_base_page_indices()")
        page = recurrent_states[beam].page
        return page.slot if page is not None and state.status == ACTIVE else BAD_PAGE_INDEX

    def get_scratch_desc(self, layer_group_id: SupportsIndex, beam_idx: SupportsIndex = DEFAULT_BEAM_INDEX) -> ScratchDesc | None:
        """The scratch blocks and scratch slots, for the page-index converter; None if there are no scratch blocks.

        Each beam has its own slots. Valid until a length changes.
        """
        table = self._table(layer_group_id, beam_idx)
        return scratch.describe(table)

    @property
    def has_scratch_slots(self) -> bool:
        """Whether there are scratch blocks now."""
        return self._state.holds_scratch()

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether blocks that leave their window within one long prefill step share scratch slots."""
        return self._state.scratch

    @enable_swa_scratch_reuse.setter
    def enable_swa_scratch_reuse(self, value: bool) -> None:
        wanted = flag(value, "enable_swa_scratch_reuse")
        self._require_open("enable_swa_scratch_reuse")
        scratch.switch(self._state, wanted)

    def supports_index_mode(self, mode: PageIndexMode | SupportsIndex) -> bool:
        """Whether page indices can be used in this mode now. SHARED is supported while there are no scratch blocks."""
        return page_index_mode(mode, "mode") is PageIndexMode.PER_LAYER or not self.has_scratch_slots

    def _row(self, layer_group_id: object, beam_idx: object) -> PageIndexRow:
        return self._table(layer_group_id, beam_idx).row

    def _table(self, layer_group_id: object, beam_idx: object) -> BlockTable:
        beam = self._beam(beam_idx)
        index = whole(layer_group_id, "layer_group_id")
        count = len(self._shared.life_cycles)
        if not 0 <= index < count:
            raise ConfigError(f"layer group {index} is out of range: this manager has {count}")
        table = self._state.table(index, beam)
        if table is None:
            raise ConfigError(f"layer group {index} is recurrent and has no page per block; use get_ssm_block_base_index()")
        return table

    def _beam(self, beam_idx: object) -> int:
        beam = whole(beam_idx, "beam_idx")
        width = self._state.width
        if not 0 <= beam < width:
            raise ConfigError(f"beam {beam} is out of range: it must be below the beam width, {width}")
        return beam

    def _require_open(self, call: str) -> None:
        if self._state.status == CLOSED:
            raise LogicError(f"{call}: this cache is closed")
