"""Pure arithmetic on a configuration: no state, no memory."""
