"""float32 and packed f32x2 arithmetic, and the special-function unit (MUFU).

Lives here: instructions. Not here: rounding (`bits.py`), halves (`half.py`), float64 (`double.py`).
Invariant: bit-exact with IEEE 754 and the manual, NaN patterns included, except the `.approx`
functions, whose model is the float64 result rounded to float32 (each within its bound in the
manual).
Source: PTX ISA 9.7.3.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from fovea.emulator.isa import bits as fp
from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Array, Inline, Instruction, LaneFunction

MODES = "rn rz rm rp"


def _finish(ins: Instruction, function: LaneFunction) -> Callable[..., Array]:
    """Wrap a float32 function with the `.ftz` and `.sat` of an instruction."""
    has_ftz, has_sat = ins.has("ftz"), ins.has("sat")
    if not has_ftz and not has_sat:
        return function
    flush, saturate = fp.flush_f32, fp.saturate

    def wrapped(*operands: Array) -> Array:
        if has_ftz:
            operands = tuple(flush(operand) for operand in operands)
        result = function(*operands)
        if has_sat:
            result = saturate(result)
        return flush(result) if has_ftz else result

    return wrapped


def apply(ins: Instruction, function: LaneFunction, operands: str, t: str) -> Inline:
    """Return `d = function(operands)`, all of type t."""
    name = ins.program.bind(function, "f")
    sources = ", ".join(ins.src(operand, t) for operand in operands.split())
    return ins.assign("d", f"{name}({sources})", t)


def mode_of(ins: Instruction) -> str:
    """Return the rounding mode: to nearest even if none is written."""
    return ins["rnd"] or "rn"


# --- float32 ------------------------------------------------------------------------------------

_PLAIN = {"add": "+", "sub": "-", "mul": "*"}


def _directed(name: str, mode: str) -> Callable[[Array, Array], Array]:
    if name == "mul":
        return lambda a, b: fp.mul_f32_mode(a, b, mode)
    if name == "sub":
        return lambda a, b: fp.add_f32_mode(a, -b, mode)
    return lambda a, b: fp.add_f32_mode(a, b, mode)


def _nearest(name: str) -> Callable[[Array, Array], Array]:
    ufunc = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]

    def function(a: Array, b: Array) -> Array:
        result = ufunc(a, b)
        check = result.dot(result)
        return fp.canonical_f32(result) if check != check else result

    return function


@instruction("add{.rnd}{.ftz}{.sat}.f32 d, a, b", "sub{.rnd}{.ftz}{.sat}.f32 d, a, b",
             "mul{.rnd}{.ftz}{.sat}.f32 d, a, b", source="PTX ISA 9.7.3.3-5",
             evidence="manual-only", rnd=MODES)  # fmt: skip
def add_sub_mul(ins: Instruction) -> Inline:
    """d = a op b, rounded once."""
    name, mode = ins.opcode.split(".")[0], mode_of(ins)
    if mode == "rn" and not ins.has("ftz") and not ins.has("sat"):
        a, b = ins.src("a", "f32"), ins.src("b", "f32")
        canonical = ins.program.bind(fp.canonical_f32, "f")
        setup = (
            f"v = {a} {_PLAIN[name]} {b}",
            "s = v.dot(v)",  # NaN exactly if a lane is: one reduction, no temporary
            f"if s != s: v = {canonical}(v)",
        )
        return Inline(ins.result("d", "v", "f32"), setup)
    function = _nearest(name) if mode == "rn" else _directed(name, mode)
    return apply(ins, _finish(ins, function), "a b", "f32")


@instruction("fma.rnd{.ftz}{.sat}.f32 d, a, b, c", "mad{.rnd}{.ftz}{.sat}.f32 d, a, b, c",
             source="PTX ISA 9.7.3.6-7", evidence="manual-only", rnd=MODES)  # fmt: skip
def fma(ins: Instruction) -> Inline:
    """d = a * b + c, rounded once."""
    mode = mode_of(ins)
    if mode == "rn":
        function: Callable[..., Array] = fp.fma_f32
    else:
        function = partial(fp.fma_f32_mode, mode=mode)
    return apply(ins, _finish(ins, function), "a b c", "f32")


def _divide(a: Array, b: Array, mode: str) -> Array:
    result = a / b
    if mode != "rn":
        wide = a.astype(np.float64) / b  # correctly rounded to 53 bits: never hides inexactness
        residue = np.sign(wide - result.astype(np.float64))
        exact = wide * b == a
        residue = np.where((residue == 0) & ~exact, _residue(a, b, result), residue)
        moved = fp.towards(result, residue, mode)
        result = np.where(np.isfinite(wide), moved, result)
    return fp.canonical_f32(result) if np.isnan(result).any() else result


def _residue(a: Array, b: Array, quotient: Array) -> Array:
    """Return the sign of a / b - quotient from the exact remainder."""
    remainder = a.astype(np.float64) - quotient.astype(np.float64) * b
    return np.sign(remainder) * np.sign(b)


@instruction("div.rnd{.ftz}.f32 d, a, b", source="PTX ISA 9.7.3.8", evidence="manual-only",
             rnd=MODES)  # fmt: skip
def div(ins: Instruction) -> Inline:
    """d = a / b, rounded once."""
    mode = mode_of(ins)
    return apply(ins, _finish(ins, lambda a, b: _divide(a, b, mode)), "a b", "f32")


@instruction("div.precision{.ftz}.f32 d, a, b", source="PTX ISA 9.7.3.8", evidence="inferred",
             kind="mufu", precision="full approx")  # fmt: skip
def div_approx(ins: Instruction) -> Inline:
    """d = a / b within 2 ulp; modelled as correctly rounded."""
    return apply(ins, _finish(ins, lambda a, b: _divide(a, b, "rn")), "a b", "f32")


@instruction("abs{.ftz}.f32 d, a", "neg{.ftz}.f32 d, a", source="PTX ISA 9.7.3.9-10",
             evidence="manual-only")  # fmt: skip
def abs_neg(ins: Instruction) -> Inline:
    """d = |a| or -a; a NaN becomes the canonical one."""
    is_abs = ins.opcode.startswith("abs")

    def function(a: Array) -> Array:
        pattern = a.view(np.uint32)
        changed = pattern & np.uint32(0x7FFFFFFF) if is_abs else pattern ^ np.uint32(0x80000000)
        result = changed.view(np.float32)
        check = result.dot(result)
        return fp.canonical_f32(result) if check != check else result

    return apply(ins, _finish(ins, function), "a", "f32")


@instruction("copysign.type d, a, b", source="PTX ISA 9.7.3.2", evidence="manual-only",
             type="f32 f64")  # fmt: skip
def copysign(ins: Instruction) -> Inline:
    """d = magnitude of b with the sign of a."""
    return apply(ins, lambda a, b: np.copysign(b, a), "a b", ins["type"])


def choose_f32(is_max: bool, keeps_nan: bool) -> Callable[[Array, Array], Array]:
    """Return min or max: -0 < +0; NaN only if both are NaN, or (`.NaN`) if one is."""
    choose = np.fmax if is_max else np.fmin

    def function(a: Array, b: Array) -> Array:
        result = choose(a, b)
        if not result.all():
            pattern = a.view(np.uint32) & b.view(np.uint32)
            if not is_max:
                pattern = a.view(np.uint32) | b.view(np.uint32)
            result = np.where((a == 0) & (b == 0), pattern.view(np.float32), result)
        if keeps_nan:
            result = np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), result)
        check = result.dot(result)
        return fp.canonical_f32(result) if check != check else result

    return function


@instruction("min{.ftz}{.NaN}{.xorsign.abs}.f32 d, a, b",
             "max{.ftz}{.NaN}{.xorsign.abs}.f32 d, a, b", source="PTX ISA 9.7.3.11-12",
             evidence="manual-only")  # fmt: skip
@instruction("min{.ftz}{.NaN}{.abs}.f32 d, a, b, c", "max{.ftz}{.NaN}{.abs}.f32 d, a, b, c",
             source="PTX ISA 9.7.3.11-12", evidence="manual-only", targets="sm_100+")  # fmt: skip
def minimum_maximum(ins: Instruction) -> Inline:
    """d = min or max; three operands, with `.abs` their magnitudes, on sm_100."""
    pair = choose_f32(ins.opcode.startswith("max"), ins.has("NaN"))
    function = _with_xor_of_signs(pair) if ins.has("xorsign") else pair
    if "c" in ins.operands:
        magnitude = np.abs if ins.has("abs") else np.asarray

        def of_three(a: Array, b: Array, c: Array) -> Array:
            return function(function(magnitude(a), magnitude(b)), magnitude(c))

        return apply(ins, _finish(ins, of_three), "a b c", "f32")
    return apply(ins, _finish(ins, function), "a b", "f32")


def _with_xor_of_signs(pair: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Return `pair` of the magnitudes, with the xor of the signs (`.xorsign.abs`)."""

    def function(a: Array, b: Array) -> Array:
        sign = (a.view(np.uint32) ^ b.view(np.uint32)) & np.uint32(0x80000000)
        chosen = pair(np.abs(a), np.abs(b))
        signed = chosen.view(np.uint32) & np.uint32(0x7FFFFFFF) | sign
        return np.where(np.isnan(chosen), chosen, signed.view(np.float32))

    return function


