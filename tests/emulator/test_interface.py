"""What a launch tells besides its stores: counters of each kind, and a trace for Perfetto."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from fovea import emulator

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "isa_cases"))

from block_table import read

BLOCKS = Path(__file__).parent / "isa" / "cases" / "blocks"


def launch(name: str, **options) -> emulator.Result:
    """Run a block case by its file's name."""
    case = read(BLOCKS / f"{name}.ptx")
    assert case.tensor is None
    return emulator.load_ptx(case.text).launch(
        "case",
        case.cluster,
        case.threads,
        case.cluster,
        [case.inputs.copy(), case.before.copy()],
        options=emulator.Options(**options),
    )


WGMMA = "wgmma/product_m64n8k16_f32_bf16_bf16"
TCGEN05 = "tcgen05/kind_f16_bf16_bf16_to_f32"
BULK = "bulk/cp_async_bulk_shared_cta_global_mbarrier_complete_tx_bytes"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # four products of 64 x 8 x 16 over one swizzle width, two operations a term
        (WGMMA, {"mma_flops.bf16": 4 * 64 * 8 * 16 * 2, "shared_store_bytes": (64 + 8) * 128}),
        (
            TCGEN05,
            {"mma_flops.bf16": 128 * 16 * 16 * 2, "tensor_memory_load_bytes": 128 * 16 * 4},
        ),
        (BULK, {"bulk_load_bytes": 512, "shared_load_bytes": 512, "global_store_bytes": 512}),
        ("wgmma/product_m64n8k32_s32_s8_s8", {"mma_flops.s8": 4 * 64 * 8 * 32 * 2}),
        ("tcgen05/kind_tf32_tf32_tf32_to_f32", {"mma_flops.tf32": 128 * 16 * 8 * 2}),
    ],
)
def test_counters_count_flops_and_bytes_exactly(name, expected):
    counters = launch(name).counters
    assert {key: counters.get(key) for key in expected} == expected


def test_counters_of_warps_add_up_to_those_of_the_launch():
    result = launch(WGMMA)
    assert sorted(result.counters_by_warp) == [((0, 0, 0), warp) for warp in range(4)]
    for kind in ("alu", "memory", "sync", "mma", "control"):
        key = f"instructions.{kind}"
        parts = [counters[key] for counters in result.counters_by_warp.values()]
        assert sum(parts) == result.counters[key] > 0


def test_waits_are_counted_by_barrier():
    results = [launch(TCGEN05, seed=seed, async_delay="late") for seed in range(3)]
    for result in results:
        waited = {key: n for key, n in result.counters.items() if key.startswith("waited_steps.")}
        assert waited["waited_steps.barrier 0"] > 0
        assert any(key.startswith("waited_steps.mbarrier at shared") for key in waited)


@pytest.mark.parametrize(("name", "wait"), [(WGMMA, "wgmma"), (BULK, "mbarrier at")])
def test_waits_for_asynchronous_work_have_names(name, wait):
    results = [launch(name, seed=seed, async_delay="late") for seed in range(3)]
    waited = {key for result in results for key in result.counters if key.startswith("waited")}
    assert any(key.startswith(f"waited_steps.{wait}") for key in waited)
    assert "waited_steps.other" not in waited


@pytest.mark.parametrize("name", [WGMMA, TCGEN05, "tcgen05/pair_of_CTAs_256_rows"])
def test_trace_is_a_well_formed_timeline_of_every_warp(name, tmp_path):
    result = launch(name, trace=True)
    result.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named, spans = set(), defaultdict(list)
    for event in events:
        where = event["pid"], event["tid"]
        if event["ph"] == "M":
            named.add(where)
            continue
        assert where in named, "Perfetto shows an unnamed track"
        assert event["ph"] in ("X", "i")
        assert 0 <= event["ts"] <= result.steps
        if event["ph"] == "X":
            assert event["dur"] > 0
            spans[where].append((event["ts"], event["ts"] + event["dur"]))
    assert len(named) == len(result.counters_by_warp)
    for ranges in spans.values():
        open_until: list[int] = []
        for start, end in sorted(ranges, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "spans of a track nest or part"
            open_until.append(end)


def test_trace_of_equal_seeds_is_equal(tmp_path):
    texts = []
    for number in range(2):
        path = tmp_path / f"{number}.json"
        launch(TCGEN05, seed=5, trace=True).write_trace(path)
        texts.append(path.read_text())
    assert texts[0] == texts[1]


def test_result_of_a_launch_holds_no_copy_of_the_callers_arrays():
    case = read(BLOCKS / f"{BULK}.ptx")
    before, after = case.inputs.copy(), case.before.copy()
    emulator.load_ptx(case.text).launch("case", 1, case.threads, args=[before, after])
    np.testing.assert_array_equal(before, case.inputs)
    np.testing.assert_array_equal(after, case.expected)
