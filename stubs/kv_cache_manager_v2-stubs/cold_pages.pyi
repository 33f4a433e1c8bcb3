"""How pages are stored on cold levels, by the names of the reference. There is one way: their bytes as they are."""

class IKvCacheColdPageCodec:
    """A codec of pages on cold levels: the class of what `create_default_kv_cache_cold_page_codec` returns."""

class PlainPages(IKvCacheColdPageCodec):
    """Pages keep their bytes on every level."""

_DEFAULT = PlainPages()

def create_default_kv_cache_cold_page_codec() -> IKvCacheColdPageCodec:
    """The lossless default, which a manager uses without a codec too: pages keep their bytes on every level."""

def require_plain_pages(codec: object) -> None:
    """Raise ConfigError unless the codec is None or the default."""
