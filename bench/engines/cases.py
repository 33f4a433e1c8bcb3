"""What is checked and what is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.engines import workloads
from bench.engines.vllm_seam import Setup
from bench.engines.workloads import Arrival


@dataclass(frozen=True)
class Case:
    title: str
    setup: Setup
    work: Callable[[], Sequence[Arrival]]
    tight: bool = False  # there is room for a part only: requests are preempted, and cached blocks evicted
    max_steps: int = 0  # 0: until all requests are served
    skipped: int = 0  # first steps, in which what is timed begins


def _small(kind: str) -> Callable[[], Sequence[Arrival]]:
    return lambda: workloads.small(kind)


def checks(quick: bool) -> list[Case]:
    """Each small workload, on both schedulers, with and without a window and pressure; and a large one."""
    cases: list[Case] = []
    for kind in workloads.SMALL:
        for windows in ((None,), (None, 64), (None, 100)):
            for overlapped in (False, True):
                for tight in (False, True):
                    title = f"{kind}, {'full' if len(windows) == 1 else f'full + window {windows[1]}'}"
                    title += f"{', overlapped' if overlapped else ''}{', pressure' if tight else ''}"
                    blocks = 256 * len(windows) if tight else 4096
                    setup = Setup(blocks, 16, windows, 256, 512 if tight else 1024, overlapped)
                    cases.append(Case(title, setup, _small(kind), tight))
    if quick:
        return cases[::7]
    for tight in (False, True):
        setup = Setup(2560 if tight else 16384, max_running=1024, max_step_tokens=2048 if tight else 8192)
        cases.append(Case(f"1,310 requests, full{', pressure' if tight else ''}", setup, workloads.large, tight))
    return cases


def timings(quick: bool) -> list[Case]:
    """A thousand requests at a time, or as many as fit."""
    part = 20 if quick else 1
    steps = 60 if quick else 300
    wide = 65536
    return [
        Case("decode", Setup(1 << 17, max_step_tokens=wide), lambda: workloads.decode(1000 // part), max_steps=steps, skipped=40),
        Case(
            "decode, full + window 1,024",
            Setup(1 << 18, windows=(None, 1024), max_step_tokens=wide),
            lambda: workloads.decode(1000 // part),
            max_steps=steps,
            skipped=40,
        ),
        Case(
            "decode, overlapped",
            Setup(1 << 17, max_step_tokens=wide, overlapped=True),
            lambda: workloads.decode(1000 // part),
            max_steps=steps,
            skipped=40,
        ),
        Case("serve", Setup(1 << 15), lambda: workloads.serve(4000 // part)),
        Case("pressure", Setup((1 << 13) // part), lambda: workloads.pressure(2000 // part), tight=True),
        Case("long prompts in parts", Setup(1 << 16), lambda: workloads.chunks(64 // part)),
    ]


TITLES: Final = [case.title for case in timings(False)]
