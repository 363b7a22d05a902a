"""The command `fovea`: one file per subcommand, over fovea's public names.

Invariant: `main` and `info` need torch alone; the others need the extra `cli` and say so.
"""
