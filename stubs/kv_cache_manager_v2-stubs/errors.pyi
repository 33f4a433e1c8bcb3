"""The exceptions of this package.

A user's mistake raises before anything changes, with the offending value and the remedy in the text. The builtin base classes keep
an engine's existing handlers working. This file is never compiled, so that subclasses of users work on both builds.
"""

class KVCacheError(Exception):
    """The base class of all errors of this package."""

class ConfigError(KVCacheError, ValueError, AssertionError):
    """A configuration field or an argument has an invalid value."""

class UnknownBufferError(ConfigError, KeyError):
    """The configuration has no such layer or role. Also a KeyError, which engines catch to test whether a buffer exists."""

class LogicError(KVCacheError, RuntimeError, AssertionError):
    """The object's present state does not allow the call."""

class AlreadyDroppedError(LogicError, ValueError):
    """A planned drop was applied twice."""

class OutOfMemoryError(KVCacheError, MemoryError):
    """A tier or the process has not enough memory for the request."""

class OutOfPagesError(OutOfMemoryError):
    """There are not enough slots, even if every evictable page is evicted."""

class DeviceUnavailableError(KVCacheError, RuntimeError):
    """No device can be initialised. The text names the alternatives."""

class CuError(KVCacheError, RuntimeError):
    """A device call failed. `error_code` is the driver's code, `call` the function that returned it."""

    error_code: int
    call: str

    def __init__(self, message: str, error_code: int = 0, call: str = "") -> None: ...

class HostRegistrationError(OutOfMemoryError):
    """Host memory could not be registered with the device. The text names the size, the limit and the remedy."""

class PageDataLostError(KVCacheError, RuntimeError):
    """A failed transfer lost the bytes of a page that a request needs. Close the request and start it again."""

class CorruptedError(LogicError):
    """The manager is poisoned: an unexpected exception left its structures inconsistent. The text names the first cause.

    `KVCacheManager.poison_reason()` returns the same text. `shutdown()` still frees all memory.
    """
