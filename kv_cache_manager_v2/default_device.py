"""The device that a manager runs on when the user passes no driver.

KVCM_DEVICE selects it: "cuda" (the default) or "emulated". There is no silent fallback: without a usable GPU an error names both
remedies. The CUDA driver is optional and never compiled, so it is imported here by name.
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
    """A driver of the device that KVCM_DEVICE selects. Raises DeviceUnavailableError, or ConfigError for an unknown name."""
    name = os.environ.get(DEVICE_VARIABLE, "cuda")
    if name == "emulated":
        return EmulatedDriver()
    if name != "cuda":
        raise ConfigError(f"{DEVICE_VARIABLE}={name!r}: must be 'cuda' or 'emulated'")
    driver: object = importlib.import_module("kv_cache_manager_v2.extras.cuda").CudaDriver()
    assert isinstance(driver, Driver)
    return driver
