"""The kinds of layers of the model that a replay simulates: one layer of each kind decides as much as thirty.

Rule: a page of every kind has the same size, so all kinds share the slots of a tier and evict each other by age alone; the figures
then do not hang on how many bytes a model's layers have. A block of B tokens has one page of each attention kind, and a recurrent
state is one page whatever its length.

What may be reused, n tokens long: full attention needs the pages of all n tokens; a window those that the next query sees (and the
sinks'); a recurrent state needs a snapshot at exactly n. The replay takes snapshots as an engine with chunked prefill would:
a prompt is committed up to each multiple of `snapshot_every` tokens, then up to its end, and generated tokens likewise. A block of
the cache keeps one snapshot, the one that covers most of it, so with less than a block between two of them the earlier ones are
replaced.
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
        """The layer as the manager is told of it."""
        buffers = [BufferConfig(ROLE, page_bytes)]
        if self.recurrent:
            return SsmLayerConfig(self.layer, buffers)
        return AttentionLayerConfig(self.layer, buffers, self.window, self.sinks or None)

    def stale(self, num_tokens: int, tokens_per_block: int) -> tuple[int, int]:
        """Blocks that no query after `num_tokens` tokens reads."""
        if self.window is None:
            return 0, 0
        first = -(-self.sinks // tokens_per_block)
        return first, max(first, (num_tokens + 1 - self.window) // tokens_per_block)


@dataclass(frozen=True)
class Layers:
    """A preset: its kinds of layers, and how often recurrent state is kept for others."""

    preset: str
    kinds: tuple[LayerKind, ...]
    snapshot_every: int | None = None  # tokens from one snapshot to the next; None without recurrent layers

    @property
    def names(self) -> list[str]:
        """By kind, which is also the order of the manager's layer groups."""
        return [kind.name for kind in self.kinds]

    @property
    def window(self) -> int | None:
        return next((kind.window for kind in self.kinds if kind.window is not None), None)

    @property
    def sinks(self) -> int | None:
        """None without a window."""
        return next((kind.sinks for kind in self.kinds if kind.window is not None), None)

    def configs(self, page_bytes: int) -> Sequence[AttentionLayerConfig | SsmLayerConfig]:
        return [kind.config(page_bytes) for kind in self.kinds]


FULL: Final = Layers("full", (LayerKind("full", LayerId(0)),))


def make_layers(
    preset: str, trace_block_size: int, window: int | None = None, sinks: int | None = None, snapshot_every: int | None = None
) -> Layers:
    """A preset with its options, None being their defaults; raises ValueError for one that the preset does not have."""
    if window is not None and "window" not in preset:
        raise ValueError(f"--window means nothing with --layers {preset}")
    if sinks is not None and preset != "window-sinks":
        raise ValueError(f"--sinks means nothing with --layers {preset}")
    if snapshot_every is not None and preset != "full+ssm":
        raise ValueError(f"--snapshot-every means nothing with --layers {preset}")
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
