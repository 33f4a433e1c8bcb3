"""Eviction policies: in which order pages of equal priority are evicted."""
