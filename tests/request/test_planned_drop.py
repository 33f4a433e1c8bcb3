"""Planned drops: pages that only the next turn of a conversation needs."""

from __future__ import annotations

import gc

import pytest

from kv_cache_manager_v2 import LogicError, PlannedDropHandle
from tests.support import inside
from tests.support.engine import Token
from tests.support.models import KIB, MIB, attention, model, small, ssm
from tests.support.rig import Rig, toks


def plan_of(rig: Rig, tokens: list[Token]) -> PlannedDropHandle:
    """Have the tokens cached and their endpoint planned."""
    request = rig.start(tokens)
    rest = tokens[len(request.tokens) :]
    if rest:
        assert request.advance(rest)
    request.cache.stop_committing()
    plan = request.cache.plan_committed_block_drop()
    assert plan is not None
    request.close()
    return plan


@pytest.mark.parametrize("backoff", [0, 1])
def test_two_endpoints_of_one_path(backoff: int) -> None:
    """8 tokens a block, full and window 8. Dropping the plan of the first 8 costs that endpoint only; dropping that of 24 leaves
    16; a second drop raises."""
    with Rig(small(16, kinds=["full", (8, 0)], tokens_per_block=8, backoff=backoff)) as rig:
        tokens = toks(0, 24)
        first, second = plan_of(rig, tokens[:8]), plan_of(rig, tokens)
        assert rig.probe(tokens[:8]) == 8 - backoff
        first.drop()
        assert rig.probe(tokens[:8]) == 0
        assert rig.probe(tokens) == 24 - backoff
        second.drop()
        assert rig.probe(tokens) == 16
        for plan in (first, second):
            with pytest.raises(RuntimeError, match="already been dropped") as refused:
                plan.drop()
            assert isinstance(refused.value, ValueError)
        assert inside.coverage(rig.manager, tokens, 0) == [8, 8, 8]


@pytest.mark.parametrize("what", ["coverage", "page"])
def test_an_endpoint_that_cannot_be_reused_has_no_plan(what: str) -> None:
    """A page that covers one token less than it should, or that is gone: None."""
    with Rig(small(16, kinds=["full", (8, 0)], tokens_per_block=8)) as rig:
        rig.seed(toks(0, 16))
        request = rig.start(toks(0, 16))
        request.cache.stop_committing()
        plan = request.cache.plan_committed_block_drop()
        assert plan is not None
        request.close()
        other = rig.request(toks(0, 12))
        block = inside.tree_blocks(rig.manager, toks(0, 16))[1]
        page = inside.page_of(block, rig.group(1))
        assert page is not None
        if what == "coverage":
            inside.narrow(rig.manager, block, page)
        else:
            inside.drop(rig.manager, page)
        late = rig.request([*toks(0, 16)])
        assert late.cache.num_committed_tokens < 16
        third = rig.start()
        assert third.advance(toks(0, 16))  # finds the block there
        third.cache.stop_committing()
        if what == "coverage":
            inside.narrow(rig.manager, block, inside.page_of(block, rig.group(1)))
        else:
            inside.drop(rig.manager, inside.page_of(block, rig.group(1)))
        assert third.cache.plan_committed_block_drop() is None
        other.close()


def test_two_plans_on_one_endpoint() -> None:
    """Commits at 32 and 64, two plans for 64: the first drop changes nothing, the second leaves 32. An empty cache has no plan."""
    with Rig(model([attention(0, 8 * KIB), ssm(1, 24 * KIB)], gpu=8 * MIB)) as rig:
        rig.seed(toks(0, 32))
        first, second = plan_of(rig, toks(0, 64)), plan_of(rig, toks(0, 64))
        assert rig.probe(toks(0, 64)) == 64
        first.drop()
        assert rig.probe(toks(0, 64)) == 64
        second.drop()
        assert rig.probe(toks(0, 64)) == 32
        empty = rig.create()
        empty.stop_committing()
        assert empty.plan_committed_block_drop() is None


def test_every_page_that_the_endpoint_needs_is_planned_once() -> None:
    """48 tokens, 32 a block, window 32 and recurrent: both window pages and the last snapshot; dropped, nothing is left."""
    with Rig(model([attention(0, 8 * KIB, window=32), ssm(1, 24 * KIB)], gpu=8 * MIB)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 48))
        request.cache.stop_committing()
        plan = request.cache.plan_committed_block_drop()
        assert plan is not None
        plans = [page.plans for block in inside.tree_blocks(rig.manager, toks(0, 48)) for page in block.pages if page is not None]
        assert plans == [1, 1, 1]
        request.close()
        assert rig.probe(toks(0, 48)) == 48
        plan.drop()
        assert rig.probe(toks(0, 48)) == 0
        assert inside.num_tree_blocks(rig.manager) == 0


def test_best_sibling_not_first_sibling() -> None:
    """Two branches behind 12 tokens, 8 a block, full and window 8; the second one's window page of its block 1 was dropped by plan.
    A query of the second reuses 12, through 4 tokens of the first one's block."""
    with Rig(small(16, kinds=["full", (8, 0)], tokens_per_block=8)) as rig:
        prefix = toks(0, 12)
        first = [*prefix, *toks(100, 104)]
        second = [*prefix, *toks(200, 204)]
        rig.seed(first)
        plan = plan_of(rig, second)
        assert rig.probe(second) == 16
        plan.drop()
        assert rig.probe(second) == 12
        again = rig.start(second)
        assert len(again.tokens) == 12
        again.check()
        assert again.advance(second[12:])
        again.check()


def test_a_plan_needs_a_settled_endpoint() -> None:
    """Before `stop_committing` the call raises."""
    with Rig(small(8, kinds=[(8, 0)])) as rig:
        request = rig.start()
        assert request.advance(toks(0, 8))
        with pytest.raises(LogicError, match="stop_committing"):
            request.cache.plan_committed_block_drop()


@pytest.mark.parametrize("busy", ["held", "locked"])
def test_pages_in_use_are_not_dropped(busy: str) -> None:
    """The next turn still uses the pages when the plan is dropped: they stay until the storage needs their slots."""
    with Rig(small(8, kinds=[(8, 0)])) as rig:
        plan = plan_of(rig, toks(0, 16))
        user = rig.request(toks(0, 16))
        if busy == "locked":
            assert user.resume()
        plan.drop()
        if busy == "held":
            assert user.resume()
        user.check()
        user.close()
        assert rig.probe(toks(0, 16)) == 16


def test_a_discarded_plan_applies() -> None:
    """A handle is dropped without `drop()`: the next call applies its plan."""
    with Rig(small(8, kinds=[(8, 0)])) as rig:
        plan = plan_of(rig, toks(0, 16))
        assert rig.probe(toks(0, 16)) == 16
        del plan
        gc.collect()
        rig.create().close()
        assert rig.probe(toks(0, 16)) < 16
