"""Sizes of what is known of packed sequences: their table, and what is announced of one.

Lives here: sizes in device and shared memory. Not here: what they say
(`kernels/device/sequences.py`, which writes and reads them). Invariant: no host code reads the
table.
"""

SEQUENCE_WORDS = 8  # 32-bit words in shared memory beside an announcement
RECORD_WORDS = 8  # 32-bit words of a sequence: those of one sector of the L2 cache


def table_words(num_sequences: int) -> int:
    """Return the 32-bit words of a table: a record each, and the counter of tiles behind them."""
    return RECORD_WORDS * num_sequences + 1
