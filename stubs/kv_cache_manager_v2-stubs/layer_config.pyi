"""The configuration of a model's layers: their buffers, windows and recurrent states.

As in config.py, each record is validated on construction, and `validate()` does so again. Sizes are in bytes, lengths in tokens.
The file is not compiled, so that subclasses of users work on both builds.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from kv_cache_manager_v2.ids import DataRole, LayerId

@dataclass
class BufferConfig:
    """One buffer of a layer, and its size for one block."""

    role: DataRole
    size: int
    tokens_per_block_override: int | None = None

    def validate(self) -> None: ...
    def expansion(self, tokens_per_block: SupportsIndex) -> int:
        """How many of the buffer's own blocks make one block of the manager. Raises ConfigError if they do not divide it evenly."""

@dataclass
class LayerConfig(ABC):
    """One layer of the model and its buffers."""

    layer_id: LayerId
    buffers: Sequence[BufferConfig]

    def validate(self) -> None: ...
    @property
    @abstractmethod
    def window_size(self) -> int | None:
        """Tokens that a query sees, itself included; None: all."""

    @property
    def sink_size(self) -> int:
        """First tokens, which every query sees although they have left the window."""

    @abstractmethod
    def group_key(self, tokens_per_block: SupportsIndex) -> tuple[object, ...]:
        """Layers with equal keys form one layer group. For the kinds in this file: (is attention, window or 0, sink blocks)."""

    def parts(self) -> Sequence[LayerConfig]:
        """The layer as one layer for each layer group that it belongs to. The first part has `buffers`."""

@dataclass
class AttentionLayerConfig(LayerConfig):
    """A layer of full attention, or of sliding-window attention with optional sinks.

    A layer that is recurrent too has `states`. It belongs to two layer groups: that of its attention, and the recurrent one.
    """

    sliding_window_size: int | None = None
    num_sink_tokens: int | None = None
    states: Sequence[BufferConfig] = ()

    def validate(self) -> None: ...
    @property
    def window_size(self) -> int | None: ...
    @property
    def sink_size(self) -> int: ...
    def group_key(self, tokens_per_block: SupportsIndex) -> tuple[bool, int, int]: ...
    def parts(self) -> Sequence[LayerConfig]: ...

@dataclass
class SsmLayerConfig(LayerConfig):
    """A recurrent layer: one state per request, whatever the request's length."""

    def validate(self) -> None: ...
    @property
    def window_size(self) -> int | None: ...
    def group_key(self, tokens_per_block: SupportsIndex) -> tuple[bool, int, int]: ...
