"""The configuration: defaults, positional order, checks that name field, value and remedy, and the copies that must work."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kv_cache_manager_v2 import EmulatedDriver, KVCacheManager
from kv_cache_manager_v2.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import CacheTier, DataRole, LayerId
from tests.support.models import MIB, attention, both, buffers, model, ssm


def test_defaults() -> None:
    """The documented defaults."""
    config = model([attention(0, 64)])
    assert config.max_util_for_resume == 0.97
    assert config.enable_partial_reuse
    assert config.reuse_match_backoff == 0
    assert list(config.constraints) == []
    assert config.typical_step is None
    assert config.initial_pool_ratio is None
    assert not config.enable_swa_scratch_reuse
    assert not config.commit_min_snapshot
    assert config.enable_stats
    assert not config.text_only
    assert config.rebalance_min_sampled_kv_caches == 2000
    assert config.rebalance_cooldown_secs == 120.0
    assert config.rebalance_target_ratio_update_interval == 100
    assert config.rebalance_ratio_threshold == 1.25
    assert config.rebalance_moving_average_decay == 0.9999
    assert config.block_key_hash == "blake3"
    assert not config.strict_quota


class OwnSsm(SsmLayerConfig):
    """An engine's own class."""


class OwnDisk(DiskCacheTierConfig):
    """An engine's own class."""


class OwnConfig(KVCacheManagerConfig):
    """An engine's own class."""


def test_subclasses_are_accepted(tmp_path: Path) -> None:
    """A user's subclass of a configuration is what its base is, on both builds."""
    layer = OwnSsm(LayerId(0), buffers(64))
    tiers = [GpuCacheTierConfig(64 * MIB), OwnDisk(64 * MIB, str(tmp_path))]
    config = OwnConfig(32, tiers, [layer], commit_min_snapshot=True)
    manager = KVCacheManager(config, driver=EmulatedDriver())
    manager.create_kv_cache().close()
    manager.shutdown()
    with pytest.raises(ConfigError, match="layer 0 is an SSM layer"):
        OwnConfig(32, tiers, [layer])


def test_positional_order() -> None:
    """Fields may be given by position, in the documented order."""
    layer = AttentionLayerConfig(LayerId(3), [BufferConfig(DataRole("key"), 64, 16)], 128, 48)
    assert (layer.layer_id, layer.window_size, layer.num_sink_tokens) == (3, 128, 48)
    assert (layer.buffers[0].role, layer.buffers[0].size, layer.buffers[0].tokens_per_block_override) == ("key", 64, 16)
    state = SsmLayerConfig(LayerId(4), buffers(64))
    desc = KVCacheDesc(10, 4)
    assert (desc.capacity, desc.history_length) == (10, 4)
    batch = BatchDesc([desc], 3)
    tiers = [GpuCacheTierConfig(1 * MIB), HostCacheTierConfig(2 * MIB)]
    config = KVCacheManagerConfig(
        32, tiers, [layer, state], 0.5, False, 2, [batch], batch, [0.5, 0.5], SwaScratchReuseConfig(7), True
    )
    assert (config.max_util_for_resume, config.enable_partial_reuse, config.reuse_match_backoff) == (0.5, False, 2)
    assert config.constraints == [batch]
    assert config.typical_step is batch
    assert config.initial_pool_ratio == [0.5, 0.5]
    assert config.enable_swa_scratch_reuse
    assert config.commit_min_snapshot


def test_tiers(tmp_path: Path) -> None:
    """Each tier knows its kind; its quota is a positive integer; a disk path is a directory."""
    assert GpuCacheTierConfig(1).tier == CacheTier.GPU_MEM
    assert HostCacheTierConfig(1).tier == CacheTier.HOST_MEM
    assert DiskCacheTierConfig(1, str(tmp_path)).tier == CacheTier.DISK
    with pytest.raises(ConfigError, match="quota of GpuCacheTierConfig is 0; it must be at least 1"):
        GpuCacheTierConfig(0)
    with pytest.raises(ConfigError, match="quota of HostCacheTierConfig is -5"):
        HostCacheTierConfig(-5)
    with pytest.raises(ConfigError, match=r"quota of GpuCacheTierConfig is 1\.5; it must be an integer"):
        GpuCacheTierConfig(1.5)  # type: ignore[arg-type]
    assert DiskCacheTierConfig(1, tmp_path).path == str(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="path of DiskCacheTierConfig is 3"):
        DiskCacheTierConfig(1, 3)  # type: ignore[arg-type]
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match="must be an existing directory"):
        DiskCacheTierConfig(1, str(missing))


