"""Queries for how much of a prompt is cached. None of them changes a cache or moves a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import instance_or_none, items_of, octets, renamed
from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.eviction.policy import EvictionPolicy
from kv_cache_manager_v2.ids import GPU_LEVEL
from kv_cache_manager_v2.planning.hit_curve import HitCurve
from kv_cache_manager_v2.request.call import look
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.reuse.explain import MissHistory, MissReport, explain
from kv_cache_manager_v2.reuse.explain_hits import HitsReport
from kv_cache_manager_v2.reuse.keys import ReuseScope, ScopeLike, scope_of
from kv_cache_manager_v2.reuse.limits import MatchLimits
from kv_cache_manager_v2.reuse.live_curve import LiveCurve
from kv_cache_manager_v2.reuse.match import Match, first_new_block_key, match, match_keys
from kv_cache_manager_v2.reuse.search import Search
from kv_cache_manager_v2.reuse.tokens import Tokens, TokenSequence, pack_unchecked
from kv_cache_manager_v2.reuse_match import ReuseMatch
from kv_cache_manager_v2.step import ManagerSteps
from kv_cache_manager_v2.storage.hierarchy import Hierarchy


class ManagerReuse(ManagerSteps):
    """The part of `KVCacheManager` that answers what could be reused."""

    def __init__(
        self,
        config: KVCacheManagerConfig,
        driver: Driver,
        hierarchy: Hierarchy,
        shared: ManagerState,
        history: MissHistory | None,
    ) -> None:
        super().__init__(config, driver, hierarchy, shared)
        self._tree = shared.tree
        self._history = history  # the latest drops, for `explain_miss`

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
        scope = scope_of(reuse_scope)
        packed = self._prompt(input_tokens, tokens)
        bounds = instance_or_none(limits, MatchLimits, "limits")
        with self._shared.lock:
            look(self._shared, "probe_reuse()")
            return self._match(scope, packed, bounds).num_tokens

    def find_reuse(
        self, reuse_scope: ScopeLike | None = None, input_tokens: Tokens | None = None, limits: MatchLimits | None = None
    ) -> ReuseMatch:
        """As `probe_reuse`, with a result to create a cache from. Changes nothing and holds nothing.

        For a scheduler that retries admission: the tree is searched again only if it has changed.
        """
        scope = scope_of(reuse_scope)
        packed = self._prompt(input_tokens, None)
        bounds = instance_or_none(limits, MatchLimits, "limits")
        with self._shared.lock:
            look(self._shared, "find_reuse()")
            config = self._config
            search = Search(self._tree, scope, packed, config.enable_partial_reuse, config.reuse_match_backoff, bounds)
            return ReuseMatch(self._shared, search)

    @property
    def eviction_policy(self) -> EvictionPolicy:
        """The policy that the configuration asked for. It belongs to this manager alone."""
        return self._shared.eviction_policy

    @property
    def num_published_blocks(self) -> int:
        """Blocks that have entered the tree so far: a mark for `MatchLimits.published_before`. It never decreases."""
        return self._tree.clock

    def probe_first_new_block_key(
        self, reuse_scope: ScopeLike | None = None, input_tokens: Tokens | None = None, tokens: Tokens | None = None
    ) -> bytes | None:
        """The key of the first full block of this prompt that cannot be reused: a request created now would compute it first.

        None if the rest of the prompt fills no block. Two prompts with the same key would compute the same block.
        """
        scope = scope_of(reuse_scope)
        packed = self._prompt(input_tokens, tokens)
        with self._shared.lock:
            look(self._shared, "probe_first_new_block_key()")
            return first_new_block_key(self._tree, scope, packed, self._match(scope, packed))

    def probe_reuse_by_keys(self, reuse_scope: ScopeLike | None, block_keys: Sequence[bytes]) -> int:
        """As `probe_reuse`, given the chained keys of the prompt's blocks, without the root key. Only whole blocks match.

        The first call computes the keys of all cached blocks, which are then kept.
        """
        scope = scope_of(reuse_scope)
        keys = [octets(key, f"block_keys[{i}]") for i, key in enumerate(items_of(block_keys, "block_keys", "keys of 32 bytes"))]
        with self._shared.lock:
            look(self._shared, "probe_reuse_by_keys()")
            return match_keys(self._tree, scope, keys, self._config.reuse_match_backoff).num_tokens

    def explain_miss(self, reuse_scope: ScopeLike | None, tokens: Tokens) -> MissReport:
        """Explain why `probe_reuse` finds no more: print the result. Changes nothing.

        Dropped blocks are known only if `miss_history` is configured. O(prompt), plus one probe per other scope.
        """
        scope = scope_of(reuse_scope)
        packed = pack_unchecked(tokens, self._config.text_only)
        config = self._config
        tiers = [tier_config.tier for tier_config in config.cache_tiers]
        with self._shared.lock:
            look(self._shared, "explain_miss()")
            return explain(self._tree, scope, packed, config.enable_partial_reuse, config.reuse_match_backoff, self._history, tiers)

    def explain_hits(self) -> HitsReport:
        """What the look-ups found so far, and which layer groups made their matches shorter, why, and what to configure: print it.

        A layer group that loses more tokens than are reused is also named in the log, once, from the hundredth look-up on.
        """
        with self._shared.lock:
            look(self._shared, "explain_hits()")
            return self._shared.losses.report()

    def hit_curve(self, cache_level: SupportsIndex = GPU_LEVEL) -> HitCurve:
        """What this level would find of the prompts if it had another size, and the warmer ones their present sizes.

        It is an estimate, from a sample of the blocks, for the least recently used order and layers that need all blocks: of the
        tokens of all caches created since `restart_hit_curve()`, those that this level would find and no warmer one. See
        docs/hit_curve.md for its error. O(1). Raises LogicError unless `hit_curve_rate` is configured.
        """
        level = self._level(cache_level)
        with self._shared.lock:
            look(self._shared, "hit_curve()")
            sizings = self._hierarchy.sizings
            warmer = sum([self._layout.blocks_in(sizings[number].slots) for number in range(level)])
            return self._live_curve("hit_curve()").curve(warmer, self._layout.block_bytes())

    @property
    def hit_curve_rate(self) -> float:
        """The share of the blocks that `hit_curve` samples now; 0 without a curve. It falls if the sample becomes too large."""
        curve = self._shared.live_curve
        return 0.0 if curve is None else curve.rate

    def restart_hit_curve(self) -> None:
        """Let `hit_curve` count anew. It still knows the blocks that were used before."""
        with self._shared.lock:
            look(self._shared, "restart_hit_curve()")
            self._live_curve("restart_hit_curve()").restart()

    # --- internal

    def _live_curve(self, call: str) -> LiveCurve:
        curve = self._shared.live_curve
        if curve is None:
            raise LogicError(f"{call}: no hit curve is kept; configure hit_curve_rate, such as 0.1")
        return curve

    def _match(self, scope: ReuseScope, tokens: TokenSequence, limits: MatchLimits | None = None) -> Match:
        config = self._config
        return match(self._tree, scope, tokens, config.enable_partial_reuse, config.reuse_match_backoff, limits)

    def _prompt(self, input_tokens: Tokens | None, tokens: Tokens | None) -> TokenSequence:
        """Pack the tokens to look up. `tokens` is the old name of the argument."""
        given = input_tokens if tokens is None else renamed("tokens", "input_tokens", tokens)
        return pack_unchecked(() if given is None else given, self._config.text_only)
