"""Limits on what a match may use, for one call."""

from dataclasses import dataclass

@dataclass(frozen=True)
class MatchLimits:
    """What a match may use, besides what the configuration allows. The defaults allow everything.

    Raises ConfigError for a value of a wrong type or below 0, and if both `max_tokens` and `exact_tokens` are given.
    """

    max_tokens: int | None = None
    exact_tokens: int | None = None
    whole_blocks: bool = False
    computed_only: bool = False
    published_before: int | None = None
