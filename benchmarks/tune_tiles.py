"""Time every candidate tile shape of the Hopper forward on the calls that its choice decides.

    python -m benchmarks.tune_tiles --prepare .carry/tiles            # here: compile, no GPU
    python -m benchmarks.tune_tiles --bundle .carry/tiles             # there: time
    python -m benchmarks.tune_tiles --bundle .carry/tiles --case "D128 causal S8192"

From the repository's root, with `src` and `.` on PYTHONPATH. A candidate that does not fit an SM,
or whose kernel keeps numbers in local memory, is named and left out. The winners are written by
hand into `src/fovea/plan/sm90.py`, with the reason in docs/notes/hopper_forward.md: what wins by
less than the noise of FlashAttention-3 against itself is no reason. Writes tiles.json.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fovea
from benchmarks import bench_forward_mods, protocol
from benchmarks.run import Run, parser_of
from benchmarks.shapes import Shape
from fovea.arch import SM90
from fovea.compile.aot import write_bundle
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan import select
from fovea.plan.kernel_calls import as_kernel_call
from fovea.plan.sm90 import ForwardPlan
from fovea.plan.sm90_tiles import TileShape
from fovea.problem import AttentionProblem, Request, make_dense
from fovea.problem.parts import numbers_of, tensors_of

CANDIDATES: dict[int, tuple[TileShape, ...]] = {
    64: (
        TileShape(256, 64, 6, 2, skips_idle=True),
        TileShape(192, 128, 3, 2, skips_idle=True),
        TileShape(256, 64, 6, 2),
        TileShape(256, 64, 6, 2, cluster=2),
        TileShape(192, 128, 3, 2),
        TileShape(192, 128, 3, 2, cluster=2),
        TileShape(192, 96, 3, 2),
        TileShape(192, 64, 6, 2),
        TileShape(128, 128, 3, 2),
        TileShape(128, 176, 3, 2),
    ),
    128: (
        TileShape(192, 64, 4, 2, skips_idle=True),
        TileShape(192, 64, 4, 2),
        TileShape(192, 64, 4, 2, cluster=2),
        TileShape(192, 80, 3, 2),
        TileShape(128, 128, 2, 2),
        TileShape(128, 128, 3, 1),
        TileShape(128, 176, 2, 1),
        TileShape(128, 64, 4, 2),
    ),
    192: (TileShape(128, 96, 2, 1), TileShape(128, 112, 2, 1, cluster=2)),
    256: (
        TileShape(128, 64, 2, 1),
        TileShape(128, 64, 2, 1, spare_q=True),
        TileShape(128, 64, 2, 1, cluster=2),
        TileShape(128, 64, 2, 1, cluster=2, spare_q=True),
        TileShape(128, 80, 2, 1),
        TileShape(128, 80, 2, 1, cluster=2),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call whose tile shape is a choice."""

    shape: Shape
    keywords: Callable[[Shape, str], dict[str, Any]] = field(default=lambda shape, device: {})

    def problem(self, device: str) -> AttentionProblem:
        """Return the call; its tensors are touched on a GPU alone."""
        shape = self.shape
        sizes = [(shape.B, shape.S, heads, shape.D) for heads in (shape.H, shape.Hkv, shape.Hkv)]
        make = torch.randn if device == "cuda" else torch.empty
        q, k, v = (make(size, dtype=torch.bfloat16, device=device) for size in sizes)
        request = Request(causal=shape.causal, **self.keywords(shape, device))
        return make_dense(q, k, v, request)


def _mod(make: Callable[[Shape, str], bench_forward_mods.Case]) -> Callable[..., dict[str, Any]]:
    """Return the keywords of a case of the mods suite."""

    def keywords(shape: Shape, device: str) -> dict[str, Any]:
        case = make(shape, device)
        mask = None
        if case.mask_mod is not None:
            size = (shape.S, shape.S)
            mask = fovea.create_block_mask(case.mask_mod, None, None, *size, device=device)
        return {"score_mod": case.score_mod, "block_mask": mask}

    return keywords


