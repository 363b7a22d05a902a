"""Ask ptxas which declared types of register each operand of an instruction takes.

Reads and rewrites `tests/emulator/isa/operand_types.txt`: a line is a statement with one operand
left open (`@`, or `@1`, `@2`, ... for the registers of a vector), and the types that ptxas took
there. To learn about another operand add its statement, with nothing behind the bar.
Usage: python scripts/isa_cases/record_operand_types.py PTXAS
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parents[2] / "tests/emulator/isa/operand_types.txt"
TYPES = ("b8 u8 s8 b16 u16 s16 f16 b32 u32 s32 f32 f16x2 b64 u64 s64 f64 b128 pred").split()
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
    """Return a statement with registers of a type in the open operand."""
    return re.sub(r"@(\d*)", lambda found: f"%{ptx_type}_{found[1] or 139}", statement)


def _refused(ptxas: str, version: str, target: str, statements: list[str]) -> set[int]:
    """Return the positions of the statements that ptxas refuses."""
    start = prelude(version, target)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "types.ptx"
        path.write_text(start + "\n".join(f"{{ {text} }}" for text in statements) + "\nret;\n}\n")
        done = subprocess.run(
            [ptxas, "-arch", target, str(path), "-o", "/dev/null"], capture_output=True, text=True
        )
    found: set[int] = set()
    for line, kind, message in re.findall(r"line (\d+); (\w+)\s*: (.*)", done.stderr + done.stdout):
        position = int(line) - 1 - start.count("\n")
        if kind == "fatal":
            raise SystemExit(f"{statements[position]}: {message}")
        found.add(position)
    return found


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
        tried = [(s, t) for s in statements for t in TYPES]
        refused = _refused(ptxas, ptx_version, target, [filled(*item) for item in tried])
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
