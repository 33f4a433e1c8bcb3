"""Tests of which tokens are already cached."""
