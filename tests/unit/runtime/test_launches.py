"""What a launch is given, the first time and again; memory that launches share.

The launcher is a stand-in that keeps its arguments: nothing is computed here.
"""

import pytest
import torch
from launch_arguments import NAMES, tensors

import fovea
from fovea import AuxRequest, dispatch, mods
from fovea.problem import Request, make_dense
from fovea.problem.parts import numbers_of, tensors_of
from fovea.runtime import arguments, cuda, stream_memory
from fovea.testing.inputs import normal


def keywords_by_name():
    slopes, ids = normal((4,), seed=5), torch.arange(256) // 50
    flags, number = torch.ones(256, dtype=torch.bool), torch.tensor(0.25)
    width, slope = 100, 0.5
    mask = fovea.create_block_mask(
        lambda b, h, i, j: (i - j).abs() <= width, 1, 1, 256, 256, device="cpu"
    )
    return {
        "dense": {},
        "causal": {"causal": True, "scale": 0.5},
        "window, softcap": {"window": (width, 0), "softcap": 30.0},
        "sink": {"sink": normal((4,), seed=6)},
        "aux": {"return_aux": AuxRequest(lse=True, max_score=True)},
        "score_mod": {"score_mod": lambda s, b, h, i, j: s + slopes[h] * slope * (j - i)},
        "flags": {"mask_mod": lambda b, h, i, j: flags[j] & (ids[i] == ids[j])},
        "number": {"score_mod": lambda s, b, h, i, j: s * number},
        "block_mask": {"block_mask": mask, "score_mod": lambda s, b, h, i, j: s + slopes[h]},
    }


def same(one, other):
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("name", keywords_by_name())
@pytest.mark.parametrize("needs_grad", [False, True])
def test_recognised_call_launches_what_the_checked_one_did(name, needs_grad, launched):
    keywords = keywords_by_name()[name]
    q, k, v = (t.requires_grad_(needs_grad) for t in tensors())
    outputs = [fovea.attention(q, k, v, **keywords) for _ in range(2)]
    fresh = [NAMES.index(n) for n in ("out", "lse", "max_score", "counter", "captures")]
    first, second = launched
    assert len(first) == len(second) == len(NAMES)
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        if place not in fresh:
            assert same(one, other), NAMES[place]
        else:
            assert (one is None) == (other is None), NAMES[place]
    for one, other in zip(first[NAMES.index("captures")] or (), second[-2] or (), strict=True):
        assert torch.equal(one, other)
    for output, given in zip(outputs, launched, strict=True):
        out = output[0] if isinstance(output, tuple) else output
        assert out.data_ptr() == given[NAMES.index("out")].data_ptr()
        assert out.requires_grad == needs_grad
        if isinstance(output, tuple):
            assert output[1].lse.data_ptr() == given[NAMES.index("lse")].data_ptr()
            assert output[1].max_score.data_ptr() == given[NAMES.index("max_score")].data_ptr()


def test_numbers_of_this_call_are_launched(launched):
    q, k, v = tensors()

    def times(slope):
        return lambda s, b, h, i, j: s * slope

    for slope, scale, softcap in ((0.5, 0.25, 3.0), (-2.0, 2, 5)):
        fovea.attention(q, k, v, scale=scale, softcap=softcap, score_mod=times(slope))
        scores, scalars = launched[-1][NAMES.index("scores")], launched[-1][-1]
        assert scores == pytest.approx((scale, scale * 1.4426950408889634, softcap))
        assert scalars == (slope,)


def test_soft_cap_that_a_score_mod_is_is_launched(launched):
    q, k, v = tensors()
    for cap in (20.0, 30.0, 20.0):
        fovea.attention(q, k, v, score_mod=mods.softcap(cap))
        assert launched[-1][NAMES.index("scores")][2] == cap
        assert launched[-1][-1] is None


