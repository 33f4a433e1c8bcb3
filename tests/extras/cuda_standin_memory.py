"""The memory calls of the stand-in for `cuda.bindings.driver`: reservations, chunks, mappings, pinned host memory.

Rule: ranges are freed exactly as they were allocated; everything else is the error that the driver documents.
"""

from __future__ import annotations

import threading

from tests.extras import cuda_standin_device as parts
from tests.extras import cuda_standin_types as types
from tests.extras.cuda_standin_types import (
    CUdeviceptr,
    CUmemAccessDesc,
    CUmemAllocationGranularity_flags,
    CUmemAllocationProp,
    CUmemAllocationType,
    CUmemGenericAllocationHandle,
    CUresult,
    count_of,
    entries,
    instance,
    integer,
)

OK = CUresult.CUDA_SUCCESS
INVALID = CUresult.CUDA_ERROR_INVALID_VALUE

DEVICE_ALIAS = 1 << 60  # host memory that cuMemHostAlloc gives has another address on the device: they must not be mixed up


class MemoryCalls:
    """Device memory, and the host memory that the device knows."""

    def __init__(self, devices: int, granularity: int, memory: int, pinnable: int) -> None:
        self.devices = devices
        self.granularity = granularity
        self.memory = memory  # bytes of device memory left
        self.pinnable = pinnable  # bytes of host memory that may still be pinned
        self.reservations: dict[int, int] = {}
        self.chunks: dict[int, parts.Chunk] = {}
        self.mappings: dict[int, int] = {}
        self.accessible: dict[int, int] = {}  # those of the mappings that may be touched
        self.registered: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.lock = threading.Lock()
        self._next_handle = 0x1000

    def new_handle(self) -> int:
        with self.lock:
            self._next_handle += 0x10
            return self._next_handle

    def reachable(self, address: int, nbytes: int) -> bool:
        """Whether device or pinned memory covers a range, across neighbouring mappings."""
        at = address
        tables = (self.accessible, self.registered, self.pinned)
        while at < address + nbytes:
            ends = [base + length for table in tables for base, length in list(table.items()) if base <= at < base + length]
            if not ends:
                return False
            at = max(ends)
        return True

    # --- device memory

    def cuMemGetAllocationGranularity(
        self, prop: CUmemAllocationProp | None, option: CUmemAllocationGranularity_flags
    ) -> tuple[CUresult, int | None]:
        instance(prop, CUmemAllocationProp)
        instance(option, CUmemAllocationGranularity_flags)
        return OK, self.granularity

    def cuMemAddressReserve(
        self, size: int, alignment: int, addr: CUdeviceptr | int, flags: int
    ) -> tuple[CUresult, CUdeviceptr | None]:
        if count_of(size) % self.granularity or size == 0 or count_of(alignment) or integer(addr) or count_of(flags):
            return INVALID, None
        address = parts.reserve(size)
        self.reservations[address] = size
        return OK, CUdeviceptr(address)

    def cuMemAddressFree(self, ptr: CUdeviceptr | int, size: int) -> tuple[CUresult]:
        address = integer(ptr)
        mapped = any(address <= at < address + size for at in self.mappings)
        if self.reservations.get(address) != count_of(size) or mapped:
            return (INVALID,)
        del self.reservations[address]
        parts.release(address, size)
        return (OK,)

    def cuMemCreate(
        self, size: int, prop: CUmemAllocationProp | None, flags: int
    ) -> tuple[CUresult, CUmemGenericAllocationHandle | None]:
        instance(prop, CUmemAllocationProp)
        assert prop is not None
        pinned = prop.type == CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        here = prop.location.type == types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE and prop.location.id < self.devices
        if not pinned or not here or count_of(size) % self.granularity or size == 0 or count_of(flags):
            return INVALID, None
        if size > self.memory:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.memory -= size
        handle = self.new_handle()
        self.chunks[handle] = parts.Chunk(size)
        return OK, CUmemGenericAllocationHandle(handle)

    def cuMemRelease(self, handle: CUmemGenericAllocationHandle | int) -> tuple[CUresult]:
        chunk = self.chunks.pop(integer(handle), None)
        if chunk is None:
            return (INVALID,)
        self.memory += chunk.nbytes
        chunk.close()
        return (OK,)

    def cuMemMap(
        self, ptr: CUdeviceptr | int, size: int, offset: int, handle: CUmemGenericAllocationHandle | int, flags: int
    ) -> tuple[CUresult]:
        address, chunk = integer(ptr), self.chunks.get(integer(handle))
        if chunk is None or chunk.nbytes != count_of(size) or count_of(offset) or count_of(flags):
            return (INVALID,)
        inside = any(base <= address and address + size <= base + length for base, length in self.reservations.items())
        free = all(address + size <= base or base + length <= address for base, length in self.mappings.items())
        if not inside or not free:
            return (INVALID,)
        chunk.map(address)
        self.mappings[address] = size
        return (OK,)

    def cuMemUnmap(self, ptr: CUdeviceptr | int, size: int) -> tuple[CUresult]:
        address = integer(ptr)
        if self.mappings.get(address) != count_of(size):
            return (INVALID,)
        del self.mappings[address]
        self.accessible.pop(address, None)
        parts.unmap(address, size)
        return (OK,)

    def cuMemSetAccess(
        self, ptr: CUdeviceptr | int, size: int, desc: tuple[CUmemAccessDesc, ...] | list[CUmemAccessDesc] | None, count: int
    ) -> tuple[CUresult]:
        address = integer(ptr)
        given = entries(desc, CUmemAccessDesc, count_of(count))
        wanted = types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        right = all(isinstance(one, CUmemAccessDesc) and one.flags == wanted and one.location.type == 1 for one in given)
        if self.mappings.get(address) != count_of(size) or count != 1 or not right:
            return (INVALID,)
        parts.allow_access(address, size)
        self.accessible[address] = size
        return (OK,)

    # --- host memory

    def cuMemHostRegister(self, p: int, bytesize: int, Flags: int) -> tuple[CUresult]:
        address = integer(p)
        if count_of(bytesize) == 0 or count_of(Flags) != 3:
            return (INVALID,)
        if any(address < base + length and base < address + bytesize for base, length in self.registered.items()):
            return (CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        if bytesize > self.pinnable:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        self.pinnable -= bytesize
        self.registered[address] = bytesize
        return (OK,)

    def cuMemHostUnregister(self, p: int) -> tuple[CUresult]:
        nbytes = self.registered.pop(integer(p), None)
        if nbytes is None:
            return (CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,)
        self.pinnable += nbytes
        return (OK,)

    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> tuple[CUresult, int | None]:
        if count_of(bytesize) == 0 or count_of(Flags) != 3:
            return INVALID, None
        address = parts.pinned(bytesize)
        self.pinned[address] = bytesize
        return OK, address

    def cuMemFreeHost(self, p: int) -> tuple[CUresult]:
        nbytes = self.pinned.pop(integer(p), None)
        if nbytes is None:
            return (INVALID,)
        parts.release(p, nbytes)
        return (OK,)

    def cuMemHostGetDevicePointer(self, p: int, Flags: int) -> tuple[CUresult, CUdeviceptr | None]:
        if integer(p) not in self.pinned or count_of(Flags):
            return INVALID, None
        return OK, CUdeviceptr(p + DEVICE_ALIAS)
