"""The policy that a configuration asks for: by name, or by something that makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kv_cache_manager_v2.arguments import check_maker, instance
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.eviction.adaptive import AdaptivePolicy, HintsPolicy
from kv_cache_manager_v2.eviction.policy import EvictionPolicy

POLICIES: Final[dict[str, Callable[[], EvictionPolicy]]] = {
    "lru": EvictionPolicy,
    "hints": HintsPolicy,
    "adaptive": AdaptivePolicy,
}


def check_policy(wanted: object) -> None:
    """Raise ConfigError unless the value is the name of a policy, or can be called."""
    check_maker(wanted, "eviction_policy", POLICIES, EvictionPolicy)


def make_policy(wanted: str | Callable[[], EvictionPolicy]) -> EvictionPolicy:
    """A new policy, by name or by calling what the user gave. Raises ConfigError if that returns something else."""
    make: Callable[[], object] = POLICIES[wanted] if isinstance(wanted, str) else wanted
    policy = instance(make(), EvictionPolicy, "the policy that eviction_policy() returned")
    if not hasattr(policy, "order"):
        raise ConfigError(f"{type(policy).__name__} has no order; its __init__ must call EvictionPolicy.__init__")
    return policy
