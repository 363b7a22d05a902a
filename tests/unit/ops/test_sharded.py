"""Two processes, one call: sharded inputs give the results and gradients of the whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src"

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import fovea

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
plain = [torch.randn(*shape, dtype=torch.float64)
         for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (4,), (7,))]


def run(tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    q, k, v, sink, table = leaves
    out, aux = fovea.attention(
        q, k, v, sink=sink, causal=True, scale=0.3,
        score_mod=lambda s, b, h, i, j: s + table[j], return_aux=fovea.AuxRequest(lse=True))
    (out.square().sum() + aux.lse.sum()).backward()
    return [out, aux.lse, *(leaf.grad for leaf in leaves)]


expected = run(plain)
for place, sink_place in ((Shard(2), Shard(0)), (Shard(0), Replicate()), (Shard(1), Replicate())):
    places = (place, place, place, sink_place, Replicate())
    found = run([distribute_tensor(t, mesh, [p]) for t, p in zip(plain, places)])
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.full_tensor(), other)
from torch.distributed.tensor.experimental import implicit_replication
q, sink, table = distribute_tensor(plain[0], mesh, [Replicate()]), plain[3], plain[4]
mod = lambda s, b, h, i, j: s + table[j]
captured = ("(7,) captured by score_mod", {"score_mod": mod})
for name, keywords in (("sink", {"sink": sink}), captured):
    try:
        fovea.attention(q, q, q, **keywords)
    except TypeError as error:
        assert name in str(error) and "distribute_tensor" in str(error), error
    else:
        raise AssertionError(name)
    whole = fovea.attention(*(plain[0],) * 3, **keywords)
    with implicit_replication():
        torch.testing.assert_close(fovea.attention(q, q, q, **keywords).full_tensor(), whole)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_results_and_gradients_of_one(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
