"""Cases that need a whole thread block: how one is written down, and the PTX around its body.

Lives here: the case, its file and the shared pieces of PTX. Not here: the cases (`block_*.py`),
their expected values, launches. Invariant: a case is a kernel `case(in, out)` or
`case(in, out, tensor)` over 32-bit words; `out` holds `before` at first and `expected` in the end,
bit for bit, whatever the order of accumulation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Words = np.ndarray  # one-dimensional, uint32
WORDS_A_LINE = 32
SILICON_TARGETS = ("sm_90a",)  # what the GPU at hand runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor map over `in` or `out`; sizes and box count elements, innermost first."""

    over: str
    element: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]
    swizzle: int = 0
    element_strides: tuple[int, ...] = ()
    fills_nan: bool = False

    def describe(self) -> str:
        """Return the map as one line of a file."""
        parts = [f"over={self.over}", f"element={self.element}"]
        for name in ("sizes", "strides", "box", "element_strides"):
            parts.append(f"{name}={','.join(map(str, getattr(self, name)))}")
        return " ".join([*parts, f"swizzle={self.swizzle}", f"fills_nan={int(self.fills_nan)}"])


def read_tensor(line: str) -> Tensor:
    """Return the map that `Tensor.describe` wrote."""
    values = dict(part.split("=") for part in line.split())
    sizes: dict[str, Any] = {
        name: tuple(int(word) for word in values[name].split(",") if word)
        for name in ("sizes", "strides", "box", "element_strides")
    }
    return Tensor(
        over=values["over"],
        element=values["element"],
        swizzle=int(values["swizzle"]),
        fills_nan=values["fills_nan"] == "1",
        **sizes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCase:
    """One case.

    Attributes:
        source: the manual's section that gives the expected values.
        ptx: the whole kernel.
        inputs, before, expected: words of `in`, of `out` at first, of `out` in the end.
    """

    name: str
    group: str
    source: str
    ptx: str
    expected: Words
    inputs: Words = field(default_factory=lambda: np.zeros(4, np.uint32))
    before: Words | None = None
    threads: int = 32
    cluster: int = 1
    tensor: Tensor | None = None
    target: str = "sm_90a"

    @property
    def path(self) -> Path:
        """The file of the case, below the folder of all."""
        return Path(self.group) / (re.sub(r"[^A-Za-z0-9]+", "_", self.name).strip("_") + ".ptx")


def words(values: np.ndarray) -> Words:
    """Return an array's bytes as words, padded with zeros."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    padded = np.zeros(-(-len(raw) // 4) * 4, np.uint8)
    padded[: len(raw)] = raw
    return padded.view(np.uint32)


def render(case: BlockCase, evidence: str) -> str:
    """Return the text of a case's file."""
    lines = [f"// case: {case.name}", f"// evidence: {evidence}", f"// source: {case.source}"]
    lines.append(f"// launch: threads={case.threads} cluster={case.cluster}")
    if case.tensor is not None:
        lines.append(f"// tensor: {case.tensor.describe()}")
    for label, values in (("in", case.inputs), ("before", case.before), ("out", case.expected)):
        if values is None:
            continue
        for start in range(0, len(values), WORDS_A_LINE):
            part = values[start : start + WORDS_A_LINE]
            lines.append(f"// {label}: " + " ".join(f"{int(word):x}" for word in part))
    return "\n".join(lines) + "\n" + case.ptx


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFile:
    """A case as read from its file."""

    text: str
    evidence: str
    target: str
    threads: int
    cluster: int
    tensor: Tensor | None
    inputs: Words
    before: Words
    expected: Words


def read(path: Path) -> BlockFile:
    """Read a case's file."""
    text = path.read_text()
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r"// (\w+): (.*)", line)
        if match:
            found.setdefault(match[1], []).append(match[2])

    def column(label: str) -> Words:
        return np.array(
            [int(w, 16) for line in found.get(label, ()) for w in line.split()], np.uint32
        )

    launch = dict(part.split("=") for part in found["launch"][0].split())
    target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    assert target, path
    expected = column("out")
    return BlockFile(
        text=text,
        evidence=found["evidence"][0],
        target=target[1],
        threads=int(launch["threads"]),
        cluster=int(launch["cluster"]),
        tensor=read_tensor(found["tensor"][0]) if "tensor" in found else None,
        inputs=column("in"),
        before=column("before") if "before" in found else np.zeros_like(expected),
        expected=expected,
    )


# --- pieces of PTX --------------------------------------------------------------------------------

