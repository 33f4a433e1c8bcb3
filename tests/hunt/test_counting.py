"""Every driver call of a workload refused: a sample of the points. `make hunt` tries all of them.

A point is a call's number, how often it and those behind it are refused, and the exception. Whatever was refused, the engine finds
its counts as they were, every byte right or its loss named, every slot accounted for and every tier in service once the device is
healed; and a shutdown that was refused succeeds the next time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hunt.counting import every, pairs, run, workload
from tests.hunt.setups import MODELS

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # handles are dropped on purpose
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SHARDS = 2
STRIDE = 4001  # prime, so that all kinds of points come up


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("model", MODELS)
def test_any_refused_call_leaves_a_manager_that_works(tmp_path: Path, model: str, shard: int) -> None:
    """Once, twice or for ever, alone or with a second one; CuError, KeyboardInterrupt, MemoryError and an unknown class."""
    setup = workload(model)
    plain = run(setup, str(tmp_path), [])
    assert plain.calls > 300
    points = [*every(plain.calls, plain.end_calls), *pairs(plain.calls, plain.calls, shard)]
    for point in points[shard * (STRIDE // SHARDS) :: STRIDE]:
        run(setup, str(tmp_path), point)


@pytest.mark.parametrize("model", MODELS)
def test_a_workload_passes_every_kind_of_driver_call(tmp_path: Path, model: str) -> None:
    """What is counted is not a corner: memory, files, events and copies are all among the calls."""
    names = set(run(workload(model), str(tmp_path), []).names)
    assert names >= {"create_chunk", "map_chunk", "unmap", "destroy_chunk", "host_register", "host_unregister", "synchronize"}
    assert names >= {"record_event", "query_event", "destroy_event", "create_stream", "destroy_stream"}
    assert names >= {"copy_batch", "copy", "write_files", "read_files", "poll_gate", "release_gate"}
