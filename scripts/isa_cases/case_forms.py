"""The list of cases: every form exercised on one warp of 32 threads."""

from collections.abc import Iterator

from case_table import Case

_INT = ("u16", "s16", "u32", "s32", "u64", "s64")


def _simple(
    opcode: str, output: str, inputs: str, *, tail: str = "", approximate: bool = False,
    target: str = "sm_90a", group: str = "",
) -> Case:  # fmt: skip
    kinds = tuple(inputs.split())
    operands = ", ".join(["%o0", *(f"%i{j}" for j in range(len(kinds)))])
    return Case(opcode, kinds, (output,), f"{opcode} {operands}{tail};", target, approximate, group)


def integer() -> Iterator[Case]:
    """Integer arithmetic and bits."""
    for t in _INT:
        for name in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"):
            yield _simple(f"{name}.{t}", t, f"{t} {t}")
        for name in ("mad.lo", "mad.hi", "sad"):
            yield _simple(f"{name}.{t}", t, f"{t} {t} {t}")
        if t[0] == "s":
            yield _simple(f"abs.{t}", t, t)
            yield _simple(f"neg.{t}", t, t)
    for t, w in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
        yield _simple(f"mul.wide.{t}", w, f"{t} {t}")
        yield _simple(f"mad.wide.{t}", w, f"{t} {t} {w}")
    for t in ("u32", "s32"):
        for half in ("lo", "hi"):
            yield _simple(f"mul24.{half}.{t}", t, f"{t} {t}")
            yield _simple(f"mad24.{half}.{t}", t, f"{t} {t} {t}")
    for name in ("add.sat.s32", "sub.sat.s32", "min.relu.s32", "max.relu.s32"):
        yield _simple(name, "s32", "s32 s32")
    yield _simple("mad.hi.sat.s32", "s32", "s32 s32 s32")
    for t in ("u16x2", "s16x2"):
        for name in ("add", "min", "max"):
            yield _simple(f"{name}.{t}", "b32", "b32 b32")
    for t in ("b32", "b64"):
        yield _simple(f"popc.{t}", "b32", t)
        yield _simple(f"clz.{t}", "b32", t)
        yield _simple(f"brev.{t}", t, t)
        yield _simple(f"bfi.{t}", t, f"{t} {t} shift shift")
    for t in ("u32", "s32", "u64", "s64"):
        yield _simple(f"bfind.{t}", "b32", t)
        yield _simple(f"bfind.shiftamt.{t}", "b32", t)
        yield _simple(f"bfe.{t}", t, f"{t} shift shift")
    for mode in ("clamp", "wrap"):
        yield _simple(f"bmsk.{mode}.b32", "b32", "shift shift")
        yield _simple(f"szext.{mode}.u32", "b32", "b32 shift")
        yield _simple(f"szext.{mode}.s32", "b32", "b32 shift")
    yield _simple("fns.b32", "b32", "b32 lane small")
    for a in ("u32", "s32"):
        for b in ("u32", "s32"):
            yield _simple(f"dp4a.{a}.{b}", "b32", "b32 b32 b32")
            yield _simple(f"dp2a.lo.{a}.{b}", "b32", "b32 b32 b32")
            yield _simple(f"dp2a.hi.{a}.{b}", "b32", "b32 b32 b32")
    for t in ("u32", "u64"):
        yield Case(f"add.cc.{t}", (t, t, t, t), (t, t),
                   f"add.cc.{t} %o0, %i0, %i1; addc.{t} %o1, %i2, %i3;")  # fmt: skip
        yield Case(f"sub.cc.{t}", (t, t, t, t), (t, t),
                   f"sub.cc.{t} %o0, %i0, %i1; subc.{t} %o1, %i2, %i3;")  # fmt: skip
        yield Case(
            f"mad.lo.cc.{t}",
            (t, t, t, t),
            (t, t),
            f"mad.lo.cc.{t} %o0, %i0, %i1, %i2; madc.hi.{t} %o1, %i0, %i1, %i3;",
        )


