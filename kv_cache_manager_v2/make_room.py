"""Make-room policies: which other cache gives up pages when a request has a shortage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import flag
from kv_cache_manager_v2.request.request import ACTIVE
from kv_cache_manager_v2.storage.planner import Shortage

if TYPE_CHECKING:
    from kv_cache_manager_v2.kv_cache import KVCache


@mypyc_attr(allow_interpreted_subclasses=True)
class MakeRoom(ABC):
    """A make-room policy. A step, `resize` and `resume` ask the one that they are given, unless the shortage is permanent."""

    @abstractmethod
    def make_room(self, asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache]) -> bool:
        """Free pages for the cache that has the shortage: suspend or close other caches, of the step or not.

        `candidates` are the other ACTIVE caches of the step, in its order; there are none outside a step, where the policy has to
        know the caches itself. True: the request is tried again, and this is called again as long as the shortage has become
        smaller. False: the call returns False, or the request does not take part in the step.
        """


def made_room(
    policy: MakeRoom, asking: KVCache, shortage: Shortage | None, last: Shortage | None, candidates: Sequence[KVCache]
) -> bool:
    """Ask a policy. False if it has no answer, or if its last one has not lessened the shortage.

    `last` is the shortage of the cache before the policy was last asked for it; None if it was not.
    """
    if shortage is None or shortage.permanent:
        return False
    same = last is not None and (last.pool_group, last.over_limit) == (shortage.pool_group, shortage.over_limit)
    if last is not None and same and last.missing <= shortage.missing:
        return False
    ask: Callable[..., object] = policy.make_room
    return flag(ask(asking, shortage, candidates), "the answer of make_room()")


def try_again(policy: MakeRoom, asking: KVCache, call: Callable[[], bool]) -> bool:
    """Repeat a call that had a shortage as long as the policy makes room. Returns whether it has succeeded."""
    state = asking.state
    status = state.status  # that the call needs: the policy may suspend, resume or close the cache itself
    last: Shortage | None = None
    while True:
        shortage = state.last_shortage
        if not made_room(policy, asking, shortage, last, []):
            return False
        if state.status != status:
            return state.status == ACTIVE
        if call():
            return True
        last = shortage
