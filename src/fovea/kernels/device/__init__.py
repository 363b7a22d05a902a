"""Device functions that kernels of every architecture share."""
