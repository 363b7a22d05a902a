"""Where bytes are: swizzles, matrix descriptors, register fragments, tensor maps. Pure functions of
numbers.
"""
