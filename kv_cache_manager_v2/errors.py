"""The exception tree: every error that we raise on purpose is one of these.

Rule: a user's mistake raises before anything changes, and the text carries the offending value and the remedy. The builtin bases
let an engine's existing handlers keep working. None of these is a native class: native classes cannot have such bases.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr


@mypyc_attr(native_class=False)
class KVCacheError(Exception):
    """Root of all errors of this package."""


@mypyc_attr(native_class=False)
class ConfigError(KVCacheError, ValueError, AssertionError):
    """A configuration or an argument has a value that can never work."""


@mypyc_attr(native_class=False)
class UnknownBufferError(ConfigError, KeyError):
    """A layer or a role that the configuration does not have; engines ask so whether there is one, and catch KeyError."""

    def __str__(self) -> str:
        return str(self.args[0])


@mypyc_attr(native_class=False)
class LogicError(KVCacheError, RuntimeError, AssertionError):
    """A call that the object's present state does not allow."""


@mypyc_attr(native_class=False)
class AlreadyDroppedError(LogicError, ValueError):
    """A handle that has been used up was used again."""


@mypyc_attr(native_class=False)
class OutOfMemoryError(KVCacheError, MemoryError):
    """A tier or the process has no memory left for what was asked."""


@mypyc_attr(native_class=False)
class OutOfPagesError(OutOfMemoryError):
    """No page can be had, even by evicting everything that may be evicted."""


@mypyc_attr(native_class=False)
class DeviceUnavailableError(KVCacheError, RuntimeError):
    """No device can be initialised."""


@mypyc_attr(native_class=False)
class CuError(KVCacheError, RuntimeError):
    """A device call failed; `error_code` is the driver's code, `call` the function that returned it."""

    def __init__(self, message: str, error_code: int = 0, call: str = "") -> None:
        super().__init__(message, error_code, call)
        self.error_code = error_code
        self.call = call

    def __str__(self) -> str:
        return str(self.args[0])


@mypyc_attr(native_class=False)
class HostRegistrationError(OutOfMemoryError):
    """Host memory could not be registered with the device: names the size, the limit found and the remedy."""


@mypyc_attr(native_class=False)
class PageDataLostError(KVCacheError, RuntimeError):
    """The bytes of a page that a request depends on were lost by a failed transfer; close the request and start it again."""


@mypyc_attr(native_class=False)
class CorruptedError(LogicError):
    """The manager is poisoned: an exception left its structures inconsistent. The text names the first cause.

    `KVCacheManager.poison_reason()` says the same; `shutdown()` still frees all memory.
    """
