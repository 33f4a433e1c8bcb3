"""Optional adapters, each needing its own extra; never compiled."""
