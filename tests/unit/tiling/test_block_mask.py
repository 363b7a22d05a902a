"""create_block_mask against torch's, entry for entry, in sizes, fields and errors.

The masks people write are in `test_block_mask_acceptance.py`.
"""

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

import fovea
from fovea.errors import TraceError
from fovea.tiling.block_mask import create_block_mask

LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def assert_equal_masks(mine: BlockMask, theirs: BlockMask) -> None:
    """Check all lists, with what lies behind the counts, and all other fields."""
    assert mine.seq_lengths == theirs.seq_lengths
    assert mine.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert mine.mask_mod is theirs.mask_mod
    assert mine.shape == theirs.shape
    for name in LISTS:
        a, b = getattr(mine, name), getattr(theirs, name)
        assert a.dtype == b.dtype == torch.int32, name
        assert a.stride() == b.stride(), name
        assert torch.equal(a, b), name


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(width):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= width)


def document_ids(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


LENGTHS = [120, 1, 77, 202, 60, 40]


@pytest.mark.parametrize("seed", range(12))
def test_block_mask_of_random_documents_and_sizes_equals_torch(seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    seqlen_q, seqlen_kv = pick(1, 400), pick(1, 400)
    ids_q = torch.randint(0, 4, (seqlen_q,), generator=generator).sort().values
    ids_kv = torch.randint(0, 4, (seqlen_kv,), generator=generator).sort().values
    shift, width = pick(-50, 50), pick(1, 200)

    def mask_mod(b, h, q_idx, kv_idx):
        near = (q_idx + shift - kv_idx).abs() <= width - 20 * h
        return (ids_q[q_idx] == ids_kv[kv_idx]) & near

    size = (1, pick(1, 3), seqlen_q, seqlen_kv)
    block = (pick(1, 70), pick(1, 70))
    assert_equal_masks(
        create_block_mask(mask_mod, *size, device="cpu", BLOCK_SIZE=block),
        torch_create_block_mask(mask_mod, *size, device="cpu", BLOCK_SIZE=block),
    )


def test_block_mask_of_an_empty_sequence_has_no_blocks():
    mask = create_block_mask(causal, 2, None, 0, 300, device="cpu")
    assert mask.kv_indices.shape == (2, 1, 0, 3)
    assert mask.q_num_blocks.tolist() == [[[0, 0, 0]]] * 2
    mask = create_block_mask(causal, None, None, 300, 0, device="cpu")
    assert mask.kv_num_blocks.tolist() == [[[0, 0, 0]]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seqlens", [(5, 0), (0, 5), (0, 0), (300, 0)])
@pytest.mark.parametrize("rule", ["band", "bits"])
def test_block_mask_without_keys_or_queries_gives_zeros(seqlens, rule):
    def mask_mod(b, h, i, j):
        return i >= j if rule == "band" else (i * j + h) % 3 == 0

    q = torch.randn(1, seqlens[0], 4, 8, requires_grad=True)
    k = torch.randn(1, seqlens[1], 4, 8, requires_grad=True)
    heads = None if rule == "band" else 4
    mask = fovea.create_block_mask(mask_mod, None, heads, *seqlens, device="cpu")
    request = fovea.AuxRequest(lse=True)
    out, aux = fovea.attention(q, k, k, block_mask=mask, return_aux=request)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(aux.lse, torch.full((1, 4, seqlens[0]), -torch.inf))
    out.sum().backward()
    assert not q.grad.any()


def test_block_mask_works_in_torch_flex_attention_and_its_methods():
    mine = create_block_mask(sliding_window(100), 2, 2, 300, 300, device="cpu", BLOCK_SIZE=64)
    theirs = torch_create_block_mask(mine.mask_mod, 2, 2, 300, 300, device="cpu", BLOCK_SIZE=64)
    q, k, v = (torch.randn(2, 2, 300, 16) for _ in range(3))
    assert torch.equal(
        flex_attention(q, k, v, block_mask=mine), flex_attention(q, k, v, block_mask=theirs)
    )
    assert mine.sparsity() == theirs.sparsity()
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    assert_equal_masks(mine._adjust(200, 150), theirs._adjust(200, 150))
    assert mine.to_string() == theirs.to_string()


def test_block_mask_inside_a_compiled_function_breaks_the_graph_and_is_the_same():
    def function(x, width):
        mask = create_block_mask(sliding_window(width), None, None, 300, 300, device="cpu")
        return x + mask.kv_num_blocks.sum(), mask

    compiled = torch.compile(function, backend="eager")
    total, mask = compiled(torch.zeros(()), 100)
    expected, direct = function(torch.zeros(()), 100)
    assert torch.equal(total, expected)
    for name in LISTS:
        assert torch.equal(getattr(mask, name), getattr(direct, name))


def test_block_mask_inside_a_full_graph_raises_and_says_to_make_it_outside():
    def function(x):
        mask = create_block_mask(sliding_window(9), None, None, 300, 300, device="cpu")
        return x + mask.kv_num_blocks.sum()

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="call it outside the compiled function"):
        compiled(torch.zeros(()))


def test_block_mask_of_a_learnable_capture_records_no_graph():
    bias = torch.randn(300, requires_grad=True)
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: bias[kv_idx] > 0, None, None, 300, 300, device="cpu"
    )
    assert int(mask.kv_num_blocks.sum()) == 9


def test_block_mask_without_a_device_lies_where_its_captures_do():
    ids = document_ids(LENGTHS)
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx], None, None, 500, 500
    )
    assert mask.kv_indices.device == ids.device


