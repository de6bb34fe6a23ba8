"""Inductor lowerings and Triton kernels."""
