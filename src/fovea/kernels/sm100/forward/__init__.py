"""The Blackwell forward: `kernel.py` shows it whole, each role has a file."""
