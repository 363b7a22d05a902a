"""Mods: score_mod and mask_mod functions, their graphs, and a library of them."""
