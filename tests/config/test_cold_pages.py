"""The codec of cold pages: an engine may pass the default."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import (
    ConfigError,
    EmulatedDriver,
    HostCacheTierConfig,
    IKvCacheColdPageCodec,
    KVCacheManager,
    create_default_kv_cache_cold_page_codec,
)
from tests.support.models import GRAIN, small


class Codec(IKvCacheColdPageCodec):
    """A codec of an engine."""


def test_tiers_are_checked_by_the_names_of_the_reference() -> None:
    """`assert_valid` is `validate`."""
    tier = HostCacheTierConfig(GRAIN)
    tier.assert_valid()
    tier.quota = 0
    with pytest.raises(ConfigError, match="quota"):
        tier.assert_valid()


def test_the_default_is_taken_and_no_other() -> None:
    """By position, as the third argument; what is refused is named, and leaves no memory."""
    config = small(4)
    config.cache_tiers = [*config.cache_tiers, HostCacheTierConfig(4 * GRAIN)]
    driver = EmulatedDriver()
    codec = create_default_kv_cache_cold_page_codec()
    assert isinstance(codec, IKvCacheColdPageCodec)
    with KVCacheManager(config, None, codec, driver=driver):
        pass
    with pytest.raises(ConfigError, match=r"cold_page_codec is <.*Codec object.*>; it must be None, or create_default"):
        KVCacheManager(config, None, Codec(), driver=driver)
    driver.close()
