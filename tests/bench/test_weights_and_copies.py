"""Memory and copies: what is weighed is plausible, every pair of tiers is copied, and reports over nothing say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.copies import copies_table
from bench.copies_worker import PAIRS, engine_rates, plain_of, plain_rates
from bench.memory import memory_table
from bench.memory_worker import WEIGHINGS, per_cached_block


def test_a_cached_block_weighs_at_least_its_tokens() -> None:
    """32 tokens take 128 bytes; objects around them take more, but not kilobytes."""
    assert 128 < per_cached_block(25_600, "full") < 2000


def test_a_table_of_weights_has_a_column_for_each_build() -> None:
    table = memory_table({title: {"compiled": 500.0, "interpreted": 1000.0} for title in WEIGHINGS})
    assert table.splitlines()[0].split()[-2:] == ["compiled", "interpreted"]
    assert len(table.splitlines()) == 1 + len(WEIGHINGS)
    assert memory_table({}) == "no rows: nothing was weighed"


def test_every_pair_of_tiers_is_copied_and_held_against_a_plain_loop(tmp_path: Path) -> None:
    """Pages leave and reach every tier; files warm and cold."""
    plain = plain_rates(64 << 10, 4, str(tmp_path), 1)
    engine = engine_rates(64 << 10, 4, str(tmp_path), 1)
    assert len(engine) == len(PAIRS) + 2  # reads from disk are measured twice
    for pair, rate in engine.items():
        assert rate > 0
        assert plain[plain_of(pair)] > 0


@pytest.mark.parametrize(
    ("pair", "plain"),
    [
        ("GPU to host", "memcpy"),
        ("host to disk, warm", "file write, warm"),
        ("disk to GPU, warm", "file read, warm"),
        ("disk to host, cold", "file read, cold"),
    ],
)
def test_a_pair_is_held_against_the_loop_in_the_same_mode(pair: str, plain: str) -> None:
    assert plain_of(pair) == plain


def test_a_table_of_copies_shows_the_share_of_the_plain_rate() -> None:
    line = copies_table([{"pair": "GPU to host", "page": 262144, "batch": 16, "rate": 8.0, "plain": 10.0}]).splitlines()[1]
    assert line.split() == ["GPU", "to", "host", "256", "KiB", "16", "8.00", "10.00", "80%"]
    assert copies_table([]) == "no rows: nothing was copied"
