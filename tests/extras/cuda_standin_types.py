"""Enums, handles and structures of the stand-in for `cuda.bindings.driver`: the members that the package under test uses.

Rule: names and numbers are those of the real package; one test compares them with the stub, another with the package itself.
"""

from __future__ import annotations

from enum import IntEnum

CUDA_VERSION = 13050
CU_MEMHOSTREGISTER_PORTABLE = 1
CU_MEMHOSTREGISTER_DEVICEMAP = 2
CU_MEMHOSTALLOC_PORTABLE = 1
CU_MEMHOSTALLOC_DEVICEMAP = 2


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_INVALID = 0
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_INVALID = 0
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemcpySrcAccessOrder(IntEnum):
    CU_MEMCPY_SRC_ACCESS_ORDER_INVALID = 0
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1


class CUevent_flags(IntEnum):
    CU_EVENT_BLOCKING_SYNC = 1
    CU_EVENT_DISABLE_TIMING = 2


class CUstream_flags(IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUstreamWaitValue_flags(IntEnum):
    CU_STREAM_WAIT_VALUE_GEQ = 0


class Handle:
    """What the package makes of a C handle: an object that converts to int and has no arithmetic."""

    def __init__(self, init_value: int = 0) -> None:
        if init_value < 0:
            raise OverflowError("can't convert negative value to unsigned PY_LONG_LONG")
        self._value = init_value

    def __int__(self) -> int:
        return self._value


class CUdeviceptr(Handle):
    pass


class CUdevice(Handle):
    pass


class CUmemGenericAllocationHandle(Handle):
    pass


class CUcontext(Handle):
    pass


class CUstream(Handle):
    pass


class CUevent(Handle):
    pass


class CUmemLocation:
    def __init__(self) -> None:
        self.type = CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID
        self.id = 0


class AllocationFlags:
    def __init__(self) -> None:
        self.gpuDirectRDMACapable = 0


class CUmemAllocationProp:
    def __init__(self) -> None:
        self.type = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
        self.location = CUmemLocation()
        self.allocFlags = AllocationFlags()


class CUmemAccessDesc:
    def __init__(self) -> None:
        self.location = CUmemLocation()
        self.flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


class CUmemcpyAttributes:
    def __init__(self) -> None:
        self.srcAccessOrder = CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_INVALID
        self.flags = 0


def integer(value: object) -> int:
    """A handle, a pointer or an int, as the package takes them (None is NULL); anything else is a TypeError, floats too."""
    if value is None:
        return 0
    if isinstance(value, Handle):
        return int(value)
    if isinstance(value, int):
        return value
    raise TypeError(f"an integer is required, not {type(value).__name__}")


def count_of(value: object) -> int:
    """A C size or unsigned flags: an int that is not negative."""
    if not isinstance(value, int):
        raise TypeError(f"an integer is required, not {type(value).__name__}")
    if value < 0:
        raise OverflowError("can't convert negative value to size_t")
    return value


def entries(value: object, kind: type, count: int) -> list[object]:
    """A list or tuple of at least `count` instances of a class, as the package demands of C arrays."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"{type(value).__name__!r} object is not a list or tuple of {kind.__name__}")
    if not all(isinstance(entry, kind) for entry in value):
        raise TypeError(f"Argument is not instance of type (expected tuple[{kind.__name__},] or list[{kind.__name__},]")
    if len(value) < count:
        raise RuntimeError(f"List is too small: {len(value)} < {count}")
    return list(value)


def instance(value: object, kind: type) -> None:
    """An enum or structure of exactly this class. The package lets ints pass for enums; we do not."""
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