def logic() -> Iterator[Case]:
    """Logic, shifts, permutes."""
    for t in ("b16", "b32", "b64"):
        for name in ("and", "or", "xor"):
            yield _simple(f"{name}.{t}", t, f"{t} {t}")
        yield _simple(f"not.{t}", t, t)
        yield _simple(f"cnot.{t}", t, t)
        yield _simple(f"shl.{t}", t, f"{t} shift")
    for name in ("and", "or", "xor"):
        yield _simple(f"{name}.pred", "pred", "pred pred")
    yield _simple("not.pred", "pred", "pred")
    for t in ("u16", "s16", "u32", "s32", "u64", "s64", "b32"):
        yield _simple(f"shr.{t}", t, f"{t} shift")
    for direction in "lr":
        for mode in ("clamp", "wrap"):
            yield _simple(f"shf.{direction}.{mode}.b32", "b32", "b32 b32 shift")
    for table in (0x96, 0xE8, 0xCA, 0x01):
        yield Case(f"lop3.b32 {table:#04x}", ("b32", "b32", "b32"), ("b32",),
                   f"lop3.b32 %o0, %i0, %i1, %i2, {table};")  # fmt: skip
    yield Case("lop3.or.b32", ("b32", "b32", "b32", "pred"), ("b32", "pred"),
               "lop3.or.b32 %o0|%o1, %i0, %i1, %i2, 0xC0, %i3;")  # fmt: skip
    yield _simple("prmt.b32", "b32", "b32 b32 b32")
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        yield _simple(f"prmt.b32.{mode}", "b32", "b32 b32 small")


def predicate() -> Iterator[Case]:
    """Comparisons and selections."""
    for t in ("u16", "s32", "u64"):
        for op in ("eq", "ne", "lt", "le", "gt", "ge"):
            yield _simple(f"setp.{op}.{t}", "pred", f"{t} {t}")
    for op in ("lo", "ls", "hi", "hs"):
        yield _simple(f"setp.{op}.u32", "pred", "u32 u32")
    floats = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num",
              "nan")  # fmt: skip
    for op in floats:
        yield _simple(f"setp.{op}.f32", "pred", "f32 f32")
    for op in ("lt", "geu", "nan"):
        yield _simple(f"setp.{op}.f64", "pred", "f64 f64")
        yield _simple(f"setp.{op}.f16", "pred", "f16 f16")
        yield _simple(f"setp.{op}.bf16", "pred", "bf16 bf16")
        yield _simple(f"setp.{op}.ftz.f32", "pred", "f32 f32")
        yield Case(f"setp.{op}.f16x2", ("f16x2", "f16x2"), ("pred", "pred"),
                   f"setp.{op}.f16x2 %o0|%o1, %i0, %i1;")  # fmt: skip
    for op in ("and", "or", "xor"):
        yield Case(f"setp.lt.{op}.s32", ("s32", "s32", "pred"), ("pred", "pred"),
                   f"setp.lt.{op}.s32 %o0|%o1, %i0, %i1, %i2;")  # fmt: skip
    yield _simple("set.lt.u32.s32", "u32", "s32 s32")
    yield _simple("set.gt.f32.f32", "f32", "f32 f32")
    for t in ("b16", "b32", "b64", "f32", "f64"):
        yield _simple(f"selp.{t}", t, f"{t} {t} pred")
    yield _simple("slct.b32.s32", "b32", "b32 b32 s32")
    yield _simple("slct.f32.f32", "f32", "f32 f32 f32")


