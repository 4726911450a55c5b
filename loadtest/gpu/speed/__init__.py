"""How fast: kernels and steps beside the device's ceilings and the best peer."""