def test_checksums_of_a_disk_tier(tmp_path: Path) -> None:
    """On unless they are switched off; an unknown name is refused, also one that was assigned later."""
    path = str(tmp_path)
    config = DiskCacheTierConfig(1, path)
    assert config.checksum == "xxh3"
    assert DiskCacheTierConfig(1, path, "xxh3") == config
    assert DiskCacheTierConfig(1, path, None).checksum is None
    assert DiskCacheTierConfig(1, path, "none") == DiskCacheTierConfig(1, path, None)
    for wrong in ("crc32c", "", 0, False, ["xxh3"]):
        with pytest.raises(ConfigError, match=r'checksum of DiskCacheTierConfig is .*; it must be "xxh3", or None'):
            DiskCacheTierConfig(1, path, wrong)  # type: ignore[arg-type]
    config.checksum = "md5"
    with pytest.raises(ConfigError, match="'md5'"):
        config.validate()


def test_what_is_no_list_of_the_right_records_is_named() -> None:
    """One record in the place of a list, or something else in a list, is refused with the field, the value and what is right."""
    gpu, layer, buffer = GpuCacheTierConfig(MIB), attention(0, 64), BufferConfig("key", 64)
    mistakes: list[tuple[Callable[[], object], str]] = [
        (lambda: KVCacheManagerConfig(32, gpu, [layer]), "cache_tiers is GpuCacheTierConfig(quota="),  # type: ignore[arg-type]
        (lambda: KVCacheManagerConfig(32, [MIB], [layer]), "cache_tiers has 1048576 at position 0"),  # type: ignore[list-item]
        (lambda: KVCacheManagerConfig(32, [gpu], 4), "layers is 4; it must be a list of LayerConfig"),  # type: ignore[arg-type]
        (lambda: KVCacheManagerConfig(32, [gpu], [layer, 1]), "layers has 1 at position 1; each item must be a LayerConfig"),  # type: ignore[list-item]
        (lambda: AttentionLayerConfig(7, buffer), "buffers of layer 7 is BufferConfig(role='key'"),  # type: ignore[arg-type]
        (lambda: AttentionLayerConfig(7, [("key", 64)]), "buffers of layer 7 has ('key', 64) at position 0"),  # type: ignore[list-item]
        (lambda: BufferConfig(64, "key"), "role of a buffer is 64; it must be a string"),  # type: ignore[arg-type]
        (lambda: BatchDesc([10]), "kv_caches of BatchDesc has 10 at position 0"),  # type: ignore[list-item]
        (lambda: KVCacheManagerConfig(32, [gpu], [layer], constraints=[1]), "constraints has 1 at position 0"),  # type: ignore[list-item]
        (lambda: KVCacheManagerConfig(32, [gpu], [layer], typical_step=8), "typical_step is 8; it must be a BatchDesc"),  # type: ignore[arg-type]
        (
            lambda: KVCacheManagerConfig(32, [gpu], [layer], swa_scratch_reuse=True),  # type: ignore[arg-type]
            "swa_scratch_reuse is True; it must be a SwaScratchReuseConfig, or None",
        ),
    ]
    for make, text in mistakes:
        with pytest.raises(ConfigError, match=re.escape(text)):
            make()


def test_tier_order(tmp_path: Path) -> None:
    """The first tier is the GPU, and the tiers go from warm to cold."""
    layers = [attention(0, 64)]
    gpu, host, disk = GpuCacheTierConfig(MIB), HostCacheTierConfig(MIB), DiskCacheTierConfig(MIB, str(tmp_path))
    assert KVCacheManagerConfig(32, [gpu, host, disk], layers).cache_tiers == [gpu, host, disk]
    assert len(KVCacheManagerConfig(32, [gpu, disk], layers).cache_tiers) == 2
    with pytest.raises(ConfigError, match="must begin with a GpuCacheTierConfig"):
        KVCacheManagerConfig(32, [host, gpu], layers)
    with pytest.raises(ConfigError, match="must begin with a GpuCacheTierConfig"):
        KVCacheManagerConfig(32, [], layers)
    with pytest.raises(ConfigError, match="HOST_MEM after DISK"):
        KVCacheManagerConfig(32, [gpu, disk, host], layers)


