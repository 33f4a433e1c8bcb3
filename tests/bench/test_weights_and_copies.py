"""Memory and copies: what is weighed is plausible, every pair of tiers is copied, and reports over nothing say so."""

from __future__ import annotations

from pathlib import Path

from bench.copies import MODES, CopyRow, copies_table
from bench.copies_worker import FEWEST_PAIRS, TIERS, WAYS, measure
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
    """Pages leave and reach every tier; files cached, with and without sums, and cold when read or synced when written."""
    rows = measure(64 << 10, 2, str(tmp_path), 512 << 10)
    found = {(row["pair"], row["mode"]) for row in rows}
    assert len(found) == len(rows) == 2 + 4 * 3
    assert {pair for pair, _mode in found} == {f"{a} to {b}" for a in TIERS for b in TIERS if a != b}
    for row in rows:
        assert min(row["rate"], row["plain"], row["share"]) > 0
        assert row["pairs"] >= FEWEST_PAIRS


def test_a_batch_of_any_size_is_measured(tmp_path: Path) -> None:
    """One page; and a batch that leaves no room for a second one in the span."""
    for batch, span in ((1, 64 << 10), (4, 64 << 10)):
        rows = measure(16 << 10, batch, str(tmp_path), span)
        assert {row["batch"] for row in rows} == {batch}


def test_a_table_of_copies_shows_the_share_of_the_plain_rate() -> None:
    row: CopyRow = {
        "pair": "GPU to host",
        "mode": "memory",
        "page": 262144,
        "batch": 16,
        "pairs": 5,
        "rate": 8.0,
        "plain": 10.0,
        "share": 0.8,
        "more": 50e-6,
    }
    table = copies_table([row]).splitlines()
    assert table[-1].split() == ["memory", "GPU", "to", "host", "256", "KiB", "16", "8.00", "10.00", "80%", "50", "us", "5"]
    assert copies_table([]) == "no rows: nothing was copied"


def test_a_table_of_copies_says_what_each_mode_is() -> None:
    """Buffered or direct, cached or cold, checksums: a rate without its mode means nothing."""
    for way in WAYS:
        assert f"\n {way.mode}  " in MODES
