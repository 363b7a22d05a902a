"""Constants, names, special registers, `_` and the like as operands, as ptxas judges them.

`operand_types.txt` has what ptxas took for every operand of every kind of form, `verdicts.txt`
what it said to single statements.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from operand_probes import KINDS, TYPES

from fovea.emulator import Options, OutOfBounds, PtxError, UnsupportedForm, load_ptx
from fovea.emulator.ptx.module import Layout

FOLDER = Path(__file__).parent


def refusal(target: str, statement: str, declarations: str = "") -> str:
    """Return what is wrong with a statement ("": nothing); `%<type>_<n>` need no declaration."""
    if not declarations:
        used = set(re.findall(r"%([a-z]+\d*(?:x2)?)_", statement))
        declarations = " ".join(f".reg .{name} %{name}_<140>;" for name in used.intersection(TYPES))
    text = (
        f".version 9.2\n.target {target}\n.address_size 64\n"
        ".shared .align 128 .b8 sm[1024], s[1024];\n"
        ".const .align 16 .b8 c[64];\n.global .align 16 .b8 g[64];\n"
        f".visible .entry k(.param .u64 p) {{ .local .align 16 .b8 l[64]; {declarations}\n"
        f"{statement}\nret; }}"
    )
    try:
        Layout.of(text).kernel("k")
    except PtxError as error:
        return str(error)
    return ""


def _rows() -> Iterator[tuple[str, str, set[str]]]:
    for part in (FOLDER / "operand_types.txt").read_text().split("\n## ")[1:]:
        title, *lines = part.splitlines()
        for line in lines:
            statement, bar, names = line.partition(" |")
            if bar:
                yield title.split()[1], statement, set(names.split())


def _is_quirk(statement: str, kind: str) -> bool:
    """Return whether ptxas takes there what no compiler writes and means nothing."""
    if kind == "special64":  # as an address, as a destination
        return "[@" in statement or bool(re.search(r" (\{?@|.*\[%b64_\d\], \{@)", statement))
    if statement.startswith("mov.b128 {") or (kind == "special" and "{@" in statement):
        return True
    # ptxas does not look at the sparsity selector, at A in registers of a wgmma, and at one cvt
    return "sp" in statement or statement.startswith(
        ("wgmma", "movmatrix", "cvt.rn.satfinite.e2m1")
    )


# by kind, how many operands take it here though ptxas refuses: mostly vectors of constants alone
UNCHECKED = {"decimal": 12, "double": 77, "single": 32, "int": 78, "special64": 15, "name": 25,
             "sink": 1, "special": 26, "one": 10}  # fmt: skip


def test_other_operands_are_judged_as_by_ptxas():
    false_alarms: list[str] = []
    unchecked: Counter[str] = Counter()
    for target, statement, taken in _rows():
        for kind, text in KINDS.items():
            is_refused = refusal(target, re.sub(r"@\d*", text, statement))
            if is_refused and kind in taken and not _is_quirk(statement, kind):
                false_alarms.append(f"{statement} with {text}: {is_refused}")
            elif not is_refused and kind not in taken:
                unchecked[kind] += 1
    assert not false_alarms
    assert dict(unchecked) == UNCHECKED


DECLARED = (
    ".reg .b16 %h<4>; .reg .b32 %a, %b, %v, %w, %r<4>; .reg .f32 %f, %f1, %f2; .reg .b64 %d, %e,"
    "%p; .reg .f64 %fd<3>; .reg .pred %q, %q1, %q2; .reg .b128 %x; .reg .f16 %hf<3>;"
)


def _verdicts() -> list[tuple[str, str, bool]]:
    """Return (target, statement, whether the emulator takes it)."""
    found: list[tuple[str, str, bool]] = []
    for part in (FOLDER / "verdicts.txt").read_text().split("\n## ")[1:]:
        target, *lines = part.splitlines()
        for line in lines:
            sign, _, statement = line.partition(" ")
            found.append((target, statement, (sign[-1] == "+") is not sign.startswith("!")))
    return found


def test_statements_are_judged_as_by_ptxas():
    verdicts = _verdicts()
    refusals = [refusal(target, statement, DECLARED) for target, statement, _ in verdicts]
    assert len(verdicts) > 500
    assert not [
        (target, statement, message)
        for (target, statement, is_taken), message in zip(verdicts, refusals, strict=True)
        if is_taken is bool(message)
    ]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("add.u32 %a, %tid.x, 1;", "move it into a register first"),
        ("mov.u32 %a, %tid;", "such as %tid.x"),
        ("add.f32 %f, %f1, 1;", "write 1.0, or 0f"),
        ("add.f16 %hf1, %hf1, 1;", "move its bits into a register first"),
        ("and.b32 %a, %b, 1.5;", "write its bits as an integer"),
        ("add.u32 _, %a, %b;", "only results may be dropped"),
        ("and.b32 %a, %b, !%q;", "may not be negated"),
        ("st.global.b32 [%p], sm;", "operand b is the name sm"),
        ("ld.global.b32 %a, [sm];", "sm is a .shared variable, the address must be of .global"),
        ("st.param.b64 [p], %d;", "p is a parameter of the kernel"),
        ("ld.shared.b32 %a, [16];", "of .local alone"),
        ("ld.shared.b32 %a, [sm-4];", "a negative offset is written +-4"),
        ("ld.shared.b32 %a, [%b-4];", "a negative offset is written +-4"),
        ("bfe.u32 %a, %b, 256, 1;", "must lie in 0..255"),
        ("mov.f64 %fd1, 1e400;", "outside the range of .f64"),
        ("ld.global.v4.b64 {%d, %d, %d, %d}, [%p];", "exists on sm_100 and later only"),
        ("st.const.b32 [c], %a;", "does not implement"),
        ("cp.async.wait_group -1;", "must not be negative"),
    ],
)
def test_refusal_says_what_to_write(statement, message):
    assert message in refusal("sm_90a", statement, DECLARED)


KERNEL = """.version 9.2
.target sm_90a
.address_size 64
.shared .align 8 .b8 s[32];
.visible .entry k(.param .u64 p) {{
    .local .align 8 .b8 l[32]; .reg .b64 %p, %d; .reg .b32 %a; .reg .f64 %fd; .reg .f32 %f;
    ld.param.u64 %p, [p];
    {body}
    ret;
}}
"""


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("st.global.b64 [%p], 1.5;", 0x3FF8000000000000),
        ("mov.b64 %d, -1.5; st.global.b64 [%p], %d;", 0xBFF8000000000000),
        ("mov.f64 %fd, .5+1.0; st.global.f64 [%p], %fd;", 0x3FF8000000000000),
        ("mov.b64 %fd, 0x123456789abcdef0; st.global.b32 [%p], %fd;", 0x9ABCDEF0),
        ("mov.f32 %f, 1e40; st.global.f32 [%p], %f;", 0x7F800000),
        ("mov.b32 %a, 7; st.shared.b32 [s+8], %a; mov.b32 %a, s+12; ld.shared.b32 %a, [%a+-4];"
         "st.global.b32 [%p], %a;", 7),
        ("mov.b32 %a, 7; st.shared.b32 [s+4*2], %a; ld.b32 %a, [s+8]; st.global.b32 [%p], %a;", 7),
        ("mov.b32 %a, 7; st.local.b32 [l+8+-4], %a; ld.b32 %a, [l+4]; st.global.b32 [%p], %a;", 7),
        ("mov.b32 %a, 7; st.b32 [s], %a; red.add.u32 [s], %a; ld.shared.b32 %a, [s];"
         "st.global.b32 [%p], %a;", 14),
        ("lop3.b32 %a, 0xf0, 0xcc, 0xaa, -2; st.global.b32 [%p], %a;", 0xFE),
    ],
)  # fmt: skip
def test_operand_has_the_value_that_ptxas_gives_it(body, value):
    out = np.zeros(1, np.uint64)
    load_ptx(KERNEL.format(body=body)).launch("k", 1, 1, args=[out])
    assert int(out[0]) == value


@pytest.mark.parametrize(
    "body",
    [
        "ld.param.u64 %d, [p+8];",
        "ld.param.u8 %a, [p+8];",
        "st.shared.b32 [s+-4], %a;",
        "ld.local.b32 %a, [l+-4];",
    ],
)
def test_access_beside_a_variable_is_reported(body):
    kernel = load_ptx(KERNEL.format(body="mov.b32 %a, 1;" + body))
    with pytest.raises(OutOfBounds):
        kernel.launch("k", 1, 1, args=[np.zeros(1, np.uint64)], options=Options(seed=1))


def test_register_parameter_of_a_function_is_not_implemented():
    text = ".version 9.2\n.target sm_90a\n.address_size 64\n.func f(.reg .b32 %a) { ret; }"
    with pytest.raises(UnsupportedForm, match=r"PTX line 4.*declare them as \.param"):
        load_ptx(text)
