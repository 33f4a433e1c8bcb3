"""The benchmark inside vLLM's scheduler, as far as it runs without vLLM: our manager in its interface, and the checking worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from bench.engines.__main__ import faults
from bench.engines.adapter import Blocks, Lora, VllmCacheManager
from bench.engines.fingerprints import Worker

BLOCK = 4


@dataclass
class Request:
    """What vLLM's requests have."""

    request_id: str
    _all_token_ids: list[int]
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    cache_salt: str | None = None
    lora_request: Lora | None = None
    num_prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)


def make_manager(num_pages: int, *windows: int, watermark: float = 0.0) -> VllmCacheManager:
    return VllmCacheManager(num_pages + 1, BLOCK, [None, *windows], 1000, 1000, watermark, None)


def admit(
    manager: VllmCacheManager, request: Request, end: int, must_fit: bool = False, beside_others: bool = True
) -> tuple[int, Blocks | None]:
    """As the scheduler does, for a step that ends after so many tokens: the tokens found, and the blocks."""
    found, hit, _ = manager.get_computed_blocks(request)
    blocks = manager.allocate_slots(
        request, end - hit, hit, found, full_sequence_must_fit=must_fit, has_scheduled_reqs=beside_others
    )
    return hit, blocks


def step(manager: VllmCacheManager, request: Request, tokens: list[int]) -> Blocks | None:
    """The step before has ended with the first of these tokens; the next one computes them."""
    request.num_computed_tokens = len(request._all_token_ids)
    request._all_token_ids += tokens
    return manager.allocate_slots(request, len(tokens))


def ids(blocks: Blocks | None) -> list[list[int]]:
    assert blocks is not None
    found = blocks.get_block_ids()
    assert found is not None
    return list(found)


def test_a_worker_hears_of_each_block_once() -> None:
    """Inside a block there is nothing to tell. A block that has left its window is the null block, 0."""
    manager = make_manager(20, 4)
    request = Request("a", list(range(6)))
    _, blocks = admit(manager, request, 6)
    assert ids(blocks) == [[1, 2], [3, 4]]
    answers = [step(manager, request, [token]) for token in range(6, 14)]
    assert [answer for answer in answers if answer is manager.empty_kv_cache_blocks] == [answers[n] for n in (0, 1, 3, 4, 5, 7)]
    assert [len(new) for answer in (answers[2], answers[6]) for new in ids(answer)] == [1, 1, 1, 1]
    full, window = ids(manager.get_blocks("a"))
    assert len(set(full)) == 4
    assert window[:2] == [0, 0]
    assert min(window[2:]) > 0
    manager.free(request)
    assert manager.usage == 0
    manager.check_idle()


@pytest.mark.parametrize("windows", [(), (4,)])
def test_blocks_are_found_in_the_step_that_computes_them(windows: tuple[int, ...]) -> None:
    """As wholes, within one scope, and never the last token. A request keeps its own pages for blocks that it has computed too."""
    manager = make_manager(40, *windows)
    first, second = Request("a", list(range(9))), Request("b", list(range(9)))
    own = ids(admit(manager, first, 9)[1])
    hit, shared = admit(manager, second, 9)
    assert hit == 8
    assert [row[1] for row in ids(shared)] == [row[1] for row in own]
    assert admit(manager, Request("c", list(range(9)), cache_salt="other"), 9)[0] == 0
    assert admit(manager, Request("d", list(range(8))), 8)[0] == 4
    assert admit(manager, Request("e", list(range(9)), skip_reading_prefix_cache=True), 9)[0] == 0
    assert ids(manager.get_blocks("a")) == own
    for token in range(9, 13):
        assert step(manager, first, [token]) is not None
    assert manager.get_computed_blocks(Request("f", list(range(13))))[1] == 12


def test_without_room_nothing_changes() -> None:
    """Pages of a match count as taken; so do those of the whole prompt, if it must fit, and the watermark."""
    manager = make_manager(10, watermark=0.2)
    first = Request("a", list(range(20)))
    assert admit(manager, first, 20)[1] is not None
    first.num_computed_tokens = 20
    manager.free(first)
    big = Request("b", [*range(20), *range(100, 124)])
    assert admit(manager, big, 44) == (20, None)
    assert admit(manager, big, 24, must_fit=True) == (20, None)
    assert admit(manager, big, 40) == (20, None), "the watermark"
    assert manager.usage == 0
    assert admit(manager, big, 40, beside_others=False)[1] is not None
    big.num_computed_tokens = 40
    assert manager.allocate_slots(big, 1) is None
    manager.free(big)
    manager.check_idle()


def test_what_a_request_published_for_a_step_that_never_was_scheduled_is_gone() -> None:
    manager = make_manager(10)
    request = Request("a", list(range(8)))
    admit(manager, request, 8)
    manager.free(request)
    assert admit(manager, Request("b", list(range(9))), 9)[0] == 0


def test_cached_blocks_are_dropped_by_id() -> None:
    manager = make_manager(10)
    request = Request("a", list(range(12)))
    _, blocks = admit(manager, request, 12)
    assert not manager.reset_prefix_cache(), "a request has pages"
    request.num_computed_tokens = 12
    manager.free(request)
    manager.evict_blocks([ids(blocks)[0][1]])
    later = Request("b", list(range(13)))
    assert manager.get_computed_blocks(later)[1] == 4
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(later)[1] == 0


@dataclass
class New:
    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0


@dataclass
class Known:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Plan:
    scheduled_new_reqs: list[New]
    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: Known = field(default_factory=Known)
    finished_req_ids: set[str] = field(default_factory=set)


def run(*plans: Plan) -> list[str]:
    worker = Worker(10, BLOCK, [None])
    for plan in plans:
        worker.run(plan)  # type: ignore[arg-type]  # lists of a protocol's classes are invariant
    return worker.errors


def test_the_worker_finds_wrong_pages() -> None:
    """A page of two requests, one that was never computed, a missing one; what is right passes."""
    tokens = list(range(8))
    whole = Plan([New("a", tokens, ([1, 2],))], {"a": 8})
    more = Known(["a"], set(), [([3],)], [8])
    assert run(whole, Plan([], {"a": 1}, more)) == []
    assert run(whole, Plan([New("b", tokens, ([1, 3],), 4)], {"b": 4})) == [], "a shared block"
    assert "another request writes" in run(Plan([New("a", tokens, ([1, 2],)), New("b", tokens, ([3, 2],))], {"a": 8, "b": 8}))[0]
    assert "reads 4 wrong" in run(whole, Plan([New("b", tokens, ([4, 3],), 4)], {"b": 4}))[0]
    assert "reads 4 wrong" in run(whole, Plan([New("b", list(range(1, 9)), ([1, 3],), 4)], {"b": 4}))[0], "of other tokens"
    assert "no page" in run(whole, Plan([], {"a": 1}, Known(["a"], set(), [([0],)], [8])))[0]


def test_a_difference_is_a_fault_where_nothing_is_short() -> None:
    case = {"errors": [[], []], "same_answers": True, "tight": False, "first_difference": None, "hits": [5, 5]}
    assert faults({"equal": case, "tight": {**case, "tight": True, "first_difference": 3, "hits": [5, 4]}}) == []
    assert (
        len(faults({"a": {**case, "first_difference": 3}, "b": {**case, "hits": [5, 4]}, "c": {**case, "same_answers": False}}))
        == 3
    )
    assert faults({"a": {**case, "tight": True, "errors": [["theirs"], ["ours"]]}}) == ["a: ours"]