def test_block_mask_of_captures_elsewhere_raises():
    ids = document_ids(LENGTHS)
    with pytest.raises(ValueError, match=r"device=meta .*allowed: cpu, where a tensor of shape"):
        create_block_mask(
            lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx], None, None, 500, 500,
            device="meta",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"B": 0}, "B=0 .*at least 1"),
        ({"H": -1}, "H=-1 .*at least 1"),
        ({"Q_LEN": -5}, "Q_LEN=-5 .*at least 0"),
        ({"Q_LEN": None}, "Q_LEN=None .*at least 0"),
        ({"KV_LEN": 2.5}, "KV_LEN=2.5 .*at least 0"),
        ({"BLOCK_SIZE": 0}, "BLOCK_SIZE=0 .*positive"),
        ({"BLOCK_SIZE": (128,)}, r"BLOCK_SIZE=\(128,\) .*pair"),
        ({"BLOCK_SIZE": (16, 0)}, r"BLOCK_SIZE=\(16, 0\) .*positive"),
    ],
)
def test_block_mask_of_a_wrong_size_raises(changes, message):
    keywords = {"B": 1, "H": 1, "Q_LEN": 64, "KV_LEN": 64, "device": "cpu"} | changes
    with pytest.raises(ValueError, match=message):
        create_block_mask(causal, **keywords)


def test_block_mask_of_a_score_mod_raises():
    with pytest.raises(TraceError):
        create_block_mask(lambda score, b, h, q, kv: score, None, None, 64, 64, device="cpu")


def test_block_mask_that_cannot_be_traced_raises():
    with pytest.raises(TraceError, match=r"test_block_mask\.py"):
        create_block_mask(
            lambda b, h, q_idx, kv_idx: torch.linalg.inv(q_idx) > 0, None, None, 64, 64,
            device="cpu",
        )  # fmt: skip


def test_block_mask_without_structure_shows_its_progress(monkeypatch, capsys):
    seconds = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    dense = torch.eye(512, dtype=torch.bool)
    create_block_mask(lambda b, h, q, kv: dense[q, kv], None, None, 512, 512, device="cpu")
    assert "create_block_mask:" in capsys.readouterr().err


