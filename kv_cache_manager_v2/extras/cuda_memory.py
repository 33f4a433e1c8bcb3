"""Device and host memory of one CUDA device, with a record of what is allocated.

A range that is not in the record is refused before CUDA sees it. What remains in the record at the end is reported as a leak.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Final

from kv_cache_manager_v2.device.os_memory import memlock_limit
from kv_cache_manager_v2.errors import HostRegistrationError, LogicError
from kv_cache_manager_v2.extras.cuda_context import SUCCESS, CudaContext

if TYPE_CHECKING:
    from cuda.bindings.driver import CUmemAccessDesc, CUmemAllocationProp, CUresult

RDMA_REFUSALS: Final = (1, 800, 801)  # invalid value, not permitted, not supported: results where GPUDirect RDMA is unavailable


class Allocations:
    """The live handles of one kind, with their sizes."""

    def __init__(self, noun: str) -> None:
        self.noun: Final = noun
        self.live: dict[int, int] = {}  # handle or address -> bytes (0 for kinds without a size)

    def add(self, handle: int, nbytes: int = 0) -> None:
        """Add a new handle."""
        self.live[handle] = nbytes

    def require(self, handle: int, nbytes: int = 0) -> None:
        """Raise LogicError unless the handle is live and has this size."""
        size = self.live.get(handle)
        if size is None:
            raise LogicError(f"{self.noun} {handle:#x} is unknown: it was freed already or never created")
        if size != nbytes:
            raise LogicError(f"{self.noun} {handle:#x} has {size} bytes, but {nbytes} were to be freed: free all of it")

    def remove(self, handle: int) -> None:
        """Remove a freed handle."""
        del self.live[handle]

    def leaks(self) -> list[str]:
        """A text for each live handle."""
        return [f"{self.noun} {handle:#x}" + (f" ({nbytes} bytes)" if nbytes else "") for handle, nbytes in self.live.items()]


class CudaMemory:
    """Reservations, physical chunks, mappings and registered host ranges of one device."""

    def __init__(self, bindings: ModuleType, context: CudaContext) -> None:
        if TYPE_CHECKING:
            from cuda.bindings import driver as api
        else:
            api = bindings
        self._context: Final = context
        self._cuMemAddressReserve = api.cuMemAddressReserve
        self._cuMemAddressFree = api.cuMemAddressFree
        self._cuMemCreate = api.cuMemCreate
        self._cuMemRelease = api.cuMemRelease
        self._cuMemMap = api.cuMemMap
        self._cuMemUnmap = api.cuMemUnmap
        self._cuMemSetAccess = api.cuMemSetAccess
        self._cuMemHostRegister = api.cuMemHostRegister
        self._cuMemHostUnregister = api.cuMemHostUnregister
        self._cuMemHostAlloc = api.cuMemHostAlloc
        self._cuMemFreeHost = api.cuMemFreeHost
        self._cuMemHostGetDevicePointer = api.cuMemHostGetDevicePointer
        self._register_flags = api.CU_MEMHOSTREGISTER_PORTABLE | api.CU_MEMHOSTREGISTER_DEVICEMAP
        self._pinned_flags = api.CU_MEMHOSTALLOC_PORTABLE | api.CU_MEMHOSTALLOC_DEVICEMAP

        self._chunk: CUmemAllocationProp = api.CUmemAllocationProp()  # properties of all chunks
        self._chunk.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._chunk.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._chunk.location.id = context.ordinal
        rdma = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        self._chunk.allocFlags.gpuDirectRDMACapable = 1 if context.attribute(rdma) else 0  # lets a network card read pages
        access: CUmemAccessDesc = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = context.ordinal
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = [access]
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        call = "cuMemGetAllocationGranularity"
        self.granularity: Final = context.value(call, api.cuMemGetAllocationGranularity(self._chunk, minimum))

        self._reservations = Allocations("reservation at")
        self._chunks = Allocations("chunk")
        self._mappings = Allocations("mapping at")
        self._registrations = Allocations("host registration at")

    # --- device memory

    def reserve(self, nbytes: int) -> int:
        """Reserve an address range of the device; returns its address."""
        address = int(self._context.value("cuMemAddressReserve", self._cuMemAddressReserve(nbytes, 0, 0, 0)))
        self._reservations.add(address, nbytes)
        return address

    def release_reservation(self, address: int, nbytes: int) -> None:
        """Release a whole reservation, in which nothing is mapped."""
        self._reservations.require(address, nbytes)
        for mapped in self._mappings.live:
            if address <= mapped < address + nbytes:
                raise LogicError(f"reservation at {address:#x} still has a chunk mapped at {mapped:#x}: unmap it first")
        self._context.check("cuMemAddressFree", self._cuMemAddressFree(address, nbytes))
        self._reservations.remove(address)

    def create_chunk(self, nbytes: int) -> int:
        """Allocate physical device memory; returns its handle. Raises OutOfMemoryError."""
        with self._context:
            result = self._cuMemCreate(nbytes, self._chunk, 0)
            if result[0] in RDMA_REFUSALS and self._chunk.allocFlags.gpuDirectRDMACapable:
                # The device can, but something around it cannot (a container, a hypervisor): go on without, for good.
                self._chunk.allocFlags.gpuDirectRDMACapable = 0
                result = self._cuMemCreate(nbytes, self._chunk, 0)
            chunk = int(self._context.value("cuMemCreate", result))
        self._chunks.add(chunk, nbytes)
        return chunk

    def destroy_chunk(self, chunk: int) -> None:
        """Free physical memory that is mapped nowhere."""
        self._chunks.require(chunk, self._chunks.live.get(chunk, 0))
        self._context.check("cuMemRelease", self._cuMemRelease(chunk))
        self._chunks.remove(chunk)

    def map_chunk(self, address: int, nbytes: int, chunk: int) -> None:
        """Map a whole chunk at an address inside a reservation."""
        self._chunks.require(chunk, nbytes)
        self._context.check("cuMemMap", self._cuMemMap(address, nbytes, 0, chunk, 0))
        self._mappings.add(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map_chunk` of exactly this range."""
        self._mappings.require(address, nbytes)
        self._context.check("cuMemUnmap", self._cuMemUnmap(address, nbytes))
        self._mappings.remove(address)

    def set_access(self, address: int, nbytes: int) -> None:
        """Let the device read and write a mapped range."""
        self._context.check("cuMemSetAccess", self._cuMemSetAccess(address, nbytes, self._access, 1))

    # --- host memory

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin a range of host memory. Raises HostRegistrationError."""
        with self._context:
            code = self._cuMemHostRegister(address, nbytes, self._register_flags)[0]
            if code != SUCCESS:
                raise self._refusal(address, nbytes, code)
        self._registrations.add(address, nbytes)

    def _refusal(self, address: int, nbytes: int, code: CUresult) -> HostRegistrationError:
        limit = memlock_limit()
        found = "unlimited" if limit < 0 else f"{limit} bytes"
        pinned = sum(self._registrations.live.values())
        reason = self._context.explain(code)
        return HostRegistrationError(
            f"{nbytes} bytes of host memory at {address:#x} could not be registered with the device: {reason}; "
            f"{pinned} bytes are registered already and RLIMIT_MEMLOCK is {found}; raise it (ulimit -l unlimited) or register less"
        )

    def host_unregister(self, address: int, nbytes: int) -> None:
        """Unpin a range, exactly as it was registered."""
        self._registrations.require(address, nbytes)
        with self._context:
            self._context.check("cuMemHostUnregister", self._cuMemHostUnregister(address))
        self._registrations.remove(address)

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        """Allocate pinned host memory for the driver itself; returns its host address and its device address."""
        with self._context:
            address = self._context.value("cuMemHostAlloc", self._cuMemHostAlloc(nbytes, self._pinned_flags))
            call = "cuMemHostGetDevicePointer"
            try:
                device_address = int(self._context.value(call, self._cuMemHostGetDevicePointer(address, 0)))
            except BaseException:
                self._cuMemFreeHost(address)
                raise
        return address, device_address

    def free_pinned(self, address: int) -> None:
        """Free memory of `allocate_pinned`."""
        with self._context:
            self._context.check("cuMemFreeHost", self._cuMemFreeHost(address))

    # --- closing

    def free_all(self) -> list[str]:
        """Free all that is still allocated, in the order that CUDA requires; returns a text for each leak."""
        kinds = (self._registrations, self._mappings, self._chunks, self._reservations)
        leaks = [leak for kind in kinds for leak in kind.leaks()]
        for address, nbytes in list(self._registrations.live.items()):
            self.host_unregister(address, nbytes)
        for address, nbytes in list(self._mappings.live.items()):
            self.unmap(address, nbytes)
        for chunk in list(self._chunks.live):
            self.destroy_chunk(chunk)
        for address, nbytes in list(self._reservations.live.items()):
            self.release_reservation(address, nbytes)
        return leaks
