"""The configuration of a model's layers: their buffers, windows and recurrent states.

As in config.py, each record is validated on construction, and `validate()` does so again. Sizes are in bytes, lengths in tokens.
The file is not compiled, so that subclasses of users work on both builds.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import at_least, check_list_field, check_whole_field, given
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import DataRole, LayerId


@dataclass
class BufferConfig:
    """One buffer of a layer, and its size for one block."""

    role: DataRole
    size: int  # bytes for one block, of the buffer's own length if that is overridden
    tokens_per_block_override: int | None = None  # tokens in one of its own blocks, if a kernel needs shorter ones: a divisor

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        role = given(self, "role")
        if not isinstance(role, str):
            raise ConfigError(f'role of a buffer is {role!r}; it must be a string, such as "key"')
        owner = f" of buffer {role!r}"
        check_whole_field(self, "size", 1, owner)
        if given(self, "tokens_per_block_override") is not None:
            check_whole_field(self, "tokens_per_block_override", 1, owner)

    def expansion(self, tokens_per_block: SupportsIndex) -> int:
        """How many of the buffer's own blocks make one block of the manager. Raises ConfigError if they do not divide it evenly."""
        length = at_least(tokens_per_block, "tokens_per_block", 1)
        override = self.tokens_per_block_override
        if override is None:
            return 1
        if override < 1 or length % override != 0:
            raise ConfigError(
                f"tokens_per_block_override of buffer {self.role!r} is {override}; it must divide tokens_per_block, {length}"
            )
        return length // override


@dataclass
class LayerConfig(ABC):
    """One layer of the model and its buffers."""

    layer_id: LayerId
    buffers: Sequence[BufferConfig]

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        check_whole_field(self, "layer_id", 0)
        check_list_field(self, "buffers", BufferConfig, f" of layer {self.layer_id}")
        if len(self.buffers) == 0:
            raise ConfigError(f"layer {self.layer_id} has no buffers; give it at least one")
        roles: set[str] = set()
        for buffer in self.buffers:
            buffer.validate()
            if buffer.role in roles:
                raise ConfigError(f"layer {self.layer_id} has two buffers of role {buffer.role!r}; roles must be unique in a layer")
            roles.add(buffer.role)

    @property
    @abstractmethod
    def window_size(self) -> int | None:
        """Tokens that a query sees, itself included; None: all."""

    @property
    def sink_size(self) -> int:
        """First tokens, which every query sees although they have left the window."""
        return 0

    @abstractmethod
    def group_key(self, tokens_per_block: SupportsIndex) -> tuple[object, ...]:
        """Layers with equal keys form one layer group. For the kinds in this file: (is attention, window or 0, sink blocks)."""

    def parts(self) -> Sequence[LayerConfig]:
        """The layer as one layer for each layer group that it belongs to. The first part has `buffers`."""
        return (self,)


@dataclass
class AttentionLayerConfig(LayerConfig):
    """A layer of full attention, or of sliding-window attention with optional sinks.

    A layer that is recurrent too has `states`. It belongs to two layer groups: that of its attention, and the recurrent one.
    """

    sliding_window_size: int | None = None  # tokens that a query sees, itself included, sinks excluded; None: all
    num_sink_tokens: int | None = None  # first tokens, which every query sees; only with a window
    states: Sequence[BufferConfig] = ()  # recurrent state, one per request; roles differ from those of `buffers`

    def validate(self) -> None:
        super().validate()
        owner = f" of layer {self.layer_id}"
        if given(self, "sliding_window_size") is not None:
            check_whole_field(self, "sliding_window_size", 1, owner)
        if given(self, "num_sink_tokens") is not None:
            check_whole_field(self, "num_sink_tokens", 0, owner)
            if self.num_sink_tokens != 0 and self.sliding_window_size is None:
                raise ConfigError(
                    f"num_sink_tokens of layer {self.layer_id} is {self.num_sink_tokens} without a window; "
                    "set sliding_window_size, or omit the sinks: full attention sees every token anyway"
                )
        check_list_field(self, "states", BufferConfig, owner)
        for part in self.parts()[1:]:
            for role in {buffer.role for buffer in self.buffers} & {state.role for state in part.buffers}:
                raise ConfigError(f"layer {self.layer_id} has a buffer and a state of role {role!r}; roles must be unique")

    @property
    def window_size(self) -> int | None:
        return self.sliding_window_size

    @property
    def sink_size(self) -> int:
        return self.num_sink_tokens or 0

    def group_key(self, tokens_per_block: SupportsIndex) -> tuple[bool, int, int]:
        length = at_least(tokens_per_block, "tokens_per_block", 1)
        return True, self.sliding_window_size or 0, -(-(self.num_sink_tokens or 0) // length)

    def parts(self) -> Sequence[LayerConfig]:
        if not self.states:
            return (self,)
        return dataclasses.replace(self, states=()), SsmLayerConfig(self.layer_id, self.states)


@dataclass
class SsmLayerConfig(LayerConfig):
    """A recurrent layer: one state per request, whatever the request's length."""

    def validate(self) -> None:
        super().validate()
        for buffer in self.buffers:
            if buffer.tokens_per_block_override is not None:
                raise ConfigError(
                    f"tokens_per_block_override of buffer {buffer.role!r} of SSM layer {self.layer_id} is "
                    f"{buffer.tokens_per_block_override}; a state does not consist of blocks, so it must be omitted"
                )

    @property
    def window_size(self) -> int | None:
        return None

    def group_key(self, tokens_per_block: SupportsIndex) -> tuple[bool, int, int]:
        at_least(tokens_per_block, "tokens_per_block", 1)
        return False, 0, 0
