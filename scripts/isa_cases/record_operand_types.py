"""Ask ptxas which declared types of register each operand of an instruction takes, and what else.

Reads and rewrites `tests/emulator/isa/operand_types.txt`: a line is a statement with one operand
left open (`@`, or `@1`, `@2`, ... for the registers of a vector), the types that ptxas took there,
and the kinds of operand other than registers (`operand_probes.py`). To learn about another operand
add its statement, with nothing behind the bar.
Usage: python scripts/isa_cases/record_operand_types.py PTXAS
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/emulator/isa"))

from operand_probes import KINDS, TYPES

FILE = Path(__file__).parents[2] / "tests/emulator/isa/operand_types.txt"
HEAD = """.version {version}
.target {target}
.address_size 64
.shared .align 128 .b8 sm[1024];
.visible .entry kernel()
{{ {registers}
"""


def prelude(version: str, target: str) -> str:
    """Return what stands before the statements; registers are `%<type>_<number>`."""
    registers = " ".join(f".reg .{name} %{name}_<140>;" for name in TYPES)
    return HEAD.format(version=version, target=target, registers=registers)


def filled(statement: str, ptx_type: str) -> str:
    """Return a statement with registers of a type, or something of a kind, in the open operand."""
    if ptx_type in KINDS:
        return re.sub(r"@\d*", KINDS[ptx_type], statement)
    return re.sub(r"@(\d*)", lambda found: f"%{ptx_type}_{found[1] or 139}", statement)


def _refused(ptxas: str, version: str, target: str, statements: list[str]) -> set[int]:
    """Return the positions of the statements that ptxas refuses."""
    start = prelude(version, target)
    found: set[int] = set()
    left = list(range(len(statements)))
    while True:  # a syntax error ends a run of ptxas: take the statement out and go on
        done = _run(ptxas, target, start + "\n".join(f"{{ {statements[n]} }}" for n in left))
        lines = re.findall(r"line (\d+); (?:error|fatal) ", done.stderr + done.stdout)
        positions = {left[int(line) - 1 - start.count("\n")] for line in lines}
        if not done.returncode:
            return found
        if not positions:
            if len(left) == 1:
                return found | set(left)
            half = len(left) // 2
            for part in (left[:half], left[half:]):
                refused = _refused(ptxas, version, target, [statements[n] for n in part])
                found |= {part[n] for n in refused}
            return found
        found |= positions
        left = [n for n in left if n not in positions]


def _run(ptxas: str, target: str, text: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "types.ptx"
        path.write_text(text + "\nret;\n}\n")
        command = [ptxas, "-arch", target, str(path), "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True)


def _sections(text: str) -> Iterator[tuple[str, str, list[str]]]:
    for part in text.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        version, target = title.split()
        yield version, target, [line.partition(" |")[0] for line in lines if line]


def main(ptxas: str) -> None:
    """Rewrite the file with what a ptxas takes."""
    text = FILE.read_text()
    version = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    release = version.split(" V")[-1].split()[0]
    head = [*text.split("\n## ")[0].splitlines()[:-1], f"# ptxas {release}"]
    for ptx_version, target, statements in _sections(text):
        tried = [(s, t) for t in (*TYPES, *KINDS) for s in statements]
        refused: set[int] = set()
        for start in range(0, len(tried), len(statements)):  # a type or a kind at a time
            part = [filled(*item) for item in tried[start : start + len(statements)]]
            refused |= {start + n for n in _refused(ptxas, ptx_version, target, part)}
        head.append(f"\n## {ptx_version} {target}")
        taken: dict[str, list[str]] = {statement: [] for statement in statements}
        for position, (statement, name) in enumerate(tried):
            if position not in refused:
                taken[statement].append(name)
        for statement, names in taken.items():
            if not names:
                raise SystemExit(f"ptxas takes no type at all: {statement}")
            head.append(f"{statement} | {' '.join(names)}".rstrip())
    FILE.write_text("\n".join(head) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
