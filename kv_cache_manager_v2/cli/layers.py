"""The kinds of layers of the model that a replay simulates. One layer of each kind gives the same result as many.

The pages of all kinds have the same size, so all kinds share the slots of a tier and are evicted by age alone. The result does not
depend on how many bytes a model's layers have. A block has one page of each attention kind. A recurrent state is one page, whatever
the request's length.

To reuse n tokens, full attention needs the pages of all n tokens, and a windowed layer those that the next query sees, sinks
included. A recurrent layer needs a snapshot at exactly n. The replay takes snapshots like an engine with chunked prefill: it
commits a prompt up to each multiple of `snapshot_every` tokens and up to its end, and generated tokens likewise. A block of the
cache keeps only its last snapshot, so earlier ones in a block are replaced. Or it takes snapshots by prompt:
at the last block boundary of a prompt, where it leaves the prompts before it, and where generated tokens fill a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_cache_manager_v2 import AttentionLayerConfig, BufferConfig, SsmLayerConfig
from kv_cache_manager_v2.ids import DataRole, LayerId

ROLE: Final = DataRole("kv")
PRESETS: Final = ("full", "full+window", "window-sinks", "full+ssm")
DEFAULT_WINDOW: Final = 1024  # tokens
DEFAULT_SINKS: Final = 4  # tokens


@dataclass(frozen=True)
class LayerKind:
    """One layer of the simulated model, with a life cycle of its own."""

    name: str  # in reports
    layer: LayerId
    window: int | None = None  # tokens; None: full attention
    sinks: int = 0  # leading tokens that never fall out of the window
    recurrent: bool = False

    def config(self, page_bytes: int) -> AttentionLayerConfig | SsmLayerConfig:
        """The layer's configuration for the manager."""
        buffers = [BufferConfig(ROLE, page_bytes)]
        if self.recurrent:
            return SsmLayerConfig(self.layer, buffers)
        return AttentionLayerConfig(self.layer, buffers, self.window, self.sinks or None)

    def stale(self, num_tokens: int, tokens_per_block: int) -> tuple[int, int]:
        """The range of blocks that no query after `num_tokens` tokens reads."""
        if self.window is None:
            return 0, 0
        first = -(-self.sinks // tokens_per_block)
        return first, max(first, (num_tokens + 1 - self.window) // tokens_per_block)


@dataclass(frozen=True)
class Layers:
    """A preset: its kinds of layers, and where snapshots of recurrent state are taken."""

    preset: str
    kinds: tuple[LayerKind, ...]
    snapshot_every: int | None = None  # tokens from one snapshot to the next; None without recurrent layers, or by prompt

    @property
    def recurrent(self) -> bool:
        return any(kind.recurrent for kind in self.kinds)

    @property
    def snapshots_by_prompt(self) -> bool:
        """Whether snapshots are taken where `KVCache.prefill_end` says."""
        return self.recurrent and self.snapshot_every is None

    def with_snapshots_by_prompt(self) -> Layers:
        """The same layers, with snapshots where `KVCache.prefill_end` says."""
        return Layers(self.preset, self.kinds)

    @property
    def names(self) -> list[str]:
        """Names of the kinds, in the order of the manager's layer groups."""
        return [kind.name for kind in self.kinds]

    @property
    def window(self) -> int | None:
        return next((kind.window for kind in self.kinds if kind.window is not None), None)

    @property
    def sinks(self) -> int | None:
        """Sink tokens of the windowed kind; None without one."""
        return next((kind.sinks for kind in self.kinds if kind.window is not None), None)

    def configs(self, page_bytes: int, state_bytes: int) -> Sequence[AttentionLayerConfig | SsmLayerConfig]:
        return [kind.config(state_bytes if kind.recurrent else page_bytes) for kind in self.kinds]


FULL: Final = Layers("full", (LayerKind("full", LayerId(0)),))


def make_layers(
    preset: str, trace_block_size: int, window: int | None = None, sinks: int | None = None, snapshot_every: int | None = None
) -> Layers:
    """Make a preset with its options; None selects the default. Raises ValueError for an option that the preset does not have."""
    if window is not None and "window" not in preset:
        raise ValueError(f"--window has no effect with --layers {preset}; omit it, or choose --layers with a window")
    if sinks is not None and preset != "window-sinks":
        raise ValueError(f"--sinks has no effect with --layers {preset}; omit it, or choose --layers window-sinks")
    if snapshot_every is not None and preset != "full+ssm":
        raise ValueError(f"--snapshot-every has no effect with --layers {preset}; omit it, or choose --layers full+ssm")
    full = LayerKind("full", LayerId(0))
    span = DEFAULT_WINDOW if window is None else window
    if preset == "full+window":
        return Layers(preset, (full, LayerKind("window", LayerId(1), span)))
    if preset == "window-sinks":
        return Layers(preset, (LayerKind("window", LayerId(0), span, DEFAULT_SINKS if sinks is None else sinks),))
    if preset == "full+ssm":
        every = trace_block_size if snapshot_every is None else snapshot_every
        return Layers(preset, (full, LayerKind("ssm", LayerId(1), recurrent=True)), every)
    assert preset == "full"
    return FULL
