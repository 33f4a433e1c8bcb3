"""The exceptions of this package.

A user's mistake raises before anything changes, with the offending value and the remedy in the text. The builtin base classes keep
an engine's existing handlers working. None of these is a native class, since native classes cannot have such bases.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr


@mypyc_attr(native_class=False)
class KVCacheError(Exception):
    """The base class of all errors of this package."""


@mypyc_attr(native_class=False)
class ConfigError(KVCacheError, ValueError, AssertionError):
    """A configuration field or an argument has an invalid value."""


@mypyc_attr(native_class=False)
class UnknownBufferError(ConfigError, KeyError):
    """The configuration has no such layer or role. Also a KeyError, which engines catch to test whether a buffer exists."""

    def __str__(self) -> str:
        return str(self.args[0])


@mypyc_attr(native_class=False)
class LogicError(KVCacheError, RuntimeError, AssertionError):
    """The object's present state does not allow the call."""


@mypyc_attr(native_class=False)
class AlreadyDroppedError(LogicError, ValueError):
    """A planned drop was applied twice."""


@mypyc_attr(native_class=False)
class OutOfMemoryError(KVCacheError, MemoryError):
    """A tier or the process has not enough memory for the request."""


@mypyc_attr(native_class=False)
class OutOfPagesError(OutOfMemoryError):
    """There are not enough slots, even if every evictable page is evicted."""


@mypyc_attr(native_class=False)
class DeviceUnavailableError(KVCacheError, RuntimeError):
    """No device can be initialised. The text names the alternatives."""


@mypyc_attr(native_class=False)
class CuError(KVCacheError, RuntimeError):
    """A device call failed. `error_code` is the driver's code, `call` the function that returned it."""

    def __init__(self, message: str, error_code: int = 0, call: str = "") -> None:
        super().__init__(message, error_code, call)
        self.error_code = error_code
        self.call = call

    def __str__(self) -> str:
        return str(self.args[0])


@mypyc_attr(native_class=False)
class HostRegistrationError(OutOfMemoryError):
    """Host memory could not be registered with the device. The text names the size, the limit and the remedy."""


@mypyc_attr(native_class=False)
class PageDataLostError(KVCacheError, RuntimeError):
    """A failed transfer lost the bytes of a page that a request needs. Close the request and start it again."""


@mypyc_attr(native_class=False)
class CorruptedError(LogicError):
    """The manager is poisoned: an unexpected exception left its structures inconsistent. The text names the first cause.

    `KVCacheManager.poison_reason()` returns the same text. `shutdown()` still frees all memory.
    """
