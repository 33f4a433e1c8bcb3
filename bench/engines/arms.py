"""The cache managers that are compared inside vLLM's scheduler, besides vLLM's own as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from bench.engines import ARMS
from bench.engines.adapter import Blocks, Request, VllmCacheManager
from bench.engines.vllm_seam import Scheduler, Setup, make_cache_manager, make_scheduler


class Floor(VllmCacheManager):
    """Gives no pages and finds nothing: what is left is the scheduler's own."""

    def get_computed_blocks(self, request: Request, max_cache_hit_length: int | None = None) -> tuple[Blocks, int, int]:
        return self.empty_kv_cache_blocks, 0, 0

    def allocate_slots(self, request: Request, num_new_tokens: int, *more: object, **named: object) -> Blocks | None:
        return self.empty_kv_cache_blocks

    def free(self, request: Request) -> None: ...

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None: ...

    @property
    def usage(self) -> float:
        return 0.5


class _Own(Protocol):
    """What is wrapped of vLLM's manager."""

    empty_kv_cache_blocks: object

    def allocate_slots(self, request: Request, num_new_tokens: int, *more: object, **named: object) -> object: ...
    def free(self, request: Request) -> None: ...


class ShortCut:
    """vLLM's own manager with one change: a token inside a block, for which it has nothing to do, is answered at once.

    For full attention only: a block that leaves a window is another thing to do.
    """

    def __init__(self, own: object, block_size: int) -> None:
        manager = cast(_Own, own)
        self._allocate: Callable[..., object] = manager.allocate_slots
        self._free = manager.free
        self._nothing = manager.empty_kv_cache_blocks
        self._block_size = block_size
        self._due: dict[str, int] = {}  # by request: the end of the next step for which there is something to do
        vars(manager)["allocate_slots"] = self.allocate_slots
        vars(manager)["free"] = self.free

    def allocate_slots(self, request: Request, num_new_tokens: int, *more: object, **named: object) -> object:
        end = request.num_computed_tokens + num_new_tokens
        if end < self._due.get(request.request_id, 0):
            return self._nothing
        blocks = self._allocate(request, num_new_tokens, *more, **named)
        if blocks is not None:
            found = named.get("num_new_computed_tokens", 0)
            assert isinstance(found, int)
            size = self._block_size
            published = min(end + found, request.num_tokens) // size
            self._due[request.request_id] = min((published + 1) * size, -(-(end + found) // size) * size + 1)
        return blocks

    def free(self, request: Request) -> None:
        self._due.pop(request.request_id, None)
        self._free(request)


def make_arm(arm: str, setup: Setup) -> tuple[Scheduler, bool]:
    """A scheduler, and whether its cache manager needs the requests' blocks hashed."""
    scheduler = make_scheduler(setup)
    if arm in ("ours", "floor"):
        scheduler.kv_cache_manager = make_cache_manager(VllmCacheManager if arm == "ours" else Floor, scheduler, setup)
        return scheduler, False
    if arm == "vLLM, short cut":
        ShortCut(scheduler.kv_cache_manager, setup.block_size)
    return scheduler, True


def arms_for(setup: Setup, fixed_batch: bool) -> Sequence[str]:
    """The arms that do the same work. A manager that finds no prefixes does so only in a batch that nobody joins or leaves."""
    return [arm for arm in ARMS if (arm != "vLLM, short cut" or setup.windows == (None,)) and (arm != "floor" or fixed_batch)]
