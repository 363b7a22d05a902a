"""Count what the Blackwell forward does for a KV tile, beside flash-attn-4's kernel.

Both kernels run on the emulator at two lengths of keys; the difference of their counters, over the
KV tiles between, is what one more tile costs a CTA. Needs what `scripts/test_foreign` installs for
the second column, else prints ours alone.

Usage: PYTHONPATH=src python scripts/kernel_counters.py [HEAD_DIM [ROWS]]
With 512 rows, the kernels of long dense calls, whose CTAs multiply in pairs; 256 is the default.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from fovea.arch import SM100
from fovea.emulator import Options
from fovea.emulator.counters import instruction_costs
from fovea.emulator.isa.instruction import Instruction
from fovea.emulator.machine import blocks
from fovea.plan.select import PAIR_QUERIES, forward_plan
from fovea.problem import AttentionProblem, Request, make_dense
from fovea.runtime import emulated
from fovea.testing.inputs import Shape, dense_qkv

Run = Callable[[int, int, int], Counter[str]]  # (rows, seqlen_kv, head_dim) -> counters

FOREIGN = Path(__file__).parents[1] / "tests" / "foreign"
# The compilers read their target when they are imported.
TARGET = {
    "CUTE_DSL_ARCH": "sm_100a",
    "FLASH_ATTENTION_ARCH": "sm_100",
    "FLASH_ATTENTION_NUM_SMS": "132",
}
CTA_ROWS, TILE, LENGTHS = 256, 128, (512, 1024)
OPTIONS = Options(async_delay="eager")
MOVES = {"mov", "cvta"}  # which the assembler removes
SHOWN = {
    "mufu.ex2": "exponentials on the MUFU",
    "instructions.mufu": "MUFU instructions (warps)",
    "own.alu": "FMA and ALU instructions, moves aside (warps)",
    "own.maximum": "of them maxima and minima",
    "own.wait": "mbarrier waits (warps)",
    "own.arrive": "mbarrier arrivals (warps), commits included",
    "instructions.memory": "loads and stores (warps)",
    "instructions.sync": "synchronising instructions (warps)",
    "shared_load_bytes": "shared memory, bytes read by threads",
    "shared_store_bytes": "shared memory, bytes written by threads",
    "tensor_memory_load_bytes": "tensor memory, bytes read by threads",
    "tensor_memory_store_bytes": "tensor memory, bytes written by threads",
}


def finer_costs(instruction: Instruction) -> Iterator[tuple[str, int, int]]:
    """Yield the emulator's counters of an instruction, and those that this table adds."""
    yield from instruction_costs(instruction)
    mnemonic, opcode = instruction.entry.form.mnemonic, instruction.opcode
    if instruction.entry.kind == "alu" and mnemonic not in MOVES:
        yield "own.alu", 1, 0
        if mnemonic in ("max", "min"):
            yield "own.maximum", 1, 0
    if mnemonic == "mbarrier" and "wait" in opcode:
        yield "own.wait", 1, 0
    if (mnemonic == "mbarrier" and "arrive" in opcode) or "commit" in opcode:
        yield "own.arrive", 1, 0


blocks.instruction_costs = finer_costs


def problem_of(rows: int, seqlen_kv: int, head_dim: int) -> AttentionProblem:
    """Return a dense call of one head."""
    shape = Shape(seqlen_q=rows, seqlen_kv=seqlen_kv, heads_q=1, heads_kv=1, head_dim=head_dim)
    return make_dense(*dense_qkv(shape, dtype=torch.bfloat16), Request(wants_lse=True))


def our_counters(rows: int, seqlen_kv: int, head_dim: int) -> Counter[str]:
    """Return the counters of our kernel; more rows than a CTA has get the plan of a long call."""
    problem = problem_of(rows, seqlen_kv, head_dim)
    plan = forward_plan(problem, SM100)
    if rows > CTA_ROWS:
        plan = forward_plan(problem_of(PAIR_QUERIES, TILE, head_dim), SM100)
    emulated.forward_plan = lambda *_: plan
    _, launches = emulated.emulate(problem, SM100, num_sms=2, options=OPTIONS)
    return total([launch.counters for launch in launches])


def their_runner(folder: Path) -> Run:
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

    def run(rows: int, seqlen_kv: int, head_dim: int) -> Counter[str]:
        problem = problem_of(rows, seqlen_kv, head_dim)
        tensors = (problem.q, problem.k, problem.v)
        with FakeTensorMode():
            fakes = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in tensors]
            interface._flash_attn_fwd(*fakes, causal=False, return_lse=True)
        first = len(compiler.counters)
        interface._flash_attn_fwd(*map(claim, tensors), causal=False, return_lse=True)
        return total(compiler.counters[first:])

    return run


def total(counters: Sequence[Mapping[str, int]]) -> Counter[str]:
    """Return the sums over launches."""
    result: Counter[str] = Counter()
    for one in counters:
        result.update(one)
    return result


def per_tile(run: Run, rows: int, head_dim: int) -> dict[str, float]:
    """Return what one more KV tile costs a CTA, by counter."""
    short, long = (run(rows, length, head_dim) for length in LENGTHS)
    tiles = (LENGTHS[1] - LENGTHS[0]) // TILE * (rows // CTA_ROWS)
    return {name: (long[name] - short[name]) / tiles for name in SHOWN}


def main() -> None:
    """Print the table of one head dimension."""
    os.environ |= TARGET
    head_dim = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    rows = int(sys.argv[2]) if len(sys.argv) > 2 else CTA_ROWS
    if rows not in (CTA_ROWS, 2 * CTA_ROWS):
        raise SystemExit(f"ROWS={rows} is not one of {CTA_ROWS}, {2 * CTA_ROWS}; name one of them")
    sys.argv = sys.argv[:1]  # the compiler reads it
    columns = {"fovea": per_tile(our_counters, rows, head_dim)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            columns["flash-attn-4"] = per_tile(their_runner(Path(folder)), rows, head_dim)
        except ModuleNotFoundError as missing:
            sys.stderr.write(f"{missing}; scripts/test_foreign installs it\n")
    kernel = "a KV tile" if rows == CTA_ROWS else "a CTA of a pair and a KV tile"
    lines = [f"| for {kernel}, D{head_dim} | {' | '.join(columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name, text in SHOWN.items():
        lines.append(f"| {text} | {' | '.join(f'{c[name]:.0f}' for c in columns.values())} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