def test_check_of_the_environment_is_asked_for_in_every_call(launched, monkeypatch):
    q, k, v = tensors()
    seen = []
    monkeypatch.setattr(dispatch, "check_contents", seen.append)
    fovea.attention(q, k, v)
    assert len(seen) == 0
    monkeypatch.setenv("FOVEA_CHECK", "1")
    fovea.attention(q, k, v)
    assert len(seen) == 1
    monkeypatch.delenv("FOVEA_CHECK")
    fovea.attention(q, k, v)
    assert len(seen) == 1
    assert len(launched) == 3


def test_misaligned_tensors_are_copied_by_recognised_calls(launched):
    q, k, v = tensors()
    fovea.attention(q, k, v)
    memory = torch.zeros(q.numel() + 1, dtype=q.dtype)
    shifted = memory[1:].view(q.shape)
    fovea.attention(shifted, k, v)
    given = launched[1][0]
    assert given.data_ptr() % 16 == 0
    assert torch.equal(given, shifted)


def test_head_dim_that_is_padded_comes_back_unpadded(launched):
    q, k, v = tensors(head_dim=60)
    for _ in range(2):
        out = fovea.attention(q, k, v)
        assert launched[-1][0].shape[-1] == launched[-1][NAMES.index("out")].shape[-1] == 64
        assert out.shape == q.shape


# ------------------------------------------------------------------------------- shared memory


def is_dynamic(keywords):
    problem = make_dense(*tensors(), Request(**keywords))
    return cuda.arguments_of(problem)[1][NAMES.index("counter")] is not None


def test_every_launch_gets_a_zero_of_its_own(launched):
    q, k, v = tensors()
    assert is_dynamic({"causal": True})
    used = []
    for _ in range(2 * stream_memory._COUNTERS + 3):
        fovea.attention(q, k, v, causal=True)
        counter = launched[-1][NAMES.index("counter")]
        assert counter.shape == (1,)
        assert counter.dtype == torch.int32
        assert counter.item() == 0
        counter.fill_(7)  # as the kernel leaves it
        used.append(counter)
    assert len({counter.data_ptr() for counter in used}) == len(used)


def test_lse_that_nobody_asked_for_shares_memory_and_any_other_does_not(launched):
    q, k, v = tensors()

    def lse_of(**keywords):
        result = fovea.attention(q, k, v, **keywords)
        return launched[-1][NAMES.index("lse")], result

    aux = AuxRequest(lse=True)
    lse_of()  # is checked, and keeps its own
    first, _ = lse_of()
    assert lse_of()[0].data_ptr() == first.data_ptr()
    assert lse_of()[0].shape == (2, 4, 256)
    kept = [lse_of(return_aux=aux) for _ in range(2)]
    q.requires_grad_()
    kept += [lse_of() for _ in range(2)]
    places = {lse.data_ptr() for lse, _ in kept} | {first.data_ptr()}
    assert len(places) == 5


def test_large_lse_is_not_kept(launched, monkeypatch):
    monkeypatch.setattr(stream_memory, "_SCRATCH_BYTES", 100)
    q, k, v = tensors()
    for _ in range(2):
        fovea.attention(q, k, v)
    (memory,) = stream_memory._memories.values()
    assert memory._scratch == {}


def test_scratch_of_many_shapes_is_bounded(launched):
    for seqlen in range(1, 3 * stream_memory._SCRATCH_SHAPES):
        for _ in range(2):
            fovea.attention(*tensors(seqlen=seqlen))
    (memory,) = stream_memory._memories.values()
    assert len(memory._scratch) <= stream_memory._SCRATCH_SHAPES


@pytest.mark.parametrize("state", ["capture", "device"])
def test_capture_and_other_devices_share_nothing(state, launched, monkeypatch):
    q, k, v = tensors()
    fovea.attention(q, k, v, causal=True)
    if state == "capture":
        monkeypatch.setattr(stream_memory, "is_capturing", lambda: True)
    else:
        monkeypatch.setattr(stream_memory, "_current_device", lambda: 1)
    for _ in range(2):
        fovea.attention(q, k, v, causal=True)
    lses = [given[NAMES.index("lse")] for given in launched]
    counters = [given[NAMES.index("counter")] for given in launched]
    for values in (lses, counters):
        assert len({value.data_ptr() for value in values}) == 3
    assert all(counter.item() == 0 for counter in counters)


