"""Validation of arguments at the public interface.

Rule: a signature says what should be passed; what is passed is validated by one of these calls before anything changes. A mistake
raises ConfigError with the parameter's name and the value, on both builds. The compiled build checks the class of some arguments at
entry, where `refuse` raises the same error.

Integers are annotated `SupportsIndex`: any integer type is accepted (numpy's and torch's too) and becomes an int. bool is refused,
and so is a float without a fraction. Numbers are annotated `SupportsFloat`, since a compiled function would make a float of a bool.
"""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from types import FrameType
from typing import Any, Final, NoReturn, Protocol, SupportsFloat, SupportsIndex, TypeAlias, TypeVar, cast

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import UNSIGNED_64_LIMIT, PageIndexMode

SEQUENCE_LIMIT: Final = 1 << 31  # items: positions fit int32
WORD_LIMIT: Final = 1 << 63  # lengths, sizes and addresses stay below: nothing that large can be, and machines count in words
LONGEST_SHOWN: Final = 200  # characters of a value in a message

_T = TypeVar("_T")


class IntBuffer(Protocol):
    """A one-dimensional buffer of integers: array, numpy array, memoryview, torch CPU tensor."""

    def __len__(self) -> int: ...

    def tolist(self) -> Any: ...


Integers: TypeAlias = Sequence[SupportsIndex] | IntBuffer  # what calls take as a sequence of integers


def shown(value: object) -> str:
    """A value as error messages show it, shortened if long."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of thousands of digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"of class {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


_EXPECTED: Final = {
    "bool": "True or False",
    "bytes": "bytes",
    "float": "a number",
    "int": "an integer",
    "str": "a string",
}  # classes in the words of a message


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Raise ConfigError: the argument `name` is not of the class `expected`, as mypyc spells it ("bool", "a.b.Class or None")."""
    kind = expected.removesuffix(" or None")
    words = _EXPECTED.get(kind) or f"of class {kind.rpartition('.')[2]}"
    raise ConfigError(f"{name} is {shown(value)}; it must be {words}{'' if kind == expected else ', or None'}")


def given(record: object, field: str) -> object:
    """The value of a field that a user has assigned. Read by name: the compiled build raises for an attribute of a wrong type."""
    value: object = getattr(record, field)
    return value


def renamed(old: str, new: str, value: _T) -> _T:
    """Return the argument of a parameter passed by its old name, with a DeprecationWarning."""
    deprecated(f"the parameter {old} is now {new}; the old name will be removed in the next release")
    return value


