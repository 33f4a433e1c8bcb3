"""Eviction policies: a policy gives the cached blocks of a request a class when the request ends."""

from __future__ import annotations

from typing import Final, SupportsIndex

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.eviction.order import EvictionOrder

MORE: Final = "more"  # what an engine expects of a conversation
END: Final = "end"
EXPECTATIONS: Final[tuple[str, ...]] = (MORE, END)


class RequestEnd:
    """What is known of a request that ends."""

    def __init__(
        self, num_tokens: int, num_reused: int, scope: bytes, blocks: list[bytes], expect: str | None, capacity: int
    ) -> None:
        self.num_tokens = num_tokens  # committed
        self.num_reused = num_reused  # tokens that it found in the cache
        self.scope = scope  # requests of equal scopes share blocks
        self.blocks = blocks  # the packed tokens of its full committed blocks
        self.expect = expect  # what `KVCache.close` was told: "more", "end" or None
        self.capacity = capacity  # blocks that fit all levels together

    @property
    def num_blocks(self) -> int:
        """Full committed blocks."""
        return len(self.blocks)


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy:
    """Decides which of two evictable pages of equal priority is evicted first. This one is least recently used.

    A policy has a few classes. It gives every request that ends a class, which its cached blocks take. A block that other blocks
    continue, too, keeps a higher class. Within a class the page that became evictable first is evicted first. Between classes, each
    page's age counts as `credits[class]` pages younger. See `order` and docs/eviction_policies.md.

    One object belongs to one manager. Its methods are called with the manager locked, and must not call the manager or its caches.
    """

    def __init__(self, credits: Integers = (0,), usual: SupportsIndex = 0) -> None:
        """`credits`: of each class, in pages, from 0 to 2**48; they must not decrease. `usual`: class of all other pages."""
        self.order: EvictionOrder = EvictionOrder(credits, usual)
        self.listens: bool = self.order.classes > 1  # whether `class_of` is called for requests of which nothing is expected

    def class_of(self, end: RequestEnd) -> int:
        """The class of a request's cached blocks. Called once for each request, when it is closed.

        If it raises an Exception, or returns no class, the error is logged and the blocks take the usual class.
        """
        return self.order.usual
