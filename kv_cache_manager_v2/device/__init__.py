"""Memory, streams and files of a device, and what the manager builds from them."""
