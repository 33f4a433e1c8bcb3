"""Tests of the layout floor."""