@pytest.mark.parametrize("override", [0, -64, 48, 127, 256])
def test_bad_override(override: int) -> None:
    """An override that is not positive or does not divide the block is refused, never a crash."""
    with pytest.raises(ConfigError, match=f"tokens_per_block_override.*{override}"):
        model([attention(0, 64, override=override)], tokens_per_block=128)


def test_good_override() -> None:
    """64 divides 128; it repeats twice in a block."""
    config = model([attention(0, 64, override=64)], tokens_per_block=128)
    assert config.layers[0].buffers[0].expansion(128) == 2


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.1, math.nan, math.inf, -math.inf, True, np.True_, "0.9"])
def test_bad_max_util(value: float) -> None:
    """A threshold outside (0, 1] is refused with the field's name; it is also a ValueError and an AssertionError."""
    with pytest.raises(ConfigError, match="max_util_for_resume"):
        model([attention(0, 64)], max_util=value)
    with pytest.raises(ValueError, match="max_util_for_resume"):
        model([attention(0, 64)], max_util=value)
    with pytest.raises(AssertionError, match="max_util_for_resume"):
        model([attention(0, 64)], max_util=value)


def test_max_util_of_one() -> None:
    """1.0 is valid, also when given as an int."""
    assert model([attention(0, 64)], max_util=1.0).max_util_for_resume == 1.0
    assert model([attention(0, 64)], max_util=1).max_util_for_resume == 1.0


def test_ssm_needs_min_snapshot() -> None:
    """An SSM layer without commit_min_snapshot is refused; with it, partial reuse may be on or off."""
    tiers = [GpuCacheTierConfig(MIB)]
    layers = [attention(0, 64), ssm(1, 64)]
    with pytest.raises(ConfigError, match="commit_min_snapshot"):
        KVCacheManagerConfig(32, tiers, layers)
    for partial in (True, False):
        assert KVCacheManagerConfig(32, tiers, layers, enable_partial_reuse=partial, commit_min_snapshot=True).commit_min_snapshot


def test_snapshots_at_block_ends_need_min_snapshot() -> None:
    """Without it no commit makes a snapshot; also where the field is assigned later."""
    tiers, layers = [GpuCacheTierConfig(MIB)], [attention(0, 64)]
    with pytest.raises(ConfigError, match="snapshot_at_block_ends is True, but commit_min_snapshot is False"):
        KVCacheManagerConfig(32, tiers, layers, snapshot_at_block_ends=True)
    config = KVCacheManagerConfig(32, tiers, layers, commit_min_snapshot=True, snapshot_at_block_ends=True)
    config.commit_min_snapshot = False
    with pytest.raises(ConfigError, match="snapshot_at_block_ends"):
        config.validate()


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        ([], "initial_pool_ratio length"),
        ([1.0], "initial_pool_ratio length"),
        ([0.0, 1.0], "values must be positive"),
        ([-0.1, 1.1], "values must be positive"),
        ([math.nan, 1.0], "values must be positive"),
        ([math.inf, 0.5], "values must be positive"),
        ([0.3, 0.3, 0.4], "initial_pool_ratio length"),
        ([0.4, 0.5], r"values must sum to 1\.0"),
    ],
)
def test_bad_ratio(ratio: list[float], message: str) -> None:
    """One positive weight for each layer group, summing to 1."""
    with pytest.raises(ConfigError, match=message):
        model([attention(0, 64, window=128), attention(1, 128)], ratio=ratio)


