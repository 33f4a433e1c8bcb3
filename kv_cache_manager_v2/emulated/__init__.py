"""The emulated device: a `Driver` over host memory, in which streams really overtake each other and calls can be told to fail."""
