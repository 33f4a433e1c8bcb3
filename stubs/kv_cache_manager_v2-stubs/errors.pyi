"""The exception tree: every error that we raise on purpose is one of these.

Rule: a user's mistake raises before anything changes, and the text carries the offending value and the remedy. The builtin bases
let an engine's existing handlers keep working. None of these is a native class: native classes cannot have such bases.
"""

class KVCacheError(Exception):
    """Root of all errors of this package."""

class ConfigError(KVCacheError, ValueError, AssertionError):
    """A configuration or an argument has a value that can never work."""

class UnknownBufferError(ConfigError, KeyError):
    """A layer or a role that the configuration does not have; engines ask so whether there is one, and catch KeyError."""

class LogicError(KVCacheError, RuntimeError, AssertionError):
    """A call that the object's present state does not allow."""

class AlreadyDroppedError(LogicError, ValueError):
    """A handle that has been used up was used again."""

class OutOfMemoryError(KVCacheError, MemoryError):
    """A tier or the process has no memory left for what was asked."""

class OutOfPagesError(OutOfMemoryError):
    """No page can be had, even by evicting everything that may be evicted."""

class DeviceUnavailableError(KVCacheError, RuntimeError):
    """No device can be initialised."""

class CuError(KVCacheError, RuntimeError):
    """A device call failed; `error_code` is the driver's code, `call` the function that returned it."""

    error_code: int
    call: str

    def __init__(self, message: str, error_code: int = 0, call: str = "") -> None: ...

class HostRegistrationError(OutOfMemoryError):
    """Host memory could not be registered with the device: names the size, the limit found and the remedy."""

class PageDataLostError(KVCacheError, RuntimeError):
    """The bytes of a page that a request depends on were lost by a failed transfer; close the request and start it again."""

class CorruptedError(LogicError):
    """The manager is poisoned: an exception left its structures inconsistent. The text names the first cause.

    `KVCacheManager.poison_reason()` says the same; `shutdown()` still frees all memory.
    """
