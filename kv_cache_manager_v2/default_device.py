"""Which device a manager runs on when the user names none.

KVCM_DEVICE says "cuda" (also when unset) or "emulated"; there is no silent fallback. Without a usable GPU the error names both ways
out. The CUDA driver is an extra that is not compiled: it is imported by name, and only here.
"""

from __future__ import annotations

import importlib
import os
from typing import Final

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import ConfigError

DEVICE_VARIABLE: Final = "KVCM_DEVICE"


def default_driver() -> Driver:
    """A driver of the device that the environment asks for. Raises DeviceUnavailableError, or ConfigError for an unknown name."""
    name = os.environ.get(DEVICE_VARIABLE, "cuda")
    if name == "emulated":
        return EmulatedDriver()
    if name != "cuda":
        raise ConfigError(f"{DEVICE_VARIABLE}={name!r}: must be 'cuda' or 'emulated'")
    driver: object = importlib.import_module("kv_cache_manager_v2.extras.cuda").CudaDriver()
    assert isinstance(driver, Driver)
    return driver
