"""The growth fit on data whose exponent is known, and what is said of curves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fit import exponent, final_exponent
from bench.growth import Measured, growth_json, growth_table, plot

SIZES = [10, 100, 1_000, 10_000, 100_000]


@given(st.floats(-1.0, 2.0), st.floats(1e-9, 1e3))
def test_the_exponent_of_a_power_law_is_found(power: float, factor: float) -> None:
    """Any factor, any exponent: a straight line in logarithms."""
    assert exponent(SIZES, [factor * size**power for size in SIZES]) == pytest.approx(power, abs=1e-9)


def test_the_final_exponent_sees_growth_behind_a_constant_part() -> None:
    """A call costs 10 us and 1 ns a block: at small sizes all is constant, the large ones are linear."""
    times = [1e-5 + 1e-9 * size for size in [10, 100, 1_000, 100_000, 1_000_000, 10_000_000]]
    sizes = [10, 100, 1_000, 100_000, 1_000_000, 10_000_000]
    assert exponent(sizes, times) < 0.6
    assert final_exponent(sizes, times) > 0.9


def test_a_logarithm_is_next_to_nothing() -> None:
    """What grows with the depth of a tree is told from what grows with its size."""
    assert 0.0 < final_exponent(SIZES, [math.log(size) for size in SIZES]) < 0.2


@pytest.mark.parametrize(("sizes", "times"), [([1, 2], [1.0]), ([5, 5], [1.0, 2.0]), ([1, 2], [0.0, 1.0]), ([1], [1.0])])
def test_what_has_no_exponent_is_refused(sizes: list[int], times: list[float]) -> None:
    with pytest.raises(ValueError, match="got"):
        exponent(sizes, times)


def test_no_curves_are_said_to_be_none() -> None:
    assert growth_table([]) == "no curves: nothing was measured"
    assert growth_json([]) == {}


def test_a_curve_shows_its_exponent_beside_the_planned_one() -> None:
    curve = Measured("tokens", "probe", "prompt", 1.0, [1024, 4096, 16384], [1e-6, 4e-6, 16e-6])
    line = growth_table([curve]).splitlines()[-1]
    assert line.split()[:5] == ["probe", "exponent", "+1.00", "(planned", "1)"]


def test_a_curve_of_one_point_has_no_exponent() -> None:
    curve = Measured("tokens", "probe", "prompt", 1.0, [1024], [1e-6])
    assert curve.exponent() is None
    assert "exponent   -" in growth_table([curve])


def test_plots_are_made_or_their_lack_explained(tmp_path: Path) -> None:
    """One picture an axis where matplotlib is installed, else the reason."""
    said = plot([Measured("tokens", "probe", "prompt", 1.0, [1024, 4096], [1e-6, 4e-6])], tmp_path)
    if said[0].startswith("no plots"):
        assert list(tmp_path.iterdir()) == []
    else:
        assert said == ["growth-tokens.png"]
        assert (tmp_path / "growth-tokens.png").read_bytes().startswith(b"\x89PNG")
