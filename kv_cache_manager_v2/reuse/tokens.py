"""Tokens packed into bytes, so that comparing tokens is comparing bytes.

Rule: equal bytes mean equal tokens, and a byte prefix at a token boundary is a token prefix. An id is 4 bytes, little-endian, below
2**31. A multimodal digest is the word 0x80000000, which no id can be, followed by its 32 bytes.

Text has no digests: position p is at byte 4 * p, and an int32 or uint32 buffer is packed by one copy. `pack_unchecked` does not
check the range of a buffer's ids. Ids that equal cached tokens were checked when those were cached, and a match checks the rest.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from ctypes import string_at
from dataclasses import dataclass, field
from itertools import islice
from operator import index
from typing import Any, Final, SupportsIndex, TypeAlias

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import IntBuffer, at_least, given, is_bool, octets, require_readable, shown, text
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import DIGEST_BYTES, TOKEN_ID_LIMIT

TOKEN_BYTES: Final = 4
DIGEST_MARK: Final = b"\x00\x00\x00\x80"
_BIG_ENDIAN: Final = sys.byteorder == "big"
_INTEGER_FORMATS: Final = "bBhHiIlLqQ"  # buffer element types that hold integers


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class MmItemContext:
    """A multimodal item as a token: its 32-byte content digest. `uuid`, the front end's id of the item, is not compared."""

    digest: bytes
    uuid: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        digest = octets(given(self, "digest"), "digest")
        if len(digest) != DIGEST_BYTES:
            raise ConfigError(f"digest is {shown(digest)}; it must be {DIGEST_BYTES} bytes")
        uuid = given(self, "uuid")
        if uuid is not None:
            text(uuid, "uuid")


class TokenSequence:
    """An immutable run of tokens, packed."""

    def __init__(self, data: bytes, num_tokens: int, digests: list[int], checked: bool) -> None:
        self.data = data
        self.num_tokens = num_tokens
        self.digests = digests  # positions of the digests, ascending; empty for text
        self.checked = checked  # whether every id is known to be in range; set by `check_range`
        self.uuids: dict[bytes, str] | None = None  # the front end's ids of multimodal items by digest; None if none was given

    def byte_offset(self, position: int) -> int:
        """Byte offset in `data` of the token at a position. O(log digests), O(1) for text."""
        if not self.digests:
            return TOKEN_BYTES * position
        return TOKEN_BYTES * position + DIGEST_BYTES * bisect_left(self.digests, position)

    def slice_bytes(self, beg: int, end: int) -> bytes:
        """The packed tokens of positions beg..end-1."""
        return self.data[self.byte_offset(beg) : self.byte_offset(end)]

    def whole_tokens(self, num_bytes: int) -> int:
        """How many tokens lie wholly within the first `num_bytes` of `data`. O(log digests), O(1) for text."""
        if not self.digests:
            return num_bytes >> 2
        before = 0  # bisection: how many digests begin within those bytes
        most = len(self.digests)
        while before < most:
            half = (before + most) >> 1
            if TOKEN_BYTES * self.digests[half] + DIGEST_BYTES * half < num_bytes:
                before = half + 1
            else:
                most = half
        if before == 0:
            return num_bytes >> 2
        last = self.digests[before - 1]
        if num_bytes < TOKEN_BYTES * last + DIGEST_BYTES * before + TOKEN_BYTES:
            return last
        return (num_bytes - DIGEST_BYTES * before) >> 2


TokenIdExt: TypeAlias = int | bytes | MmItemContext  # one token: an id, a digest, or a multimodal item
Tokens: TypeAlias = Sequence[SupportsIndex | bytes | MmItemContext] | IntBuffer | TokenSequence  # what calls take as tokens


def pack(tokens: object, text_only: bool = False) -> TokenSequence:
    """Pack a sequence of ids, digests and MmItemContext, or a one-dimensional buffer of integers. O(tokens).

    Buffers are arrays, numpy arrays, memoryviews and torch CPU tensors. Raises ConfigError with position and value for an id
    outside [0, 2**31), an element of another type (a bool is none), a digest of another length, or a digest despite `text_only`.
    """
    sequence = pack_unchecked(tokens, text_only)
    check_range(sequence, 0)
    return sequence