PROLOGUE = """
    mov.u32 %thread, %tid.x;
    mov.u32 %smem, smem;
    mov.u32 %bar, bars;
    mov.u32 %rank, %cluster_ctarank;
    shr.u32 %warp, %thread, 5;
    setp.eq.u32 %first, %thread, 0;
    setp.eq.and.u32 %lead, %rank, 0, %first;
    ld.param.u64 %in, [in];
    ld.param.u64 %out, [out];
"""
INIT_BARRIERS = """
    @%first mbarrier.init.shared::cta.b64 [%bar], 1;
    @%first mbarrier.init.shared::cta.b64 [%bar+8], 1;
    @%first fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
CLUSTER_SYNC = """
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""


def wait(label: str, at: str = "%bar", parity: int = 0) -> str:
    """Wait for a phase of an mbarrier."""
    return f"""
{label}:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [{at}], {parity};
    @!%p bra {label};
"""


def expect(size: int, issuer: str = "%first", at: str = "%bar") -> str:
    """Arrive and announce bytes."""
    return f"    @{issuer} mbarrier.arrive.expect_tx.shared::cta.b64 %state, [{at}], {size};\n"


def fill(size: int, label: str = "fill", *, start: int = 0, at: int = 0) -> str:
    """All threads copy `size` bytes of `in` from byte `start` to shared memory."""
    return f"""
    mov.u32 %i, %ntid.x;
    shl.b32 %stride, %i, 2;
    shl.b32 %i, %thread, 2;
{label}:
    setp.ge.u32 %q, %i, {size};
    @%q bra {label}_end;
    cvt.u64.u32 %a, %i;
    add.u64 %a, %in, %a;
    ld.global.b32 %t, [%a+{start}];
    add.u32 %j, %smem, %i;
    st.shared.b32 [%j+{at}], %t;
    add.u32 %i, %i, %stride;
    bra {label};
{label}_end:
"""


def dump(size: int, label: str = "dump", *, at: int = 0, to: int = 0) -> str:
    """All threads copy `size` bytes of shared memory to the CTA's part of `out`."""
    return f"""
    mov.u32 %i, %ntid.x;
    shl.b32 %stride, %i, 2;
    shl.b32 %i, %thread, 2;
    mul.wide.u32 %b, %rank, {size};
    add.u64 %b, %out, %b;
{label}:
    setp.ge.u32 %q, %i, {size};
    @%q bra {label}_end;
    add.u32 %j, %smem, %i;
    ld.shared.b32 %t, [%j+{at}];
    cvt.u64.u32 %a, %i;
    add.u64 %a, %b, %a;
    st.global.b32 [%a+{to}], %t;
    add.u32 %i, %i, %stride;
    bra {label};
{label}_end:
"""


def registers(letter: str, count: int, start: int = 0) -> str:
    """Return a vector operand."""
    return "{" + ", ".join(f"%{letter}{start + j}" for j in range(count)) + "}"


def store_registers(count: int, letter: str = "d", threads: int = 128) -> str:
    """Thread t stores register j to word j * threads + t of `out`."""
    lines = ["    mul.wide.u32 %a, %thread, 4;", "    add.u64 %a, %out, %a;"]
    lines += [f"    st.global.b32 [%a+{4 * threads * j}], %{letter}{j};" for j in range(count)]
    return "\n".join(lines) + "\n"


def kernel(
    body: str,
    *,
    shared: int = 16384,
    target: str = "sm_90a",
    cluster: int = 1,
    has_tensor: bool = False,
    wide: Sequence[tuple[str, int]] = (),
) -> str:
    """Return a whole module around a body."""
    tensor = ", .param .align 64 .b8 tensor[128]" if has_tensor else ""
    pair = f"\n.reqnctapercluster {cluster}, 1, 1" if cluster > 1 else ""
    more = "".join(f"    .reg .b32 %{letter}<{count}>;\n" for letter, count in wide)
    version = "8.7" if target == "sm_90a" else "8.8"
    map_address = (
        "    mov.b64 %map, tensor;\n    cvta.param.u64 %map, %map;\n" if has_tensor else ""
    )
    lines = f"""
.version {version}
.target {target}
.address_size 64

.visible .entry case(.param .u64 in, .param .u64 out{tensor}){pair}
{{
    .shared .align 1024 .b8 smem[{shared}];
    .shared .align 16 .b8 bars[64];
    .reg .pred %first, %lead, %p, %q, %yes, %no;
    .reg .b16 %h, %mask;
    .reg .b32 %thread, %warp, %rank, %smem, %bar, %i, %j, %t, %stride, %r<32>;
    .reg .b64 %in, %out, %map, %a, %b, %state, %w<16>;
{more}{PROLOGUE}{map_address}{body}
    ret;
}}
"""
    return "\n".join(line for line in lines.lstrip("\n").splitlines() if line.strip()) + "\n"