def test_streams_share_nothing(launched, monkeypatch):
    q, k, v = tensors()
    for stream in (1, 2):
        monkeypatch.setattr(stream_memory, "_current_stream", lambda index, s=stream: s)
        fovea.attention(q, k, v, causal=True)
    first, second = launched
    for name in ("lse", "counter"):
        place = NAMES.index(name)
        assert first[place].data_ptr() != second[place].data_ptr()


def test_operators_share_nothing(launched):
    """Graphs of torch.compile may run in memory that is taken back behind the back of its owner."""
    q, k, v = tensors()
    problem = make_dense(q, k, v, Request(causal=True))
    for _ in range(2):
        cuda.forward(problem)
    assert stream_memory._memories == {}


# ------------------------------------------------------------------------------- capture of graphs


def test_first_launch_under_capture_may_open_its_kernel_and_later_ones_may_not(
    launched, monkeypatch
):
    from contextlib import contextmanager

    events = []

    @contextmanager
    def allowed():
        events.append("allowed")
        yield
        events.append(len(launched))

    monkeypatch.setattr(cuda, "unrelated_calls_allowed", allowed)
    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    q, k, v = tensors()
    for _ in range(3):
        fovea.attention(q, k, v)
    assert events == ["allowed", 1]
    assert len(launched) == 3


