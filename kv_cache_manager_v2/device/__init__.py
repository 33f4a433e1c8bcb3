"""What memory, streams and files are made of."""
