"""Peak memory of the reference grows with the lengths, not with their product."""

import subprocess
import sys

import pytest

# A process of its own, since resident memory never shrinks back.
_PROGRAM = """
import resource, sys
import torch, fovea
torch.set_num_threads(1)
seqlen, heads = int(sys.argv[1]), 2
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
small = [torch.randn(1, 200, heads, 16, requires_grad=True) for _ in range(3)]
slopes = torch.rand(heads, requires_grad=True)
mod = lambda s, b, h, q_idx, kv_idx: s + slopes[h] * (kv_idx - q_idx)
fovea.attention(*small, score_mod=mod).sum().backward()
q, k, v = (torch.randn(1, seqlen, heads, 16, requires_grad=True) for _ in range(3))
before = peak()
fovea.attention(q, k, v, causal=True, score_mod=mod).sum().backward()
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_of_forward_and_backward_is_a_fraction_of_one_score_matrix():
    seqlen = 12288
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(seqlen)], capture_output=True, text=True, check=True
    )
    added_megabytes = float(done.stdout)
    score_matrix_megabytes = 2 * seqlen**2 * 4 / 2**20
    assert added_megabytes < score_matrix_megabytes / 10
