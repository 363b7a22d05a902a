"""Time packed sequences of unequal lengths: fovea beside FlashAttention-3, and beside itself dense.

    python -m benchmarks.bench_varlen                     # every call
    python -m benchmarks.bench_varlen --call "D128 causal"

From the repository's root, with `src` and `.` on PYTHONPATH. Writes varlen.json: TFLOP/s of visible
pairs. `dense` is fovea's dense forward on about as many pairs, in sequences of the one length in
which the packed ones have their average pair; its rate counts its own pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers, protocol
from benchmarks.run import Run, parser_of
from benchmarks.shapes import Shape

Launch = Callable[[], Any]

_SEQUENCES, _MEAN, _LONGEST = 64, 2048, 16384


@cache
def lengths() -> tuple[int, ...]:
    """Return 64 log-normal lengths of mean 2048, at most 16384, always the same."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(_SEQUENCES, generator=generator, dtype=torch.float64).exp()
    scale = 1.0
    for _ in range(50):  # cutting the longest lowers the mean
        scale *= _MEAN / float((drawn * scale).clamp(1, _LONGEST).mean())
    return tuple(int(length) for length in (drawn * scale).clamp(1, _LONGEST).round())


@dataclass(frozen=True, slots=True)
class Call:
    """One call on the sequences of `lengths`; the names are those of a result row."""

    H: int
    Hkv: int
    D: int
    causal: bool

    @property
    def pairs(self) -> int:
        """Visible pairs of one head, half of each square when causal."""
        return sum(n * n // 2 if self.causal else n * n for n in lengths())

    @property
    def flops(self) -> int:
        """FLOPs of the packed call."""
        return 4 * self.H * self.D * self.pairs

    @property
    def dense(self) -> Shape:
        """The dense call that is timed beside: the pairs' average length, in whole tiles."""
        total = sum(lengths())
        length = round(sum(n * n for n in lengths()) / total / 128) * 128
        return Shape(max(round(total / length), 1), self.H, self.Hkv, length, self.D, self.causal)

    def row(self) -> dict[str, int | bool | str]:
        """Return the call as the head of a result row."""
        head = {"B": _SEQUENCES, "H": self.H, "Hkv": self.Hkv, "S": sum(lengths()), "D": self.D}
        return {**head, "causal": self.causal, "longest": max(lengths()), "beside": str(self.dense)}

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"{_SEQUENCES} sequences H{self.H}/{self.Hkv} D{self.D} {kind}"


CALLS = tuple(
    Call(heads, heads_kv, head_dim, causal)
    for heads, heads_kv, head_dim in ((32, 8, 128), (16, 16, 128), (32, 8, 64))
    for causal in (True, False)
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """q, k and v as (total, heads, head_dim), and where the sequences lie."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts: Tensor

    @classmethod
    def random(cls, call: Call, dtype: torch.dtype, device: str = "cuda") -> "Inputs":
        """Return random normal inputs."""
        generator = torch.Generator(device).manual_seed(0)
        total = sum(lengths())

        def normal(heads: int) -> Tensor:
            size = (total, heads, call.D)
            return torch.randn(size, device=device, dtype=dtype, generator=generator)

        starts = torch.tensor((0, *lengths()), device=device).cumsum(0).to(torch.int32)
        return cls(q=normal(call.H), k=normal(call.Hkv), v=normal(call.Hkv), starts=starts)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What both packed functions take first, in one order."""
        longest = max(lengths())
        return (self.q, self.k, self.v, self.starts, self.starts, longest, longest)


def fovea_varlen(inputs: Inputs, call: Call) -> Launch:
    """Return fovea's packed call."""
    import fovea

    keywords: dict[str, Any] = {"causal": call.causal, "backend": "cuda"}
    return partial(fovea.attention_varlen, *inputs.arguments, **keywords)


def fa3_varlen(inputs: Inputs, call: Call) -> Launch:
    """Return FlashAttention-3's packed call, from whichever package of it is installed."""
    try:
        from fa3_fwd_interface import flash_attn_varlen_func
    except ImportError:
        from flash_attn_interface import flash_attn_varlen_func
    return partial(flash_attn_varlen_func, *inputs.arguments, causal=call.causal)


PACKED: dict[str, Callable[[Inputs, Call], Launch]] = {"fovea": fovea_varlen, "fa3": fa3_varlen}


def chosen(words: list[str]) -> tuple[Call, ...]:
    """Return the calls whose name holds every word of one of `words`; all without any.

    Raises:
        ValueError: nothing matches.
    """
    if not words:
        return CALLS
    found = [c for text in words for c in CALLS if set(text.split()) <= set(str(c).split())]
    if not found:
        known = "; ".join(str(call) for call in CALLS)
        raise ValueError(f"no call matches {words} (known: {known}); drop a word.")
    return tuple(dict.fromkeys(found))


def measure(call: Call, run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """Return the result row of one call."""
    inputs = Inputs.random(call, dtype)
    makers = {name: partial(make, inputs, call) for name, make in PACKED.items()}
    launches, outputs = peers.ready(makers)
    checks = peers.largest_difference(outputs)
    del outputs
    dense_inputs = peers.Inputs.random(call.dense, dtype)
    launches["dense"] = peers.FORWARD["fovea"](dense_inputs, call.dense)
    samples = run.measure(launches)
    dense = {"dense": samples.pop("dense")}
    rates = {
        **protocol.rates(samples, call.flops / 1e12),
        **protocol.rates(dense, call.dense.forward_flops() / 1e12),
    }
    return {**call.row(), **rates, **checks}


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--call", action="append", metavar="WORDS", help='such as "D128 causal"; repeatable'
    )
    options = parser.parse_args()
    try:
        calls = chosen(options.call or [])
    except ValueError as error:
        parser.error(str(error))
    run = Run(options, "varlen")
    for call in calls:
        row = measure(call, run, getattr(torch, options.dtype))
        run.add({**row, "dtype": options.dtype}, [*PACKED, "dense"], str(call))
    run.end()


if __name__ == "__main__":
    main()
