"""Page indices of whole arrays: the same as index by index, from and into every kind of memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import INT32_MAX, LifeCycleId, PageIndexMode, PoolGroupId, PoolId
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange
from kv_cache_manager_v2.layout.index_arrays import WORTH_IT
from kv_cache_manager_v2.layout.page_index import PageIndexConverter, ScratchDesc
from kv_cache_manager_v2.layout.pools import BufferPlace

PER_LAYER = PageIndexMode.PER_LAYER
LENGTHS: Final = (0, 1, 7, WORTH_IT - 1, WORTH_IT, 3 * WORTH_IT)


def torch_of(values: list[int], kind: str) -> Any:
    torch = pytest.importorskip("torch")
    return torch.tensor(values, dtype=getattr(torch, kind))


MEMORY: Final[dict[str, Callable[[list[int]], Any]]] = {
    "array": lambda values: array("i", values),
    "array of 64 bits": lambda values: array("q", values),
    "memoryview": lambda values: memoryview(array("i", values)),
    "numpy": lambda values: np.array(values, np.int32),
    "numpy of 64 bits": lambda values: np.array(values, np.int64),
    "torch": lambda values: torch_of(values, "int32"),
    "torch of 64 bits": lambda values: torch_of(values, "int64"),
}
OTHER: Final[dict[str, Callable[[list[int]], Any]]] = {
    "every second": lambda values: np.repeat(np.array(values, np.int32), 2)[::2],
    "every second of torch": lambda values: torch_of([value for value in values for _i in range(2)], "int32")[::2],
    "other width": lambda values: np.array(values, np.int16),
    "tuple": tuple,
}


def converter(scale: int = 8, position: int = 5, expansion: int = 1) -> PageIndexConverter:
    place = BufferPlace(LifeCycleId(0), PoolGroupId(0), PoolId(0))
    place.scale, place.position, place.expansion = scale, position, expansion
    place.layer_util, place.layer_first = 2, 4
    return PageIndexConverter(place)


def bases_of(length: int, absent: bool) -> list[int]:
    rng = random.Random(length)
    return [rng.choice([-1, -7, 3]) if absent and rng.random() < 0.5 else rng.randrange(4000) for _i in range(length)]


def scratch_of(length: int) -> ScratchDesc:
    return ScratchDesc(HalfOpenRange(length // 3, length // 2 + 3), [5000 + 3 * number for number in range(length // 2 + 1)])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("expansion", [1, 3])
@pytest.mark.parametrize("kind", [*MEMORY, *OTHER])
def test_arrays_are_converted_as_lists_are(kind: str, expansion: int, length: int) -> None:
    """In both modes, with absent and with scratch blocks; the input stays as it was."""
    convert = converter(expansion=expansion)
    for absent in (False, True):
        bases = bases_of(length, absent)
        source = (MEMORY | OTHER)[kind](bases)
        assert convert(source) == convert(bases)
        assert convert(source, PER_LAYER) == convert(bases, PER_LAYER)
        assert convert(source, PER_LAYER, scratch_of(length)) == convert(bases, PER_LAYER, scratch_of(length))
        assert list(source) == bases


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("expansion", [1, 3])
@pytest.mark.parametrize("kind", MEMORY)
def test_out_is_filled_and_returned(kind: str, expansion: int, length: int) -> None:
    """From a list and from an array; entries after the result stay as they are."""
    convert = converter(expansion=expansion)
    bases = bases_of(length, True)
    for source in (bases, array("i", bases)):
        out = MEMORY[kind]([77] * (length * expansion + 4))
        assert convert(source, PER_LAYER, scratch_of(length), out=out) is out
        assert list(out) == [*convert(bases, PER_LAYER, scratch_of(length)), 77, 77, 77, 77]


@pytest.mark.parametrize("length", LENGTHS)
def test_out_may_be_the_input(length: int) -> None:
    bases = np.array(bases_of(length, True), np.int32)
    expected = list(converter()(bases.tolist(), PER_LAYER))
    assert converter()(bases, PER_LAYER, out=bases).tolist() == expected


@pytest.mark.parametrize("length", [7, 3 * WORTH_IT])
def test_wrong_out_is_refused_with_nothing_written(length: int) -> None:
    """Too short, of another kind, not writable, not contiguous; and an index that does not fit, or a descriptor out of date."""
    bases = array("i", bases_of(length, False))
    readonly = np.zeros(length, np.int32)
    readonly.flags.writeable = False
    bad: list[Any] = [
        np.full(length - 1, 7, np.int32),
        np.full(length, 7, np.int16),
        np.full((length, 1), 7, np.int32),
        np.full(2 * length, 7, np.int32)[::2],
        readonly,
        bytearray(4 * length),
        [0] * length,
    ]
    for out in bad:
        before = list(np.asarray(out).flat)
        with pytest.raises(ConfigError, match="out "):
            converter()(bases, PER_LAYER, out=out)
        assert list(np.asarray(out).flat) == before
    good = np.full(length, 7, np.int32)
    bases[length // 2] = INT32_MAX // 8 + 1
    with pytest.raises(ConfigError, match=f"page index {bases[length // 2] * 8 + 5} does not fit int32"):
        converter()(bases, PER_LAYER, out=good)
    bases[length // 2] = 0
    with pytest.raises(ConfigError, match="but the descriptor has 0"):
        converter()(bases, PER_LAYER, ScratchDesc(HalfOpenRange(0, 2), []), out=good)
    with pytest.raises(ConfigError, match="does not fit int32"):
        converter()(bases, PER_LAYER, ScratchDesc(HalfOpenRange(0, 2), [INT32_MAX // 8 + 1]), out=good)
    assert set(good.tolist()) == {7}


def test_a_tensor_on_a_device_is_refused_with_the_remedy() -> None:
    torch = pytest.importorskip("torch")
    out: Any = torch.zeros(4, dtype=torch.int32, device="meta")
    with pytest.raises(ConfigError, match=r"out must be in host memory, got a tensor on meta"):
        converter()([1], out=out)
