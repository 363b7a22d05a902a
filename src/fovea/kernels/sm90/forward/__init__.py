"""The Hopper forward: `kernel.py` shows it whole, each role has a file."""
