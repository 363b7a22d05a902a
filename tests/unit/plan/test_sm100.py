"""The Blackwell plan: what it allocates fits, aliases by name and adds up."""

import itertools
from dataclasses import replace

import pytest
import torch

from fovea import mods
from fovea.arch import SM100, SM103
from fovea.plan import draw, sm100_tiles
from fovea.plan.features import ForwardFeatures
from fovea.plan.roles import REGISTERS_PER_SM
from fovea.plan.select import FEW_QUERIES, PAIR_QUERIES, forward_plan
from fovea.plan.sm100 import make_forward_plan
from fovea.plan.tensor_memory import TensorRegion, check_regions
from fovea.problem import Request, make_dense

FEATURES = (
    ForwardFeatures(),
    ForwardFeatures(limit_left=True, limit_right=True, sink=True),
    ForwardFeatures(max_score=True),
    ForwardFeatures(block_lists=True, full_lists=True, max_score=True),
)


def plans():
    dims = itertools.product(sm100_tiles.TILE_HEAD_DIMS, repeat=2)
    for dtype, head_dims, features in itertools.product(("bfloat16", "float16"), dims, FEATURES):
        # Where the streams share one O, they always share their rows.
        for splits in (False, True) if max(head_dims) <= 192 else (True,):
            yield make_forward_plan(dtype, head_dims, features, arch="sm100", splits_keys=splits)


def dense_plan(head_dim=128, head_dim_v=128):
    return make_forward_plan("bfloat16", (head_dim, head_dim_v), ForwardFeatures(), arch="sm100")


def problem_of(seqlen_q, seqlen_kv=300, head_dim=128, head_dim_v=None):
    q = torch.empty(1, seqlen_q, 4, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, seqlen_kv, 2, head_dim, dtype=torch.bfloat16, device="meta")
    v = torch.empty(1, seqlen_kv, 2, head_dim_v or head_dim, dtype=torch.bfloat16, device="meta")
    return make_dense(q, k, v, Request())


def test_every_plan_fits_shared_memory_and_the_register_file():
    for plan in plans():
        assert plan.shared_bytes <= sm100_tiles.SHARED_BYTES_PER_CTA
        registers = sum(role.threads * role.registers for role in plan.roles)
        assert registers <= REGISTERS_PER_SM


def test_every_stage_and_barrier_is_counted_once():
    for plan in plans():
        rings = sum(2 * edge.stages for edge in plan.edges)
        signals = sum(signal.stages for signal in plan.signals)
        # Answers to requests for a tile come with a barrier of their own.
        assert plan.num_barriers == rings + signals + plan.is_dynamic


def test_launches_of_no_plan_need_a_counter():
    assert not any(plan.needs_counter for plan in plans())
    assert any(plan.is_dynamic for plan in plans())


def test_keys_of_plans_differ_where_code_does():
    texts = [plan.key_text() for plan in plans()]
    assert len(set(texts)) == len(texts)


def test_products_and_softmax_of_a_stream_arrive_as_often_as_is_expected():
    plan = dense_plan()
    arrivals = {signal.name: (signal.stages, signal.arrivals) for signal in plan.signals}
    assert arrivals["s_full"] == (2, 1)  # a commit
    assert arrivals["p_full"] == (4, 4)  # two parts, the four warps of a stream
    # Two softmax warpgroups, the epilogue's, and the warp that issues products.
    assert plan.work_edge.empty_arrivals == 13


def test_p_lies_in_the_part_of_s_that_was_read_before_it():
    plan = dense_plan()
    chunk = sm100_tiles.CHUNK_COLUMNS
    for stream in range(sm100_tiles.STREAMS):
        s, p = plan.column("s", stream), plan.column("p", stream)
        for end in range(chunk, plan.tile_n + 1, chunk):
            assert p + end // 2 <= s + end


