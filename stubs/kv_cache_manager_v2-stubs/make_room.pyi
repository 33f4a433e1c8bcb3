"""Make-room policies: which other cache gives up pages when a request has a shortage."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.storage.planner import Shortage

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

def try_again(policy: MakeRoom, asking: KVCache, call: Callable[[], bool]) -> bool:
    """Repeat a call that had a shortage as long as the policy makes room. Returns whether it has succeeded."""
