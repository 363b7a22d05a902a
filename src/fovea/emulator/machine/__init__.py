"""The machine: grid, clusters, CTAs, warps, memories, barriers. It knows no instruction."""