def floating() -> Iterator[Case]:
    """float32 and float64."""
    for mode in ("rn", "rz", "rm", "rp"):
        for name in ("add", "sub", "mul", "div"):
            yield _simple(f"{name}.{mode}.f32", "f32", "f32 f32")
        yield _simple(f"fma.{mode}.f32", "f32", "f32 f32 f32")
        yield _simple(f"sqrt.{mode}.f32", "f32", "f32")
        yield _simple(f"rcp.{mode}.f32", "f32", "f32")
        for name in ("add", "mul"):
            yield _simple(f"{name}.{mode}.f64", "f64", "f64 f64")
        yield _simple(f"fma.{mode}.f64", "f64", "f64 f64 f64")
    for name in ("add", "mul"):
        yield _simple(f"{name}.rn.ftz.f32", "f32", "f32 f32")
        yield _simple(f"{name}.rn.sat.f32", "f32", "f32 f32")
    yield _simple("fma.rn.ftz.f32", "f32", "f32 f32 f32")
    yield _simple("fma.rn.ftz.sat.f32", "f32", "f32 f32 f32")
    for name in ("min", "max"):
        for more in ("", ".ftz", ".NaN", ".xorsign.abs"):
            yield _simple(f"{name}{more}.f32", "f32", "f32 f32")
        yield _simple(f"{name}.f64", "f64", "f64 f64")
    for name in ("abs", "neg"):
        yield _simple(f"{name}.f32", "f32", "f32")
        yield _simple(f"{name}.ftz.f32", "f32", "f32")
        yield _simple(f"{name}.f64", "f64", "f64")
    for t in ("f32", "f64"):
        yield _simple(f"copysign.{t}", t, f"{t} {t}")
        for op in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            yield _simple(f"testp.{op}.{t}", "pred", t)
    yield _simple("div.rn.f64", "f64", "f64 f64")
    yield _simple("sqrt.rn.f64", "f64", "f64")
    yield _simple("rcp.rn.f64", "f64", "f64")
    for name in ("rcp", "rsqrt", "sqrt", "ex2", "lg2"):
        yield _simple(f"{name}.approx.ftz.f32", "f32", "f32", approximate=True)
        yield _simple(f"{name}.approx.f32", "f32", "f32", approximate=True)
    for name in ("sin", "cos"):
        yield _simple(f"{name}.approx.f32", "f32", "angle", approximate=True)
    yield _simple("tanh.approx.f32", "f32", "f32", approximate=True)
    yield _simple("div.full.f32", "f32", "f32 f32", approximate=True)


def half() -> Iterator[Case]:
    """f16, bf16 and pairs."""
    for t in ("f16", "bf16", "f16x2", "bf16x2"):
        for name in ("add", "sub", "mul"):
            yield _simple(f"{name}.rn.{t}", t, f"{t} {t}")
        yield _simple(f"fma.rn.{t}", t, f"{t} {t} {t}")
        yield _simple(f"fma.rn.relu.{t}", t, f"{t} {t} {t}")
        for name in ("min", "max"):
            yield _simple(f"{name}.{t}", t, f"{t} {t}")
            yield _simple(f"{name}.NaN.{t}", t, f"{t} {t}")
            yield _simple(f"{name}.xorsign.abs.{t}", t, f"{t} {t}")
        yield _simple(f"neg.{t}", t, t)
        yield _simple(f"abs.{t}", t, t)
    for t in ("f16", "f16x2"):
        yield _simple(f"add.rn.ftz.{t}", t, f"{t} {t}")
        yield _simple(f"mul.rn.sat.{t}", t, f"{t} {t}")
        yield _simple(f"fma.rn.ftz.sat.{t}", t, f"{t} {t} {t}")


