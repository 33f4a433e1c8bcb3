"""The emulated device: a `Driver` over host memory with asynchronous streams and faults that tests can inject."""
