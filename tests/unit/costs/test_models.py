"""The simulated roles: bounds that no schedule may break, and what a change of a unit does."""

from dataclasses import replace

import pytest

from fovea.costs import sm90, sm100
from fovea.costs.calibration import Calibration
from fovea.costs.counted import Cycles, KernelCounts, RoleCounts
from fovea.costs.machine import B200, H200
from fovea.errors import UnsupportedError
from fovea.plan.features import ForwardFeatures
from fovea.plan.sm90 import make_forward_plan
from fovea.plan.sm100 import make_forward_plan as make_blackwell_plan

IDEAL = Calibration(
    serial_share=0.0,
    product_gap=0.0,
    handoff=0.0,
    softmax_stall=0.0,
    ends=0.0,
    launch_us=0.0,
    copy_latency=0.0,
    memory_latency=0.0,
)
REAL = replace(IDEAL, serial_share=0.9, product_gap=25, handoff=20, ends=1400, copy_latency=600)
NOTHING = Cycles(issue=0, fma=0, alu=0, mufu=0)
VISITS = 24
# Where copies and operands do not share the ports of shared memory.
WIDE = {"shared_bytes": 4096}


def _counts(**visits):
    roles = {role: RoleCounts(visit=visit, ends=NOTHING) for role, visit in visits.items()}
    return KernelCounts(key="made up", roles=roles)


def _softmax(mufu):
    return Cycles(issue=100, fma=0, alu=0, mufu=mufu)


def _hopper(mufu, calibration, head_dim=128, machine=H200):
    plan = make_forward_plan("bfloat16", (head_dim, head_dim), ForwardFeatures(), length="medium")
    model = sm90.Sm90Model(
        plan=plan,
        counts=_counts(compute=_softmax(mufu)),
        machine=machine,
        calibration=calibration,
    )
    return plan, sm90.simulate(model, [VISITS])


GRAPH = sm100.Graph(tile_n=128, head_dim=128, head_dim_v=128, stages=(4, 4), p_parts=(96, 32))


def _blackwell(mufu, calibration, graph=GRAPH, visits=VISITS, machine=B200):
    counts = _counts(softmax=_softmax(mufu), mma=NOTHING, epilogue=NOTHING, correction=NOTHING)
    model = sm100.Sm100Model(graph=graph, counts=counts, machine=machine, calibration=calibration)
    return sm100.simulate(model, [visits])


def test_hopper_bound_by_products_keeps_the_tensor_cores_busy():
    plan, done = _hopper(64, IDEAL, machine=replace(H200, **WIDE))
    flops = 4 * plan.tile_m * plan.tile_n * 128 * VISITS
    assert done.busy["tensor"] == pytest.approx(flops / H200.tensor_flops)
    assert done.busy["tensor"] / done.now > 0.9


def test_hopper_bound_by_exponentials_takes_their_time():
    plan, done = _hopper(2000, IDEAL, head_dim=64)
    assert done.busy["mufu"] == pytest.approx(2000 * plan.num_consumers * VISITS)
    assert done.busy["mufu"] / done.now > 0.9


def test_copies_and_operands_share_the_ports_of_shared_memory():
    assert _hopper(64, IDEAL)[1].now > _hopper(64, IDEAL, machine=replace(H200, **WIDE))[1].now


def test_latencies_only_lengthen():
    assert _hopper(256, REAL)[1].now > _hopper(256, IDEAL)[1].now
    assert _blackwell(900, REAL).now > _blackwell(900, IDEAL).now


def test_blackwell_products_of_two_streams_hide_the_softmax():
    done = _blackwell(400, IDEAL, machine=replace(B200, **WIDE))
    assert done.busy["tensor"] == pytest.approx(2048 * VISITS)
    assert done.busy["tensor"] / done.now > 0.85


def test_no_unit_does_more_than_a_cycle_a_cycle():
    for done in (_blackwell(1000, REAL), _hopper(256, REAL)[1]):
        assert all(busy <= done.now * (1 + 1e-6) for busy in done.busy.values())


def test_a_search_for_the_maximum_lengthens_the_chain():
    seeking = replace(GRAPH, seek_maxima=66.0)
    assert _blackwell(1000, REAL, seeking, 1).now > _blackwell(1000, REAL, GRAPH, 1).now


def test_a_correction_role_takes_every_tile():
    done = _blackwell(900, REAL, replace(GRAPH, corrects=True, epilogue="correction"))
    assert any(span.lane == "correction" for span in done.spans)


def test_a_shared_ring_and_parts_do_not_deadlock():
    ring = replace(GRAPH, shares_ring=True, stages=(3, 3))
    parts = replace(GRAPH, head_dim=192, parts=(3, 2), stages=(5, 3))
    for graph in (ring, parts):
        done = _blackwell(900, REAL, graph)
        per_visit = 2 * 128 * 128 * (graph.head_dim + 128) * 2 / B200.tensor_flops
        assert done.busy["tensor"] == pytest.approx(per_visit * VISITS)


def test_a_stream_skips_what_a_causal_mask_hides_from_it():
    done = _blackwell(900, IDEAL, replace(GRAPH, skips_hidden=True))
    assert done.busy["tensor"] == pytest.approx(1024 * (2 * VISITS - 1))


def test_a_pair_of_ctas_halves_what_each_loads():
    alone, paired = (_blackwell(900, IDEAL, replace(GRAPH, pair=n)) for n in (1, 2))
    q_cycles = 2 * 128 * 128 * 2 / B200.port_bytes
    assert paired.busy["l2"] - q_cycles == pytest.approx((alone.busy["l2"] - q_cycles) / 2)


def test_graph_of_a_plan_has_its_rings_and_parts():
    plan = make_blackwell_plan("bfloat16", (192, 128), ForwardFeatures(), arch="sm100")
    graph = sm100.graph_of(plan)
    assert graph.stages == (plan.k_edge.stages, plan.v_edge.stages)
    assert graph.parts == (plan.k_parts, plan.v_parts)
    assert graph.shares_ring
    assert plan.shares_ring
    assert not graph.skips_hidden
    causal = make_blackwell_plan(
        "bfloat16", (128, 128), ForwardFeatures(limit_right=True), arch="sm100"
    )
    assert sm100.graph_of(causal).skips_hidden


def test_plan_whose_streams_share_rows_is_refused_with_what_there_is():
    plan = make_blackwell_plan(
        "bfloat16", (128, 128), ForwardFeatures(), arch="sm100", splits_keys=True
    )
    with pytest.raises(UnsupportedError, match="streams share their query rows; it has them for"):
        sm100.graph_of(plan)
