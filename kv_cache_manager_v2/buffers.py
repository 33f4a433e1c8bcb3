"""Integers in memory of the caller: arrays, numpy arrays, memoryviews, and torch tensors in host memory, pinned or not.

All of them are seen as a memoryview of 32-bit or 64-bit integers, without a copy. The memoryview keeps the memory alive.
"""

from __future__ import annotations

import importlib
from array import array
from ctypes import c_char
from typing import Any, Final

from kv_cache_manager_v2.errors import ConfigError

_FORMATS: Final = {"i": "i", "l": "q", "q": "q"}  # of signed integers in native byte order
_TENSORS: Final = {"torch.int32": "i", "torch.int64": "q"}


def integers_in(target: object) -> memoryview[int] | None:
    """One-dimensional contiguous memory of int32 or int64; None for anything else, which may still be a sequence."""
    if isinstance(target, (list, tuple, str, bytes, bytearray)):
        return None
    if hasattr(target, "data_ptr"):
        return _of_tensor(target) if _is_plain(target) and _dimensions(target) == 1 else None
    try:
        view = memoryview(target)  # type: ignore[arg-type]  # raises TypeError without the buffer protocol
    except (TypeError, ValueError):  # ValueError: a format that memoryview does not know
        return None
    kind = _FORMATS.get(view.format.removeprefix("@"))
    if kind is None or view.ndim != 1 or not view.c_contiguous:
        return None
    return view if view.format == kind else _cast(view, kind)


def writable_integers(target: object, name: str, kinds: str = "iq", dimensions: int = 1) -> memoryview[int]:
    """The memory of a buffer that the package fills, in one dimension. `kinds` are "i" for int32, "q" for int64, or both.

    Raises ConfigError, with the remedy, unless it is writable contiguous host memory of that many dimensions.
    """
    wanted = "int32" if kinds == "i" else "int32 or int64"
    if hasattr(target, "data_ptr"):
        return _writable_tensor(target, name, kinds, wanted, dimensions)
    try:
        view = memoryview(target)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name} must support the buffer protocol, got {type(target).__name__}: pass an {wanted} numpy array, "
            "an array('i') or a torch.int32 tensor in host memory"
        ) from None
    kind = _FORMATS.get(view.format.removeprefix("@"))
    if kind is None or kind not in kinds or view.ndim != dimensions:
        raise ConfigError(f"{name} must be {_counted(dimensions)} {wanted}; got format {view.format!r} with {view.ndim} dimensions")
    if view.readonly or not view.c_contiguous:
        raise ConfigError(f"{name} must be writable and contiguous")
    if view.format == kind and dimensions == 1:
        return view
    return _empty(kind) if view.nbytes == 0 else _cast(view, kind)


def require_length(view: memoryview[int], name: str, needed: int) -> None:
    """Raise ConfigError unless the memory has at least so many entries."""
    if len(view) < needed:
        raise ConfigError(f"{name} has {len(view)} entries; it must have at least {needed}")


def numpy_or_none() -> Any:
    """numpy, or None if it is not installed. Imports it on the first call: only long arrays are worth it."""
    if not _NUMPY:
        try:
            _NUMPY.append(importlib.import_module("numpy"))
        except ImportError:
            _NUMPY.append(None)
    return _NUMPY[0]


_NUMPY: Final[list[Any]] = []  # once looked for: the module, or None


def _writable_tensor(tensor: Any, name: str, kinds: str, wanted: str, dimensions: int) -> memoryview[int]:
    if tensor.device.type != "cpu":
        raise ConfigError(f"{name} must be in host memory, got a tensor on {tensor.device}: pass a CPU tensor")
    kind = _TENSORS.get(str(tensor.dtype))
    if kind is None or kind not in kinds or _dimensions(tensor) != dimensions:
        raise ConfigError(
            f"{name} must be {_counted(dimensions)} {wanted}, got {tensor.dtype} with {_dimensions(tensor)} dimensions"
        )
    if not tensor.is_contiguous():
        raise ConfigError(f"{name} must be writable and contiguous")
    return _of_tensor(tensor)


def _counted(dimensions: int) -> str:
    return "one-dimensional" if dimensions == 1 else f"{dimensions}-dimensional"


def _dimensions(tensor: Any) -> int:
    count: object = tensor.dim()
    return count if isinstance(count, int) else -1  # an object that only resembles a tensor


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor is contiguous host memory of int32 or int64."""
    if tensor.device.type != "cpu" or str(tensor.dtype) not in _TENSORS:
        return False
    contiguous: bool = tensor.is_contiguous()
    return contiguous


def _of_tensor(tensor: Any) -> memoryview[int]:
    kind = _TENSORS[str(tensor.dtype)]
    count: int = tensor.numel()
    if count == 0:
        return _empty(kind)
    item: int = tensor.element_size()
    memory: Any = (c_char * (count * item)).from_address(tensor.data_ptr())
    memory.tensor = tensor  # lives as long as the memoryview
    return _cast(memoryview(memory), kind)


def _cast(view: memoryview, kind: str) -> memoryview[int]:
    octets = view.cast("B")
    return octets.cast("i") if kind == "i" else octets.cast("q")


def _empty(kind: str) -> memoryview[int]:
    return memoryview(array("i")) if kind == "i" else memoryview(array("q"))
