"""Named attention calls that together use every feature of the forward kernels.

Lives here: inputs and options of each call, at a size for a GPU and at one for making its plan or
for the emulator. Not here: running and judging them (`judge.py`). Invariant: both sizes of a case
have the same plan, so a bundle made from the small ones serves the large ones; the numbers depend
on nothing but the case.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fovea import create_block_mask, mods
from fovea.problem import AttentionProblem, Request, make_dense
from fovea.testing.inputs import Shape, dense_qkv, normal
from fovea.testing.masks import block_mask_of, random_states

Options = dict[str, Any]
MakeOptions = Callable[[Shape, torch.device], Options]
Transform = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call.

    Attributes:
        name: what it is about.
        shape, small: sizes on a GPU, and elsewhere.
        options: keyword arguments of `fovea.attention`.
        transform: what is done to freshly drawn q, k, v.
        wants_max_score: ask for it; such variants keep the exact running maximum.
        checks_gradients: also run the backward, at the small size only.
    """

    name: str
    shape: Shape
    small: Shape
    dtype: torch.dtype = BF16
    options: MakeOptions = lambda shape, device: {}
    transform: Transform | None = None
    wants_max_score: bool = False
    checks_gradients: bool = False

    def build(self, device: torch.device | str, *, is_small: bool) -> "Call":
        """Return the call's tensors and options."""
        device = torch.device(device)
        shape = self.small if is_small else self.shape
        q, k, v = dense_qkv(shape, dtype=self.dtype, device=device)
        if self.transform is not None:
            q, k, v = self.transform(q, k, v)
        return Call(q=q, k=k, v=v, options=self.options(shape, device), case=self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A case with its tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    case: Case

    def problem(self) -> AttentionProblem:
        """Return the validated problem."""
        request = Request(wants_lse=True, wants_max_score=self.case.wants_max_score, **self.options)
        return make_dense(self.q, self.k, self.v, request)


LARGE = Shape(batch=2, seqlen_q=1500, seqlen_kv=2100, heads_q=4, heads_kv=2, head_dim=128)
LARGE_64 = replace(LARGE, head_dim=64)
LARGE_256 = replace(LARGE, head_dim=256)
SMALL = Shape(batch=1, seqlen_q=129, seqlen_kv=300, heads_q=2, heads_kv=1, head_dim=128)
SMALL_64 = replace(SMALL, head_dim=64)
SMALL_256 = replace(SMALL, head_dim=256)


def _fixed(**options: Any) -> MakeOptions:
    return lambda shape, device: options


def _joined(*makers: MakeOptions) -> MakeOptions:
    def make(shape: Shape, device: torch.device) -> Options:
        return {k: v for maker in makers for k, v in maker(shape, device).items()}

    return make


# --- features by themselves -----------------------------------------------------------------------


def _keys(shape: Shape) -> int:
    return shape.k[1]


def _alibi(shape: Shape, device: torch.device) -> Options:
    slopes = mods.alibi_slopes(shape.heads_q).to(device)
    return {"score_mod": mods.alibi(slopes=slopes)}


def _relative_bias(shape: Shape, device: torch.device) -> Options:
    table = normal((shape.heads_q, 257), seed=5, device=device)
    return {"score_mod": mods.relative_bias(table, 128)}


def _t5_bias(shape: Shape, device: torch.device) -> Options:
    return {"score_mod": mods.t5_bias(normal((32, shape.heads_q), seed=6, device=device))}


def _dense_bias(shape: Shape, device: torch.device) -> Options:
    size = (shape.batch, shape.heads_q, shape.seqlen_q, _keys(shape))
    return {"score_mod": mods.dense_bias(normal(size, seed=7, dtype=BF16, device=device))}


def _temperature(shape: Shape, device: torch.device) -> Options:
    return {"score_mod": mods.temperature(torch.tensor(0.7, device=device))}


def _tanh_mod(shape: Shape, device: torch.device) -> Options:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 20.0 * torch.tanh(score / 20.0) + torch.sin(score) * 0.01

    return {"score_mod": score_mod}


def _masking_score(shape: Shape, device: torch.device) -> Options:
    """A score_mod that hides keys by -inf, a whole row among them, with a NaN branch not taken."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = torch.where(kv_idx % 3 == 0, score, float("-inf"))
        safe = torch.where(kv_idx >= 0, kept, torch.sqrt(score * 0 - 1.0))
        return torch.where(q_idx == 5, float("-inf"), safe)

    return {"score_mod": score_mod}


def _gather_of_gather(shape: Shape, device: torch.device) -> Options:
    generator = torch.Generator().manual_seed(8)
    group = torch.randint(0, 17, (_keys(shape),), generator=generator).to(device)
    table = normal((17, 9), seed=9, dtype=torch.float16, device=device)
    number = torch.randint(-9, 9, (shape.seqlen_q,), generator=generator).to(torch.int16)
    number = number.to(device)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[group[kv_idx], number[q_idx]]

    return {"score_mod": score_mod}


def _row_reduction(shape: Shape, device: torch.device) -> Options:
    a = normal((shape.seqlen_q, 6), seed=10, device=device)
    b_rows = normal((_keys(shape), 6), seed=11, device=device)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (a[q_idx] * b_rows[kv_idx]).sum()

    return {"score_mod": score_mod}


def _wild_integers(shape: Shape, device: torch.device) -> Options:
    """Division, remainder and shifts of negative numbers, by ints, int64 and 0-d tensors."""
    divisor, shift = 7, 3
    step = torch.tensor(-5, device=device)  # 0-d int64
    offset = torch.arange(_keys(shape), device=device) - 40  # int64
    small = torch.arange(shape.seqlen_q, device=device).to(torch.int8)
    wide = 2**40

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        a = (q_idx - offset[kv_idx]) // divisor + (kv_idx - q_idx) % step
        c = ((kv_idx - 77) >> shift) ^ (q_idx << 1) & 31
        far = (q_idx + wide) % 11
        return score + (a + c + far + small[q_idx]) * 0.01

    return {"score_mod": score_mod}


def _empty_and_host(shape: Shape, device: torch.device) -> Options:
    """A table without entries that hidden positions alone read, and a number on the host."""
    table = torch.empty(0, 3, device=device)
    step = torch.tensor(0.25)  # on the CPU

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(kv_idx < 0, table[q_idx, kv_idx], score + step * (kv_idx % 3))

    return {"score_mod": score_mod}


def _document(shape: Shape, device: torch.device) -> Options:
    total = max(_keys(shape), shape.seqlen_q)
    ids = (torch.arange(total) * 7 // total).to(torch.int32).to(device)
    return {"mask_mod": mods.document(ids, causal=False)}


def _bool_capture(shape: Shape, device: torch.device) -> Options:
    """A padding mask as a bool tensor; all keys of the last batch entry are hidden."""
    generator = torch.Generator().manual_seed(12)
    keep = torch.rand(shape.batch, _keys(shape), generator=generator) < 0.6
    keep[-1] = shape.batch == 1
    keep = keep.to(device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return keep[b, kv_idx]

    return {"mask_mod": mask_mod}


def _any_capture(shape: Shape, device: torch.device) -> Options:
    generator = torch.Generator().manual_seed(13)
    chosen = torch.randint(0, 40, (shape.seqlen_q, 4), generator=generator).to(device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (chosen[q_idx] == kv_idx // 8).any()

    return {"mask_mod": mask_mod}


def _checkerboard(shape: Shape, device: torch.device) -> Options:
    return {"mask_mod": mods.checkerboard(3)}


def _late_keys(shape: Shape, device: torch.device) -> Options:
    """Rows that see their first key in another KV tile than most, and rows that see none."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < q_idx * 3 % 211) & (q_idx % 5 != 2)

    return {"mask_mod": mask_mod}


def _block_mask(mask_mod: Callable[[Shape, torch.device], Options]) -> MakeOptions:
    def make(shape: Shape, device: torch.device) -> Options:
        function = mask_mod(shape, device)["mask_mod"]
        size = (shape.batch, shape.heads_q, shape.seqlen_q, _keys(shape))
        return {"block_mask": create_block_mask(function, *size, device=device)}

    return make


def _window_mod(shape: Shape, device: torch.device) -> Options:
    return {"mask_mod": mods.sliding_window(200)}


def _late_rows(shape: Shape, device: torch.device) -> Options:
    """Rows past 64 see keys past 128 only, so most first keys lie in a full block."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= 100) & ((q_idx < 64) | (kv_idx >= 128)) & (q_idx != 70)

    return {"mask_mod": mask_mod}


def _random_blocks(block_q: int, block_kv: int) -> MakeOptions:
    """Lists that no mask_mod gives: unordered states, empty rows, a ragged edge."""

    def make(shape: Shape, device: torch.device) -> Options:
        counts = (-(-shape.seqlen_q // block_q), -(-_keys(shape) // block_kv))
        states = random_states(shape.batch, shape.heads_q, *counts, seed=14)
        states[0, 0, 0] = 0  # a row of blocks that lists nothing
        mask = block_mask_of(
            states.to(device),
            seqlen_q=shape.seqlen_q,
            seqlen_kv=_keys(shape),
            block_q=block_q,
            block_kv=block_kv,
            mask_mod=mods.checkerboard(1),
        )
        return {"block_mask": mask}

    return make


def _sink(shape: Shape, device: torch.device) -> Options:
    return {"sink": normal((shape.heads_q,), seed=15, device=device) * 3}


def _sink_large(shape: Shape, device: torch.device) -> Options:
    return {"sink": torch.linspace(-300.0, 300.0, shape.heads_q, device=device)}


# --- inputs ---------------------------------------------------------------------------------------


def _inside_nan(x: Tensor) -> Tensor:
    """Return a view of the same values in a buffer that is NaN elsewhere, with odd strides."""
    batch, rows, heads, dim = x.shape
    padded = -(-dim // 8) * 8 + 8
    buffer = x.new_full((batch + 1, rows + 9, heads + 1, padded), torch.nan)
    view = buffer[:batch, :rows, :heads, :dim]
    view.copy_(x)
    return view


def _poisoned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _inside_nan(q), _inside_nan(k), _inside_nan(v)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory order (batch, heads, seqlen, head_dim)."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return q, k, v


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K and V of one batch entry for all; one V row for all keys of a head."""
    return q, k[:1].expand_as(k), v[:1, :1].expand_as(v)


def _unaligned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bases off by two bytes, and a last stride of 2."""

    def shifted(x: Tensor) -> Tensor:
        buffer = x.new_full((x.numel() + 1,), torch.nan)
        buffer[1:] = x.reshape(-1)
        return buffer[1:].view(x.shape)

    spread = torch.stack((v, torch.full_like(v, torch.nan)), dim=-1)[..., 0]
    return shifted(q), shifted(k), spread


def _ramp(low: float, high: float) -> Transform:
    """Return scores that run from `low` to `high` (powers of two) along the keys of every row."""

    def transform(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = q.clone(), k.clone()
        steps = torch.linspace(low, high, k.shape[1], device=k.device) * 0.6931471805599453
        unit = k.shape[-1] ** 0.5 / 8.0  # 8 * unit * steps / sqrt(head_dim) = steps
        q[..., 0] = 8.0
        k[..., 0] = (steps * unit).to(k.dtype)[:, None]
        return q, k, v

    return transform


def _huge_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Single keys whose scores are hundreds of times the others', each seen by some rows."""
    k = k.clone()
    for position in (0, k.shape[1] // 2, k.shape[1] - 1):
        k[:, position] *= 60.0
    return q, k, v


def _huge_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    limit = 2.0**120 if v.dtype == BF16 else 2.0**12
    v = v.clone()
    v[:, ::3] *= limit
    return q, k, v


def _zeros(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), k, v


# --- the list -------------------------------------------------------------------------------------

CAUSAL = _fixed(causal=True)
WINDOW = _fixed(window=(200, 30))
CAUSAL_WINDOW = _fixed(causal=True, window=(150, None))


def _case(name: str, options: MakeOptions | None = None, **fields: Any) -> Case:
    chosen = {"shape": LARGE, "small": SMALL, "options": options or _fixed(), **fields}
    return Case(name=name, **chosen)


def _sized(shape: Shape, **changes: Any) -> Shape:
    return replace(shape, **changes)


def _both(**changes: Any) -> dict[str, Shape]:
    return {"shape": replace(LARGE, **changes), "small": replace(SMALL, **changes)}


_D64 = {"shape": LARGE_64, "small": SMALL_64}
_D256 = {"shape": LARGE_256, "small": SMALL_256}

CASES: tuple[Case, ...] = (
    # one feature each
    _case("dense"),
    _case("dense fp16", dtype=FP16),
    _case("dense d64", **_D64),
    _case("dense d256", **_D256),
    _case("causal", CAUSAL),
    _case("causal d64", CAUSAL, **_D64),
    _case("causal d256 fp16", CAUSAL, dtype=FP16, **_D256),
    _case("causal top left", _fixed(causal="top_left")),
    _case(
        "causal dead rows",
        CAUSAL,
        shape=_sized(LARGE, seqlen_q=2100, seqlen_kv=1500),
        small=_sized(SMALL, seqlen_q=300, seqlen_kv=129),
    ),
    _case("window", WINDOW),
    _case("window one key", _fixed(window=(0, 0))),
    _case("window left only", _fixed(window=(77, None))),
    _case("window right only", _fixed(window=(None, 5))),
    _case("causal window d64", CAUSAL_WINDOW, **_D64),
    _case("softcap", _fixed(softcap=5.0)),
    _case("softcap d256", _fixed(softcap=5.0), **_D256),
    _case("scale zero", _fixed(scale=0.0)),
    _case("scale negative", _fixed(scale=-0.2)),
    _case("sink", _sink),
    _case("sink large", _sink_large, **_both(heads_q=4, heads_kv=4)),
    _case("max_score", wants_max_score=True),
    _case("max_score causal fp16", CAUSAL, wants_max_score=True, dtype=FP16),
    # sizes
    _case("one query", **_both(seqlen_q=1)),
    _case("one key", **_both(seqlen_kv=1)),
    _case("seven by 127", **_both(seqlen_q=7, seqlen_kv=127)),
    _case("causal 129 by 7", CAUSAL, **_both(seqlen_q=129, seqlen_kv=7)),
    _case("whole tiles", **_both(seqlen_q=256, seqlen_kv=352)),
    _case("gqa 5 heads", CAUSAL, **_both(heads_q=5, heads_kv=1)),
    _case("mha batch 3", CAUSAL, **_both(batch=3, heads_q=2, heads_kv=2)),
    _case("d96 dv72", CAUSAL, **_both(head_dim=96, head_dim_v=72)),
    _case("d40 dv128", **_both(head_dim=40, head_dim_v=128)),
    _case("d5 dv3", **_both(head_dim=5, head_dim_v=3)),
    _case("d100 dv1", CAUSAL, **_both(head_dim=100, head_dim_v=1)),
    _case("d192 dv128", CAUSAL, **_both(head_dim=192, head_dim_v=128)),
    # layouts
    _case("NaN around", CAUSAL, transform=_poisoned),
    _case("NaN around d20", transform=_poisoned, **_both(head_dim=20, head_dim_v=36)),
    _case("NaN around window d64", WINDOW, transform=_poisoned, **_D64),
    _case("heads first", CAUSAL, transform=_heads_first),
    _case("expanded", transform=_expanded, **_both(batch=3)),
    _case("unaligned", transform=_unaligned),
    # numbers that force a redo, or nearly
    _case("rising 300", transform=_ramp(-300.0, 300.0)),
    _case("falling 300", transform=_ramp(300.0, -300.0)),
    _case("rising 300 causal", CAUSAL, transform=_ramp(-300.0, 300.0)),
    _case("falling 300 causal d64", CAUSAL, transform=_ramp(300.0, -300.0), **_D64),
    _case("rising 90", CAUSAL, transform=_ramp(-45.0, 45.0)),
    _case("rising 300 fp16", transform=_ramp(-300.0, 300.0), dtype=FP16),
    _case("huge keys", transform=_huge_keys),
    _case("huge keys causal window", CAUSAL_WINDOW, transform=_huge_keys, **_D64),
    _case("huge values", transform=_huge_values),
    _case("huge values causal fp16", CAUSAL, transform=_huge_values, dtype=FP16),
    _case("huge keys sink", _sink_large, transform=_huge_keys, **_both(heads_q=4, heads_kv=4)),
    _case("zero q", CAUSAL, transform=_zeros),
    # score mods
    _case("alibi", _alibi),
    _case("causal alibi", _joined(CAUSAL, _alibi)),
    _case("causal alibi d64 fp16", _joined(CAUSAL, _alibi), dtype=FP16, **_D64),
    _case("relative bias", _relative_bias),
    _case("t5 bias", _t5_bias),
    _case("dense bias d64", _dense_bias, **_D64),
    _case("temperature", _temperature),
    _case("tanh mod", _tanh_mod),
    _case("masking score", _masking_score),
    _case("gather of gather", _gather_of_gather),
    _case("row reduction", _row_reduction),
    _case("wild integers", _wild_integers),
    _case("empty and host captures", _empty_and_host),
    _case("alibi rising", _joined(CAUSAL, _alibi), transform=_ramp(-300.0, 300.0)),
    # mask mods
    _case("document mask", _document),
    _case("bool padding", _bool_capture, **_both(batch=2)),
    _case("any of a row", _any_capture),
    _case("late keys", _late_keys),
    _case("late keys d64 rising", _late_keys, transform=_ramp(-300.0, 300.0), **_D64),
    # block lists
    _case("blocks window", _block_mask(_window_mod)),
    _case("blocks late", _block_mask(_late_rows)),
    _case("blocks late rising", _block_mask(_late_rows), transform=_ramp(-300.0, 300.0)),
    _case("blocks document d64", _block_mask(_document), **_D64),
    _case("blocks random", _random_blocks(128, 128), **_both(batch=2, heads_q=4)),
    _case("blocks random d256", _random_blocks(256, 64), **_D256),
    _case("blocks random wide fp16", _random_blocks(384, 256), dtype=FP16),
    # together
    _case("window sink", _joined(WINDOW, _sink)),
    _case("causal softcap", _joined(CAUSAL, _fixed(softcap=20.0))),
    _case("softcap score mask", _joined(_fixed(softcap=20.0), _alibi, _checkerboard)),
    _case("blocks alibi", _joined(_block_mask(_late_rows), _alibi)),
    _case("blocks causal gqa", _joined(_random_blocks(128, 128), CAUSAL), **_both(heads_q=4)),
    _case("blocks mask window sink", _joined(_random_blocks(128, 128), _late_keys, WINDOW, _sink)),
    _case(
        "everything",
        _joined(
            _random_blocks(128, 128), _late_keys, CAUSAL_WINDOW, _sink, _fixed(softcap=20.0), _alibi
        ),
        wants_max_score=True,
    ),
    _case(
        "dead rows sink softcap",
        _joined(CAUSAL, _sink, _fixed(softcap=20.0)),
        shape=_sized(LARGE, seqlen_q=2100, seqlen_kv=1500),
        small=_sized(SMALL, seqlen_q=300, seqlen_kv=129),
    ),
    _case("scale negative mask", _joined(_fixed(scale=-0.1), _late_keys, CAUSAL)),
    _case("NaN around blocks alibi", _joined(_block_mask(_late_rows), _alibi), transform=_poisoned),
    # gradients
    _case("gradients causal", CAUSAL, checks_gradients=True),
    _case("gradients sink window", _joined(WINDOW, _sink), checks_gradients=True),
    _case("gradients relative bias", _joined(CAUSAL, _relative_bias), checks_gradients=True),
    _case("gradients blocks", _random_blocks(128, 128), checks_gradients=True, dtype=FP16),
)


def case_named(name: str) -> Case:
    """Return the case of this name."""
    return next(case for case in CASES if case.name == name)
