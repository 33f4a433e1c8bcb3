"""The whole manager under random load, against a small model and byte for byte."""
