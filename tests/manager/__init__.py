"""The behaviour of the manager as an engine sees it, mostly through the public interface, on the emulated device."""
