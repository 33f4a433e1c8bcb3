"""Life cycles: how long the pages of a layer group are needed.

All differences between full attention, sliding windows and recurrent (SSM) state are methods of this file. A further life cycle
is a subclass and a factory for its layers (`register_life_cycle`). Ranges are half-open pairs of block ordinals; (b, b) is empty.

The first query of the next step is at position h, the history. So a window of W tokens needs positions h + 1 - W to h, of which
W - 1 are history.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, SupportsIndex

from kv_cache_manager_v2.config import LayerConfig
from kv_cache_manager_v2.ids import LifeCycleId
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange

NEVER: Final[int]

class LifeCycle(ABC):
    """When the pages of one layer group are needed, and which tokens can be reused from them."""

    index: LifeCycleId
    tokens_per_block: int

    def __init__(self, index: LifeCycleId, tokens_per_block: int) -> None: ...
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

    def next_stale_change(self, history: int) -> int:
        """The smallest larger history at which more blocks are stale; NEVER if there is none."""

    def scratch_from(self, ordinal: int, max_rewind: int) -> int:
        """The smallest capacity at which this block or a later one is scratch, if the history ends before it."""

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

class AttentionLifeCycle(LifeCycle):
    """Full attention (no window), or a sliding window with optional attention sinks.

    stale(h) = [s, max(s, floor((h + 1 - W) / B))) with s = min(ceil(h / B), sink blocks); empty without a window. A subclass for
    another shape of window overrides `stale` and `stale_from`; the other methods follow from these.
    """

    def __init__(self, index: LifeCycleId, tokens_per_block: int, window: int | None, sink_blocks: int) -> None: ...
    @staticmethod
    def make(
        window_size: SupportsIndex | None, num_sink_tokens: SupportsIndex | None, tokens_per_block: SupportsIndex
    ) -> AttentionLifeCycle:
        """A life cycle that belongs to no model. `window_size` None means full attention. Raises ConfigError."""

    def __reduce__(self) -> tuple[object, ...]: ...
    @property
    def is_attention(self) -> bool: ...
    @property
    def window_size(self) -> int | None: ...
    @property
    def num_sink_blocks(self) -> int: ...
    def stale(self, history: int) -> tuple[int, int]: ...
    def stale_from(self, ordinal: int) -> int: ...
    def scratch(self, history: int, capacity: int, max_rewind: int) -> tuple[int, int]: ...
    def usable_tokens(self, coverage: int, tokens: int) -> int: ...
    def loss_ends_path(self, ordinal: int) -> bool: ...
    def blocks(self, history: int, capacity: int) -> int: ...
    def structural_floor(self, widest_window_blocks: int) -> int: ...

AttnLifeCycle = AttentionLifeCycle

class SsmLifeCycle(LifeCycle):
    """Recurrent state: one live page per request, never shared. The tree keeps snapshots, each usable at exactly one position."""

    def __reduce__(self) -> tuple[object, ...]: ...
    @property
    def is_attention(self) -> bool: ...
    @property
    def window_size(self) -> int | None: ...
    @property
    def num_sink_blocks(self) -> int: ...
    def stale(self, history: int) -> tuple[int, int]: ...
    def stale_from(self, ordinal: int) -> int: ...
    def scratch(self, history: int, capacity: int, max_rewind: int) -> tuple[int, int]: ...
    def usable_tokens(self, coverage: int, tokens: int) -> int: ...
    def loss_ends_path(self, ordinal: int) -> bool: ...
    def blocks(self, history: int, capacity: int) -> int: ...
    def structural_floor(self, widest_window_blocks: int) -> int: ...

LifeCycleMaker = Callable[[LifeCycleId, int, LayerConfig], LifeCycle]

def register_life_cycle(layer_class: type[LayerConfig], maker: LifeCycleMaker) -> None:
    """Let `maker(index, tokens_per_block, layer)` make the life cycle of layers of a class and its subclasses."""

def make_life_cycle(index: LifeCycleId, tokens_per_block: int, layer: LayerConfig) -> LifeCycle:
    """The life cycle of a layer group, from one of its layers. Raises ConfigError for a class that has none."""
