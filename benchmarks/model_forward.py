"""What the frozen cost model says of the Blackwell forward, beside flash-attn-4's kernel.

Both kernels go through the same counters, the same simulated roles and the same frozen latencies;
nothing here is measured, and nothing is fitted to what is published about a B200. Written to
`benchmarks/results/model/forward.json`.

Usage: python -m benchmarks.model_forward
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks import protocol
from fovea.arch import SM100
from fovea.costs.calibration import Calibration, frozen
from fovea.costs.counted import KernelCounts, read_counts
from fovea.costs.launch import Call
from fovea.costs.machine import B200
from fovea.costs.predict import Kernel, Prediction, Predictor, graph_kernel, kernel_of
from fovea.costs.sm100 import Graph
from fovea.costs.timeline import timeline_of, timeline_record
from fovea.errors import UnsupportedError
from fovea.plan.select import forward_plan, unsupported
from fovea.problem import Request, make_dense

RESULT = protocol.RESULTS / "model" / "forward.json"
COUNTS = protocol.RESULTS / "model" / "counts.json"
TIMELINES = protocol.RESULTS / "model" / "timelines.json"
DRAWN_VISITS = 6
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
SEQLENS = (2048, 4096, 8192, 16384, 32768)
TOKENS = 32768  # of a call, and 2048 columns of heads, as the published figures have them
COLUMNS = 2048

# flash-attn-4 4.0.0b36, flash_fwd_sm100.py: shared memory for K and V is what Q and O leave of
# 224 KiB; a row's maximum takes 64 three-operand instructions of 128 columns, and two to finish.
_FA4_SHARED_BYTES = 224 * 1024
_FA4_SEEK_MAXIMA = 66
_TILE = 128

# TFLOP/s that others measured on a B200, by (head_dim, head_dim_v, causal, seqlen), with a source.
_RUN_A, _PRS = "Dao-AILab/flash-attention#2605", "Dao-AILab/flash-attention#{}"
PUBLISHED: dict[tuple[int, int, bool, int], list[tuple[float, str]]] = {
    **{(64, 64, False, s): [(t, _RUN_A)] for s, t in zip(SEQLENS, (733, 749, 758, 762))},
    **{(64, 64, True, s): [(t, _RUN_A)] for s, t in zip(SEQLENS, (579, 713, 792, 834))},
    **{(128, 128, True, s): [(t, _RUN_A)] for s, t in zip(SEQLENS, (927, 1090))},
    (128, 128, False, 2048): [(1279, _RUN_A)],
    (128, 128, False, 4096): [(1328, _RUN_A)],
    (128, 128, False, 8192): [(1358, _RUN_A), (1534.8, _PRS.format(2280))],
    (128, 128, False, 16384): [(1362, _RUN_A)],
    (128, 128, False, 32768): [(1613, "arXiv 2603.05451, its best shape (1605 in the blog)")],
    (128, 128, True, 8192): [(1418.1, _PRS.format(2280))],
    (192, 128, False, 8192): [(1555.7, _PRS.format(2270))],
    (192, 128, True, 8192): [(1494.1, _PRS.format(2270))],
}


def calls() -> Iterator[Call]:
    """Yield the calls of the table."""
    for head_dim, head_dim_v in HEAD_DIMS:
        for causal in (False, True):
            for seqlen in SEQLENS:
                yield Call(
                    batch=TOKENS // seqlen,
                    heads=COLUMNS // head_dim_v,
                    seqlen_q=seqlen,
                    seqlen_kv=seqlen,
                    head_dim=head_dim,
                    head_dim_v=head_dim_v,
                    causal=causal,
                )


def our_kernel(call: Call, calibration: Calibration) -> Kernel | str:
    """Return our kernel of a call, or what is lacking."""
    q, k, v = (
        torch.empty(call.batch, call.seqlen_q, call.heads, columns, dtype=torch.bfloat16)
        for columns in (call.head_dim, call.head_dim, call.head_dim_v)
    )
    problem = make_dense(q, k, v, Request(causal=call.causal))
    lack = unsupported(problem, SM100)
    if lack is not None:
        return lack
    plan = forward_plan(problem, SM100)
    if (plan.head_dim, plan.head_dim_v) != (call.head_dim, call.head_dim_v):
        return f"no plan of its own: padded to ({plan.head_dim}, {plan.head_dim_v})"
    try:
        return kernel_of(plan, B200, calibration)
    except UnsupportedError as error:
        return str(error)


def their_graph(call: Call) -> Graph:
    """Return the roles of flash-attn-4's kernel of a call."""
    dims = (call.head_dim, call.head_dim_v)
    pair = 2 if not call.causal and call.head_dim > 64 else 1
    q_bytes, o_bytes = (2 * _TILE * columns * 2 for columns in dims)
    # O takes Q's memory where both do not fit.
    taken = max(q_bytes, o_bytes) if call.head_dim == 192 else q_bytes + o_bytes
    stages = (_FA4_SHARED_BYTES - taken) // (_TILE * max(dims) * 2 // pair)
    stages = max(3, min(32, stages))  # three uneven ones where two of the larger fit
    return Graph(
        tile_n=_TILE,
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        stages=(stages, stages),
        shares_ring=True,
        p_parts=(96, 32),
        pair=pair,
        seek_maxima=_FA4_SEEK_MAXIMA,
        corrects=True,
        looks_ahead=False,
        is_persistent=not call.causal,
        epilogue="correction",
    )


