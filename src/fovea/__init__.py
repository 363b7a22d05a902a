"""fovea: exact attention for PyTorch, customised by plain-Python score and mask functions."""
