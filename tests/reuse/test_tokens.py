"""Packing tokens: the same bytes for the same tokens whatever carries them, and nothing out of range gets in."""

from __future__ import annotations

import ctypes
import pickle
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.reuse.tokens import (
    MmItemContext,
    TokenSequence,
    check_range,
    count_tokens,
    gen_multimodal_cache_key_tokens,
    has_digest,
    pack,
    pack_unchecked,
    unpack,
)
from tests.support.tree_rig import digest

TOP = (1 << 31) - 1
MIXED: list[int | bytes] = [digest(1), 5, digest(2), digest(3), TOP, 0, 7, digest(4)]
tokens_lists = st.lists(st.one_of(st.integers(0, TOP), st.binary(min_size=32, max_size=32)), max_size=40)


@given(tokens_lists)
def test_unpack_undoes_pack(tokens: list[int | bytes]) -> None:
    """Packed bytes give their tokens back, and count them."""
    sequence = pack(tokens)
    assert unpack(sequence.data) == tokens
    assert count_tokens(sequence.data) == sequence.num_tokens == len(tokens)
    assert sequence.digests == [i for i, token in enumerate(tokens) if isinstance(token, bytes)]
    assert has_digest(sequence.data) == bool(sequence.digests)


@given(tokens_lists, tokens_lists)
def test_byte_prefix_is_token_prefix(a: list[int | bytes], b: list[int | bytes]) -> None:
    """One packed sequence begins another exactly if its tokens do."""
    assert pack(b).data.startswith(pack(a).data) == (b[: len(a)] == a)
    assert pack(a + b).data.startswith(pack(a).data)


@given(tokens_lists)
def test_offsets_are_those_of_the_tokens(tokens: list[int | bytes]) -> None:
    """A position's byte offset is the length of what is packed before it; back again, half a token does not count."""
    sequence = pack(tokens)
    for position in range(len(tokens) + 1):
        offset = len(pack(tokens[:position]).data)
        assert sequence.byte_offset(position) == offset
        assert sequence.whole_tokens(offset) == position
        if position < len(tokens):
            after = len(pack(tokens[: position + 1]).data)
            assert {sequence.whole_tokens(n) for n in range(offset, after)} == {position}
            assert sequence.slice_bytes(position, len(tokens)) == pack(tokens[position:]).data


def test_layout_of_the_bytes() -> None:
    """Ids are 4 bytes, little-endian; a digest is the word 0x80000000 and its 32 bytes."""
    assert pack([1, 258]).data == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert pack([1, digest(9), 2]).data == b"\1\0\0\0" + b"\0\0\0\x80" + digest(9) + b"\2\0\0\0"


def fake_tensor(values: Any, dtype: str, device: str = "cpu") -> Any:
    """An object with the calls of a torch tensor over a numpy array's memory."""
    contiguous = values.flags.c_contiguous
    return SimpleNamespace(
        data_ptr=lambda: values.ctypes.data,
        dim=lambda: values.ndim,
        shape=values.shape,
        numel=lambda: values.size,
        dtype=f"torch.{dtype}",
        device=SimpleNamespace(type=device),
        is_contiguous=lambda: contiguous,
        contiguous=lambda: fake_tensor(np.ascontiguousarray(values), dtype),
        tolist=lambda: values.tolist(),
    )


