"""Disaggregated serving: page tables of two managers, and which bytes of one belong to which of the other."""
