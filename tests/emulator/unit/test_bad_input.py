"""Bad texts and launches: a structured error with its line, whatever the text says."""

import itertools
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fovea import emulator
from fovea.emulator import Options

HEAD = ".version 8.7\n.target sm_100a\n.address_size 64\n"


def kernel(body: str, signature: str = "", top: str = "", directives: str = "") -> str:
    """Return a module of one kernel; its body is line 6, what stands before it line 4."""
    return f"{HEAD}{top}.visible .entry k({signature}) {directives}\n{{\n{body}\nret;\n}}\n"


def run(text: str, **options: Any) -> None:
    """Load and launch, with zero for every parameter."""
    module = emulator.load_ptx(text)
    sizes = module.parameter_sizes("k")
    module.launch("k", 1, 32, args=[bytes(n) for n in sizes], options=Options(**options))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (kernel(".reg .b32 %a; mov.b32 %a, 1<<99999999999999;"), 6, "shift by"),
        (kernel(".reg .b32 %a; mov.b32 %a, 1>>-1;"), 6, "shift by"),
        (kernel(".reg .b32 %a; mov.b32 %a, " + "9" * 5000 + ";"), 6, "no number"),
        (kernel(".reg .b32 %a; mov.b32 %a, " + "9" * 40 + "/3;"), 6, "fit 64 bits"),
        (kernel(".reg .b32 %a; mov.b32 %a, 1 % 0;"), 6, "division by zero"),
        (kernel(".reg .b32 %a; mov.b32 %a, " + "(" * 5000), 6, "nested too deeply"),
        (kernel("{" * 5000 + "}" * 5000), 6, "nested too deeply"),
        (kernel(".reg .b32 %a; mov.b32 %a, \u0663;"), 6, "\u0663"),
        (kernel("").replace("8.7", "x"), 1, r"\.version x is none"),
        (kernel("").replace("8.7", "99.9"), 1, r"\.version 99\.9 is none"),
        (kernel(".reg .b32 %a; mov.b32 %a, " + "-" * 50000 + "1;"), 6, "nested too deeply"),
        (kernel(".local .b8 s[99999999999999];"), 6, "local memory"),
        (kernel("", top=".global .b8 g[999999999999999]; "), 4, "no memory for"),
        (kernel("", top=".const .b8 g[999999999999999]; "), 4, "const exceed"),
        (kernel("", top=".global .align 3 .b8 g[4]; "), 4, "power of two"),
        (kernel("", top=".global .align 99999999999999 .b8 g[4]; "), 4, "power of two"),
        (kernel("", top=".global .b32 g[2] = {1,2,3}; "), 4, "more than 2 initial values"),
        (kernel("", signature=".param .b8 p[99999]"), 4, "parameters exceed 32764"),
        (kernel(".reg .b32 %f; mov.b32 %f, 1e99;"), 6, "float literal"),
        (kernel(".shared .b32 s; .shared .b32 s;"), 6, "declared twice"),
        (kernel(".param .b64 p; call.uni (p), vprintf, (p);"), 6, "vprintf takes 2"),
    ],
)
def test_bad_text_is_an_error_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(emulator.PtxError, match=message) as info:
        run(text)
    assert info.value.line == line


@pytest.mark.parametrize(
    ("expression", "value"),
    [("-7/2", -3), ("-7 % 2", 1), ("1<<63", 1 << 63), ("0xffffffffffffffff/2", (1 << 63) - 1)],
)
def test_constant_expression_is_exact_in_64_bits(expression: str, value: int) -> None:
    out = np.zeros(1, np.uint64)
    body = (
        f".reg .b64 %p, %v; ld.param.u64 %p, [o]; mov.b64 %v, {expression}; st.global.b64 [%p], %v;"
    )
    module = emulator.load_ptx(kernel(body, signature=".param .u64 o"))
    module.launch("k", 1, 1, args=[out])
    assert int(out[0]) == value & (1 << 64) - 1


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"grid": (2**31 - 1, 65535, 65536)}, "grid"),
        ({"grid": 0}, "grid"),
        ({"grid": "x"}, "grid"),
        ({"grid": (1, 1, 1, 1)}, "grid"),
        ({"block": 1025}, "block"),
        ({"block": (32, 32, 2)}, "block"),
        ({"grid": 2, "cluster": 3}, "cluster"),
        ({"grid": 32, "cluster": 32}, "cluster"),
        ({"args": ()}, "args"),
        ({"args": (1, 2)}, "args"),
        ({"args": (1.5j,)}, r"args\[0\]"),
        ({"args": (b"123",)}, r"args\[0\]"),
        ({"args": (1 << 70,)}, r"args\[0\]"),
        ({"args": (np.zeros((4, 4))[:, ::2],)}, r"args\[0\]"),
        ({"shared_bytes": -1}, "shared_bytes"),
        ({"shared_bytes": 1 << 40}, "shared_bytes"),
        ({"kernel": "other"}, "kernel"),
    ],
)
def test_bad_launch_is_an_error_that_names_the_argument(
    launch: dict[str, Any], message: str
) -> None:
    module = emulator.load_ptx(kernel("", signature=".param .u64 p"))
    use = {"kernel": "k", "grid": 1, "block": 32, "args": (0,)} | launch
    with pytest.raises(emulator.LaunchError, match=message):
        module.launch(**use)