@pytest.mark.parametrize(
    "number",
    [
        torch.tensor(0.1),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(0.3, dtype=torch.bfloat16),
        torch.tensor(2**62 + 1),
        torch.tensor(True),
        torch.tensor(200, dtype=torch.uint8),
    ],
    ids=lambda number: str(number.dtype),
)
def test_number_on_the_host_goes_along_without_a_copy_from_host_memory(number):
    """A copy would be repeated by a graph from memory that may be gone: a fill holds the value."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append((func.__name__, args))
            return func(*args, **(kwargs or {}))

    with Spy():
        found = arguments._capture(number, torch.device("meta"), None, is_paired=False)
    assert found.is_meta
    assert found.shape == (1,)
    assert not any("copy" in name for name, _ in calls)
    filled = [args for name, args in calls if name.startswith("full")]
    expected = number.view(torch.uint8) if number.dtype == torch.bool else number
    assert filled[0][1] == expected.item()
    assert torch.full((1,), filled[0][1], dtype=found.dtype).item() == expected.item()
    assert found.dtype == expected.dtype


def test_parts_of_a_problem_are_ordered_as_launches_read_them():
    q, k, v = tensors()
    keywords = keywords_by_name()["block_mask"]
    problem = make_dense(q, k, v, Request(**keywords))
    found = tensors_of(problem)
    lists = problem.block_lists.tensors()
    assert found[4:] == [*problem.score_mod.captures, *lists]
    assert numbers_of(problem)[2] == ((), (), (100,))


# ------------------------------------------------- what the reference would find, and a kernel not


def test_gathers_out_of_range_are_found_before_a_launch(launched):
    q, k, v = tensors()

    def shifted(table, shift):
        return lambda s, b, h, i, j: s + table[h + shift]

    def limited(table, limit):
        return lambda s, b, h, i, j: torch.where(h < limit, table[h], s)

    whole, short = normal((4,), seed=1), normal((3,), seed=1)
    for right, wrong in (
        (shifted(whole, 0), shifted(whole, 1)),
        (shifted(whole, 0), shifted(short, 0)),
        (limited(short, 3), limited(short, 4)),
    ):
        for _ in range(2):
            fovea.attention(q, k, v, score_mod=right)
        count = len(launched)
        with pytest.raises(IndexError, match="index into dimension 0"):
            fovea.attention(q, k, v, score_mod=wrong)
        assert len(launched) == count


def test_block_mask_that_shrinks_in_place_is_found_before_a_launch(launched):
    q, k, v = tensors()
    mask = fovea.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 256, 256, device="cpu")
    for _ in range(2):
        fovea.attention(q, k, v, block_mask=mask)
    mask.kv_indices.resize_(1, 1, 1, 1)
    with pytest.raises(ValueError, match="block_mask"):
        fovea.attention(q, k, v, block_mask=mask)
    assert len(launched) == 2


# --------------------------------------------------------------------------- what kernels count on


def captures_of_launch(launched, **keywords):
    q, k, v = tensors(seqlen=64)
    fovea.attention(q, k, v, **keywords)
    return launched[-1][NAMES.index("captures")]


@pytest.mark.parametrize(("extent", "first"), [(64, 0), (65, 0), (64, 1), (71, 3)])
def test_vector_read_by_key_is_aligned_and_of_even_extent(extent, first, launched):
    table = torch.arange(100, dtype=torch.int32)[first : first + extent]
    (given,) = captures_of_launch(launched, score_mod=lambda s, b, h, i, j: s + table[j])
    assert given.data_ptr() % 16 == 0
    assert given.shape[0] % 2 == 0
    assert torch.equal(given[:extent], table)
    is_fit = extent % 2 == 0 and table.data_ptr() % 16 == 0
    assert (given.data_ptr() == table.data_ptr()) == is_fit


def test_vector_that_moves_between_calls_is_aligned_again(launched):
    whole = torch.arange(100, dtype=torch.int32)

    def adding(table):
        return lambda s, b, h, i, j: s + table[j]

    for first in (0, 0, 1, 4, 2):
        table = whole[first : first + 64]
        (given,) = captures_of_launch(launched, score_mod=adding(table))
        assert given.data_ptr() % 16 == 0
        assert torch.equal(given, table)


@pytest.mark.parametrize("make", [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[:, :1]])
def test_capture_has_a_unit_last_stride(make, launched):
    table = make(torch.arange(128.0 * 128).view(128, 128))
    mod = lambda s, b, h, i, j: s + table[i % table.shape[0], j % table.shape[1]]  # noqa: E731
    (given,) = captures_of_launch(launched, score_mod=mod)
    assert given.stride(-1) == 1
    assert torch.equal(given, table)


def test_order_of_query_tiles_is_kept_with_its_mask_alone():
    memory = stream_memory.StreamMemory(torch.device("cpu"))
    for rows in range(1, 3 * stream_memory._ORDERS):
        counts = torch.arange(rows, dtype=torch.int32).view(1, 1, rows)
        order = memory.tile_order(counts, None, 2, 2 * rows - 1)
        assert order is memory.tile_order(counts, None, 2, 2 * rows - 1)
        expected = [2 * row + half for row in reversed(range(rows)) for half in (0, 1)]
        assert order.tolist() == [tile for tile in expected if tile < 2 * rows - 1]
    assert len(memory._orders) <= stream_memory._ORDERS


def test_numbers_of_the_host_are_kept_apart_by_sign_and_type_and_bounded():
    memory = stream_memory.StreamMemory(torch.device("cpu"))
    values = [0.0, -0.0, float("nan"), 2.5]
    first = [memory.number(value, torch.float32) for value in values]
    assert [
        memory.number(value, torch.float32) is one for value, one in zip(values, first, strict=True)
    ] == [True] * 4
    assert torch.signbit(torch.cat(first[:2])).tolist() == [False, True]
    assert bool(first[2].isnan())
    assert memory.number(2, torch.int64).dtype == torch.int64
    for value in range(3 * stream_memory._NUMBERS):
        assert memory.number(value, torch.float32).item() == value
    assert len(memory._numbers) <= stream_memory._NUMBERS


def test_number_on_the_host_that_changes_is_seen_by_a_recognised_call(launched):
    number = torch.tensor(0.25)
    for value in (0.25, 0.25, 0.5, -0.0):
        number.fill_(value)
        given = captures_of_launch(launched, score_mod=lambda s, b, h, i, j: s * number)
        assert torch.equal(given[0], torch.tensor([value]))