def their_counts() -> dict[str, KernelCounts]:
    """Return the committed counts of flash-attn-4's kernels."""
    rows = json.loads(COUNTS.read_text(encoding="utf-8"))["rows"]
    return {row["kernel"]: read_counts(row["kernel"], row) for row in rows}


def their_kernel(call: Call, calibration: Calibration) -> Kernel:
    """Return flash-attn-4's kernel of a call."""
    mask = "causal" if call.causal else "dense"
    key = f"flash-attn-4 d{call.head_dim}x{call.head_dim_v} {mask}"
    return graph_kernel(their_graph(call), their_counts()[key], B200, calibration)


def columns_of(name: str, told: Prediction, overlapped: Prediction) -> dict[str, Any]:
    """Return the columns of one kernel."""
    return {
        name: round(told.tflops, 1),
        f"{name}_peak_share": round(told.peak_share, 3),
        f"{name}_visit_cycles": round(told.times.visit),
        f"{name}_if_pipes_overlap": round(overlapped.tflops, 1),
    }


def main() -> None:
    """Predict and write."""
    calibration = frozen().calibration
    best = replace(calibration, serial_share=0.0)
    predict, predict_best = Predictor(calibration), Predictor(best)
    mhz = B200.nominal_mhz
    rows: list[dict[str, Any]] = []
    for call in calls():
        row: dict[str, Any] = {
            "B": call.batch,
            "H": call.heads,
            "Hkv": call.heads,
            "S": call.seqlen_q,
            "D": call.head_dim,
            "Dv": call.head_dim_v,
            "causal": call.causal,
        }
        theirs = predict(call, their_kernel(call, calibration), mhz)
        row |= columns_of("fa4", theirs, predict_best(call, their_kernel(call, best), mhz))
        ours, ours_best = our_kernel(call, calibration), our_kernel(call, best)
        if isinstance(ours, str) or isinstance(ours_best, str):
            row["fovea"] = None
            row["fovea_lacks"] = ours
        else:
            told = predict(call, ours, mhz)
            row["kernel"] = told.kernel
            row |= columns_of("fovea", told, predict_best(call, ours_best, mhz))
            row["fovea_over_fa4"] = round(told.tflops / theirs.tflops, 3)
        key = (call.head_dim, call.head_dim_v, call.causal, call.seqlen_q)
        row["published_fa4"] = [
            {"tflops": rate, "source": source} for rate, source in PUBLISHED.get(key, [])
        ]
        rows.append(row)
        print({name: row.get(name) for name in ("D", "Dv", "causal", "S", "fovea", "fa4")})
    told = frozen()
    stamp = {
        **protocol.cpu_stamp(),
        "model_of": B200.name,
        "clock_mhz": mhz,
        "constants": asdict(calibration),
        "frozen": told.date,
        "held_out_mean_error": told.mean_error,
        "held_out_worst_error": told.worst_error,
    }
    protocol.write_result(RESULT, stamp, "TFLOP/s by the frozen model, not measured", rows)
    write_timelines(protocol.cpu_stamp(), calibration)


def write_timelines(stamp: dict[str, Any], calibration: Calibration) -> None:
    """Write what the page on the Blackwell forward draws: a query tile of both kernels."""
    call = next(call for call in calls() if call.head_dim == 128 and not call.causal)
    ours = our_kernel(call, calibration)
    assert not isinstance(ours, str), ours
    rows = [
        timeline_record(timeline_of(kernel, DRAWN_VISITS))
        for kernel in (ours, their_kernel(call, calibration))
    ]
    protocol.write_result(TIMELINES, stamp, "clocks of an SM by the frozen model", rows)


if __name__ == "__main__":
    main()
