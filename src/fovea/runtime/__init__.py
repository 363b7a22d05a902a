"""Running of artifacts.

Lives here: opening an artifact on a GPU (`module`) or on the emulator (`emulated_module`),
arguments and the order of launches. Making artifacts is `compile/`'s work. Invariant: no compiler
is needed.
"""