def conversion() -> Iterator[Case]:
    """cvt."""
    for d in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        for a in ("s32", "u64", "s16"):
            if d != a:
                yield _simple(f"cvt.{d}.{a}", {"u8": "u16", "s8": "u16"}.get(d, d), a)
    for d, a in (("u8", "s32"), ("s8", "s32"), ("s16", "s32"), ("u32", "s64"), ("s32", "u32")):
        yield _simple(f"cvt.sat.{d}.{a}", {"u8": "u16", "s8": "u16"}.get(d, d), a)
    for mode in ("rn", "rz", "rm", "rp"):
        yield _simple(f"cvt.{mode}.f32.s32", "f32", "s32")
        yield _simple(f"cvt.{mode}.f32.u64", "f32", "u64")
        yield _simple(f"cvt.{mode}.f64.s64", "f64", "s64")
        yield _simple(f"cvt.{mode}.f32.f64", "f32", "f64")
        yield _simple(f"cvt.{mode}i.s32.f32", "s32", "f32")
        yield _simple(f"cvt.{mode}i.u32.f32", "u32", "f32")
        yield _simple(f"cvt.{mode}i.s64.f32", "s64", "f32")
        yield _simple(f"cvt.{mode}i.s32.f64", "s32", "f64")
        yield _simple(f"cvt.{mode}i.f32.f32", "f32", "f32")
    yield _simple("cvt.rni.s32.f16", "s32", "f16")
    yield _simple("cvt.rzi.u16.f32", "u16", "f32")
    yield _simple("cvt.rni.f64.f64", "f64", "f64")
    yield _simple("cvt.rzi.ftz.s32.f32", "s32", "f32")
    yield _simple("cvt.rn.f16.s32", "f16", "s32")
    yield _simple("cvt.f64.f32", "f64", "f32")
    yield _simple("cvt.f32.f16", "f32", "f16")
    yield _simple("cvt.f32.bf16", "f32", "bf16")
    yield _simple("cvt.sat.f32.f32", "f32", "f32")
    for mode in ("rn", "rz"):
        for d in ("f16", "bf16"):
            yield _simple(f"cvt.{mode}.{d}.f32", d, "f32")
            yield _simple(f"cvt.{mode}.relu.{d}.f32", d, "f32")
            yield _simple(f"cvt.{mode}.{d}x2.f32", f"{d}x2", "f32 f32")
            yield _simple(f"cvt.{mode}.relu.{d}x2.f32", f"{d}x2", "f32 f32")
            yield _simple(f"cvt.{mode}.satfinite.{d}x2.f32", f"{d}x2", "f32 f32")
    yield _simple("cvt.rn.f16.f64", "f16", "f64")
    yield _simple("cvt.rna.tf32.f32", "b32", "f32")
    yield _simple("cvt.rn.tf32.f32", "b32", "f32")
    yield _simple("cvt.rz.relu.tf32.f32", "b32", "f32")
    for d in ("e4m3x2", "e5m2x2"):
        yield _simple(f"cvt.rn.satfinite.{d}.f32", "pair8", "f32 f32")
        yield _simple(f"cvt.rn.satfinite.relu.{d}.f32", "pair8", "f32 f32")
        yield _simple(f"cvt.rn.satfinite.{d}.f16x2", "pair8", "f16x2")
        yield _simple(f"cvt.rn.f16x2.{d}", "f16x2", "pair8")
        yield _simple(f"cvt.rn.relu.f16x2.{d}", "f16x2", "pair8")
    yield _simple("cvt.pack.sat.s16.s32", "b32", "s32 s32")
    yield _simple("cvt.pack.sat.u8.s32.b32", "b32", "s32 s32 b32")