def test_grid_that_overflows_64_bits_is_not_an_empty_one() -> None:
    module = emulator.load_ptx(kernel("L: bra L;"))
    with pytest.raises(emulator.StepLimitExceeded):
        module.launch("k", (2**31 - 1, 65535, 65535), 32, options=Options(max_steps=100))


# --- fuzzing --------------------------------------------------------------------------------------

_PIECES = re.findall(
    r"\s+|[%.$\w:]+|.",
    kernel(
        """.shared .align 8 .b8 bar[16]; .shared .align 128 .b8 data[512]; .local .b8 l[16];
    .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<4>; .reg .v4 .b32 v; .reg .b16 %h<4>;
    .reg .f32 %f<4>;
    ld.param.u64 %rd1, [in]; mov.u32 %r1, bar; mov.u32 %r2, data; mov.u32 %r3, %tid.x;
    setp.eq.u32 %p1, %r3, 0; @%p1 bra L1; add.s32 %r4, %r3, 1 + 2 * 3; bra.uni L2;
    L1: mov.b32 v.x, 1; mov.b32 v.y, %r3; mov.b32 v.z, 0f3f800000; mov.b32 v.w, -1;
    st.shared.v4.b32 [data], v;
    L2: @%p1 mbarrier.init.shared.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r1], 256;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r2], [%rd1], 256, [%r1];
    W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra W;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2+16]; cvt.rn.f32.u32 %f1, %r4;
    fma.rn.f32 %f2, %f1, %f1, 0f3f800000; ex2.approx.f32 %f3, %f2; cvt.rn.bf16.f32 %h1, %f3;
    shfl.sync.bfly.b32 %r5|%p3, %r4, 1, 31, -1; vote.sync.ballot.b32 %r6, %p1, -1;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+256], 32;
    ld.shared.b32 %r8, [%r2+256];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r4}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r8]; tcgen05.wait::ld.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;
    st.local.b32 [l], %r5; atom.shared.add.u32 %r6, [%r2], %r5; red.global.add.u32 [%rd1], 1;
    setmaxnreg.dec.sync.aligned.u32 24; prmt.b32 %r7, %r6, %r5, 0x3210;""",
        signature=".param .u64 in, .param .align 64 .b8 map[128]",
        directives=".reqntid 32 .maxnreg 64",
    ),
)
_JUNK = ["0", "-1", "0xffffffffffff", "%p", "{", "}", "[", "]", "@", "!", ".", "1.5", "$L", "|",
         ";", "v", ".v4", ".align", "<", ">", "%tid.x", "1<<62", '"', "//", "/*"]  # fmt: skip


@settings(
    max_examples=150, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, len(_PIECES) - 1),
            st.sampled_from(["drop", "swap", "copy", "junk"]),
            st.integers(0, len(_PIECES) - 1),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 3),
)
def test_mutated_text_never_raises_anything_but_a_located_error(
    changes: list[tuple[int, str, int]], seed: int
) -> None:
    pieces = list(_PIECES)
    for place, kind, other in changes:
        if kind == "drop":
            pieces[place] = " "
        elif kind == "swap":
            pieces[place], pieces[other] = pieces[other], pieces[place]
        elif kind == "copy":
            pieces[place] += pieces[other]
        else:
            pieces[place] = _JUNK[other % len(_JUNK)]
    _check_outcome("".join(pieces), seed)


_OPERANDS = [n for n, piece in enumerate(_PIECES) if re.match(r"%\w|v\.|\d+$|0x", piece)]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    places=st.lists(st.sampled_from(_OPERANDS), min_size=2, max_size=4),
    seed=st.integers(0, 3),
)
def test_exchanged_operands_never_raise_anything_but_a_located_error(
    places: list[int], seed: int
) -> None:
    pieces = list(_PIECES)
    for place, other in itertools.pairwise(places):
        pieces[place] = _PIECES[other]
    _check_outcome("".join(pieces), seed)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(alphabet="\n\t .;:,{}[]()<>@!|%+-*/~^&\"'0xfF1e_abvkrpt$\\\0é", max_size=60))
def test_arbitrary_characters_never_raise_anything_but_a_located_error(text: str) -> None:
    _check_outcome(kernel(text), 0)
    _check_outcome(HEAD + text, 0)


def _check_outcome(text: str, seed: int) -> None:
    data, found = np.zeros(64, np.uint64), None
    try:
        module = emulator.load_ptx(text)
        name = module.kernels[0] if module.kernels else "k"
        sizes = module.parameter_sizes(name)
        args = [data if size == 8 else bytes(size) for size in sizes]
        module.launch(name, 1, 32, args=args, options=Options(seed=seed, max_steps=500))
    except emulator.EmulatorError as error:
        found = error
    assert type(found) is not emulator.EmulatorError, found  # the bare class: an internal error
    if isinstance(found, emulator.PtxError) and not found.line:
        assert re.search(r"\.version|\.target|\.address_size", str(found)), found


def test_random_bytes_are_an_error_with_a_line() -> None:
    source = random.Random(0)
    for _ in range(200):
        text = source.randbytes(40).decode("latin-1")
        with pytest.raises(emulator.PtxError):
            emulator.load_ptx(HEAD + text + "\x01")