def deprecated(message: str) -> None:
    """Warn at the line that called the package. Looks at the frames, since a compiled call has none."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("kv_cache_manager_v2."):
        frame = frame.f_back
        level += 1
    warnings.warn(message, DeprecationWarning, stacklevel=level)


# --- numbers


def is_bool(value: object) -> bool:
    """Whether the value is a truth value: Python's or numpy's, which converts to a float, and before numpy 2.3 to an int."""
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


def whole(value: object, name: str) -> int:
    """The value as a plain int. Raises ConfigError for anything that is not an integer."""
    if type(value) is int:
        return value
    if isinstance(value, SupportsIndex) and not is_bool(value):
        try:
            return operator.index(value)
        except TypeError:  # an array of several, or something that only claims to be an integer
            pass
    refuse(name, value, "int")


def whole_or_none(value: object, name: str) -> int | None:
    """As `whole`, where None means that there is none."""
    return None if value is None else whole(value, name)


def at_least(value: object, name: str, low: int) -> int:
    """A length, a size or a count: an integer not below `low`, and below 2**63."""
    number = whole(value, name)
    if number < low:
        raise ConfigError(f"{name} is {shown(number)}; it must be at least {low}")
    if number >= WORD_LIMIT:
        raise ConfigError(f"{name} is {shown(number)}; it must be below 2**63")
    return number


def at_least_or_none(value: object, name: str, low: int) -> int | None:
    """As `at_least`, where None means that there is none."""
    return None if value is None else at_least(value, name, low)


def real(value: object, name: str) -> float:
    """Any number except a bool, as a float. NaN is accepted: the caller checks the range."""
    if type(value) is float:
        return value
    if type(value) is int and abs(value) < WORD_LIMIT:  # testing for the protocol takes some microseconds
        return float(value)
    if isinstance(value, SupportsFloat) and not is_bool(value):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} is {shown(value)}; it must be a number that a float can hold") from None
        except (TypeError, ValueError):  # an array of several, or something that only claims to be a number
            pass
    refuse(name, value, "float")


def positive(value: object, name: str) -> float:
    """A finite number above 0."""
    number = real(value, name)
    if not 0.0 < number < math.inf:
        raise ConfigError(f"{name} is {number}; it must be positive, and finite")
    return number


def unsigned(value: object, name: str) -> int:
    """An unsigned 64-bit integer, such as a salt."""
    number = whole(value, name)
    if not 0 <= number < UNSIGNED_64_LIMIT:
        raise ConfigError(f"{name} {shown(number)} is out of range: it must be in 0..2**64-1")
    return number


def unsigned_or_none(value: object, name: str) -> int | None:
    """As `unsigned`, where None means that there is none."""
    return None if value is None else unsigned(value, name)


# --- ids of requests


class OpaqueId:
    """An engine's id of a request that is neither an integer nor a string.

    Its hash and its text are taken once, and an error in a comparison means unequal: the code of its class can make no call fail.
    """

    def __init__(self, value: object, name: str) -> None:
        self.value = value
        try:
            self._hash = hash(value)
            self._text = shown(value)
        except Exception as error:
            kind = type(value).__name__
            raise ConfigError(f"{name} is of class {kind}: {error}; pass an int, a str or another object that has a hash") from None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpaqueId):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except Exception:
            return False

    def __repr__(self) -> str:
        return self._text


def request_id(value: object, name: str = "id") -> object:
    """An engine's id of a request, as the package keeps it: an int, a str, an OpaqueId, or None for none."""
    if value is None or type(value) is int or type(value) is str:
        return value
    if isinstance(value, SupportsIndex) and not is_bool(value):
        try:
            return operator.index(value)
        except TypeError:
            pass
    return OpaqueId(value, name)


def as_given(kept: object) -> object:
    """The id that the engine gave."""
    return kept.value if isinstance(kept, OpaqueId) else kept


# --- single values of other types


def flag(value: object, name: str) -> bool:
    """True or False. Raises ConfigError for anything else, including 0 and 1."""
    if value is True:
        return True
    if value is False:
        return False
    refuse(name, value, "bool")


def text(value: object, name: str) -> str:
    """A string."""
    if not isinstance(value, str):
        refuse(name, value, "str")
    return value


def octets(value: object, name: str) -> bytes:
    """Bytes."""
    if not isinstance(value, bytes):
        refuse(name, value, "bytes")
    return value


def instance(value: object, kind: type[_T], name: str) -> _T:
    """An object of our class `kind`, or of a class derived from it."""
    if not isinstance(value, kind):
        refuse(name, value, kind.__name__)
    return value


def instance_or_none(value: object, kind: type[_T], name: str) -> _T | None:
    """As `instance`, where None means that there is none."""
    if value is not None and not isinstance(value, kind):
        refuse(name, value, f"{kind.__name__} or None")
    return value


def function(value: object, name: str) -> Callable[..., object]:
    """A callable."""
    usable: bool = callable(value)
    if not usable:
        raise ConfigError(f"{name} is {shown(value)}, which cannot be called")
    return cast("Callable[..., object]", value)


def page_index_mode(value: object, name: str) -> PageIndexMode:
    """A PageIndexMode, or the int that it is."""
    if isinstance(value, PageIndexMode):
        return value
    number = whole(value, name)
    for mode in (PageIndexMode.SHARED, PageIndexMode.PER_LAYER):
        if number == mode.value:
            return mode
    raise ConfigError(f"{name} is {shown(value)}; it must be PageIndexMode.SHARED (0) or PageIndexMode.PER_LAYER (1)")


