"""Count what a warp of each role does for a KV tile and a query tile, in cycles of its pipes.

Every kernel runs on the emulator at two lengths of keys; the difference over the KV tiles between
is what a plain tile costs, the rest of the shorter run what a query tile costs besides. Written to
`src/fovea/costs/counted.json`, which `fovea.costs.counted` reads, and, with those of flash-attn-4,
to `benchmarks/results/model/counts.json`. Its kernels need what `scripts/test_foreign` installs;
without it only ours are counted and its records stay as they are. Records of kernels that no call
gets any more are dropped.

Usage: python -m benchmarks.model_counts [WORD ...]    only kernels whose key has a WORD
"""

import contextlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import protocol
from fovea.arch import ARCHS, Arch
from fovea.cli.disassembly import branch_targets, disassemble
from fovea.compile import cache
from fovea.compile.target import CompileTarget
from fovea.compile.variant import ForwardVariant
from fovea.costs.counted import counts_key
from fovea.costs.pipes import pipe_cycles
from fovea.emulator import Options, Result
from fovea.emulator.counters import instruction_costs
from fovea.emulator.isa.instruction import Instruction
from fovea.emulator.machine import blocks
from fovea.plan.forward import ForwardPlan
from fovea.plan.select import MEDIUM_SEQLEN, forward_plan, unsupported
from fovea.problem import AttentionProblem, Request, make_dense
from fovea.runtime import emulated
from fovea.testing.inputs import Shape, dense_qkv

