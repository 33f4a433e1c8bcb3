"""Disaggregated serving: page tables of managers, and which bytes of one manager's pages to copy to another's."""
