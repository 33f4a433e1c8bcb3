"""What counts as a number where the user hands us one.

Rule: any integer type is taken at the doors (numpy's and torch's scalars too) and is a plain int from there on, on both
builds; bool, floats and everything else are refused with the name and the value, before anything changes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import UNSIGNED_64_LIMIT


def whole(value: object, name: str) -> int:
    """The value as a plain int. Raises ConfigError for anything that is not an integer."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(f"{name} is {value!r}; it must be an integer")
    return operator.index(value)


def whole_or_none(value: object, name: str) -> int | None:
    """As `whole`, where None means that there is none."""
    return None if value is None else whole(value, name)


def as_list(values: Sequence[object]) -> list[object]:
    """A list of the items, which numpy and torch arrays give as plain numbers; a list as it is."""
    if isinstance(values, list):
        return values
    tolist = getattr(values, "tolist", None)
    items: object = tolist() if tolist is not None else list(values)
    if not isinstance(items, list):
        raise ConfigError(f"{values!r} has no items")
    return items


def request_id(value: object) -> int | None:
    """An engine's own number of a request: any unsigned 64-bit integer, or None for none. Raises ConfigError."""
    number = whole_or_none(value, "id")
    if number is not None and not 0 <= number < UNSIGNED_64_LIMIT:
        raise ConfigError(f"id {number} is out of range: it must be in 0..2**64-1, or None")
    return number