def warp() -> Iterator[Case]:
    """Exchanges within a warp."""
    for mode in ("up", "down", "bfly", "idx"):
        for c in (0 if mode == "up" else 31, 0x1800 if mode == "up" else 0x181F):
            yield Case(f"shfl.sync.{mode}.b32 {c:#x}", ("b32", "lane"), ("b32", "pred"),
                       f"shfl.sync.{mode}.b32 %o0|%o1, %i0, %i1, {c}, -1;")  # fmt: skip
    for mode in ("all", "any", "uni"):
        yield Case(f"vote.sync.{mode}.pred", ("pred",), ("pred",),
                   f"vote.sync.{mode}.pred %o0, %i0, -1;")  # fmt: skip
    yield Case("vote.sync.ballot.b32", ("pred",), ("b32",), "vote.sync.ballot.b32 %o0, %i0, -1;")
    yield Case("activemask.b32", (), ("b32",), "activemask.b32 %o0;")
    yield Case("elect.sync", (), ("b32", "pred"), "elect.sync %o0|%o1, -1;")
    yield Case("match.any.sync.b32", ("small",), ("b32",), "match.any.sync.b32 %o0, %i0, -1;")
    yield Case("match.all.sync.b32", ("small",), ("b32", "pred"),
               "match.all.sync.b32 %o0|%o1, %i0, -1;")  # fmt: skip
    for op in ("add", "min", "max"):
        for t in ("u32", "s32"):
            yield Case(f"redux.sync.{op}.{t}", (t,), (t,), f"redux.sync.{op}.{t} %o0, %i0, -1;")
    for op in ("and", "or", "xor"):
        yield Case(f"redux.sync.{op}.b32", ("b32",), ("b32",), f"redux.sync.{op}.b32 %o0, %i0, -1;")
    yield Case("movmatrix.trans.b16", ("b32",), ("b32",),
               "movmatrix.sync.aligned.m8n8.trans.b16 %o0, %i0;")  # fmt: skip
    yield Case("guard", ("b32", "b32", "pred"), ("b32",),
               "mov.b32 %o0, %i0;\n@%i2 mov.b32 %o0, %i1;\n@!%i2 add.u32 %o0, %o0, 7;")  # fmt: skip
    yield Case("diverge", ("b32", "pred"), ("b32",), """
        mov.b32 %o0, %i0;
        @%i1 bra ODD;
        mul.lo.u32 %o0, %o0, 3;
        bra MEET;
        ODD: add.u32 %o0, %o0, 5;
        MEET: shfl.sync.bfly.b32 %o0, %o0, 1, 31, -1;""")  # fmt: skip
    yield Case("loop", ("lane",), ("b32",), """
        .reg .pred %p; .reg .b32 %n; mov.u32 %n, %i0; mov.u32 %o0, 1;
        AGAIN: setp.eq.u32 %p, %n, 0; @%p bra DONE;
        mad.lo.u32 %o0, %o0, 3, %n; sub.u32 %n, %n, 1; bra AGAIN;
        DONE:""")  # fmt: skip
    yield Case("brx.idx", ("lane",), ("b32",), """
        .reg .b32 %n; and.b32 %n, %i0, 3;
        TARGETS: .branchtargets T0, T1, T2, T3;
        brx.idx %n, TARGETS;
        T0: mov.u32 %o0, 10; bra END; T1: mov.u32 %o0, 11; bra END;
        T2: mov.u32 %o0, 12; bra END; T3: mov.u32 %o0, 13;
        END:""")  # fmt: skip


_SMEM = ".shared .align 16 .b8 %smem[1024]; .reg .b32 %a, %b; mov.u32 %a, %smem;"


