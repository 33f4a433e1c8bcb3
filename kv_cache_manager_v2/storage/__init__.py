"""Who owns which slot, and where."""
