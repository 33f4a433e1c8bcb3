"""Queries for how much of a prompt is cached. None of them changes a cache or moves a page."""

from collections.abc import Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.eviction.policy import EvictionPolicy
from kv_cache_manager_v2.ids import GPU_LEVEL
from kv_cache_manager_v2.planning.hit_curve import HitCurve
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.reuse.explain import MissHistory, MissReport
from kv_cache_manager_v2.reuse.explain_hits import HitsReport
from kv_cache_manager_v2.reuse.keys import ScopeLike
from kv_cache_manager_v2.reuse.limits import MatchLimits
from kv_cache_manager_v2.reuse.tokens import Tokens
from kv_cache_manager_v2.reuse_match import ReuseMatch
from kv_cache_manager_v2.step import ManagerSteps
from kv_cache_manager_v2.storage.hierarchy import Hierarchy

class ManagerReuse(ManagerSteps):
    """The part of `KVCacheManager` that answers what could be reused."""

    def __init__(
        self, config: KVCacheManagerConfig, driver: Driver, hierarchy: Hierarchy, shared: ManagerState, history: MissHistory | None
    ) -> None: ...
    def probe_reuse(
        self,
        reuse_scope: ScopeLike | None = None,
        input_tokens: Tokens | None = None,
        tokens: Tokens | None = None,
        limits: MatchLimits | None = None,
    ) -> int:
        """How many of the first tokens a cache created now, with the same limits, would reuse. Changes nothing.

        It is only an estimate for a cache created later, since pages may be evicted meanwhile: see `find_reuse`.
        """

    def find_reuse(
        self, reuse_scope: ScopeLike | None = None, input_tokens: Tokens | None = None, limits: MatchLimits | None = None
    ) -> ReuseMatch:
        """As `probe_reuse`, with a result to create a cache from. Changes nothing and holds nothing.

        For a scheduler that retries admission: the tree is searched again only if it has changed.
        """

    @property
    def eviction_policy(self) -> EvictionPolicy:
        """The policy that the configuration asked for. It belongs to this manager alone."""

    @property
    def num_published_blocks(self) -> int:
        """Blocks that have entered the tree so far: a mark for `MatchLimits.published_before`. It never decreases."""

    def probe_first_new_block_key(
        self, reuse_scope: ScopeLike | None = None, input_tokens: Tokens | None = None, tokens: Tokens | None = None
    ) -> bytes | None:
        """The key of the first full block of this prompt that cannot be reused: a request created now would compute it first.

        None if the rest of the prompt fills no block. Two prompts with the same key would compute the same block.
        """

    def probe_reuse_by_keys(self, reuse_scope: ScopeLike | None, block_keys: Sequence[bytes]) -> int:
        """As `probe_reuse`, given the chained keys of the prompt's blocks, without the root key. Only whole blocks match.

        The first call computes the keys of all cached blocks, which are then kept.
        """

    def explain_miss(self, reuse_scope: ScopeLike | None, tokens: Tokens) -> MissReport:
        """Explain why `probe_reuse` finds no more: print the result. Changes nothing.

        Dropped blocks are known only if `miss_history` is configured. O(prompt), plus one probe per other scope.
        """

    def explain_hits(self) -> HitsReport:
        """What the look-ups found so far, and which layer groups made their matches shorter, why, and what to configure: print it.

        A layer group that loses more tokens than are reused is also named in the log, once, from the hundredth look-up on.
        """

    def hit_curve(self, cache_level: SupportsIndex = GPU_LEVEL) -> HitCurve:
        """What this level would find of the prompts if it had another size, and the warmer ones their present sizes.

        It is an estimate, from a sample of the blocks, for the least recently used order and layers that need all blocks: of the
        tokens of all caches created since `restart_hit_curve()`, those that this level would find and no warmer one. See
        docs/hit_curve.md for its error. O(1). Raises LogicError unless `hit_curve_rate` is configured.
        """

    @property
    def hit_curve_rate(self) -> float:
        """The share of the blocks that `hit_curve` samples now; 0 without a curve. It falls if the sample becomes too large."""

    def restart_hit_curve(self) -> None:
        """Let `hit_curve` count anew. It still knows the blocks that were used before."""
