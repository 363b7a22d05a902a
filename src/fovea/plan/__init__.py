"""Kernels as data: roles, pipelines, tiles and numerics, without a line of device code."""
