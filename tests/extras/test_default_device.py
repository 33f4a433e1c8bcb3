"""Which device a manager runs on by default."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2.build import cuda_problem
from kv_cache_manager_v2.default_device import default_driver
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import ConfigError, DeviceUnavailableError


def test_emulated_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVCM_DEVICE=emulated needs nothing."""
    monkeypatch.setenv("KVCM_DEVICE", "emulated")
    driver = default_driver()
    assert isinstance(driver, EmulatedDriver)
    driver.close()


@pytest.mark.parametrize("name", [None, "cuda"])
def test_no_silent_fallback(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Unset or "cuda" means CUDA: without a device an error that names the ways out, never the emulated one."""
    if not cuda_problem():
        pytest.skip("there is a GPU")
    if name is None:
        monkeypatch.delenv("KVCM_DEVICE", raising=False)
    else:
        monkeypatch.setenv("KVCM_DEVICE", name)
    with pytest.raises(DeviceUnavailableError, match=r"cuda extra.*EmulatedDriver\(\).*KVCM_DEVICE=emulated"):
        default_driver()


@pytest.mark.cuda
def test_cuda_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver that the default makes is the real one."""
    monkeypatch.delenv("KVCM_DEVICE", raising=False)
    driver = default_driver()
    assert driver.describe().startswith("CUDA device 0")
    driver.close()


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the value and what it may be."""
    monkeypatch.setenv("KVCM_DEVICE", "tpu")
    with pytest.raises(ConfigError, match=r"KVCM_DEVICE='tpu'.*'cuda' or 'emulated'"):
        default_driver()
