"""Measures the speed of kernels and steps, compared with the device's peak rates and the best
peer."""