def page_index_mode_or_none(value: object, name: str) -> PageIndexMode | None:
    """As `page_index_mode`, where None means that there is none."""
    return None if value is None else page_index_mode(value, name)


# --- several values


def require_readable(values: object, name: str) -> None:
    """Raise ConfigError for a sequence of 2**31 items or more, such as a `range`: to read it would take all memory."""
    try:
        short = not isinstance(values, Sized) or len(values) < SEQUENCE_LIMIT
    except OverflowError:  # of `len()` itself
        short = False
    except TypeError:  # an array without dimensions, which the caller refuses
        short = True
    except ValueError as error:  # of a memoryview that was released
        raise ConfigError(f"{name} cannot be read: {error}") from error
    if not short:
        raise ConfigError(f"{name} has 2**31 items or more; no request has so many positions")


def items_of(values: object, name: str, what: str) -> list[object]:
    """The items of a sequence (list, tuple, array, numpy's and torch's too), as a list; a list as it is. Neither a string nor
    something that can be read only once is one. `what` says in the plural what its items must be."""
    if isinstance(values, list):
        return values
    if isinstance(values, tuple):
        return list(values)
    if not isinstance(values, (str, bytes, bytearray, memoryview)):
        require_readable(values, name)
        tolist = getattr(values, "tolist", None)
        items: object = tolist() if callable(tolist) else list(values) if isinstance(values, Sequence) else None
        if isinstance(items, list):
            return items
    raise ConfigError(f"{name} is {shown(values)}; it must be a sequence of {what}")


def each_of(values: object, name: str, what: str) -> list[object]:
    """As `items_of`, for any iterable, including iterators."""
    if isinstance(values, (list, tuple)):
        return list(values)
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, bytearray, memoryview)):
        require_readable(values, name)
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
    """A mapping. `what` describes its keys and values in an error."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} is {shown(values)}; it must be a mapping of {what}")
    return values


def check_maker(wanted: object, name: str, known: Mapping[str, object], kind: type) -> None:
    """Raise ConfigError unless the value is one of the known names, or can be called, to make an object of class `kind`."""
    good: bool = wanted in known if isinstance(wanted, str) else callable(wanted)
    if not good:
        raise ConfigError(
            f"{name} is {shown(wanted)}; it must be one of {', '.join(known)}, or make a {kind.__name__} when it is called, as its "
            "class does"
        )


# --- fields of a record
#
# They are read and written by name: an assigned value is an `object` until it is checked. The compiled build would raise its own
# TypeError if it read a field of the wrong type as an attribute.


def check_whole_field(record: object, field: str, low: int, owner: str = "") -> None:
    """Convert the field to an int from `low` to 2**63 - 1. Every integer type is accepted (numpy's too), bool is not."""
    setattr(record, field, at_least(given(record, field), f"{field}{owner}", low))


def check_kind_field(record: object, field: str, kind: type, owner: str = "") -> None:
    """Raise ConfigError unless the field is None or an instance of `kind`."""
    value = given(record, field)
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{field}{owner} is {shown(value)}; it must be a {kind.__name__}, or None")


def check_list_field(record: object, field: str, kind: type, owner: str = "") -> None:
    """Raise ConfigError unless the field is a sequence of instances of `kind`."""
    value = given(record, field)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ConfigError(f"{field}{owner} is {shown(value)}; it must be a list of {kind.__name__}")
    for position, item in enumerate(value):
        if not isinstance(item, kind):
            raise ConfigError(f"{field}{owner} has {shown(item)} at position {position}; each item must be a {kind.__name__}")


def check_real_field(record: object, field: str) -> float:
    """Convert the field to a float, and return it."""
    number = real(given(record, field), field)
    setattr(record, field, number)
    return number
