"""Compilation of kernels into artifacts, without a GPU.

Lives here: target, key, compiler, artifact, cache, pool, bundles. Running an artifact is
`runtime/`'s work. Invariant: nothing here asks a GPU; cutlass is imported in `compiler` alone, and
only when something is compiled.
"""