@instruction("testp.op.type p, a", source="PTX ISA 9.7.3.1", evidence="manual-only",
             op="finite infinite number notanumber normal subnormal", type="f32 f64")  # fmt: skip
def testp(ins: Instruction) -> Inline:
    """p = whether a has a property."""
    t = ins["type"]
    least = np.finfo(np.float32 if t == "f32" else np.float64).smallest_normal
    functions: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        # zero counts as normal (sm_90)
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= least) | (a == 0)),
        "subnormal": lambda a: (np.abs(a) < least) & (a != 0),
    }
    name = ins.program.bind(functions[ins["op"]], "f")
    return ins.assign("p", f"{name}({ins.src('a', t)})", "pred")


# --- MUFU ---------------------------------------------------------------------------------------


def _tanh_wide(a: Array) -> Array:
    return np.tanh(a)


_WIDE: dict[str, Callable[[Array], Array]] = {
    "rcp": lambda a: 1.0 / a,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "sqrt": np.sqrt,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": _tanh_wide,
}


def mufu(name: str) -> Callable[[Array], Array]:
    """Return the model of a MUFU function: float64, rounded to float32."""
    wide = _WIDE[name]

    def function(a: Array) -> Array:
        result = wide(a.astype(np.float64)).astype(np.float32)
        check = result.dot(result)
        return fp.canonical_f32(result) if check != check else result

    return function