def test_p_of_a_half_row_lies_in_the_half_of_s_that_its_thread_read():
    plan = dense_plan(256, 256)
    for key in range(0, plan.tile_n, 16):
        first = plan.p_offset(key)
        half = key // plan.softmax_columns * plan.softmax_columns
        assert half <= first
        assert first + 8 <= key + 16
    assert plan.p_offset(64) == plan.column("p_upper") - plan.column("p")


@pytest.mark.parametrize(
    ("head_dims", "tile", "stages", "parts"),
    [
        ((64, 64), (256, 128), (6, 5), (1, 1)),
        ((128, 128), (256, 128), (2, 2), (1, 1)),
        ((192, 128), (256, 128), (8, 8), (3, 2)),  # one ring: 96 KiB of Q leave it 1.6 tiles
        ((192, 192), (256, 64), (3, 2), (1, 1)),  # two O of 192 columns leave S 64
        ((256, 256), (128, 128), (5, 4), (4, 4)),
        ((64, 256), (128, 128), (4, 2), (1, 1)),
    ],
)
def test_tile_is_what_shared_and_tensor_memory_have_room_for(head_dims, tile, stages, parts):
    plan = dense_plan(*head_dims)
    assert (plan.tile_m, plan.tile_n) == tile
    assert (plan.k_stages, plan.v_stages) == stages
    assert (plan.k_parts, plan.v_parts) == parts
    # No stage more would fit.
    assert plan.shared_bytes + min(e.stage_bytes for e in (plan.k_edge, plan.v_edge)) > (
        sm100_tiles.SHARED_BYTES_PER_CTA
    )


def test_head_dims_are_rounded_up_one_by_one():
    plan = forward_plan(problem_of(300, head_dim=136, head_dim_v=72), SM100)
    assert (plan.head_dim, plan.head_dim_v) == (192, 128)


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
    plan = dense_plan()
    with pytest.raises(AssertionError):
        replace(plan, p_parts=(100, 28))


def test_streams_share_their_rows_for_few_queries():
    few, many = (forward_plan(problem_of(n), SM100) for n in (FEW_QUERIES, FEW_QUERIES + 1))
    assert (few.splits_keys, few.tile_m) == (True, 128)
    assert (many.splits_keys, many.tile_m) == (False, 256)


def test_share_of_software_exponentials_follows_the_architecture():
    shares = [forward_plan(problem_of(300), arch).software_columns for arch in (SM100, SM103)]
    assert shares == [6, 0]


def test_parts_of_k_and_v_share_a_ring_in_their_order_of_use():
    plan = dense_plan(192, 128)
    assert plan.shares_ring
    assert plan.k_edge == plan.v_edge
    assert [edge.name for edge in plan.edges] == ["q", "kv", "work"]
    uses = []
    for tile in range(2):
        uses += [plan.k_use(tile, part) for part in range(plan.k_parts)]
        uses += [plan.v_use(tile, part) for part in range(plan.v_parts)]
    assert uses == list(range(2 * plan.tile_parts))


@pytest.mark.parametrize(
    ("head_dims", "splits_keys"), [((128, 128), False), ((192, 128), True), ((256, 256), True)]
)
def test_k_and_v_have_rings_of_their_own_where_tiles_are_whole_or_rows_are_shared(
    head_dims, splits_keys
):
    plan = make_forward_plan(
        "bfloat16", head_dims, ForwardFeatures(), arch="sm100", splits_keys=splits_keys
    )
    assert not plan.shares_ring
    assert [edge.name for edge in plan.edges] == ["q", "k", "v", "work"]


