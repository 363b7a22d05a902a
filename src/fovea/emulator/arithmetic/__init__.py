"""Arithmetic of the matrix units: element formats and accumulation. Pure functions of arrays."""
