"""Kernels that a chapter changes one idea at a time."""
