"""The library of mods, by what they need: positions, documents, images, tables, scores.

`fovea.mods` lists and exports them all.
"""
