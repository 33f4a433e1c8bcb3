"""Validation of arguments at the public interface.

Rule: a door takes `object`, whatever type the stubs promise, and makes of it what it needs with one of these calls, or raises
ConfigError with the parameter's name and the value, before anything changes; so the answer to a mistake is the same on both
builds. Any integer type is an integer (numpy's and torch's scalars too) and a plain int from there on; bool is none, nor is a
float that happens to be whole.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, SupportsIndex, TypeVar, cast

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import UNSIGNED_64_LIMIT

WORD_LIMIT: Final = 1 << 63  # lengths, sizes and addresses stay below: nothing that large can be, and machines count in words
LONGEST_SHOWN: Final = 200  # characters of a value in a message

_T = TypeVar("_T")


def shown(value: object) -> str:
    """A value as a message shows it: not a million tokens."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def given(record: object, field: str) -> object:
    """What a user put into a field: read by its name, since the compiled build would not read it as a type that it is not."""
    value: object = getattr(record, field)
    return value


# --- numbers


def whole(value: object, name: str) -> int:
    """The value as a plain int. Raises ConfigError for anything that is not an integer."""
    if type(value) is int:
        return value
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:  # an array of several, or something that only claims to be an integer
            pass
    raise ConfigError(f"{name} is {shown(value)}; it must be an integer")


def whole_or_none(value: object, name: str) -> int | None:
    """As `whole`, where None means that there is none."""
    return None if value is None else whole(value, name)


def at_least(value: object, name: str, low: int) -> int:
    """A length, a size or a count: an integer not below `low`, and below 2**63."""
    number = whole(value, name)
    if number < low:
        raise ConfigError(f"{name} is {number}; it must be at least {low}")
    if number >= WORD_LIMIT:
        raise ConfigError(f"{name} is {number}; it must be below 2**63")
    return number


def at_least_or_none(value: object, name: str, low: int) -> int | None:
    """As `at_least`, where None means that there is none."""
    return None if value is None else at_least(value, name, low)


def real(value: object, name: str) -> float:
    """An int or a float as a float; NaN passes, so that the caller's range check refuses it with its own words."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} is {shown(value)}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{name} is {value}; it must be a number that a float can hold") from None


def positive(value: object, name: str) -> float:
    """A duration: a number above 0, and not without end."""
    number = real(value, name)
    if not 0.0 < number < math.inf:
        raise ConfigError(f"{name} is {number}; it must be positive, and finite")
    return number


def unsigned(value: object, name: str) -> int:
    """A number that somebody else chose: any unsigned 64-bit integer."""
    number = whole(value, name)
    if not 0 <= number < UNSIGNED_64_LIMIT:
        raise ConfigError(f"{name} {number} is out of range: it must be in 0..2**64-1")
    return number


def unsigned_or_none(value: object, name: str) -> int | None:
    """As `unsigned`, where None means that there is none."""
    return None if value is None else unsigned(value, name)


def request_id(value: object) -> int | None:
    """An engine's own number of a request, or None for none."""
    return unsigned_or_none(value, "id")


# --- single values of other types


def flag(value: object, name: str) -> bool:
    """True or False; nothing else is taken for one."""
    if value is True:
        return True
    if value is False:
        return False
    raise ConfigError(f"{name} is {shown(value)}; it must be True or False")


def text(value: object, name: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {shown(value)}; it must be a string")
    return value


def octets(value: object, name: str) -> bytes:
    """Bytes."""
    if not isinstance(value, bytes):
        raise ConfigError(f"{name} is {shown(value)}; it must be bytes")
    return value


def instance(value: object, kind: type[_T], name: str) -> _T:
    """An object of our class `kind`, or of a class derived from it."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {shown(value)}; it must be of class {kind.__name__}")
    return value


def instance_or_none(value: object, kind: type[_T], name: str) -> _T | None:
    """As `instance`, where None means that there is none."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} is {shown(value)}; it must be of class {kind.__name__}, or None")
    return value


def function(value: object, name: str) -> Callable[..., object]:
    """Something to call."""
    usable: bool = callable(value)
    if not usable:
        raise ConfigError(f"{name} is {shown(value)}, which cannot be called")
    return cast("Callable[..., object]", value)


# --- several values


def items_of(values: object, name: str, what: str) -> list[object]:
    """The items of a sequence (list, tuple, array, numpy's and torch's too), as a list; a list as it is. Neither a string nor
    something that can be read only once is one. `what` says in the plural what its items must be."""
    if isinstance(values, list):
        return values
    if isinstance(values, tuple):
        return list(values)
    if not isinstance(values, (str, bytes, bytearray, memoryview)):
        tolist = getattr(values, "tolist", None)
        items: object = tolist() if callable(tolist) else list(values) if isinstance(values, Sequence) else None
        if isinstance(items, list):
            return items
    raise ConfigError(f"{name} is {shown(values)}; it must be a sequence of {what}")


def each_of(values: object, name: str, what: str) -> list[object]:
    """As `items_of`, for whatever can be iterated over, once too."""
    if isinstance(values, (list, tuple)):
        return list(values)
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, bytearray, memoryview)):
        return list(values)
    raise ConfigError(f"{name} is {shown(values)}; it must be an iterable of {what}")


def wholes(values: object, name: str, low: int) -> list[int]:
    """A sequence of integers, none below `low`, all of them below 2**63."""
    return [at_least(item, f"{name}[{position}]", low) for position, item in enumerate(items_of(values, name, "integers"))]


def instances(values: object, kind: type[_T], name: str) -> list[_T]:
    """A sequence of objects of our class `kind`."""
    found: list[_T] = []
    for position, item in enumerate(items_of(values, name, f"{kind.__name__} objects")):
        found.append(instance(item, kind, f"{name}[{position}]"))
    return found


def mapping(values: object, name: str, what: str) -> Mapping[object, object]:
    """A mapping; `what` says of what to what."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} is {shown(values)}; it must be a mapping of {what}")
    return values
