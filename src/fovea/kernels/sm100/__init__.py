"""Kernels for Blackwell (sm_100a and sm_103a)."""