MILLION = """
import resource, sys, time
import torch
torch.set_num_threads(1)
from fovea.tiling.block_mask import create_block_mask

n = 1 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
generator = torch.Generator().manual_seed(0)
starts = torch.randint(1, n, (999,), generator=generator).sort().values
ids = torch.bucketize(torch.arange(n), starts, right=True)
masks = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 4096),
    "document": lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]),
    "prefix": lambda b, h, q, kv: (q >= kv) | (kv < 70001),
    "chunks": lambda b, h, q, kv: (q >= kv) & (q // 5000 == kv // 5000),
    "sinks": lambda b, h, q, kv: (q >= kv) & ((q - kv < 4096) | (kv < 4)),
}
# Processor time of one thread: what a clock shows where nothing else runs.
begin = time.process_time()
mask = create_block_mask(masks[sys.argv[1]], None, None, n, n, device="cpu")
spent = time.process_time() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
partial, full = int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())
assert (partial, full) == (int(mask.q_num_blocks.sum()), int(mask.full_q_num_blocks.sum()))
assert mask.kv_indices.shape == (1, 1, 8192, 8192)
print(spent, (peak - before) * 1024, peak * 1024, partial, full)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window", "document", "prefix", "chunks", "sinks"])
def test_block_mask_of_a_million_tokens_takes_seconds_and_little_memory(name):
    done = subprocess.run(
        [sys.executable, "-c", MILLION, name],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(fovea.__file__).parents[1])},
    )
    seconds, added, peak, partial, full = (float(x) for x in done.stdout.split())
    assert seconds < 15, f"{seconds:.1f} s"
    assert max(added, peak - 0.3e9) < 1.5e9, f"{added / 1e9:.2f} GB added to {peak / 1e9:.2f} GB"
    if name == "causal":
        assert (partial, full) == (8192, 8192 * 8191 / 2)
    if name == "window":
        # Each block row has the diagonal, 31 full blocks and the block that the window cuts.
        assert (partial, full) == (8192 + 8192 - 32, 31 * 8192 - sum(range(1, 32)))


@pytest.mark.parametrize("device", ["nope", "cuda:99", 3.5])
def test_device_that_cannot_be_used_is_named(device):
    with pytest.raises(ValueError, match=r"device=.*torch says"):
        create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 70, device=device)


def test_parameters_of_torch_are_taken_in_their_order_where_they_mean_something():
    mine, theirs = (inspect.signature(f) for f in (create_block_mask, torch_create_block_mask))
    assert [*theirs.parameters] == [*mine.parameters][: len(theirs.parameters)]
    plain = create_block_mask(causal, None, None, 300, 300, "cpu", 64)
    for mask in (
        create_block_mask(causal, None, None, 300, 300, "cpu", 64, True),
        create_block_mask(causal, None, None, 300, 300, "cpu", 64, False, True, False, False),
    ):
        assert_equal_masks(mask, plain)


@pytest.mark.parametrize(
    ("name", "value"), [("separate_full_blocks", False), ("compute_dq_write_order", True)]
)
def test_parameters_of_torch_that_fovea_lacks_raise_and_name_the_way_out(name, value):
    options = {name: value}
    with pytest.raises(fovea.UnsupportedError, match=rf"{name}={value}.*torch's create_block"):
        create_block_mask(causal, None, None, 300, 300, device="cpu", **options)
    theirs = torch_create_block_mask(causal, None, None, 300, 300, device="cpu", **options)
    q = torch.randn(1, 300, 2, 8)
    expected = fovea.attention(q, q, q, causal=True)
    torch.testing.assert_close(fovea.attention(q, q, q, block_mask=theirs), expected)


def test_dq_kv_order_that_is_no_bool_raises():
    with pytest.raises(TypeError, match="dq_kv_order"):
        create_block_mask(causal, None, None, 300, 300, device="cpu", dq_kv_order=torch.arange(3))
