"""A run: a scheduler of vLLM serves a workload, step by step, with a worker that has no model.

Times are those of the processor in the scheduler's thread, so that other processes do not count.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import thread_time

from bench.engines.adapter import Request
from bench.engines.fingerprints import StepPlan, Worker
from bench.engines.vllm_seam import Scheduler, Setup, make_output, make_request
from bench.engines.workloads import Arrival


@dataclass
class Outcome:
    """What happened. Lists have an item for each step."""

    trace: list[dict[str, int]] = field(default_factory=list)  # tokens that each request computes
    schedule: list[float] = field(default_factory=list)  # seconds of processor time
    update: list[float] = field(default_factory=list)
    add: float = 0.0  # seconds, of all requests
    hits: int = 0  # tokens that requests found cached when they first began
    prompts: int = 0  # tokens of those prompts
    preempted: int = 0
    errors: list[str] = field(default_factory=list)  # of the worker, and answers of a wrong length
    answers: dict[str, list[int]] = field(default_factory=dict)


def serve(
    scheduler: Scheduler, setup: Setup, work: Sequence[Arrival], hashed: bool, checked: bool = False, max_steps: int = 0
) -> Outcome:
    """Serve all requests, or so many steps."""
    worker = Worker(setup.num_blocks + 1, setup.block_size, setup.windows, checked)
    outcome = Outcome(errors=worker.errors)
    requests: dict[str, Request] = {}
    goals: dict[str, int] = {}
    waiting = sorted(enumerate(work), key=lambda item: item[1].step, reverse=True)
    running: deque[tuple[StepPlan, dict[str, list[int]]]] = deque()
    step = 0
    gc.collect()
    gc.freeze()  # the requests to come are not what is measured
    while waiting or running or scheduler.has_unfinished_requests():
        while waiting and waiting[-1][1].step <= step:
            number, arrival = waiting.pop()
            name = f"r{number}"
            goals[name] = arrival.new_tokens
            begun = thread_time()
            request = make_request(name, arrival.prompt, arrival.new_tokens, setup.block_size if hashed else 0, arrival.priority)
            scheduler.add_request(request)
            outcome.add += thread_time() - begun
            requests[name] = request
        step += 1
        begun = thread_time()
        plan = scheduler.schedule()
        scheduled = thread_time()
        outcome.schedule.append(scheduled - begun)
        outcome.trace.append(dict(plan.num_scheduled_tokens))
        for new in plan.scheduled_new_reqs:
            if requests[new.req_id].num_preemptions == 0:
                outcome.hits += new.num_computed_tokens
                outcome.prompts += len(new.prompt_token_ids)
        sampled = worker.run(plan)
        if sampled:
            running.append((plan, sampled))
        if not running or (setup.overlapped and sampled and len(running) < 2):
            continue
        ended, sampled = running.popleft()
        output = make_output(sampled)
        begun = thread_time()
        scheduler.update_from_output(ended, output)
        outcome.update.append(thread_time() - begun)
        if step == max_steps:
            break
    outcome.preempted = sum([request.num_preemptions for request in requests.values()])
    for name, request in requests.items():
        answer = outcome.answers[name] = request._all_token_ids[request.num_prompt_tokens :]
        if not max_steps and len(answer) != goals[name]:
            worker.errors.append(f"{name} has {len(answer)} tokens of {goals[name]}")
    return outcome
