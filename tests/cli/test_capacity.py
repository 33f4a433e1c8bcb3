"""The sizes of tiers: exactly the number of blocks asked for, in the smallest possible pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2 import CacheTier
from kv_cache_manager_v2.cli.capacity import TierBlocks, blocks_of_gib, plan_capacity

GPU, HOST, DISK = CacheTier.GPU_MEM, CacheTier.HOST_MEM, CacheTier.DISK


@pytest.mark.parametrize("num_blocks", [1, 3, 100, 1000, 1447, 16_384, 100_000, 1_000_000])
@pytest.mark.parametrize("tokens_per_block", [32, 512])
def test_a_single_tier_holds_exactly_its_blocks(num_blocks: int, tokens_per_block: int) -> None:
    capacity = plan_capacity([TierBlocks(GPU, num_blocks)], tokens_per_block, 0, "/tmp")
    assert capacity.num_blocks == [num_blocks]
    assert capacity.page_bytes <= max(4096, (2 << 20) // num_blocks)


@given(st.integers(64, 2000), st.floats(0.01, 16), st.floats(0.5, 16), st.sampled_from([0, 128, 5000]))
def test_three_tiers_hold_at_least_and_hardly_more_than_their_blocks(gpu: int, host: float, disk: float, least: int) -> None:
    wanted = [TierBlocks(GPU, gpu), TierBlocks(HOST, 1 + int(host * gpu)), TierBlocks(DISK, 1 + int(disk * gpu))]
    capacity = plan_capacity(wanted, 32, least, "/tmp")
    assert capacity.tier_names == ["gpu", "host", "disk"]
    assert capacity.page_bytes >= least
    # at worst a granule in 256 MiB of pages too many: a 128th of all blocks, as seen from the smaller of the coarse tiers
    numbers = [tier.num_blocks for tier in wanted]
    excess = (sum(numbers) / 128 + 1) / min(wanted[0].num_blocks, wanted[2].num_blocks)
    for tier, provided in zip(wanted, capacity.num_blocks, strict=True):
        assert tier.num_blocks <= provided <= tier.num_blocks * (1 + excess) + 1


def test_millions_of_blocks_take_little_memory() -> None:
    capacity = plan_capacity([TierBlocks(GPU, 5_000_000), TierBlocks(HOST, 20_000_000)], 32, 0, "/tmp")
    assert 5_000_000 <= capacity.num_blocks[0] <= 5_000_100
    assert 20_000_000 <= capacity.num_blocks[1] <= 20_000_100
    assert capacity.page_bytes <= 4096


def test_gib_are_counted_in_whole_blocks_of_real_kv() -> None:
    """80 layers of 8 heads of 128 elements in 2 bytes, keys and values: 320 KiB a token."""
    assert blocks_of_gib(10, 327_680, 32) == 1024
    assert blocks_of_gib(9.999, 327_680, 32) == 1023
    assert blocks_of_gib(0.001, 327_680, 32) == 0
