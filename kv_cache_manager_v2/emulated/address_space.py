"""The emulated device's address space: reservations, chunks, mappings and registered host ranges.

Device work may access a byte only in a mapped, accessible chunk or in a registered host range. Any other access raises an error
that names the address and its owner. A guard page after each reservation keeps ranges of two owners apart.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections import deque
from typing import Final

from kv_cache_manager_v2.device.os_memory import (
    PAGE_BYTES,
    allow_access,
    clear_range,
    format_bytes,
    reserve_range,
    round_up,
    unmap_range,
    zero_range,
)
from kv_cache_manager_v2.errors import LogicError

_REMEMBERED: Final = 64  # freed ranges remembered for error texts


class RangeSet:
    """Disjoint half-open ranges of addresses; adjacent ranges are merged. Lookup is O(log n), change O(n), for few ranges.

    A change replaces both lists, so that a reader on another thread sees the state before or after it.
    """

    def __init__(self) -> None:
        self.ranges: tuple[list[int], list[int]] = ([], [])  # begins and ends, ascending

    def covers(self, begin: int, end: int) -> bool:
        """Whether all of [begin, end) lies in one range."""
        begins, ends = self.ranges
        i = bisect_right(begins, begin) - 1
        return i >= 0 and end <= ends[i]

    def touches(self, begin: int, end: int) -> bool:
        """Whether any byte of [begin, end) lies in some range."""
        begins, ends = self.ranges
        i = bisect_left(begins, end) - 1
        return i >= 0 and ends[i] > begin

    def with_range(self, begin: int, end: int) -> tuple[list[int], list[int]]:
        """The ranges and one more, which overlaps none of them."""
        assert begin < end
        assert not self.touches(begin, end)
        begins = self.ranges[0].copy()
        ends = self.ranges[1].copy()
        i = bisect_left(begins, begin)
        if i < len(begins) and begins[i] == end:
            end = ends[i]
            del begins[i], ends[i]
        if i > 0 and ends[i - 1] == begin:
            ends[i - 1] = end
        else:
            begins.insert(i, begin)
            ends.insert(i, end)
        return begins, ends

    def without_range(self, begin: int, end: int) -> tuple[list[int], list[int]]:
        """The ranges less one range that they cover completely."""
        assert begin < end
        assert self.covers(begin, end)
        begins = self.ranges[0].copy()
        ends = self.ranges[1].copy()
        i = bisect_right(begins, begin) - 1
        old_begin, old_end = begins[i], ends[i]
        del begins[i], ends[i]
        if end < old_end:
            begins.insert(i, end)
            ends.insert(i, old_end)
        if old_begin < begin:
            begins.insert(i, old_begin)
            ends.insert(i, begin)
        return begins, ends

    def check_invariants(self) -> None:
        begins, ends = self.ranges
        assert len(begins) == len(ends)
        for i in range(len(begins)):
            assert begins[i] < ends[i], self.ranges
            assert i == 0 or ends[i - 1] < begins[i], self.ranges


class _Reservation:
    """One reserved address range."""

    def __init__(self, number: int, address: int, nbytes: int) -> None:
        self.number = number  # for error texts: tells it from a later one at the same address
        self.address = address
        self.nbytes = nbytes
        self.mapped = 0  # bytes in mapped chunks
        self.views = 0  # arrays over it that are alive
        self.released = False


class _Mapping:
    """One chunk mapped at one address."""

    def __init__(self, address: int, nbytes: int, chunk: int, owner: _Reservation) -> None:
        self.address = address
        self.nbytes = nbytes
        self.chunk = chunk
        self.owner = owner
        self.accessible = False


class AddressSpace:
    """All memory that the emulated device knows. A call that raises has changed nothing.

    An interrupted call has changed nothing either, or is complete: it ends with assignments and deletions, with no other call
    between them.
    """

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.usable = RangeSet()  # what copies may access: accessible device memory and registered host memory
        self.registered = RangeSet()  # what file transfers may access: registered host memory
        self.chunks: dict[int, int] = {}  # handle -> bytes
        self.host_ranges: dict[int, int] = {}  # address -> bytes
        self._reservations: dict[int, _Reservation] = {}  # by address
        self._viewed: dict[int, _Reservation] = {}  # by number; those with views, also after release
        self._mappings: dict[int, _Mapping] = {}  # by address
        self._mapped_chunks: dict[int, int] = {}  # chunk -> address of its mapping
        self._mapped = RangeSet()  # all mapped chunks, accessible or not
        self._count = 0  # latest number of a reservation or chunk
        self._past: deque[tuple[int, int, str]] = deque(maxlen=_REMEMBERED)  # (begin, end, what it was)

    # --- reservations and chunks

    def reserve(self, nbytes: int) -> int:
        if nbytes <= 0 or nbytes % self.granularity:
            raise LogicError(f"reserve: {nbytes} bytes is not a positive multiple of the granularity {self.granularity}")
        span = nbytes + self.granularity + PAGE_BYTES
        raw = reserve_range(span)
        address = round_up(raw, self.granularity)  # aligned as on a device; the excess at both ends is unmapped
        if address > raw:
            unmap_range(raw, address - raw)
        end = address + nbytes + PAGE_BYTES
        if raw + span > end:
            unmap_range(end, raw + span - end)
        reservation = _Reservation(self._count + 1, address, nbytes)
        self._count += 1
        self._reservations[address] = reservation
        return address

    def release_reservation(self, address: int, nbytes: int) -> None:
        found = self._reservations.get(address)
        if found is None or found.nbytes != nbytes:
            raise LogicError(
                f"release_reservation: {self.name_range(address, nbytes)} is not a reservation; {self.locate(address)}"
            )
        if found.mapped:
            raise LogicError(f"release_reservation: {format_bytes(found.mapped)} still mapped in {self._name(found)}")
        self._past.append((address, address + nbytes, f"a freed reservation #{found.number}"))
        del self._reservations[address]  # first: an interrupt here leaves addresses unused, not in use twice
        self._free(found)

    def _free(self, reservation: _Reservation) -> None:
        """Unmap a range once no view of it is alive."""
        reservation.released = True
        if reservation.views == 0:
            unmap_range(reservation.address, reservation.nbytes + PAGE_BYTES)

    def add_view(self, address: int) -> int:
        """Register an array over the reservation at this address; returns a number for `end_view`, 0 outside device memory.

        The array can be read and written as long as it lives: it sees zeros where no chunk is mapped any more.
        """
        found = self._reservation_of(address, 1)
        if found is None:
            return 0
        found.views += 1
        self._viewed[found.number] = found
        return found.number

    def end_view(self, number: int) -> None:
        """Unregister an array that is gone. A finaliser may call it at any time."""
        viewed = self._viewed.get(number)
        if viewed is None:
            return
        viewed.views -= 1
        if viewed.views == 0:
            del self._viewed[number]
            if viewed.released:
                self._free(viewed)

    def create_chunk(self, nbytes: int) -> int:
        if nbytes <= 0 or nbytes % self.granularity:
            raise LogicError(f"create_chunk: {nbytes} bytes is not a positive multiple of the granularity {self.granularity}")
        self._count += 1
        self.chunks[self._count] = nbytes
        return self._count

    def destroy_chunk(self, chunk: int) -> None:
        if chunk not in self.chunks:
            raise LogicError(f"destroy_chunk: no chunk {chunk}: never created or destroyed already")
        if chunk in self._mapped_chunks:
            raise LogicError(f"destroy_chunk: chunk {chunk} is still mapped at {self._mapped_chunks[chunk]:#x}")
        del self.chunks[chunk]

    def map_chunk(self, address: int, nbytes: int, chunk: int) -> None:
        if self.chunks.get(chunk, 0) != nbytes:
            raise LogicError(f"map_chunk: chunk {chunk} has {self.chunks.get(chunk, 0)} bytes, not {nbytes}")
        if chunk in self._mapped_chunks:
            raise LogicError(f"map_chunk: chunk {chunk} is mapped already, at {self._mapped_chunks[chunk]:#x}")
        owner = self._reservation_of(address, nbytes)
        if owner is None or address % self.granularity:
            raise LogicError(
                f"map_chunk: {self.name_range(address, nbytes)} is not an aligned part of a reservation; {self.locate(address)}"
            )
        if self._mapped.touches(address, address + nbytes):
            raise LogicError(f"map_chunk: {self.name_range(address, nbytes)} is mapped already; {self.locate(address)}")
        mapping = _Mapping(address, nbytes, chunk, owner)
        self._mapped.ranges = self._mapped.with_range(address, address + nbytes)
        self._mappings[address] = mapping
        self._mapped_chunks[chunk] = address
        owner.mapped += nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        mapping = self._mapping_at("unmap", address, nbytes)
        if mapping.accessible:
            self.usable.ranges = self.usable.without_range(address, address + nbytes)  # work that runs late is refused
            mapping.accessible = False
        if mapping.owner.views > 0:
            zero_range(address, nbytes)
        else:
            clear_range(address, nbytes)
        self._mapped.ranges = self._mapped.without_range(address, address + nbytes)
        del self._mappings[address]
        del self._mapped_chunks[mapping.chunk]
        mapping.owner.mapped -= nbytes

    def set_access(self, address: int, nbytes: int) -> None:
        mapping = self._mapping_at("set_access", address, nbytes)
        if mapping.accessible:
            return
        allow_access(address, nbytes)
        self.usable.ranges = self.usable.with_range(address, address + nbytes)
        mapping.accessible = True

    def _mapping_at(self, call: str, address: int, nbytes: int) -> _Mapping:
        mapping = self._mappings.get(address)
        if mapping is None or mapping.nbytes != nbytes:
            raise LogicError(f"{call}: {self.name_range(address, nbytes)} is not exactly one mapped chunk; {self.locate(address)}")
        return mapping

    # --- host memory

    def host_register(self, address: int, nbytes: int) -> None:
        if nbytes <= 0 or address <= 0:
            raise LogicError(f"host_register: {self.name_range(address, nbytes)} is not a range of memory")
        if self.registered.touches(address, address + nbytes):
            raise LogicError(f"host_register: {self.name_range(address, nbytes)} is registered already; {self.locate(address)}")
        for reservation in self._reservations.values():
            if reservation.address < address + nbytes and address < reservation.address + reservation.nbytes:
                raise LogicError(
                    f"host_register: {self.name_range(address, nbytes)} is device memory, of {self._name(reservation)}"
                )
        usable = self.usable.with_range(address, address + nbytes)
        self.registered.ranges = self.registered.with_range(address, address + nbytes)
        self.usable.ranges = usable
        self.host_ranges[address] = nbytes

    def host_unregister(self, address: int, nbytes: int) -> None:
        if self.host_ranges.get(address, 0) != nbytes:
            raise LogicError(
                f"host_unregister: {self.name_range(address, nbytes)} is not a registered range; {self.locate(address)}"
            )
        self._past.append((address, address + nbytes, "an unregistered host range"))
        usable = self.usable.without_range(address, address + nbytes)
        self.registered.ranges = self.registered.without_range(address, address + nbytes)
        self.usable.ranges = usable
        del self.host_ranges[address]

    # --- checks

    def check_copy(self, call: str, role: str, address: int, nbytes: int) -> None:
        """Raise LogicError unless device work may access the range."""
        if not self.usable.covers(address, address + nbytes):
            raise LogicError(
                f"{call}: {role} {self.name_range(address, nbytes)} is neither accessible device nor registered host memory; "
                f"{self.locate(address)}"
            )

    def check_batch(self, call: str, role: str, addresses: list[int], nbytes: int) -> None:
        """As `check_copy`, for ranges of one size. One lookup if all lie in one usable range."""
        if self.usable.covers(min(addresses), max(addresses) + nbytes):
            return
        for address in addresses:
            self.check_copy(call, role, address, nbytes)

    def check_host(self, call: str, address: int, nbytes: int) -> None:
        """Raise LogicError unless the range is registered host memory."""
        if not self.registered.covers(address, address + nbytes):
            raise LogicError(f"{call}: {self.name_range(address, nbytes)} is not registered host memory; {self.locate(address)}")

    def check_hosts(self, call: str, addresses: list[int], nbytes: int) -> None:
        """As `check_host`, for ranges of one size. One lookup if all lie in one registered range."""
        if self.registered.covers(min(addresses), max(addresses) + nbytes):
            return
        for address in addresses:
            self.check_host(call, address, nbytes)

    # --- texts

    def name_range(self, address: int, nbytes: int) -> str:
        return f"[{address:#x}, {address + nbytes:#x}) of {nbytes} bytes"

    def _name(self, reservation: _Reservation) -> str:
        begin, end = reservation.address, reservation.address + reservation.nbytes
        return (
            f"device reservation #{reservation.number} [{begin:#x}, {end:#x}), "
            f"{format_bytes(reservation.mapped)} of {format_bytes(reservation.nbytes)} mapped"
        )

    def _reservation_of(self, address: int, nbytes: int) -> _Reservation | None:
        for reservation in self._reservations.values():
            if reservation.address <= address and address + nbytes <= reservation.address + reservation.nbytes:
                return reservation
        return None

    def locate(self, address: int) -> str:
        """The present or last known owner of an address, as text."""
        owner = self._reservation_of(address, 1)
        if owner is not None:
            return f"{address:#x} belongs to {self._name(owner)}"
        for begin, nbytes in self.host_ranges.items():
            if begin <= address < begin + nbytes:
                return f"{address:#x} belongs to host range {self.name_range(begin, nbytes)}"
        for begin, end, what in reversed(self._past):
            if begin <= address < end:
                return f"{address:#x} belonged to {what} [{begin:#x}, {end:#x})"
        return f"{address:#x} belongs to nothing known"

    # --- closing

    @property
    def mapped_bytes(self) -> int:
        total = 0
        for reservation in self._reservations.values():
            total += reservation.mapped
        return total

    def leaks(self) -> list[str]:
        """What was not freed, one text each."""
        found = [f"mapping {self.name_range(m.address, m.nbytes)} of chunk {m.chunk}" for m in self._mappings.values()]
        found += [self._name(r) for r in self._reservations.values()]
        found += [f"chunk {chunk} of {nbytes} bytes" for chunk, nbytes in self.chunks.items()]
        found += [f"registered host range {self.name_range(a, n)}" for a, n in self.host_ranges.items()]
        return found

    def clear(self) -> None:
        """Free everything but registered host memory, which belongs to its owner."""
        for reservation in self._reservations.values():
            self._free(reservation)
        self._reservations = {}
        self._mappings = {}
        self._mapped_chunks = {}
        self._mapped = RangeSet()
        self.chunks = {}
        self.host_ranges = {}
        self.usable = RangeSet()
        self.registered = RangeSet()

    def check_invariants(self) -> None:
        self.usable.check_invariants()
        self.registered.check_invariants()
        self._mapped.check_invariants()
        mapped: dict[int, int] = {}
        for address, mapping in self._mappings.items():
            assert address == mapping.address
            assert self._mapped_chunks[mapping.chunk] == address
            assert self.chunks[mapping.chunk] == mapping.nbytes
            assert mapping.accessible == self.usable.touches(address, address + mapping.nbytes)
            assert self._mapped.covers(address, address + mapping.nbytes)
            assert self._reservation_of(address, mapping.nbytes) is mapping.owner
            mapped[mapping.owner.address] = mapped.get(mapping.owner.address, 0) + mapping.nbytes
        assert len(self._mapped_chunks) == len(self._mappings)
        for address, reservation in self._reservations.items():
            assert reservation.mapped == mapped.get(address, 0)
        for address, nbytes in self.host_ranges.items():
            assert self.registered.covers(address, address + nbytes)
            assert self.usable.covers(address, address + nbytes)


def read_memory(address: int, nbytes: int) -> bytes:
    """The bytes at an address. The caller checks the range."""
    return ctypes.string_at(address, nbytes)


def write_memory(address: int, data: bytes) -> None:
    """Write bytes to an address. The caller checks the range."""
    ctypes.memmove(address, data, len(data))


def check_size(call: str, nbytes: int) -> None:
    """Raise LogicError for a negative size."""
    if nbytes < 0:
        raise LogicError(f"{call}: a negative size, {nbytes} bytes")
