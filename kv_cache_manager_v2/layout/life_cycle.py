"""Life cycles: how long the pages of a layer group are needed.

All differences between full attention, sliding windows and recurrent (SSM) state are methods of this file. A further life cycle
is a subclass and a factory for its layers (`register_life_cycle`). Ranges are half-open pairs of block ordinals; (b, b) is empty.

The first query of the next step is at position h, the history. So a window of W tokens needs positions h + 1 - W to h, of which
W - 1 are history.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, SupportsIndex

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import at_least
from kv_cache_manager_v2.config import AttentionLayerConfig, LayerConfig, SsmLayerConfig
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import LifeCycleId
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange

NEVER: Final = 1 << 60  # a history length that no sequence reaches


@mypyc_attr(allow_interpreted_subclasses=True)
class LifeCycle(ABC):
    """When the pages of one layer group are needed, and which tokens can be reused from them."""

    def __init__(self, index: LifeCycleId, tokens_per_block: int) -> None:
        self.index = index
        self.tokens_per_block = tokens_per_block

    @property
    @abstractmethod
    def is_attention(self) -> bool:
        """Whether pages belong to block ordinals (attention) or a request owns one live state (SSM)."""

    @property
    @abstractmethod
    def window_size(self) -> int | None:
        """The window in tokens, without sinks; None if there is no window."""

    @property
    @abstractmethod
    def num_sink_blocks(self) -> int:
        """The number of leading blocks that never become stale."""

    @abstractmethod
    def stale(self, history: int) -> tuple[int, int]:
        """Blocks that no query at or after position `history` reads."""

    @abstractmethod
    def stale_from(self, ordinal: int) -> int:
        """The smallest history at which this block, not a sink, is stale; NEVER if it is always needed."""

    def first_read(self, history: int) -> int:
        """The first position, except for sinks, that a query at position `history` reads."""
        window = self.window_size
        start, end = self.stale(history)
        oldest = end * self.tokens_per_block if end > start else 0
        return oldest if window is None else max(oldest, history + 1 - window)

    def next_stale_change(self, history: int) -> int:
        """The smallest larger history at which more blocks are stale; NEVER if there is none."""
        return self.stale_from(max(self.stale(history)[1], self.num_sink_blocks))

    def scratch_from(self, ordinal: int, max_rewind: int) -> int:
        """The smallest capacity at which this block or a later one is scratch, if the history ends before it."""
        return self.stale_from(max(ordinal, self.num_sink_blocks)) + max_rewind

    @abstractmethod
    def scratch(self, history: int, capacity: int, max_rewind: int) -> tuple[int, int]:
        """Blocks of a prefill step that no later step reads: those of stale(capacity - max_rewind) after the history."""

    @abstractmethod
    def usable_tokens(self, coverage: int, tokens: int) -> int:
        """How many of a block's first `tokens` tokens can be reused from a page with this coverage.

        Attention can reuse any prefix of the covered tokens, SSM either exactly the snapshot's tokens or none.
        """

    @abstractmethod
    def loss_ends_path(self, ordinal: int) -> bool:
        """Whether no longer sequence through this block can match once its page at this ordinal is lost."""

    @abstractmethod
    def blocks(self, history: int, capacity: int) -> int:
        """Pages that one request with these lengths has, without sharing or scratch reuse; SSM: 1."""

    @abstractmethod
    def structural_floor(self, widest_window_blocks: int) -> int:
        """The fewest pages with which a single request cannot deadlock.

        `widest_window_blocks` is the largest such number of the model's windows.
        """

    def get_stale_range(self, history_length: SupportsIndex, tokens_per_block: SupportsIndex | None = None) -> HalfOpenRange:
        """`stale` as a range object, for custom priority callbacks. `tokens_per_block` must be the life cycle's own."""
        if tokens_per_block is not None and at_least(tokens_per_block, "tokens_per_block", 1) != self.tokens_per_block:
            raise ConfigError(
                f"tokens_per_block is {tokens_per_block}; this life cycle has blocks of {self.tokens_per_block} tokens"
            )
        beg, end = self.stale(at_least(history_length, "history_length", 0))
        return HalfOpenRange(beg, end)