# The compilers read their target when they are imported.
TARGET = {
    "CUTE_DSL_ARCH": "sm_100a",
    "FLASH_ATTENTION_ARCH": "sm_100",
    "FLASH_ATTENTION_NUM_SMS": "148",
}
OPTIONS = Options(async_delay="eager")
Run = Callable[[AttentionProblem], Sequence[Result]]
PREFIX = "pipe."
LEAST_KEYS = 512
# Of calls that get the plans for few queries of many, for short sequences and for long ones.
LENGTHS = (MEDIUM_SEQLEN // 2, MEDIUM_SEQLEN, 2 * MEDIUM_SEQLEN)
UNIT = "cycles of a warp on its quarter of an SM (maxima: instructions)"
NAMES = ("issue", "fma", "alu", "mufu", "maxima")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
ROOT = Path(__file__).parents[1]
OURS = ROOT / "src" / "fovea" / "costs" / "counted.json"
FOREIGN = ROOT / "tests" / "foreign"
RESULT = ROOT / "benchmarks" / "results" / "model" / "counts.json"
WARPS = {
    "sm90": {"compute": range(4, 20)},
    "sm100": {"softmax": range(8), "epilogue": range(8, 12), "mma": range(13, 14)},
    "flash-attn-4": {"softmax": range(8), "correction": range(8, 12), "mma": range(12, 13)},
}
HEAD_DIMS = {
    "sm90": ((64, 64), (128, 128), (256, 256)),
    "sm100": ((64, 64), (128, 128), (192, 128)),
    "sm103": ((64, 64), (128, 128), (192, 128)),
}


def costs(instruction: Instruction) -> Iterator[tuple[str, int, int]]:
    """Yield the emulator's counters of an instruction, and its cycles by pipe."""
    yield from instruction_costs(instruction)
    entry = instruction.entry
    cycles = pipe_cycles(entry.kind, entry.form.mnemonic, instruction.opcode)
    for pipe, amount in asdict(cycles).items():
        if amount:
            yield f"{PREFIX}{pipe}", amount, 0
    if entry.form.mnemonic in ("max", "min") and instruction.opcode.endswith("f32"):
        yield f"{PREFIX}maxima", 1, 0


@contextlib.contextmanager
def pipe_counters() -> Iterator[None]:
    """Let kernels loaded meanwhile count their cycles by pipe, too."""
    plain = blocks.instruction_costs
    blocks.instruction_costs = costs
    try:
        yield
    finally:
        blocks.instruction_costs = plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel to count.

    Attributes:
        key: its name in the files.
        rows: query rows of a query tile, of all CTAs of a cluster.
        own_rows: rows of a warpgroup or stream that walks the keys for itself.
    """

    key: str
    kind: str
    head_dims: tuple[int, int]
    causal: bool
    rows: int
    own_rows: int
    tile_n: int

    @property
    def keys(self) -> tuple[int, int]:
        """Two lengths of keys, in whole tiles."""
        tiles = -(-LEAST_KEYS // self.tile_n)
        return tiles * self.tile_n, 2 * tiles * self.tile_n

    def problem(self, keys: int) -> AttentionProblem:
        """Return a call of one query tile."""
        shape = Shape(
            seqlen_q=self.rows,
            seqlen_kv=keys,
            heads_q=1,
            heads_kv=1,
            head_dim=self.head_dims[0],
            head_dim_v=self.head_dims[1],
        )
        tensors = dense_qkv(shape, dtype=torch.bfloat16)
        return make_dense(*tensors, Request(wants_lse=True, causal=self.causal))

    def visits(self, keys: int) -> float:
        """Return how many KV tiles those rows walk in the mean."""
        ends = range(self.own_rows, self.rows + 1, self.own_rows)
        last = [keys - (self.rows - end if self.causal else 0) for end in ends]
        return sum(-(-each // self.tile_n) for each in last) / len(last)


def our_cases() -> Iterator[tuple[Case, ForwardPlan, Arch]]:
    """Yield the kernels that plain dense and causal calls get."""
    seen: set[str] = set()
    for arch in ARCHS.values():
        for dims in HEAD_DIMS[arch.name]:
            for causal in (False, True):
                for length in LENGTHS:
                    q, k = (torch.empty(1, length, 1, dims[0], dtype=torch.bfloat16) for _ in "qk")
                    v = torch.empty(1, length, 1, dims[1], dtype=torch.bfloat16)
                    problem = make_dense(q, k, v, Request(causal=causal))
                    if unsupported(problem, arch) is not None:
                        continue
                    plan = forward_plan(problem, arch)
                    key = counts_key(plan.family, causal=causal)
                    if key in seen or plan.head_dim != dims[0]:
                        continue
                    seen.add(key)
                    own_rows = 64 if arch.name == "sm90" else 128
                    kind = "sm90" if arch.name == "sm90" else "sm100"
                    case = Case(
                        key=key,
                        kind=kind,
                        head_dims=dims,
                        causal=causal,
                        rows=plan.tile_m * (plan.cluster if arch.name == "sm90" else 1),
                        own_rows=own_rows,
                        tile_n=plan.tile_n,
                    )
                    yield case, plan, arch


def their_cases() -> Iterator[Case]:
    """Yield flash-attn-4's kernels; dense calls of wide heads run in pairs of CTAs."""
    for dims in HEAD_DIMS["sm100"]:
        for causal in (False, True):
            rows = 256 if causal or dims == (64, 64) else 512
            yield Case(
                key=f"flash-attn-4 d{dims[0]}x{dims[1]} {'causal' if causal else 'dense'}",
                kind="flash-attn-4",
                head_dims=dims,
                causal=causal,
                rows=rows,
                own_rows=rows,  # both streams of a CTA walk all of its keys
                tile_n=128,
            )


def late_share(listing: str) -> float:
    """Return the share of a plain step's exponentials that come after the second product's wait.

    Of Hopper kernels: the source lets the softmax run while the product does; the assembler moves
    part of it behind the wait for that product, as far as registers have it so.
    """
    targets = branch_targets(listing)
    shares: list[float] = []
    before = after = 0
    place = ""
    for line in listing.splitlines():
        match = INSTRUCTION.match(line)
        if "WARPGROUP.DEPBAR.LE gsb0, 0x1" in line:
            place, before, after = "before", 0, 0
        elif "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line:
            place = "after" if place == "before" else ""
        elif line.rstrip(":") in targets or (match and match[1] in ("FMNMX", "BRA")):
            if place == "after" and before + after and not (match and match[1] == "FMNMX"):
                shares.append(after / (before + after))
            place = ""
        elif match and match[1] == "MUFU" and place:
            before, after = before + (place == "before"), after + (place == "after")
    if not shares:
        raise ValueError("no plain step found in the listing; the kernel's main loop has changed")
    return round(min(shares), 3)


def listing_of(plan: ForwardPlan, arch: Arch) -> str:
    """Return the machine code of a kernel, as nvdisasm prints it."""
    artifact = cache.get_artifact(ForwardVariant(plan), CompileTarget(arch=arch.target))
    listing = disassemble(artifact.cubin)
    if listing is None:
        raise SystemExit(
            "counting Hopper kernels needs nvdisasm (pip install nvidia-cuda-nvdisasm)"
        )
    return listing


def run_ours(plan: ForwardPlan, arch: Arch, problem: AttentionProblem) -> Sequence[Result]:
    """Run our kernel with a plan, whatever plan such short lengths would get."""
    chosen = emulated.forward_plan
    emulated.forward_plan = lambda *_: plan
    try:
        return emulated.emulate(problem, arch, num_sms=2, options=OPTIONS)[1]
    finally:
        emulated.forward_plan = chosen


def foreign_runner(folder: Path) -> Run:
    """Return what runs flash-attn-4's kernel; its compiler is replaced once a process.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    sys.path.insert(0, str(FOREIGN))
    import flash_attn.cute.interface as interface
    from emulated_compiler import claim, emulate_compiler
    from torch._subclasses.fake_tensor import FakeTensorMode

    compiler = emulate_compiler(folder)
    compiler.options = OPTIONS

    def run(problem: AttentionProblem) -> Sequence[Result]:
        tensors = (problem.q, problem.k, problem.v)
        causal = problem.causal is not None
        with FakeTensorMode():
            fakes = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in tensors]
            interface._flash_attn_fwd(*fakes, causal=causal, return_lse=True)
        first = len(compiler.results)
        interface._flash_attn_fwd(*map(claim, tensors), causal=causal, return_lse=True)
        return compiler.results[first:]

    return run


def by_role(results: Sequence[Result], warps: Mapping[str, range]) -> dict[str, Counter[str]]:
    """Return the mean counters of a role's warp over the CTAs that had work."""
    found: dict[str, Counter[str]] = {}
    counters = results[-1].counters_by_warp
    for role, numbers in warps.items():
        taken = [counts for (_, warp), counts in counters.items() if warp in numbers]
        most = max(counts[f"{PREFIX}issue"] for counts in taken)
        busy = [counts for counts in taken if counts[f"{PREFIX}issue"] > most / 4]
        total: Counter[str] = Counter()
        for counts in busy:
            total.update(counts)
        found[role] = Counter({name: amount / len(busy) for name, amount in total.items()})
    return found


def count(case: Case, run: Run) -> dict[str, Any]:
    """Return what a KV tile and a query tile cost a warp of each role."""
    warps = WARPS[case.kind]
    short, long = (by_role(run(case.problem(keys)), warps) for keys in case.keys)
    tiles = (case.keys[1] - case.keys[0]) / case.tile_n
    roles: dict[str, Any] = {}
    for role in warps:
        less, more = ([c[role][f"{PREFIX}{name}"] for name in NAMES] for c in (short, long))
        visit = [(b - a) / tiles for a, b in zip(less, more, strict=True)]
        ends = [a - v * case.visits(case.keys[0]) for a, v in zip(less, visit, strict=True)]
        roles[role] = {
            "visit": {name: round(value, 2) for name, value in zip(NAMES, visit, strict=True)},
            "ends": {name: round(value, 1) for name, value in zip(NAMES, ends, strict=True)},
        }
    return {"rows": case.rows, "tile_n": case.tile_n, "roles": roles}


def main() -> None:
    """Count, and merge with what the files hold."""
    os.environ |= TARGET
    words = sys.argv[1:]
    stamp = protocol.cpu_stamp()
    sys.argv = sys.argv[:1]  # the compiler reads it
    known: dict[str, Any] = {}
    if RESULT.is_file():
        current = {case.key for case in (*(case for case, _, _ in our_cases()), *their_cases())}
        rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
        known = {key: row for row in rows if (key := row.pop("kernel")) in current}

    def take(case: Case, run: Run) -> None:
        if not words or any(word in case.key for word in words):
            known[case.key] = count(case, run)
            sys.stderr.write(f"{case.key}: {json.dumps(known[case.key]['roles'])}\n")

    with pipe_counters():
        count_all(take, known)
    ours = {key: record for key, record in sorted(known.items()) if key.startswith("fovea")}
    OURS.write_text(json.dumps({"kernels": ours}, indent=1) + "\n", encoding="utf-8")
    rows = [{"kernel": key, **record} for key, record in sorted(known.items())]
    protocol.write_result(RESULT, stamp, UNIT, rows)


def count_all(take: Callable[[Case, Run], None], known: dict[str, Any]) -> None:
    """Give every case to `take` with what runs it; add what only the machine code tells."""
    for case, plan, arch in our_cases():
        take(case, lambda problem, plan=plan, arch=arch: run_ours(plan, arch, problem))
        if case.kind == "sm90" and case.key in known:
            known[case.key]["late_share"] = late_share(listing_of(plan, arch))
    with tempfile.TemporaryDirectory() as folder:
        try:
            foreign = foreign_runner(Path(folder))
        except ModuleNotFoundError as missing:
            sys.stderr.write(f"{missing}; scripts/test_foreign installs it\n")
        else:
            for case in their_cases():
                take(case, foreign)


if __name__ == "__main__":
    main()
