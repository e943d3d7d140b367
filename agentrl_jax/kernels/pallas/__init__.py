"""Kernels for one kind of hardware, each beside a plain-JAX function that computes the same."""
