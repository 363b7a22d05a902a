"""The specification of attention in plain torch: tiled as the kernels are, and a float64 oracle."""