IDS = [0, 1, 70_000, TOP, 5]
WIDE = np.array(IDS, dtype=np.int64)
NARROW = np.array(IDS, dtype=np.int32)
SPREAD = np.zeros(10, dtype=np.int32)
SPREAD[::2] = IDS
CARRIERS: dict[str, object] = {
    "tuple": tuple(IDS),
    "deque": deque(IDS),
    "list of numpy integers": [np.int64(i) for i in IDS],
    "array of int32": array("i", IDS),
    "array of uint32": array("I", IDS),
    "array of int64": array("q", IDS),
    "memoryview": memoryview(array("i", IDS)),
    "numpy int32": NARROW,
    "numpy uint32": NARROW.astype(np.uint32),
    "numpy int64": WIDE,
    "numpy uint64": WIDE.astype(np.uint64),
    "numpy of the other byte order": NARROW.astype(">i4"),
    "numpy with gaps": SPREAD[::2],
    "numpy backwards": NARROW[::-1].copy()[::-1],
    "ctypes": (ctypes.c_int * 5)(*IDS),
    "torch int32": fake_tensor(NARROW, "int32"),
    "torch int64": fake_tensor(WIDE, "int64"),
    "torch with gaps": fake_tensor(SPREAD[::2], "int32"),
    "packed before": pack(IDS),
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_carrier_gives_the_same_bytes(carrier: str) -> None:
    """A prompt's identity does not depend on the type that carries it."""
    assert pack(CARRIERS[carrier]).data == pack(IDS).data


class Liar(Sequence[int]):
    """A sequence whose length is not the number of its items."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return 7

    def __iter__(self) -> Iterator[int]:
        return repeat(7)


RELEASED = memoryview(array("i", IDS))
RELEASED.release()


@pytest.mark.parametrize("tokens", [count(), iter(IDS), Liar(), RELEASED], ids=["endless", "iterator", "other length", "released"])
def test_what_need_not_end_is_refused(tokens: object) -> None:
    """An iterator may go on for ever; only what has a length is read, and so much of it."""
    with pytest.raises(ConfigError, match=r"tokens .*of type|cannot be read"):
        pack(tokens)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_small_integers_are_converted(dtype: Any) -> None:
    """Integers of another size are read one by one, never reinterpreted."""
    assert pack(np.array([1, 2, 100], dtype=dtype)).data == pack([1, 2, 100]).data
    assert pack(fake_tensor(np.array([1, 2, 100], dtype=dtype), np.dtype(dtype).name)).data == pack([1, 2, 100]).data


@pytest.mark.parametrize(
    "empty", [[], (), array("i"), np.zeros(0, np.int32), np.zeros(0, np.int64), fake_tensor(WIDE[:0], "int64")]
)
def test_nothing_packs_to_nothing(empty: object) -> None:
    """An empty prompt is a prompt."""
    sequence = pack(empty)
    assert (sequence.data, sequence.num_tokens) == (b"", 0)


@pytest.mark.parametrize("bad", [-1, 1 << 31, (1 << 32) - 1, 1 << 32, -(1 << 31), 1 << 40, -(1 << 63)])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    """Position and value are named, whatever carries them; no id wraps onto another."""
    carriers: list[Any] = [[1, 2, bad, 3], (1, 2, bad, 3), [digest(1), 2, bad], array("q", [1, 2, bad, 3])]
    carriers.append(np.array([1, 2, bad, 3], dtype=np.int64))
    carriers.append(fake_tensor(np.array([1, 2, bad, 3], dtype=np.int64), "int64"))
    if -(1 << 31) <= bad < 0:
        carriers.append(np.array([1, 2, bad, 3], dtype=np.int32))
    if 0 <= bad < 1 << 32:
        carriers.append(np.array([1, 2, bad, 3], dtype=np.uint32))
        carriers.append(array("I", [1, 2, bad, 3]))
    for carrier in carriers:
        with pytest.raises(ConfigError, match=rf"position 2 is .*{bad}") as error:
            pack(carrier)
        assert isinstance(error.value, ValueError)


def test_integers_beyond_every_word_are_refused() -> None:
    """Nor does Python's unlimited range matter."""
    with pytest.raises(ConfigError, match="position 1 is 1180591620717411303424"):
        pack([0, 1 << 70])
    with pytest.raises(ConfigError, match="position 0 is -1180591620717411303424"):
        pack([-(1 << 70)])


def test_buffers_of_64_bits_need_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    ids = [0, 5, (1 << 31) - 1]
    assert pack(array("q", ids)).data == pack(ids).data
    for values in ([5, -1], [5, 1 << 31], [5, (1 << 32) + 5], [0x01010101_00000005]):
        with pytest.raises(ConfigError, match=f"position {len(values) - 1} is {values[-1]}"):
            pack(array("q", values))


def test_the_range_of_a_buffer_may_be_checked_later() -> None:
    """`pack_unchecked` leaves the ids of a buffer to `check_range`, which may begin after ids that are known to be in range."""
    buffer = np.array([-5, 1, 2, 3], dtype=np.int32)
    sequence = pack_unchecked(buffer)
    check_range(sequence, 1)
    assert not sequence.checked
    with pytest.raises(ConfigError, match=r"position 0 is 4294967291 \(-5 as int32\)"):
        check_range(sequence, 0)
    good = pack_unchecked(buffer[1:])
    check_range(good, 0)
    assert good.checked
    with pytest.raises(ConfigError, match="position 0"):
        pack_unchecked([-5])


@pytest.mark.parametrize("length", [0, 1, 31, 33, 64])
def test_digests_have_32_bytes(length: int) -> None:
    """Another length would make two different items alike."""
    with pytest.raises(ConfigError, match=f"position 1 .* of {length} bytes"):
        pack([1, b"x" * length])
    with pytest.raises(ConfigError, match="must be 32 bytes"):
        MmItemContext(b"x" * length)


@pytest.mark.parametrize("bad", [1.0, "7", None, [1], np.float32(2), bytearray(32)])
def test_other_elements_are_refused(bad: object) -> None:
    """Floats and the like are no tokens, even where their value is whole."""
    with pytest.raises(ConfigError, match="position 1"):
        pack([1, bad, 2])
    with pytest.raises(ConfigError, match="position 2"):
        pack([1, digest(1), bad])


@pytest.mark.parametrize(
    "bad",
    [
        "text",
        b"bytes",
        bytearray(b"bytes"),
        17,
        None,
        np.zeros(3, np.float32),
        np.zeros(3, bool),
        np.zeros((2, 2), np.int32),
        np.zeros((2, 2), np.int16),
        np.int32(5),
        array("d", [1.0]),
        fake_tensor(np.zeros((2, 2), np.int32), "int32"),
        fake_tensor(np.zeros(2, np.float32), "float32"),
        fake_tensor(np.zeros(2, np.int32), "int32", "cuda"),
    ],
)
def test_other_carriers_are_refused(bad: object) -> None:
    """What is no one-dimensional run of integers is refused, never reinterpreted."""
    with pytest.raises(ConfigError):
        pack(bad)


def test_text_only_refuses_digests() -> None:
    """By every public call: lists, contexts and packed sequences."""
    with pytest.raises(ConfigError, match="position 1 is a digest"):
        pack([1, digest(1)], text_only=True)
    with pytest.raises(ConfigError, match="position 0 is a digest"):
        pack([MmItemContext(digest(1))], text_only=True)
    with pytest.raises(ConfigError, match="position 0 is a digest"):
        pack(pack([digest(1)]), text_only=True)
    assert pack([1, 2], text_only=True).num_tokens == 2


@pytest.mark.parametrize("length", [1, 8, 9, 32, 33, 500])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("kind", ["alone", "ids", "small ids", "one small id", "digests", "contexts", "tuple", "deque"])
def test_a_bool_is_no_token(length: int, value: bool, kind: str) -> None:
    """At whatever position of a list of whatever length, and whatever the other tokens are."""
    for position in sorted({0, length // 2, length - 1}):
        others: list[object] = list(range(1002, 1002 + length))
        if kind == "alone":
            others = [value] * length
        elif kind == "small ids":
            others = [number % 3 for number in range(length)]
        elif kind == "one small id":
            others[(position + 1) % length] = 256
        elif kind == "digests":
            others[(position + 1) % length] = digest(1)
        elif kind == "contexts":
            others[(position + 1) % length] = MmItemContext(digest(1))
        if kind != "alone":
            assert pack(others).num_tokens == length
        others[position] = value
        first = 0 if kind == "alone" else position
        tokens: object = others
        if kind == "tuple":
            tokens = tuple(others)
        elif kind == "deque":
            tokens = deque(others)
        with pytest.raises(ConfigError, match=rf"token at position {first} is {value}: a bool is no token id"):
            pack(tokens)


def test_a_numpy_bool_is_no_token() -> None:
    """Alone, in a list, and as an array."""
    for wrong in ([np.True_], [5] * 50 + [np.False_], np.ones(40, bool), memoryview(bytes(40)).cast("?")):
        with pytest.raises(ConfigError):
            pack(wrong)


def test_a_context_is_its_digest() -> None:
    """The front end's id of an item takes no part in equality."""
    item = MmItemContext(digest(7), "image 1")
    assert pack([1, item, 2]).data == pack([1, digest(7), 2]).data
    assert item == MmItemContext(digest(7), "image 2")
    assert hash(item) == hash(MmItemContext(digest(7)))
    assert item != MmItemContext(digest(8), "image 1")
    again = pickle.loads(pickle.dumps(item))
    assert (again.digest, again.uuid) == (item.digest, item.uuid)


def test_torch_tensors() -> None:
    """The real ones, where torch is installed."""
    torch: Any = pytest.importorskip("torch")
    for dtype in (torch.int32, torch.int64, torch.uint32):
        tensor = torch.tensor(IDS, dtype=torch.int64).to(dtype)
        assert pack(tensor).data == pack(IDS).data
    assert pack(torch.tensor([3, 9, 4, 9], dtype=torch.int32)[::2]).data == pack([3, 4]).data
    assert pack(torch.tensor([3, 4], dtype=torch.int16)).data == pack([3, 4]).data
    for bad in (
        torch.zeros(2),
        torch.zeros((2, 2), dtype=torch.int32),
        torch.tensor([1, -1], dtype=torch.int32),
        torch.ones(40, dtype=torch.bool),
    ):
        with pytest.raises(ConfigError):
            pack(bad)


def test_multimodal_items_as_tokens() -> None:
    """Position 0 of an item is its digest, position j the id id_offset + j; a later slice holds no digest."""
    assert gen_multimodal_cache_key_tokens(1000, digest(1), 3) == [digest(1), 1001, 1002]
    assert gen_multimodal_cache_key_tokens(1000, digest(1), 2, token_offset=2) == [1002, 1003]
    assert gen_multimodal_cache_key_tokens(1000, digest(1), 2, 0, "id") == [MmItemContext(digest(1), "id"), 1001]


@pytest.mark.parametrize(
    ("data", "count", "offset"), [(b"x" * 31, 1, 0), (digest(1), 0, 0), (digest(1), -1, 0), (digest(1), 1, -1)]
)
def test_multimodal_items_are_validated(data: bytes, count: int, offset: int) -> None:
    """Digest length, count and offset."""
    with pytest.raises(ConfigError):
        gen_multimodal_cache_key_tokens(1000, data, count, offset)


def test_mixed_sequences_by_runs() -> None:
    """Runs of ids between digests, also empty ones at both ends."""
    sequence: TokenSequence = pack(MIXED)
    assert unpack(sequence.data) == MIXED
    assert sequence.digests == [0, 2, 3, 7]
    assert sequence.checked