@pytest.mark.parametrize(
    ("mod", "loops"),
    [
        (None, False),
        (mods.alibi(slopes=torch.ones(4)), False),  # a captured value a row
        (mods.relative_bias(torch.zeros(4, 257), 128), True),  # and one a key
        (lambda score, b, h, q_idx, kv_idx: score + q_idx // 7, False),
        (lambda score, b, h, q_idx, kv_idx: score + kv_idx // 7, True),
    ],
)
def test_mods_that_read_or_divide_for_each_key_are_evaluated_in_a_loop(mod, loops):
    q, k = torch.empty(1, 300, 4, 128), torch.empty(1, 300, 2, 128)
    q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
    plan = forward_plan(make_dense(q, k, k, Request(score_mod=mod)), SM100)
    assert plan.loops_over_chunks == loops
    assert (plan.software_columns, plan.p_parts) == ((0, (128,)) if loops else (6, (96, 32)))


def test_drawing_names_every_ring_signal_and_region():
    for plan in (dense_plan(64, 64), dense_plan(256, 256)):
        graph, table = draw.role_graph(plan), draw.tensor_map(plan)
        for part in (*plan.edges, *plan.signals):
            assert f"{part.name}: " in graph
        for region in plan.tensor_regions:
            assert f"| {region.first}-{region.end - 1} | {region.name.upper()} |" in table


@pytest.mark.parametrize(
    ("head_dims", "tile_m", "stages"),
    [((128, 128), 512, (4, 4)), ((192, 128), 512, (3, 3)), ((256, 256), 256, (2, 2))],
)
def test_pair_has_half_of_every_tile_of_k_and_v(head_dims, tile_m, stages):
    alone, pair = (
        make_forward_plan("bfloat16", head_dims, ForwardFeatures(), arch="sm100", is_pair=is_pair)
        for is_pair in (False, True)
    )
    assert (pair.tile_m, pair.cta_rows) == (tile_m, alone.tile_m)
    assert pair.k_edge.stage_bytes * pair.k_parts * 2 == alone.k_edge.stage_bytes * alone.k_parts
    assert pair.v_edge.stage_bytes * pair.v_parts * 2 == alone.v_edge.stage_bytes * alone.v_parts
    assert (pair.k_parts, pair.v_parts) == (1, 1)
    assert (pair.k_stages, pair.v_stages) == stages
    arrivals = {signal.name: signal.arrivals for signal in pair.signals}
    assert arrivals["p_full"] == 2 * {s.name: s.arrivals for s in alone.signals}["p_full"]
    assert (arrivals["o_empty"], arrivals["s_full"]) == (8, 1)


@pytest.mark.parametrize(
    ("head_dims", "causal", "cluster"),
    [
        ((128, 128), False, 2),
        ((128, 128), True, 1),
        ((64, 64), False, 1),
        ((192, 128), False, 2),
        ((192, 192), False, 1),
        ((256, 256), True, 2),
    ],
)
def test_pairs_are_chosen_from_many_queries_on(head_dims, causal, cluster):
    for seqlen_q, expected in ((PAIR_QUERIES - 1, 1), (PAIR_QUERIES, cluster)):
        problem = replace(
            problem_of(seqlen_q, 300, *head_dims), causal="bottom_right" if causal else None
        )
        assert forward_plan(problem, SM100).cluster == expected


@pytest.mark.parametrize(
    ("head_dims", "page_size", "k_rows", "v_rows"),
    [
        ((64, 64), 1, 1, 1),
        ((64, 64), 24, 8, 8),
        ((128, 128), 7, 1, 1),
        ((128, 128), 256, 128, 128),
        ((192, 192), 48, 16, 16),
        ((192, 192), 256, 64, 64),
        ((256, 256), 128, 128, 32),
    ],
)
def test_copy_from_a_page_stays_inside_a_page_and_a_part_of_a_tile(
    head_dims, page_size, k_rows, v_rows
):
    features = ForwardFeatures(varlen=True)
    plan = make_forward_plan("bfloat16", head_dims, features, arch="sm100", page_size=page_size)
    assert (plan.page_box, plan.v_page_box) == (k_rows, v_rows)
    assert page_size % plan.page_box == plan.tile_n % plan.page_box == 0
    assert (plan.tile_n // plan.v_parts) % plan.v_page_box == 0
