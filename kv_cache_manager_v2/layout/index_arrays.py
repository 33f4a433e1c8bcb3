"""Arithmetic on whole arrays of page indices, at the speed of memory: a few passes of numpy over them.

numpy is optional: without it, and for short arrays, the caller computes index by index.
"""

from __future__ import annotations

from typing import Any, Final

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, INT32_MAX

WORTH_IT: Final = 128  # entries from which numpy's cost of a call is less than that of a loop


def scale_indices(numpy: Any, bases: Any, out: Any, scale: int, offset: int, factor: int = 1) -> None:
    """Write `(base * scale + offset) * factor` for each base, and BAD for a negative one. `out` may be `bases`.

    Both are one-dimensional numpy arrays of int32 or int64 of one length. Raises ConfigError, with
    nothing written, if one of the `factor` indices from there on does not fit int32.
    """
    if len(bases) == 0:
        return
    largest = int(bases.max())
    top = (largest * scale + offset) * factor + factor - 1
    if largest >= 0 and top > INT32_MAX:
        raise ConfigError(f"page index {top} does not fit int32, whose largest value is {INT32_MAX}")
    absent = bases < 0 if int(bases.min()) < 0 else None
    if scale * factor == 1:
        numpy.copyto(out, bases, casting="same_kind")
    else:
        numpy.multiply(bases, scale * factor, out=out, dtype=out.dtype, casting="same_kind")
    if offset:
        numpy.add(out, offset * factor, out=out)
    if absent is not None:
        numpy.copyto(out, BAD_PAGE_INDEX, where=absent)


def spread_indices(numpy: Any, firsts: Any, out: Any, count: int) -> None:
    """Write first, first + 1, ... first + count - 1 for each first, and `count` times BAD for a negative one."""
    table = out.reshape(-1, count)
    numpy.add(firsts[:, None], numpy.arange(count, dtype=out.dtype), out=table, casting="same_kind")
    absent = firsts < 0
    if absent.any():
        table[absent] = BAD_PAGE_INDEX
