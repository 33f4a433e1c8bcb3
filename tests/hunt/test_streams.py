"""A stream for each request: nothing is left of a request that is gone. `make hunt` serves a million of them on each schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hunt.streams import growth, serve


@pytest.mark.parametrize(("schedule", "requests", "colder"), [("eager", 4000, 0), ("random", 2000, 1), ("threads", 2000, 2)])
@pytest.mark.parametrize("handles_return", [False, True])
def test_a_request_with_a_stream_of_its_own_leaves_nothing(
    tmp_path: Path, schedule: str, requests: int, colder: int, handles_return: bool
) -> None:
    """Memory, mappings, descriptors, threads, streams and events stay as they are after the first tenth of the requests."""
    assert growth(serve(schedule, requests, str(tmp_path), handles_return, colder), 2 << 20) == ""
