"""How pages are stored on cold levels, by the names of the reference. There is one way: their bytes as they are."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import shown
from kv_cache_manager_v2.errors import ConfigError


@mypyc_attr(allow_interpreted_subclasses=True)
class IKvCacheColdPageCodec:
    """A codec of pages on cold levels: the class of what `create_default_kv_cache_cold_page_codec` returns."""


class PlainPages(IKvCacheColdPageCodec):
    """Pages keep their bytes on every level."""


_DEFAULT = PlainPages()


def create_default_kv_cache_cold_page_codec() -> IKvCacheColdPageCodec:
    """The lossless default, which a manager uses without a codec too: pages keep their bytes on every level."""
    return _DEFAULT


def require_plain_pages(codec: object) -> None:
    """Raise ConfigError unless the codec is None or the default."""
    if codec is not None and not isinstance(codec, PlainPages):
        raise ConfigError(f"cold_page_codec is {shown(codec)}; it must be None, or create_default_kv_cache_cold_page_codec()")
