"""Limits on what a match may use, for one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import at_least_or_none, flag, given
from kv_cache_manager_v2.errors import ConfigError

_WHOLE: Final = ("max_tokens", "exact_tokens", "published_before")
_FLAGS: Final = ("whole_blocks", "computed_only")


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class MatchLimits:
    """What a match may use, besides what the configuration allows. The defaults allow everything.

    Raises ConfigError for a value of a wrong type or below 0, and if both `max_tokens` and `exact_tokens` are given.
    """

    max_tokens: int | None = None  # a match is not longer
    exact_tokens: int | None = None  # a match has exactly this length, or is empty
    whole_blocks: bool = False  # a match ends with a full block
    computed_only: bool = False  # no block that is published ahead by `KVCache.commit_ahead` and not computed yet
    published_before: int | None = None  # only blocks cached when `KVCacheManager.num_published_blocks` had this value

    def __post_init__(self) -> None:
        for field in _WHOLE:
            object.__setattr__(self, field, at_least_or_none(given(self, field), field, 0))
        for field in _FLAGS:
            flag(given(self, field), field)
        if self.max_tokens is not None and self.exact_tokens is not None:
            raise ConfigError(f"max_tokens is {self.max_tokens} and exact_tokens is {self.exact_tokens}; give one of them")
