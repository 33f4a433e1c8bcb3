"""What an operation is measured on: the manager, its layers and tiers, the prompts, and how much of everything.

Rule: an operation reads its sizes from a `Setting` and nothing else, so that the same operation serves the table (one setting) and
the growth curves (one field varied).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import tempfile
from array import array
from dataclasses import dataclass
from typing import Final

from kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    DataRole,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerId,
    SsmLayerConfig,
    Stream,
    Tokens,
)
from kv_cache_manager_v2.config import CacheTierConfig, LayerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.listener import CacheListener

BLOCK: Final = 32  # tokens
SLOT: Final = 512  # bytes: small, for bookkeeping and not copying is what is timed
WINDOW: Final = 1024
TURN: Final = 512  # tokens between two snapshots of a recurrent state


@dataclass(frozen=True)
class Setting:
    """Sizes of one measurement."""

    device: str = "free"  # "free", "emulated" or "cuda"
    layers: str = "full"  # "full", "window" (full and a window of 1,024), "ssm" (full and recurrent), or a number of life cycles
    tiers: int = 1
    prompt: int = 8192  # tokens of the prompt at work
    requests: int = 1000  # open at once
    cached: int = 0  # blocks of other prompts in the tree
    held: int = 0  # GPU pages of a suspended request, older than all others
    siblings: int = 10_000  # blocks below one parent
    tokens_as: str = "int32"  # "int32", "list" or "numpy"
    statistics: bool = True  # as the configuration has it by default
    events: bool = False

    @classmethod
    def of(cls, fields: dict[str, object]) -> Setting:
        return dataclasses.replace(cls(), **fields)  # type: ignore[arg-type]  # checked by the names of the fields

    @property
    def blocks(self) -> int:
        """Blocks of the prompt."""
        return -(-self.prompt // BLOCK)

    @property
    def recurrent(self) -> bool:
        return self.layers == "ssm"


class Bench:
    """A manager on its device, with one stream and what else the operations share."""

    def __init__(self, setting: Setting, gpu_blocks: int, cold_blocks: int = 0) -> None:
        """At least `gpu_blocks` blocks of each layer group on the GPU, `cold_blocks` on each colder tier."""
        self.setting = setting
        self.driver = make_driver(setting.device)
        self.directory = tempfile.TemporaryDirectory(prefix="kvcm-bench-") if setting.tiers > 2 else None
        layers = make_layers(setting.layers)
        tiers: list[CacheTierConfig] = [GpuCacheTierConfig(gpu_blocks * SLOT * len(layers))]
        cold = max(1, cold_blocks) * SLOT * len(layers)
        for level in range(1, setting.tiers):
            if level < setting.tiers - 1 or self.directory is None:
                tiers.append(HostCacheTierConfig(cold))
            else:
                tiers.append(DiskCacheTierConfig(cold, self.directory.name))
        self.events = make_event_manager() if setting.events else None
        config = KVCacheManagerConfig(
            BLOCK,
            tiers,
            layers,
            max_util_for_resume=1.0,
            commit_min_snapshot=setting.recurrent,
            enable_stats=setting.statistics,
            initial_pool_ratio=[1 / len(layers)] * len(layers),
        )
        self.manager = KVCacheManager(config, self.events, driver=self.driver)
        self.stream: Stream = self.driver.create_stream()

    def serve(self, prompt: array[int]) -> KVCache:
        """A request whose prompt is computed and committed; with recurrent layers turn by turn, each with its snapshot."""
        cache = self.manager.create_kv_cache(None, prompt)
        assert cache.resume(self.stream)
        if not self.setting.recurrent:
            assert cache.resize(len(prompt))
            cache.commit(prompt[cache.num_committed_tokens :])
            return cache
        while cache.num_committed_tokens < len(prompt):
            beg = cache.num_committed_tokens
            end = min(beg + TURN, len(prompt))
            assert cache.resize(end)
            cache.commit(prompt[beg:end])
        return cache

    def cache_prompt(self, prompt: array[int]) -> None:
        self.serve(prompt).close()

    def cache_others(self, blocks: int) -> None:
        """Fill the tree with this many blocks of prompts that share nothing with those of `prompt_tokens(setting, small)`."""
        serial = 1 << 20
        while blocks > 0:
            some = min(blocks, 256)
            self.cache_prompt(prompt_tokens(some * BLOCK, serial))
            serial += 1
            blocks -= some

    def close(self) -> None:
        self.manager.shutdown()
        if self.directory is not None:
            self.directory.cleanup()


def make_driver(device: str) -> Driver:
    if device == "free":
        from bench.free_driver import FreeDriver

        return FreeDriver()
    if device == "emulated":
        from kv_cache_manager_v2 import EmulatedDriver

        return EmulatedDriver()
    from kv_cache_manager_v2.default_device import default_driver

    return default_driver()


def has_events() -> bool:
    """Whether this version of the package has an event manager."""
    return importlib.util.find_spec("kv_cache_manager_v2.events") is not None


def make_event_manager() -> CacheListener:
    """The package's event manager, with a queue that is large enough for all events."""
    events = importlib.import_module("kv_cache_manager_v2.events")
    listener: CacheListener = events.KVCacheEventManager(max_kv_event_entries=1 << 20)
    return listener


def make_layers(name: str) -> list[LayerConfig]:
    """The layers of a life-cycle mix; a number asks for so many life cycles: full attention, then windows of growing length."""

    def buffers() -> list[BufferConfig]:
        return [BufferConfig(DataRole("kv"), SLOT)]

    full = AttentionLayerConfig(LayerId(0), buffers())
    if name == "full":
        return [full]
    if name == "window":
        return [full, AttentionLayerConfig(LayerId(1), buffers(), WINDOW)]
    if name == "ssm":
        return [full, SsmLayerConfig(LayerId(1), buffers())]
    windows = [AttentionLayerConfig(LayerId(i), buffers(), WINDOW + BLOCK * (i - 1)) for i in range(1, int(name))]
    return [full, *windows]


def prompt_tokens(count: int, serial: int = 0) -> array[int]:
    """A prompt as engines hold it: an int32 buffer. Prompts of different serial numbers differ from their first token on."""
    start = (serial * 7919) & 0x3FFFFFFF
    return array("i", range(start, start + count))


def given_as(kind: str, prompt: array[int]) -> Tokens:
    """The same tokens in another container."""
    if kind == "int32":
        return prompt
    if kind == "list":
        return prompt.tolist()
    import numpy

    return numpy.array(prompt, dtype=numpy.int64)