def pack_unchecked(tokens: object, text_only: bool = False) -> TokenSequence:
    """Like `pack`, but without checking the range of a buffer's ids. The caller must do so with `check_range`, as a match does."""
    if isinstance(tokens, list):
        return _pack_items(tokens, text_only)
    if isinstance(tokens, tuple):
        return _pack_items(list(tokens), text_only)
    if isinstance(tokens, TokenSequence):
        if text_only and tokens.digests:
            raise ConfigError(f"token at position {tokens.digests[0]} is a digest, but text_only promises ids only")
        return tokens
    if isinstance(tokens, (str, bytes, bytearray)):
        raise ConfigError(f"tokens are of type {type(tokens).__name__}: pass a list of ids, or a buffer of 32 or 64-bit integers")
    if isinstance(tokens, array) and tokens.typecode in "iI":
        data: bytes | None = _little_endian(tokens.tobytes())
    else:
        require_readable(tokens, "the sequence of tokens")
        data = _tensor_words(tokens) if hasattr(tokens, "data_ptr") else _buffer_words(tokens)
    if data is not None:
        return TokenSequence(data, len(data) >> 2, [], False)
    tolist = getattr(tokens, "tolist", None)
    if tolist is not None:
        items = tolist()
        if not isinstance(items, list):
            raise ConfigError(f"tokens {tokens!r}: must be one-dimensional")
        return _pack_items(items, text_only)
    if isinstance(tokens, (Mapping, Set)) or not isinstance(tokens, Sized) or not isinstance(tokens, Iterable):
        raise ConfigError(
            f"tokens are of type {type(tokens).__name__}: pass a sequence of ids and digests, or a buffer of integers"
        )  # an iterator may never end
    count = len(tokens)
    items = list(islice(tokens, count + 1))
    if len(items) != count:
        raise ConfigError(f"tokens of type {type(tokens).__name__} have a length of {count}, and other numbers of items")
    return _pack_items(items, text_only)


def check_range(sequence: TokenSequence, beg: int) -> None:
    """Raise ConfigError if an id from position `beg` on is not in [0, 2**31). Reads one byte per token, once per sequence."""
    if sequence.checked:
        return
    tops = sequence.data[TOKEN_BYTES * beg + 3 :: TOKEN_BYTES]  # the highest byte of each word: ASCII means that bit 31 is clear
    if not tops.isascii():
        for i in range(len(tops)):
            if tops[i] >= 0x80:
                word = sequence.data[TOKEN_BYTES * (beg + i) : TOKEN_BYTES * (beg + i + 1)]
                value = int.from_bytes(word, "little")
                raise ConfigError(
                    f"token at position {beg + i} is {value} ({value - (1 << 32)} as int32): ids are in [0, {TOKEN_ID_LIMIT})"
                )
    if beg == 0:
        sequence.checked = True


def unpack(data: bytes) -> list[int | bytes]:
    """The tokens of packed bytes: ids, and digests as 32 bytes."""
    result: list[int | bytes] = []
    if not has_digest(data):
        result.extend(struct.unpack(f"<{len(data) >> 2}I", data))
        return result
    offset = 0
    while offset < len(data):
        word = data[offset : offset + TOKEN_BYTES]
        offset += TOKEN_BYTES
        if word == DIGEST_MARK:
            result.append(data[offset : offset + DIGEST_BYTES])
            offset += DIGEST_BYTES
        else:
            result.append(int.from_bytes(word, "little"))
    return result


def count_tokens(data: bytes) -> int:
    """How many tokens packed bytes hold."""
    if not has_digest(data):
        return len(data) >> 2
    return len(unpack(data))


def first_tokens(data: bytes, count: int) -> bytes:
    """The first `count` tokens of packed bytes."""
    if not has_digest(data):
        return data[: TOKEN_BYTES * count]
    return pack(unpack(data)[:count]).data


def has_digest(data: bytes) -> bool:
    """Whether packed bytes hold a digest. One scan in C."""
    return not data[3::TOKEN_BYTES].isascii()  # ids never have bit 31 set, so the first word that does is a mark


def gen_multimodal_cache_key_tokens(
    id_offset: SupportsIndex,
    multi_modal_data_digest: bytes,
    num_tokens: SupportsIndex,
    token_offset: SupportsIndex = 0,
    uuid: str | None = None,
) -> list[int | bytes | MmItemContext]:
    """Make tokens for `num_tokens` positions of one multimodal item, starting at the item's position `token_offset`.

    Position 0 of the item is the digest (a MmItemContext if a uuid is given), position j the id `id_offset + j`. They are for cache
    look-ups only. Raises ConfigError for a digest that is not 32 bytes, num_tokens < 1, a negative offset, or ids out of range.
    """
    digest = octets(multi_modal_data_digest, "multi_modal_data_digest")
    if len(digest) != DIGEST_BYTES:
        raise ConfigError(f"multi_modal_data_digest has {len(digest)} bytes; it must have {DIGEST_BYTES}")
    name = None if uuid is None else text(uuid, "uuid")
    offset = at_least(token_offset, "token_offset", 0)
    first = at_least(id_offset, "id_offset", 0) + offset
    end = first + at_least(num_tokens, "num_tokens", 1)
    if end > TOKEN_ID_LIMIT:
        raise ConfigError(
            f"id_offset {id_offset} + token_offset {token_offset} + num_tokens {num_tokens} exceeds {TOKEN_ID_LIMIT}: "
            "ids must be below that; choose a smaller id_offset"
        )
    result: list[int | bytes | MmItemContext] = list(range(first, end))
    if offset == 0:
        result[0] = digest if name is None else MmItemContext(digest, name)
    return result


