"""Kernels that run on any architecture."""
