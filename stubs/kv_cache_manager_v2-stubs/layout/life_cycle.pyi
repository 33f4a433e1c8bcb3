"""Life cycles: how long the pages of a kind of layer are needed.

Everything that differs between full attention, sliding windows and recurrent (SSM) state is a method here; no other code asks
for the class. Another kind is a subclass, and a maker for the layers that have it (`register_life_cycle`). Ranges are half-open
pairs of block ordinals, (b, b) when empty.

The first query of the next step is at position h, the history. So a window of W tokens needs the positions h + 1 - W .. h, of which
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
    """When pages of one group of layers are needed, and what a page of theirs is good for."""

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
        """Window in tokens without the sinks; None if nothing ever falls out of it."""

    @property
    @abstractmethod
    def num_sink_blocks(self) -> int:
        """Leading blocks that never become stale."""

    @abstractmethod
    def stale(self, history: int) -> tuple[int, int]:
        """Blocks that no query at or after position `history` reads."""

    @abstractmethod
    def stale_from(self, ordinal: int) -> int:
        """Smallest history at which this block, which is no sink, is stale; NEVER if a request keeps it to its end."""

    def next_stale_change(self, history: int) -> int:
        """Smallest history above the given one at which more blocks are stale; NEVER if there is none."""

    def scratch_from(self, ordinal: int, max_rewind: int) -> int:
        """Smallest capacity at which this block, or a later one, lies in scratch if the history ends before it."""

    @abstractmethod
    def scratch(self, history: int, capacity: int, max_rewind: int) -> tuple[int, int]:
        """Blocks of a prefill step that no later step reads: stale(capacity - max_rewind) beyond the history."""

    @abstractmethod
    def usable_tokens(self, coverage: int, tokens: int) -> int:
        """How many of a block's first `tokens` tokens can be reused from a page with this coverage: attention any prefix of what
        it covers, SSM exactly its snapshot position or nothing."""

    @abstractmethod
    def loss_ends_path(self, ordinal: int) -> bool:
        """Whether losing the page at this ordinal makes every longer sequence through its block unmatchable."""

    @abstractmethod
    def blocks(self, history: int, capacity: int) -> int:
        """Pages that one request of this shape keeps live, shared prefix and scratch aside; SSM: 1."""

    @abstractmethod
    def structural_floor(self, widest_window_blocks: int) -> int:
        """Pages without which one request could deadlock; `widest_window_blocks` is the largest floor of the model's windows."""

    def get_stale_range(self, history_length: SupportsIndex, tokens_per_block: SupportsIndex | None = None) -> HalfOpenRange:
        """`stale` as a range object, for custom priority callbacks. `tokens_per_block` can only be the life cycle's own."""

class AttentionLifeCycle(LifeCycle):
    """Full attention (no window), or a sliding window with optional attention sinks.

    stale(h) = [s, max(s, floor((h + 1 - W) / B))) with s = min(ceil(h / B), sink blocks); empty without a window. Another shape of
    window overrides `stale` and `stale_from`; all the rest follows from these.
    """

    def __init__(self, index: LifeCycleId, tokens_per_block: int, window: int | None, sink_blocks: int) -> None: ...
    @staticmethod
    def make(
        window_size: SupportsIndex | None, num_sink_tokens: SupportsIndex | None, tokens_per_block: SupportsIndex
    ) -> AttentionLifeCycle:
        """One of a window (None: full attention) and so many sink tokens, apart from any model. Raises ConfigError."""

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
    """Recurrent state: one live slot per request, never shared; the tree keeps snapshots, each good at exactly one position."""

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