def test_ratio_counts_layer_groups_not_pools_or_layers() -> None:
    """Two layer groups of equal slot size share a pool, and still have a weight each."""
    config = model([attention(0, 64, window=128), attention(1, 64), attention(2, 64)], ratio=[0.25, 0.75])
    assert config.initial_pool_ratio == [0.25, 0.75]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rebalance_min_sampled_kv_caches", -1),
        ("rebalance_cooldown_secs", -1.0),
        ("rebalance_cooldown_secs", math.inf),
        ("rebalance_cooldown_secs", math.nan),
        ("rebalance_ratio_threshold", math.nan),
        ("rebalance_moving_average_decay", math.nan),
        ("rebalance_target_ratio_update_interval", 0),
        ("rebalance_ratio_threshold", 1.0),
        ("rebalance_ratio_threshold", math.inf),
        ("rebalance_moving_average_decay", 0.0),
        ("rebalance_moving_average_decay", 1.0),
        ("tokens_per_block", 0),
        ("tokens_per_block", True),
        ("reuse_match_backoff", -1),
        ("block_key_hash", "md5"),
        ("layers", []),
    ],
)
def test_bad_settings(field: str, value: object) -> None:
    """Values out of range are refused with the field's name."""
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(model([attention(0, 64)]), **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: model([attention(0, 64), attention(0, 64)]), "layer_id 0 is used twice"),
        (lambda: attention(-1, 64), "layer_id is -1"),
        (lambda: attention(0), "no buffers"),
        (lambda: attention(0, 0), "size of buffer 'key' is 0"),
        (lambda: attention(0, 64, window=0), "sliding_window_size of layer 0 is 0"),
        (lambda: attention(0, 64, window=8, sink=-1), "num_sink_tokens of layer 0 is -1"),
        (lambda: attention(0, 64, sink=4), "without a window"),
        (lambda: AttentionLayerConfig(LayerId(0), buffers(1) + buffers(2)), "two buffers of role 'key'"),
        (lambda: SsmLayerConfig(LayerId(0), buffers(1) + buffers(2)), "two buffers of role 'key'"),
        (lambda: AttentionLayerConfig(LayerId(0), buffers(1), states=buffers(1)), "a buffer and a state of role 'key'"),
        (lambda: AttentionLayerConfig(LayerId(0), buffers(1), states="s"), "states of layer 0 is 's'"),  # type: ignore[arg-type]
        (lambda: model([both(0, [64], [64])], min_snapshot=False), "commit_min_snapshot is False, but layer 0"),
        (lambda: SsmLayerConfig(LayerId(0), buffers(1, override=8)), "a state does not consist of blocks"),
        (lambda: KVCacheDesc(4, 5), "must not exceed the capacity"),
        (lambda: KVCacheDesc(-1, 0), "capacity of KVCacheDesc is -1"),
        (lambda: KVCacheDesc(4, -1), "history_length of KVCacheDesc is -1"),
        (lambda: BatchDesc([], -1), "system_prompt_length of BatchDesc is -1"),
        (lambda: SwaScratchReuseConfig(-1), "max_rewind_len of SwaScratchReuseConfig is -1"),
    ],
)
def test_bad_records(build: Callable[[], object], message: str) -> None:
    """Each record checks itself when it is made."""
    with pytest.raises(ConfigError, match=message):
        build()


def test_zero_sinks_need_no_window() -> None:
    """num_sink_tokens=0 says the same as None."""
    assert attention(0, 64, sink=0).num_sink_tokens == 0


def test_assignments_are_checked_again() -> None:
    """A field assigned after construction is checked when the configuration is used."""
    config = model([attention(0, 64)])
    config.tokens_per_block = 0
    with pytest.raises(ConfigError, match="tokens_per_block is 0"):
        config.validate()
    with pytest.raises(ConfigError, match="tokens_per_block is 0"):
        KVCacheManager(config, driver=EmulatedDriver())


def test_numpy_integers_become_ints() -> None:
    """Sizes computed with numpy are accepted and stored as plain ints."""
    numpy = pytest.importorskip("numpy")
    tier = GpuCacheTierConfig(numpy.int64(MIB))
    assert type(tier.quota) is int


def test_copies(tmp_path: Path) -> None:
    """replace, deepcopy, pickle and copy() give equal configurations that share nothing."""
    colder = [HostCacheTierConfig(MIB), DiskCacheTierConfig(MIB, str(tmp_path))]
    config = model([attention(0, 64, window=8, sink=4), ssm(1, 128)], colder=colder, scratch_rewind=3)
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.copy(), dataclasses.replace(config)):
        assert other == config
    copied = config.copy()
    copied.layers[0].buffers[0].size = 65
    assert config.layers[0].buffers[0].size == 64
    assert dataclasses.replace(config, tokens_per_block=64).tokens_per_block == 64


def test_without_tier(tmp_path: Path) -> None:
    """Leaving out the host keeps a configured disk; the original is untouched, and the GPU cannot be left out."""
    colder = [HostCacheTierConfig(MIB), DiskCacheTierConfig(MIB, str(tmp_path))]
    config = model([attention(0, 64)], colder=colder)
    less = config.without_tier(CacheTier.HOST_MEM)
    assert [tier.tier for tier in less.cache_tiers] == [CacheTier.GPU_MEM, CacheTier.DISK]
    assert len(config.cache_tiers) == 3
    assert less.layers[0] is not config.layers[0]
    with pytest.raises(ConfigError, match="GPU_MEM tier cannot be omitted"):
        config.without_tier(CacheTier.GPU_MEM)