@instruction("rcp.approx{.ftz}.f32 d, a", "rsqrt.approx{.ftz}.f32 d, a",
             "sqrt.approx{.ftz}.f32 d, a", "ex2.approx{.ftz}.f32 d, a",
             "lg2.approx{.ftz}.f32 d, a", "sin.approx{.ftz}.f32 d, a",
             "cos.approx{.ftz}.f32 d, a", "tanh.approx.f32 d, a",
             source="PTX ISA 9.7.3.13-22", evidence="inferred", kind="mufu")  # fmt: skip
def special_function(ins: Instruction) -> Inline:
    """d = the function, within the manual's bound."""
    return apply(ins, _finish(ins, mufu(ins.opcode.split(".")[0])), "a", "f32")


@instruction("rcp.rnd{.ftz}.f32 d, a", source="PTX ISA 9.7.3.13", evidence="manual-only",
             rnd=MODES)  # fmt: skip
def rcp(ins: Instruction) -> Inline:
    """d = 1 / a, rounded once."""
    mode = mode_of(ins)
    one = np.ones(32, np.float32)
    return apply(ins, _finish(ins, lambda a: _divide(one, a, mode)), "a", "f32")


def _square_root(a: Array, mode: str) -> Array:
    result = np.sqrt(a)
    if mode != "rn":
        wide = np.sqrt(a.astype(np.float64))
        squared = result.astype(np.float64) ** 2  # exact: 48 bits
        residue = np.sign(a.astype(np.float64) - squared)
        result = np.where(np.isfinite(wide), fp.towards(result, residue, mode), result)
    return fp.canonical_f32(result) if np.isnan(result).any() else result


@instruction("sqrt.rnd{.ftz}.f32 d, a", source="PTX ISA 9.7.3.15", evidence="manual-only",
             rnd=MODES)  # fmt: skip
def sqrt(ins: Instruction) -> Inline:
    """d = square root of a, rounded once."""
    mode = mode_of(ins)
    return apply(ins, _finish(ins, lambda a: _square_root(a, mode)), "a", "f32")


# --- f32x2 --------------------------------------------------------------------------------------


def _packed(function: LaneFunction) -> Callable[..., Array]:
    """Return a function of 64-bit pairs from a function of float32 arrays of any length."""
    return lambda *pairs: function(*(pair.view(np.float32) for pair in pairs)).view(np.uint64)


@instruction("add{.rnd}{.ftz}.f32x2 d, a, b", "sub{.rnd}{.ftz}.f32x2 d, a, b",
             "mul{.rnd}{.ftz}.f32x2 d, a, b", source="PTX ISA 9.7.3.3-5", evidence="manual-only",
             targets="sm_100,sm_100a,sm_100f,sm_103,sm_103a,sm_103f,sm_101a,sm_110,sm_110a,sm_120,"
             "sm_120a", rnd=MODES)  # fmt: skip
def add_sub_mul_x2(ins: Instruction) -> Inline:
    """Both halves of d = a op b."""
    name, mode = ins.opcode.split(".")[0], mode_of(ins)
    function = _nearest(name) if mode == "rn" else _directed(name, mode)
    return apply(ins, _packed(_finish(ins, function)), "a b", "b64")


@instruction("fma.rnd{.ftz}.f32x2 d, a, b, c", source="PTX ISA 9.7.3.6", evidence="manual-only",
             targets="sm_100,sm_100a,sm_100f,sm_103,sm_103a,sm_103f,sm_101a,sm_110,sm_110a,sm_120,"
             "sm_120a", rnd=MODES)  # fmt: skip
def fma_x2(ins: Instruction) -> Inline:
    """Both halves of d = a * b + c."""
    mode = mode_of(ins)
    function: Callable[..., Array] = (
        fp.fma_f32 if mode == "rn" else partial(fp.fma_f32_mode, mode=mode)
    )
    return apply(ins, _packed(_finish(ins, function)), "a b c", "b64")
