"""The layers of a `PagedCache`: attention writes to pages and reads from them, recurrence loads its state and saves it.

Both live in one forward pass, which knows where its tokens lie. Keys and values are gathered into a tensor for each layer, because
transformers' attention knows no page tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.extras.transformers.model_layers import CONV, Addressing, Buffer, LayerBuffers
from kv_cache_manager_v2.step import Step

if TYPE_CHECKING:
    from kv_cache_manager_v2.extras.transformers.cache import PagedCache


class Places(NamedTuple):
    """Where tokens of all rows lie, row by row."""

    slots: torch.Tensor  # token slots of the tokens that are no padding
    real: torch.Tensor | None  # their positions in (rows * columns); None: there is no padding


class ForwardPass:
    """One forward pass over columns `begin` to `end` - 1 of a batch. Column c of a row is its token c - pad."""

    def __init__(self, step: Step, begin: int, end: int, pads: Sequence[int], device: torch.device) -> None:
        self.step: Final = step
        self.begin: Final = begin
        self.end: Final = end
        self.pads: Final = pads
        self.device: Final = device
        self._written: dict[Addressing, Places] = {}
        self._read: dict[Addressing, Places] = {}
        self._states: dict[Addressing, torch.Tensor] = {}

    def write(self, buffer: Buffer, new: torch.Tensor) -> None:
        """Write the new tokens of a layer, of shape (rows, heads, columns, head_dim), to its pages."""
        places = self._written.get(buffer.addressing)
        if places is None:
            places = self._written[buffer.addressing] = self._places(buffer, self.begin, read=False)
        tokens = new.detach().transpose(1, 2).flatten(0, 1)
        buffer.memory.index_copy_(0, places.slots, tokens if places.real is None else tokens.index_select(0, places.real))

    def read(self, buffer: Buffer, first: int) -> torch.Tensor:
        """The tokens of columns `first` to `end` - 1, of shape (rows, heads, columns, head_dim). Padding is 0."""
        places = self._read.get(buffer.addressing)
        if places is None:
            places = self._read[buffer.addressing] = self._places(buffer, first, read=True)
        tokens = buffer.memory.index_select(0, places.slots)
        rows, columns = len(self.pads), self.end - first
        if places.real is not None:
            tokens = tokens.new_zeros((rows * columns, *tokens.shape[1:])).index_copy_(0, places.real, tokens)
        return tokens.view(rows, columns, *tokens.shape[1:]).transpose(1, 2).contiguous()

    def state_pages(self, buffer: Buffer) -> torch.Tensor:
        """The page of each row's recurrent state."""
        pages = self._states.get(buffer.addressing)
        if pages is None:
            slots = [cache.get_ssm_block_base_index(buffer.addressing[0]) for cache in self.step.caches]
            out = torch.empty(len(slots), dtype=torch.int64)
            buffer.converter(slots, out=out)
            pages = self._states[buffer.addressing] = out.to(self.device)
        return pages

    def _places(self, buffer: Buffer, first: int, *, read: bool) -> Places:
        columns = self.end - first
        call = self.step.slots_to_read if read else self.step.slots_to_write
        out = torch.empty(len(self.pads) * columns, dtype=torch.int64)
        total = call(buffer.addressing[0], buffer.converter, out=out).total
        real: torch.Tensor | None = None
        if total < len(out):
            numbers = torch.arange(first, self.end)
            real = (numbers[None, :] >= torch.tensor(self.pads)[:, None]).flatten().nonzero().flatten().to(self.device)
        return Places(out[:total].to(self.device), real)


class PagedAttentionLayer(CacheLayerMixin):
    """Attention with a full or a sliding window."""

    is_croppable = True

    def __init__(self, cache: PagedCache, buffers: LayerBuffers) -> None:
        CacheLayerMixin.__init__(self)
        self._use(cache, buffers)

    def _use(self, cache: PagedCache, buffers: LayerBuffers) -> None:
        self.cache = cache
        self.key_buffer, self.value_buffer = buffers.attention
        self.sliding_window = buffers.plan.window
        self.is_sliding = self.sliding_window is not None
        self.is_initialized = True

    @property
    def first_read(self) -> int:
        """The first column that the next query reads."""
        return 0 if self.sliding_window is None else max(0, self.cache.length - self.sliding_window + 1)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values, and return all that the queries of the pass read."""
        current = self.cache.current_pass
        columns = key_states.shape[-2]
        if current is None or current.end - current.begin != columns:
            raise LogicError(
                f"a layer got {columns} columns outside of a forward pass of its store's model: "
                "call the model that the store was made for, not a part of it"
            )
        current.write(self.key_buffer, key_states)
        current.write(self.value_buffer, value_states)
        return current.read(self.key_buffer, self.first_read), current.read(self.value_buffer, self.first_read)

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length - self.first_read, self.first_read


class PagedStateLayer(LinearAttentionLayer):
    """A recurrent layer. Its states are copies during a pass, so that a pass that raises leaves the pages as they were."""

    def __init__(self, cache: PagedCache, buffers: LayerBuffers) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=1 + max(state.number for state in buffers.plan.states))
        self.state_buffers = buffers.states

    def load(self, current: ForwardPass) -> None:
        """A pass begins: take the states from the pages, and zeros for rows of which nothing was computed yet."""
        fresh = torch.tensor([pad >= current.begin for pad in current.pads]).to(current.device)
        for state, buffer in self.state_buffers:
            pages = current.state_pages(buffer)
            held = buffer.memory.index_select(0, pages)
            held[fresh] = 0  # their pages have not been written
            if state.kind == CONV:
                self.conv_states[state.number] = held
                self.is_conv_states_initialized[state.number] = True
                self.conv_kernel_size[state.number] = state.shape[-1]
            else:
                self.recurrent_states[state.number] = held
                self.is_recurrent_states_initialized[state.number] = True
            self.has_previous_state[state.number] = current.begin > 0
            self.dtype, self.device = held.dtype, held.device

    def save(self, current: ForwardPass) -> None:
        """The pass has ended well: write the states to the pages."""
        for state, buffer in self.state_buffers:
            states = self.conv_states if state.kind == CONV else self.recurrent_states
            held = states[state.number]
            assert held is not None
            buffer.memory.index_copy_(0, current.state_pages(buffer), held.detach())
            states[state.number] = None

    @property
    def is_croppable(self) -> bool:
        return False


class PagedHybridLayer(PagedStateLayer, PagedAttentionLayer):
    """Attention and a recurrence side by side."""

    is_croppable = False

    def __init__(self, cache: PagedCache, buffers: LayerBuffers) -> None:
        CacheLayerMixin.__init__(self)
        PagedStateLayer.__init__(self, cache, buffers)
        self._use(cache, buffers)