def _cases() -> Iterator[tuple[str, Case]]:
    for head_dim, heads in ((64, 32), (128, 16), (192, 8), (256, 8)):
        for batch, seqlen in ((32, 512), (8, 2048), (2, 8192)):
            for causal in (False, True):
                shape = Shape(batch, heads, heads, seqlen, head_dim, causal)
                kind = "causal" if causal else "full"
                yield f"D{head_dim} {kind} S{seqlen}", Case(shape=shape)
        shape = Shape(2, heads, heads, 8192, head_dim, False)
        for make in bench_forward_mods.CASES:
            name = f"D{head_dim} {make.__name__}"
            yield name, Case(shape=shape, keywords=_mod(make))


CASES = dict(_cases())


def plans(problem: AttentionProblem) -> Iterator[tuple[str, ForwardPlan | str]]:
    """Yield each candidate's text, and its plan or why it has none."""
    chosen = select.forward_plan(problem, SM90)
    assert isinstance(chosen, ForwardPlan)
    own = TileShape(*(getattr(chosen, name) for name in TileShape._fields))
    for tile in dict.fromkeys((own, *CANDIDATES[chosen.head_dim])):
        text = "x".join(map(str, tile[:5])) + (" idle" if tile.skips_idle else "")
        text += " spare" if tile.spare_q else ""
        is_whole = 128 % tile.tile_m == 0 == 128 % tile.tile_n
        if chosen.features.block_lists and not is_whole:
            yield text, "does not divide a block of 128"
            continue
        try:
            plan = ForwardPlan(
                dtype=chosen.dtype,
                head_dim=chosen.head_dim,
                head_dim_v=chosen.head_dim_v,
                features=chosen.features,
                **tile._asdict(),
            )
        except AssertionError as error:
            yield text, f"does not fit {error}"
        else:
            yield text, plan


def launches(problem: AttentionProblem) -> dict[str, protocol.Launch]:
    """Return what launches each candidate; those left out are named."""
    from fovea.runtime.arguments import ForwardLaunch
    from fovea.runtime.module import load
    from fovea.runtime.stream_memory import stream_memory

    num_sms = torch.cuda.get_device_properties(problem.device).multi_processor_count
    target = CompileTarget(arch=SM90.target, host_triple=native_host_triple())
    tensors, numbers = tensors_of(problem), numbers_of(problem)
    call = as_kernel_call(problem, SM90)
    found: dict[str, protocol.Launch] = {}
    for text, plan in plans(problem):
        if isinstance(plan, str):
            print(f"  {text} left out: {plan}")
            continue
        artifact = get_artifact(ForwardVariant(plan), target)
        used = artifact.record.kernels.values()
        local = max(each.stack_bytes + each.local_bytes for each in used)
        if local > 0:
            print(f"  {text} left out: {local} bytes of local memory a thread")
            continue
        launcher = load(artifact, problem.device)
        launch = ForwardLaunch(call, plan, num_sms, launcher, stream_memory)
        found[text] = partial(launch, tensors, numbers, False)
    return found


def prepare(folder: Path, names: list[str], workers: int | None) -> None:
    """Compile every candidate of the named cases into a bundle."""
    found: dict[ForwardVariant, None] = {}
    for name in names:
        for _, plan in plans(CASES[name].problem("cpu")):
            if isinstance(plan, ForwardPlan):
                found[ForwardVariant(plan)] = None
    write_bundle(list(found), [CompileTarget(arch=SM90.target)], folder, workers=workers)


def main() -> None:
    """Do what the command line says."""
    parser = parser_of(__doc__)
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="compile into this folder")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--case", action="append", help="repeatable; part of a name; default: all")
    options = parser.parse_args()
    wanted = options.case or [""]
    names = [name for name in CASES if any(part in name for part in wanted)]
    if options.prepare is not None:
        prepare(options.prepare, names, options.workers)
        return
    run = Run(options, "tiles", "TFLOP/s of all pairs")
    for name in names:
        case = CASES[name]
        for tile, taken in run.measure(launches(case.problem("cuda"))).items():
            rates = protocol.rates({"fovea": taken}, case.shape.forward_flops() / 1e12)
            row = {**case.shape.row(), "case": name, "tile": tile, **rates}
            run.add(row, ["fovea"], f"{name} {tile}")
    run.end()


if __name__ == "__main__":
    main()