_SHORT: Final = 32  # longest list of which each element is looked at: a longer one is packed first
_MANY: Final = 8  # a longer list in which more than one of so many elements may be a bool is searched as a whole


def _pack_items(items: list[Any], text_only: bool) -> TokenSequence:
    """Pack a list, in one call if it holds ids only."""
    num_tokens = len(items)
    if num_tokens <= _SHORT:
        for position in range(num_tokens):
            if type(items[position]) is not int and is_bool(items[position]):
                raise _bool_error(items, position)
    try:
        data = struct.pack(f"<{num_tokens}I", *items)
    except (struct.error, TypeError):  # an array of several has `__index__`, and refuses
        return _pack_mixed(items, text_only)
    if num_tokens > _SHORT:
        _check_for_bools(items, data)
    sequence = TokenSequence(data, num_tokens, [], False)
    check_range(sequence, 0)
    return sequence


def _check_for_bools(items: list[Any], data: bytes) -> None:
    """Raise ConfigError if an element is a bool, of a list without digests that was packed into `data`.

    A bool is packed as 0 or 1, and few ids have such a lowest byte, so only those are looked at. O(elements), in C.
    """
    lowest = data[::TOKEN_BYTES]
    if (lowest.count(0) + lowest.count(1)) * _MANY > len(items):
        if set(map(type, items)) - {int}:
            for position in range(len(items)):
                if is_bool(items[position]):
                    raise _bool_error(items, position)
        return
    for value in (b"\0", b"\1"):
        position = lowest.find(value)
        while position >= 0:
            if is_bool(items[position]):
                raise _bool_error(items, position)
            position = lowest.find(value, position + 1)


def _bool_error(items: list[Any], position: int) -> ConfigError:
    return ConfigError(f"token at position {position} is {items[position]}: a bool is no token id")


def _pack_mixed(items: list[Any], text_only: bool) -> TokenSequence:
    """Pack a list that holds digests or an invalid element: one call for each run of ids between digests."""
    parts: list[bytes] = []
    digests: list[int] = []
    uuids: dict[bytes, str] | None = None
    beg = 0
    for position in range(len(items)):
        item = items[position]
        if type(item) is int:
            continue
        if is_bool(item):
            raise _bool_error(items, position)
        digest = _digest_of(item, position)
        if digest is None:
            continue  # another integer type, or an error that `_pack_run` reports
        if text_only:
            raise ConfigError(f"token at position {position} is a digest, but text_only promises ids only")
        parts.append(_pack_run(items, beg, position))
        parts.append(DIGEST_MARK)
        parts.append(digest)
        digests.append(position)
        beg = position + 1
        if isinstance(item, MmItemContext) and item.uuid is not None:
            if uuids is None:
                uuids = {}
            uuids[digest] = item.uuid
    parts.append(_pack_run(items, beg, len(items)))
    sequence = TokenSequence(b"".join(parts), len(items), digests, True)
    sequence.uuids = uuids
    return sequence


def _digest_of(item: object, position: int) -> bytes | None:
    """The digest of an element; None if it is not a digest. Raises ConfigError for bytes of another length."""
    if isinstance(item, MmItemContext):
        return item.digest
    if isinstance(item, bytes):
        if len(item) != DIGEST_BYTES:
            raise ConfigError(f"token at position {position} is {item!r} of {len(item)} bytes: a digest has {DIGEST_BYTES}")
        return item
    return None