@mypyc_attr(allow_interpreted_subclasses=True)
class AttentionLifeCycle(LifeCycle):
    """Full attention (no window), or a sliding window with optional attention sinks.

    stale(h) = [s, max(s, floor((h + 1 - W) / B))) with s = min(ceil(h / B), sink blocks); empty without a window. A subclass for
    another shape of window overrides `stale` and `stale_from`; the other methods follow from these.
    """

    def __init__(self, index: LifeCycleId, tokens_per_block: int, window: int | None, sink_blocks: int) -> None:
        super().__init__(index, tokens_per_block)
        self._window = window
        self._sink_blocks = sink_blocks

    @staticmethod
    def make(
        window_size: SupportsIndex | None, num_sink_tokens: SupportsIndex | None, tokens_per_block: SupportsIndex
    ) -> AttentionLifeCycle:
        """A life cycle that belongs to no model. `window_size` None means full attention. Raises ConfigError."""
        size = at_least(tokens_per_block, "tokens_per_block", 1)
        window = None if window_size is None else at_least(window_size, "window_size", 1)
        sinks = 0 if num_sink_tokens is None or window is None else at_least(num_sink_tokens, "num_sink_tokens", 0)
        return AttentionLifeCycle(LifeCycleId(0), size, window, -(-sinks // size))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.index, self.tokens_per_block, self._window, self._sink_blocks)

    @property
    def is_attention(self) -> bool:
        return True

    @property
    def window_size(self) -> int | None:
        return self._window

    @property
    def num_sink_blocks(self) -> int:
        return self._sink_blocks

    def stale(self, history: int) -> tuple[int, int]:
        beg = min(-(-history // self.tokens_per_block), self._sink_blocks)
        window = self._window
        if window is None:
            return beg, beg
        end = (history + 1 - window) // self.tokens_per_block
        return beg, max(beg, end)

    def stale_from(self, ordinal: int) -> int:
        window = self._window
        return NEVER if window is None else (ordinal + 1) * self.tokens_per_block + window - 1

    def scratch(self, history: int, capacity: int, max_rewind: int) -> tuple[int, int]:
        first = -(-history // self.tokens_per_block)
        if self._window is None:
            return first, first
        beg, end = self.stale(max(0, capacity - max_rewind))
        beg = max(beg, first)
        end = min(end, -(-capacity // self.tokens_per_block))
        return (beg, end) if end > beg else (first, first)

    def usable_tokens(self, coverage: int, tokens: int) -> int:
        return min(coverage, tokens)

    def loss_ends_path(self, ordinal: int) -> bool:
        return self._window is None or ordinal < self._sink_blocks

    def blocks(self, history: int, capacity: int) -> int:
        beg, end = self.stale(history)
        return -(-capacity // self.tokens_per_block) - (end - beg)

    def structural_floor(self, widest_window_blocks: int) -> int:
        window = self._window
        if window is None:
            return max(1, widest_window_blocks)
        return self._sink_blocks + (window + self.tokens_per_block - 2) // self.tokens_per_block + 1


AttnLifeCycle = AttentionLifeCycle  # the name that engines test for


class SsmLifeCycle(LifeCycle):
    """Recurrent state: one live page per request, never shared. The tree keeps snapshots, each usable at exactly one position."""

    def __reduce__(self) -> tuple[object, ...]:
        return SsmLifeCycle, (self.index, self.tokens_per_block)

    @property
    def is_attention(self) -> bool:
        return False

    @property
    def window_size(self) -> int | None:
        return None

    @property
    def num_sink_blocks(self) -> int:
        return 0

    def stale(self, history: int) -> tuple[int, int]:
        return 0, history // self.tokens_per_block  # in the tree only: earlier snapshots are of no use

    def stale_from(self, ordinal: int) -> int:
        return NEVER  # the one page of a request belongs to no block

    def scratch(self, history: int, capacity: int, max_rewind: int) -> tuple[int, int]:
        return 0, 0

    def usable_tokens(self, coverage: int, tokens: int) -> int:
        return coverage if coverage <= tokens else 0

    def loss_ends_path(self, ordinal: int) -> bool:
        return False

    def blocks(self, history: int, capacity: int) -> int:
        return 1

    def structural_floor(self, widest_window_blocks: int) -> int:
        return 1


# --- which layers have which life cycle

LifeCycleMaker = Callable[[LifeCycleId, int, LayerConfig], LifeCycle]


def _attention(index: LifeCycleId, tokens_per_block: int, layer: LayerConfig) -> LifeCycle:
    assert isinstance(layer, AttentionLayerConfig)
    return AttentionLifeCycle(index, tokens_per_block, layer.window_size, -(-(layer.num_sink_tokens or 0) // tokens_per_block))


def _recurrent(index: LifeCycleId, tokens_per_block: int, layer: LayerConfig) -> LifeCycle:
    return SsmLifeCycle(index, tokens_per_block)


_MAKERS: Final[dict[type, LifeCycleMaker]] = {AttentionLayerConfig: _attention, SsmLayerConfig: _recurrent}


def register_life_cycle(layer_class: type[LayerConfig], maker: LifeCycleMaker) -> None:
    """Let `maker(index, tokens_per_block, layer)` make the life cycle of layers of a class and its subclasses."""
    _MAKERS[layer_class] = maker


def make_life_cycle(index: LifeCycleId, tokens_per_block: int, layer: LayerConfig) -> LifeCycle:
    """The life cycle of a layer group, from one of its layers. Raises ConfigError for a class that has none."""
    for base in type(layer).__mro__:
        maker = _MAKERS.get(base)
        if maker is not None:
            return maker(index, tokens_per_block, layer)
    raise ConfigError(
        f"layer {layer.layer_id} is a {type(layer).__name__}, which has no life cycle: call register_life_cycle first"
    )
