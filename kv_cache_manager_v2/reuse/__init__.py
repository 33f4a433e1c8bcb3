"""Which tokens are already cached."""
