"""A match with all that it was searched for, so that it can be searched again once the tree has changed."""

from __future__ import annotations

from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.limits import MatchLimits
from kv_cache_manager_v2.reuse.match import Match, match
from kv_cache_manager_v2.reuse.tokens import TokenSequence
from kv_cache_manager_v2.reuse.tree import RadixTree


class Search:
    """A prompt, the limits of its match, and the latest result. It owns no page."""

    def __init__(
        self, tree: RadixTree, scope: ReuseScope, tokens: TokenSequence, partial: bool, backoff: int, limits: MatchLimits | None
    ) -> None:
        self.tree = tree
        self.scope = scope
        self.tokens = tokens
        self._partial = partial
        self._backoff = backoff
        self._limits = limits
        self.found = match(tree, scope, tokens, partial, backoff, limits)
        self._version: int = tree.version

    def is_current(self) -> bool:
        """Whether another search would have the same result. O(1)."""
        return self._version == self.tree.version

    def result(self) -> Match:
        """The match in the present tree. O(1) while the tree has not changed, else as `match`."""
        if not self.is_current():
            self.found = match(self.tree, self.scope, self.tokens, self._partial, self._backoff, self._limits)
            self._version = self.tree.version
        return self.found
