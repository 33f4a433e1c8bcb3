"""The behaviour of the manager as an engine sees it, through the public face only, on the emulated device."""