def memory() -> Iterator[Case]:
    """Shared memory, vectors, matrices, atomics."""
    for vec, words in (("v2", 2), ("v4", 4)):
        regs = ", ".join(f"%i{j}" for j in range(words))
        outs = ", ".join(f"%o{j}" for j in range(words))
        yield Case(f"ld.st.shared.{vec}.b32", ("b32",) * words, ("b32",) * words, f"""
            {_SMEM} shl.b32 %b, %me, {2 + words // 2}; add.u32 %a, %a, %b;
            st.shared.{vec}.b32 [%a], {{{regs}}};
            ld.shared.{vec}.b32 {{{outs}}}, [%a];""")  # fmt: skip
    for t in ("u8", "s8", "u16", "s16"):
        yield Case(f"ld.st.shared.{t}", ("b32",), ("s32",), f"""
            {_SMEM} shl.b32 %b, %me, 2; add.u32 %a, %a, %b;
            st.shared.{t} [%a+2], %i0; bar.warp.sync -1;
            ld.shared.{t} %o0, [%a+2];""")  # fmt: skip
    for num in (1, 2, 4):
        for trans in ("", ".trans"):
            regs = ", ".join(f"%o{j}" for j in range(num))
            yield Case(
                f"ldmatrix.x{num}{trans}",
                ("b32",) * 4,
                ("b32",) * num,
                f"""
                {_SMEM} shl.b32 %b, %me, 4; add.u32 %a, %a, %b;
                st.shared.v4.b32 [%a], {{%i0, %i1, %i2, %i3}}; bar.warp.sync -1;
                ldmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 {{{regs}}}, [%a];""",
            )
            values = ", ".join(f"%i{j}" for j in range(num))
            yield Case(f"stmatrix.x{num}{trans}", ("b32",) * 4, ("b32",) * 4, f"""
                {_SMEM} shl.b32 %b, %me, 4; add.u32 %a, %a, %b;
                st.shared.v4.b32 [%a], {{0, 0, 0, 0}}; bar.warp.sync -1;
                stmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 [%a], {{{values}}};
                bar.warp.sync -1; ld.shared.v4.b32 {{%o0, %o1, %o2, %o3}}, [%a];""")  # fmt: skip
    for op, t in (("add", "u32"), ("add", "u64"), ("min", "s32"), ("max", "u32"), ("and", "b32"),
                  ("or", "b32"), ("xor", "b32"), ("inc", "u32"), ("dec", "u32"), ("exch", "b32"),
                  ("add", "f32")):  # fmt: skip
        size = 8 if t.endswith("64") else 4
        yield Case(f"atom.shared.{op}.{t}", (t, t), (t, t), f"""
            {_SMEM} mul.lo.u32 %b, %me, {size}; add.u32 %a, %a, %b;
            st.shared.b{8 * size} [%a], %i0;
            atom.shared.{op}.{t} %o0, [%a], %i1;
            ld.shared.b{8 * size} %o1, [%a];""")  # fmt: skip
    for t in ("b32", "b64"):
        size = int(t[1:]) // 8
        yield Case(f"atom.shared.cas.{t}", (t, "pred", t), (t, t), f"""
            .reg .{t} %c; {_SMEM} mul.lo.u32 %b, %me, {size}; add.u32 %a, %a, %b;
            st.shared.{t} [%a], %i0; selp.{t} %c, %i0, 3, %i1;
            atom.shared.cas.{t} %o0, [%a], %c, %i2; ld.shared.{t} %o1, [%a];""")  # fmt: skip
    yield Case("red.shared.add.u32", ("small",), ("b32",), f"""
        {_SMEM} st.shared.b32 [%a], 0; bar.warp.sync -1;
        red.shared.add.u32 [%a], %i0; bar.warp.sync -1; ld.shared.b32 %o0, [%a];""")  # fmt: skip
    yield Case("cp.async.ca.16", (), ("b32",), f"""
        {_SMEM} .reg .b64 %g; shl.b32 %b, %me, 4; add.u32 %a, %a, %b;
        mov.u32 %o0, 0; st.shared.b32 [%a], %o0;
        cp.async.ca.shared.global [%a], [%src], 4; cp.async.commit_group; cp.async.wait_group 0;
        ld.shared.b32 %o0, [%a];""")  # fmt: skip
    yield Case("mov.pack", ("b32", "b32"), ("b64", "b32", "b32"),
               "mov.b64 %o0, {%i0, %i1}; mov.b64 {%o2, %o1}, %o0;")  # fmt: skip


def every_case() -> list[Case]:
    """Return all cases with unique names."""
    groups = (integer, logic, predicate, floating, half, conversion, warp, memory)
    cases = [
        Case(c.name, c.inputs, c.outputs, c.body, c.target, c.is_approximate, group.__name__)
        for group in groups
        for c in group()
    ]
    assert len({c.name for c in cases}) == len(cases)
    return cases
