"""Whatever classes a policy gives, the tail of a path is evicted before its head."""

from __future__ import annotations

import random

import pytest

from kv_cache_manager_v2 import EvictionPolicy, KVCacheManager, RequestEnd
from tests.support import inside
from tests.support.models import Kind, small
from tests.support.rig import Request, Rig, toks


class Arbitrary(EvictionPolicy):
    """Classes without reason."""

    def __init__(self) -> None:
        super().__init__([0, 20, 25, 1000], 1)
        self.rng = random.Random(7)

    def class_of(self, end: RequestEnd) -> int:
        return self.rng.randrange(4)


@pytest.mark.parametrize("host_slots", [0, 24])
@pytest.mark.parametrize("kinds", [["full"], ["full", (8, 4)]])
def test_tails_go_before_heads(kinds: list[Kind], host_slots: int) -> None:
    """Conversations that branch, go on, are suspended and end in any order."""
    config = small(40, kinds=kinds, host_slots=host_slots)
    config.eviction_policy = Arbitrary
    rng = random.Random(host_slots)
    with Rig(config) as rig:
        prompts = [toks(0, 8)]
        running: list[Request] = []
        for _ in range(150):
            if running and rng.random() < 0.5:
                request = running.pop(rng.randrange(len(running)))
                if rng.random() < 0.2:
                    request.suspend()
                request.close()
            else:
                start = rng.choice(prompts)
                prompt = start[: rng.randrange(4, len(start) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
                request = rig.request(prompt)
                if request.resume() and request.advance(prompt[len(request.tokens) :]):
                    running.append(request)
                    prompts.append(prompt[:40])
                else:
                    request.close()
            assert inside.heads_before_tails(rig.manager) == []
        assert classes_in(rig.manager) > 1


def classes_in(manager: KVCacheManager) -> int:
    """How many classes pages are in."""
    return len({page.worth for page in manager.shared.hierarchy.all_pages()})
