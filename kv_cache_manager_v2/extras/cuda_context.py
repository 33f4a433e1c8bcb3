"""The context of one CUDA device, and the translation of result codes into errors.

Calls that depend on the current context run inside `with context:`. It pushes this context and pops it at the end, so any thread
may call, whatever its current device is.
"""

from __future__ import annotations

import importlib
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from kv_cache_manager_v2.device.process import PROCESS, forked_error
from kv_cache_manager_v2.errors import CuError, DeviceUnavailableError, LogicError, OutOfMemoryError

if TYPE_CHECKING:
    from cuda.bindings.driver import CUdevice, CUdevice_attribute, CUresult

T = TypeVar("T")

BINDINGS_MODULE: Final = "cuda.bindings.driver"

SUCCESS: Final = 0
ERROR_OUT_OF_MEMORY: Final = 2

WAYS_OUT: Final = (
    "either install the cuda extra (pip install 'kv-cache-manager-v2[cuda]') on a machine with an NVIDIA GPU and its driver, "
    "or run on the emulated device: pass driver=EmulatedDriver() or set KVCM_DEVICE=emulated"
)


def unavailable(reason: str) -> DeviceUnavailableError:
    """The error for a device that cannot be initialised, with both remedies."""
    return DeviceUnavailableError(f"no CUDA device can be initialised: {reason}. Remedy: {WAYS_OUT}")


def load_bindings() -> ModuleType:
    """Import `cuda.bindings.driver`. Raises DeviceUnavailableError if it is not installed or does not load."""
    try:
        return importlib.import_module(BINDINGS_MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        raise unavailable(f"{BINDINGS_MODULE} cannot be imported ({error})") from error


class CudaContext:
    """An initialised device and a context on it: the current context if it belongs to the device, else its primary context.

    Thread safe: the current context is a property of the calling thread.
    """

    def __init__(self, bindings: ModuleType, ordinal: int) -> None:
        if TYPE_CHECKING:
            from cuda.bindings import driver as api
        else:
            api = bindings
        self._cuGetErrorName = api.cuGetErrorName
        self._cuGetErrorString = api.cuGetErrorString
        self._cuDeviceGetAttribute = api.cuDeviceGetAttribute
        self._cuDevicePrimaryCtxRetain = api.cuDevicePrimaryCtxRetain
        self._cuDevicePrimaryCtxRelease = api.cuDevicePrimaryCtxRelease
        self._cuCtxGetCurrent = api.cuCtxGetCurrent
        self._cuCtxGetDevice = api.cuCtxGetDevice
        self._cuCtxPushCurrent = api.cuCtxPushCurrent
        self._cuCtxPopCurrent = api.cuCtxPopCurrent
        self._cuCtxSynchronize = api.cuCtxSynchronize
        self._closed = False
        self._forks = PROCESS.forks
        self._context = 0  # the driver's handle
        self._retained = False  # whether this object must release the primary context
        self.ordinal: Final = ordinal  # among the devices visible to the process
        try:
            self.check("cuInit", api.cuInit(0))
            count = self.value("cuDeviceGetCount", api.cuDeviceGetCount())
            if not 0 <= ordinal < count:
                raise unavailable(f"device {ordinal} was requested and {count} are visible")
            self.version: Final = self.value("cuDriverGetVersion", api.cuDriverGetVersion())  # 1000 * major + 10 * minor
            self._device: Final = self.value("cuDeviceGet", api.cuDeviceGet(ordinal))
            name = self.value("cuDeviceGetName", api.cuDeviceGetName(256, self._device))
            self.name: Final = name.split(b"\0")[0].decode("utf-8", "replace")
            if not self.attribute(api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED):
                raise unavailable(f"device {ordinal} ({self.name}) has no virtual memory management")
            self._open(self._device)
        except DeviceUnavailableError:
            raise
        except (CuError, OutOfMemoryError, RuntimeError, OSError) as error:  # the bindings raise if a library is missing
            raise unavailable(str(error)) from error

    def _open(self, device: CUdevice) -> None:
        current = int(self.value("cuCtxGetCurrent", self._cuCtxGetCurrent()))
        if current and int(self.value("cuCtxGetDevice", self._cuCtxGetDevice())) == int(device):
            self._context = current
            return
        self._context = int(self.value("cuDevicePrimaryCtxRetain", self._cuDevicePrimaryCtxRetain(device)))
        self._retained = True

    # --- results

    def check(self, call: str, result: tuple[CUresult] | tuple[CUresult, object]) -> None:
        """Raise CuError, or OutOfMemoryError, if a call's result is not success."""
        if result[0] != SUCCESS:
            raise self.error(call, result[0])

    def value(self, call: str, result: tuple[CUresult, T | None]) -> T:
        """As `check`; returns the call's value."""
        code, value = result
        if code != SUCCESS or value is None:
            raise self.error(call, code)
        return value

    def error(self, call: str, code: CUresult) -> CuError | OutOfMemoryError:
        """The error for a call's result code."""
        message = f"{call} failed: {self.explain(code)}"
        if code == ERROR_OUT_OF_MEMORY:
            return OutOfMemoryError(message)
        return CuError(message, int(code), call)

    def explain(self, code: CUresult) -> str:
        """Name, number and description of a result code, as far as CUDA knows them."""
        name, text = self._cuGetErrorName(code)[1], self._cuGetErrorString(code)[1]
        return f"{name.decode() if name else 'unknown error'} ({int(code)}){': ' + text.decode() if text else ''}"

    # --- the device

    def attribute(self, attribute: CUdevice_attribute) -> int:
        """The value of a device attribute."""
        return self.value("cuDeviceGetAttribute", self._cuDeviceGetAttribute(attribute, self._device))

    def __enter__(self) -> None:
        if self._closed:
            raise LogicError(f"the driver of CUDA device {self.ordinal} is closed")
        if self.inherited():
            raise forked_error(f"CUDA device {self.ordinal}")
        self.check("cuCtxPushCurrent", self._cuCtxPushCurrent(self._context))

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.check("cuCtxPopCurrent", self._cuCtxPopCurrent())

    def inherited(self) -> bool:
        """Whether this process was forked after the context was created; CUDA does not work in it."""
        return PROCESS.forks != self._forks

    def synchronize(self) -> None:
        """Block the host until all work of the context is complete."""
        with self:
            self.check("cuCtxSynchronize", self._cuCtxSynchronize())

    def close(self) -> None:
        """Release the primary context if this object retained it. Every later use raises LogicError."""
        if self._closed:
            return
        self._closed = True
        if self._retained:
            self.check("cuDevicePrimaryCtxRelease", self._cuDevicePrimaryCtxRelease(self._device))
