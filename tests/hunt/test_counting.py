"""Every driver call of short workloads refused: a sample of the cases. `make faults` tries all of them.

A case is one or two calls of the device, how often they and those after them are refused, and the exception. Whatever was refused,
the engine finds its counts as they were, every byte right or its loss named, every slot accounted for and every tier in service
once the device is healed; and a shutdown that was refused succeeds the next time, and has then given everything back.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import kv_cache_manager_v2
from kv_cache_manager_v2 import PlannedDropHandle
from kv_cache_manager_v2.build import COMPILED
from tests.arguments.stubs import operations
from tests.hunt.chapters import WORKLOADS, Workload, members
from tests.hunt.counting import alone, run, sample, together
from tests.support.drivers import CALLS

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # handles are dropped on purpose
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # old names are among the questions
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CASES = 3  # of each workload
OWNERS = ("KVCacheManager", "KVCache", "Step", "PlainBatchTables", "ReuseMatch")
ELSEWHERE = {"launch", "order", "close"} | {"read_file", "write_file", "wait_gate"}  # the engine's, and parts of calls for many


@pytest.mark.parametrize("workload", WORKLOADS, ids=Workload.describe)
def test_any_refused_call_leaves_a_manager_that_works(tmp_path: Path, workload: Workload) -> None:
    """Once, twice or for ever, alone or with a second one; CuError, KeyboardInterrupt, MemoryError and an unknown class."""
    for case in sample(workload, str(tmp_path), CASES, 0):
        run(workload, str(tmp_path), case)


def test_the_cases_are_each_point_each_number_of_times_and_pairs(tmp_path: Path) -> None:
    """What `make faults` tries."""
    plain = run(WORKLOADS[0], str(tmp_path), [])
    single = [case[0] for case in alone(plain)]
    assert {(point.number, point.end) for point in single} == {
        *((number, False) for number in range(len(plain.names))),
        *((number, True) for number in range(len(plain.end_names))),
    }
    assert all(len({p.times for p in single if (p.number, p.end) == (q.number, q.end)}) == 3 for q in single[::50])
    pairs = {(first.number, second.number) for first, second in together(plain)}
    last = len(plain.names) - 1
    assert {first for first, _second in pairs} == set(range(last))
    assert all((number, number + 1) in pairs for number in range(last))
    assert {plain.names[second] for first, second in pairs if first == 0} == set(plain.names[1:])


def public_code() -> dict[CodeType, str]:
    """Every public call that concerns requests or the manager, by its code."""
    found: dict[CodeType, str] = {PlannedDropHandle.drop.__code__: "PlannedDropHandle.drop"}
    for owner in OWNERS:
        cls = getattr(kv_cache_manager_v2, owner)
        for node in members(owner):
            member = next(vars(each)[node.name] for each in cls.__mro__ if node.name in vars(each))
            setter = any(".setter" in mark for mark in map(str, (getattr(m, "attr", "") for m in node.decorator_list)))
            call: Any = (member.fset if setter else member.fget) if isinstance(member, property) else member
            found[call.__code__] = f"{owner}.{node.name}"
    for operation in operations():
        if operation.kind == "function" and any(parameter.name == "caches" for parameter in operation.parameters):
            function = getattr(kv_cache_manager_v2, operation.name)
            found[function.__code__] = operation.name
    return found


@pytest.mark.skipif(COMPILED, reason="compiled functions have no code that a profiler sees; the workloads are the same")
def test_the_workloads_pass_every_public_call_and_every_driver_call(tmp_path: Path) -> None:
    """What is refused is all that the manager asks of its device, in every call that can be made of it."""
    wanted = public_code()
    seen: set[str] = set()
    driver: set[str] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code in wanted:
            seen.add(wanted[frame.f_code])

    for workload in WORKLOADS:
        sys.setprofile(note)
        try:
            result = run(workload, str(tmp_path), [])
        finally:
            sys.setprofile(None)
        driver |= {*result.names, *result.end_names}
    assert set(wanted.values()) - seen == set()
    assert {*CALLS} - driver - ELSEWHERE == set()
