"""The Blackwell plan: what it allocates fits, aliases by name and adds up."""

import itertools
from dataclasses import replace

import pytest
import torch

from fovea.arch import SM100, SM103
from fovea.plan import draw, sm100
from fovea.plan.features import ForwardFeatures
from fovea.plan.roles import REGISTERS_PER_SM
from fovea.plan.select import FEW_QUERIES, forward_plan
from fovea.plan.sm100 import TensorRegion, check_regions, make_forward_plan
from fovea.problem import Request, make_dense

FEATURES = (
    ForwardFeatures(),
    ForwardFeatures(limit_left=True, limit_right=True, sink=True),
    ForwardFeatures(max_score=True),
    ForwardFeatures(block_lists=True, full_lists=True, max_score=True),
)


def plans():
    kinds = itertools.product(("bfloat16", "float16"), sm100.TILE_HEAD_DIMS, FEATURES, (0, 1))
    for dtype, head_dim, features, splits in kinds:
        yield make_forward_plan(
            dtype, head_dim, features, software_columns=4, splits_keys=bool(splits)
        )


def problem_of(seqlen_q, seqlen_kv=300, head_dim=128):
    q = torch.empty(1, seqlen_q, 4, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, seqlen_kv, 2, head_dim, dtype=torch.bfloat16, device="meta")
    return make_dense(q, k, k, Request())


def test_every_plan_fits_shared_memory_and_the_register_file():
    for plan in plans():
        assert plan.shared_bytes <= sm100.SHARED_BYTES_PER_CTA
        registers = sum(role.threads * role.registers for role in plan.roles)
        assert registers <= REGISTERS_PER_SM


def test_every_stage_and_barrier_is_counted_once():
    for plan in plans():
        rings = sum(2 * edge.stages for edge in plan.edges)
        assert plan.num_barriers == rings + sum(signal.stages for signal in plan.signals)


def test_keys_of_plans_differ_where_code_does():
    texts = [plan.key_text() for plan in plans()]
    assert len(set(texts)) == len(texts)


def test_products_and_softmax_of_a_stream_arrive_as_often_as_is_expected():
    plan = make_forward_plan("bfloat16", 128, ForwardFeatures(), software_columns=4)
    arrivals = {signal.name: (signal.stages, signal.arrivals) for signal in plan.signals}
    assert arrivals["s_full"] == (2, 1)  # a commit
    assert arrivals["p_full"] == (4, 4)  # two parts, the four warps of a stream
    # Two softmax warpgroups, the epilogue's, and the warp that issues products.
    assert plan.work_edge.empty_arrivals == 13


def test_p_lies_in_the_part_of_s_that_was_read_before_it():
    plan = make_forward_plan("bfloat16", 128, ForwardFeatures(), software_columns=4)
    for stream in range(sm100.STREAMS):
        s, p = plan.column("s", stream), plan.column("p", stream)
        for end in range(sm100.CHUNK_COLUMNS, plan.tile_n + 1, sm100.CHUNK_COLUMNS):
            assert p + end // 2 <= s + end


@pytest.mark.parametrize(
    "wrong",
    [
        TensorRegion(name="x", first=100, columns=64),  # into the region behind
        TensorRegion(name="x", first=480, columns=64),  # past the end
        TensorRegion(name="x", first=100, columns=64, aliases="a"),  # not inside it
    ],
)
def test_region_where_it_must_not_be_is_refused(wrong):
    good = TensorRegion(name="a", first=0, columns=100)
    behind = TensorRegion(name="b", first=128, columns=64)
    check_regions((good, behind))
    with pytest.raises(AssertionError):
        check_regions((good, behind, wrong))


def test_parts_of_p_that_are_no_whole_chunks_are_refused():
    plan = make_forward_plan("bfloat16", 128, ForwardFeatures(), software_columns=4)
    with pytest.raises(AssertionError):
        replace(plan, p_parts=(100, 28))


def test_streams_share_their_rows_for_few_queries():
    few, many = (forward_plan(problem_of(n), SM100) for n in (FEW_QUERIES, FEW_QUERIES + 1))
    assert (few.splits_keys, few.tile_m) == (True, 128)
    assert (many.splits_keys, many.tile_m) == (False, 256)


def test_share_of_software_exponentials_follows_the_architecture():
    shares = [forward_plan(problem_of(300), arch).software_columns for arch in (SM100, SM103)]
    assert shares == [4, 0]


def test_drawing_names_every_ring_signal_and_region():
    plan = make_forward_plan("bfloat16", 64, ForwardFeatures(), software_columns=4)
    graph, table = draw.role_graph(plan), draw.tensor_map(plan)
    for part in (*plan.edges, *plan.signals):
        assert f"{part.name}: " in graph
    for region in plan.tensor_regions:
        assert f"| {region.first}-{region.end - 1} | {region.name.upper()} |" in table
