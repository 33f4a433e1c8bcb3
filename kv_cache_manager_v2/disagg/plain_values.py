"""Checks of the plain values that a dictionary from elsewhere holds: each returns the value, or raises TypeError."""

from __future__ import annotations

from collections.abc import Mapping


def mapping_of(value: object) -> Mapping[str, object]:
    """A dictionary."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a dictionary")
    return value


def items_in(value: object) -> list[object]:
    """The items of a list or tuple."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{value!r} is not a list")
    return list(value)


def number_of(value: object) -> int:
    """An integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value


def numbers_of(value: object, count: int) -> list[int]:
    """A list of exactly `count` integers."""
    items = items_in(value)
    if len(items) != count:
        raise TypeError(f"{value!r} has {len(items)} items, not {count}")
    return [number_of(item) for item in items]


def text_of(value: object) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