def _pack_run(items: list[Any], beg: int, end: int) -> bytes:
    """Pack a run of ids. Raises ConfigError with the first element that is not an id in range."""
    try:
        data = struct.pack(f"<{end - beg}I", *items[beg:end])
    except (struct.error, TypeError):
        data = DIGEST_MARK  # fails the range check, so that the loop below finds the element
    if data[3::TOKEN_BYTES].isascii():
        return data
    for position in range(beg, end):
        item = items[position]
        value = _integer(item)
        if value is None:
            raise ConfigError(
                f"token at position {position} is {item!r} of type {type(item).__name__}: "
                f"tokens are integers, {DIGEST_BYTES}-byte digests or MmItemContext"
            )
        if not 0 <= value < TOKEN_ID_LIMIT:
            raise ConfigError(f"token at position {position} is {shown(value)}: ids are in [0, {TOKEN_ID_LIMIT})")
    raise ConfigError(f"tokens at positions {beg}..{end - 1} cannot be packed")


def _integer(item: Any) -> int | None:
    """The value of anything with `__index__` (int, numpy integers); None for anything else."""
    try:
        return index(item)
    except TypeError:
        return None


def _buffer_words(tokens: object) -> bytes | None:
    """A buffer of integers as 32-bit words; None if it is not a buffer, or must be read element by element."""
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]  # raises TypeError for anything that is not a buffer
    except TypeError:
        return None
    except ValueError:
        return None  # a buffer whose format memoryview does not support, such as structured arrays
    if view.ndim != 1:
        raise ConfigError(f"tokens are a buffer of {view.ndim} dimensions {view.shape}; it must be one-dimensional")
    kind = view.format
    if kind[-1:] not in _INTEGER_FORMATS:
        raise ConfigError(f"tokens are a buffer of format {kind!r}; it must hold 32 or 64-bit integers")
    if len(kind) > 1 and kind[0] != "@" and kind[0] != ("<" if not _BIG_ENDIAN else ">"):
        return None  # the other byte order
    if view.itemsize == TOKEN_BYTES:
        return _little_endian(view.tobytes())
    if view.itemsize == 2 * TOKEN_BYTES:
        return _narrow(view.tobytes())
    return None


def _tensor_words(tensor: Any) -> bytes | None:
    """A torch tensor in host memory as 32-bit words, read from its address; None if it must be read element by element."""
    if not isinstance(tensor.dim(), int):
        raise ConfigError(
            f"tokens are of type {type(tensor).__name__}: pass a sequence of ids and digests, or a buffer of integers"
        )
    if tensor.dim() != 1:
        raise ConfigError(f"tokens are a tensor of shape {tuple(tensor.shape)}; it must be one-dimensional")
    if tensor.device.type != "cpu":
        raise ConfigError(f"tokens are a tensor on {tensor.device}; it must be in host memory: pass tensor.cpu()")
    kind = str(tensor.dtype)
    if kind not in ("torch.int32", "torch.uint32", "torch.int64", "torch.uint64"):
        if kind in ("torch.int16", "torch.uint16", "torch.int8", "torch.uint8"):
            return None
        raise ConfigError(f"tokens are a tensor of {kind}; it must hold 32 or 64-bit integers")
    if not tensor.is_contiguous():
        return _tensor_words(
            tensor.contiguous()
        )  # an argument lives until the read is done; compiled, a local would be freed after data_ptr()
    count: int = tensor.numel()
    address: int = tensor.data_ptr()
    if kind.endswith("32"):
        return _little_endian(string_at(address, TOKEN_BYTES * count)) if count else b""
    return _narrow(string_at(address, 2 * TOKEN_BYTES * count)) if count else b""


def _narrow(data: bytes) -> bytes:
    """Convert native 64-bit words to packed 32-bit ones. Raises ConfigError for the first value out of range."""
    numpy: Any = sys.modules.get("numpy")  # not imported here: a caller with long buffers has usually done so already
    if numpy is not None:
        words = numpy.frombuffer(data, numpy.int64)
        fits = not (words >> 31).any()
        narrow: bytes = words.astype("<i4").tobytes()
    else:
        halves = array("i")
        halves.frombytes(data)
        high = halves[0::2] if _BIG_ENDIAN else halves[1::2]
        low = halves[1::2] if _BIG_ENDIAN else halves[0::2]
        narrow = _little_endian(low.tobytes())
        fits = high.tobytes().count(0) == len(narrow) and narrow[3::TOKEN_BYTES].isascii()
    if not fits:
        values = struct.unpack(f"={len(data) >> 3}q", data)
        for position in range(len(values)):
            if not 0 <= values[position] < TOKEN_ID_LIMIT:
                raise ConfigError(f"token at position {position} is {values[position]}: ids are in [0, {TOKEN_ID_LIMIT})")
    return narrow


def _little_endian(data: bytes) -> bytes:
    """Native 32-bit words in little-endian byte order."""
    if not _BIG_ENDIAN:
        return data
    words = array("i")
    words.frombytes(data)
    words.byteswap()
    return words.tobytes()
