"""What a cubin's machine code holds, counted: products, exponentials, copies, local memory.

Lives here: finding nvdisasm and counting its output. Registers and shared memory stand in the
cubin itself and are read by `compile/cubin.py`. Invariant: a count comes from the disassembly of
the bytes that run; where no nvdisasm is found there is no count, never a guess.
"""

import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# Where wheels put it: the package nvidia-cuda-nvdisasm, and triton.
_PLACES = ("nvidia/cu13/bin", "triton/backends/nvidia/bin")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
EXP2 = "MUFU.EX2"
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionCounts:
    """Static instructions of a cubin.

    Attributes:
        products: matrix products (HGMMA on sm_90a, UTCHMMA on sm_100a).
        exp2: exponentials on the special-function unit.
        tma: bulk tensor copies.
        local_accesses: loads and stores of local memory; 0 means nothing spilled.
        total: all instructions.
    """

    products: int
    exp2: int
    tma: int
    local_accesses: int
    total: int


def find_nvdisasm() -> Path | None:
    """Return the disassembler's path, from PATH or from an installed wheel, or None."""
    on_path = shutil.which("nvdisasm")
    if on_path:
        return Path(on_path)
    packages = Path(sysconfig.get_paths()["platlib"])
    for place in _PLACES:
        candidate = packages / place / "nvdisasm"
        if candidate.is_file():
            return candidate
    return None


def disassemble(cubin: bytes) -> str | None:
    """Return the machine code of a cubin as nvdisasm prints it.

    None where no nvdisasm is installed or it does not take the cubin.
    """
    program = find_nvdisasm()
    if program is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "--print-code", file.name], capture_output=True, text=True, check=False
        )
    return done.stdout if done.returncode == 0 else None


def count_instructions(cubin: bytes) -> InstructionCounts | None:
    """Return the counts of a cubin, or None where it cannot be disassembled."""
    listing = disassemble(cubin)
    return None if listing is None else count_listing(listing)


def count_listing(listing: str) -> InstructionCounts:
    """Return the counts of a listing that nvdisasm printed."""
    opcodes: Counter[str] = Counter()
    for block in count_blocks(listing):
        opcodes.update(block)
    exp2 = opcodes.pop(EXP2, 0)
    opcodes["MUFU"] += exp2
    return InstructionCounts(
        products=opcodes["HGMMA"] + opcodes["UTCHMMA"],
        exp2=exp2,
        tma=sum(count for name, count in opcodes.items() if name.startswith("UTMA")),
        local_accesses=opcodes["LDL"] + opcodes["STL"],
        total=sum(opcodes.values()),
    )


def count_blocks(listing: str) -> list[Counter[str]]:
    """Return how often each opcode stands between two targets of branches, block by block.

    Opcodes are without their qualifiers, but for exponentials, which are `EXP2`.
    """
    targets = branch_targets(listing)
    blocks: list[Counter[str]] = [Counter()]
    for line in listing.splitlines():
        match = _OPCODE.match(line)
        if match:
            is_exp2 = match[1] == "MUFU" and ".EX2" in match[2]
            blocks[-1][EXP2 if is_exp2 else match[1]] += 1
        elif line.rstrip(":") in targets:
            blocks.append(Counter())
    return blocks


def branch_targets(listing: str) -> set[str]:
    """Return the labels that something branches to; nvdisasm 13.5 prints others, too."""
    return set(_TARGET.findall(listing))
