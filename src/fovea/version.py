"""The version, in one place: the build, the cache key and artifacts read it here.

It stands apart from the package's `__init__` so that low layers (the cache key, an artifact's
JSON) can import it without importing the public API above them.
"""

__version__ = "0.1.0.dev0"
