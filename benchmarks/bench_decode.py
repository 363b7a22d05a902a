"""Time few queries against long keys: fovea beside FlashAttention-3, cuDNN, flex and a plain copy.

    python -m benchmarks.bench_decode                            # twelve calls of one query
    python -m benchmarks.bench_decode --all --call "B4 Sq1"      # every known call that matches
    python -m benchmarks.bench_decode --all --peers fa3

From the repository's root, with `src` and `.` on PYTHONPATH. Writes decode.json: GB/s of K and V
read. Each implementation is a CUDA graph of calls on different K and V, more than the L2 cache
holds, so that neither the host nor the cache hides what the kernel does. `copy` moves as many bytes
with torch's own copy, half read and half written.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import peers, protocol
from benchmarks.run import Run, parser_of

Launch = Callable[[], Any]

_WORKING_SET_BYTES = 2**29  # of one turn: nine times the L2 cache of an H200
_ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Call:
    """One call; the names are those of a result row. S counts keys, Sq queries.

    With a `page` K and V lie in pages of that many keys, in random order.
    """

    B: int
    H: int
    Hkv: int
    Sq: int
    S: int
    D: int
    page: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.B * self.S * self.Hkv * self.D * _ELEMENT_BYTES

    @property
    def turns(self) -> int:
        """Calls of one launch, each on K and V of its own."""
        return -(-_WORKING_SET_BYTES // self.kv_bytes)

    def row(self) -> dict[str, int | bool]:
        """Return the call as the head of a result row; its queries are the last positions."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"causal": True}

    def __str__(self) -> str:
        pages = f" page{self.page}" if self.page else ""
        return f"B{self.B} H{self.H}/{self.Hkv} Sq{self.Sq} S{self.S} D{self.D}{pages}"


_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
CALLS = (
    *(Call(b, 32, 8, 1, s, 128) for b in (1, 2, 4, 8, 16, 32, 64) for s in _LENGTHS),
    *(Call(b, 32, 8, q, s, 128) for q in (4, 16) for b in (1, 16) for s in (4096, 32768)),
    *(Call(b, 32, 32, 1, 16384, 128) for b in (1, 16)),
    *(Call(b, 64, 8, 1, 32768, 64) for b in (1, 16)),
    *(Call(b, 16, 2, 1, 32768, 256) for b in (1, 16)),
    *(Call(b, 32, 8, 1, 32768, 128, page) for page in (16, 64, 256) for b in (1, 16)),
)
QUICK_CALLS = (
    *(Call(b, 32, 8, 1, s, 128) for b in (1, 4, 16, 64) for s in (4096, 32768, 131072)),
    *(Call(16, 32, 8, 1, 32768, 128, page) for page in (16, 64, 256)),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pages:
    """Where the keys of a paged call lie: table (batch, pages), lengths (batch,), starts of q."""

    table: Tensor
    lengths: Tensor
    starts: Tensor

    @classmethod
    def random(cls, call: Call) -> "Pages":
        """Return every page once, in random order."""
        count = call.B * call.S // call.page
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        return cls(
            table=order.to("cuda", torch.int32).view(call.B, -1),
            lengths=torch.full((call.B,), call.S, dtype=torch.int32, device="cuda"),
            starts=torch.arange(call.B + 1, dtype=torch.int32, device="cuda") * call.Sq,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """q and, for every turn, K and V as (batch, seqlen, heads, head_dim) views of one memory."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    pages: "Pages | None" = None

    @classmethod
    def random(cls, call: Call, dtype: torch.dtype) -> "Inputs":
        """Return random normal inputs."""
        generator = torch.Generator("cuda").manual_seed(0)
        size = (2 * call.turns, call.B, call.S, call.Hkv, call.D)
        memory = torch.empty(size, device="cuda", dtype=dtype)
        for part in memory:
            part.normal_(generator=generator)
        q = torch.randn(call.B, call.Sq, call.H, call.D, device="cuda", generator=generator)
        pages = None
        if call.page:
            memory = memory.view(2 * call.turns, -1, call.page, call.Hkv, call.D)
            pages = Pages.random(call)
        return cls(q=q.to(dtype), keys=list(memory[::2]), values=list(memory[1::2]), pages=pages)

    @cached_property
    def heads_first(self) -> "Inputs":
        """A copy as (batch, heads, seqlen, head_dim), in memory too; one for all who want it."""
        return Inputs(
            q=self.q.transpose(1, 2).contiguous(),
            keys=[k.transpose(1, 2).contiguous() for k in self.keys],
            values=[v.transpose(1, 2).contiguous() for v in self.values],
        )


def fovea_decode(inputs: Inputs, call: Call) -> list[Launch]:
    """Return fovea's calls."""
    import fovea

    q, pages = inputs.q, inputs.pages

    def run(k: Tensor, v: Tensor) -> Tensor:
        if pages is None:
            return fovea.attention(q, k, v, causal=True, backend="cuda")
        packed = fovea.attention_varlen(
            *(q.flatten(0, 1), k, v, pages.starts, None, call.Sq, call.S),
            seqused_kv=pages.lengths,
            page_table=pages.table,
            causal=True,
            backend="cuda",
        )
        return packed.view(*q.shape[:3], -1)

    return [partial(run, k, v) for k, v in zip(inputs.keys, inputs.values, strict=True)]


def fa3_decode(inputs: Inputs, call: Call) -> list[Launch]:
    """Return FlashAttention-3's calls, which choose their own number of splits."""
    try:
        from fa3_fwd_interface import flash_attn_with_kvcache
    except ImportError:
        from flash_attn_interface import flash_attn_with_kvcache
    keywords: dict[str, Any] = {"causal": True}
    if inputs.pages is not None:
        keywords |= {"cache_seqlens": inputs.pages.lengths, "page_table": inputs.pages.table}
    return [
        partial(flash_attn_with_kvcache, inputs.q, k, v, **keywords)
        for k, v in zip(inputs.keys, inputs.values, strict=True)
    ]


def cudnn_decode(inputs: Inputs, call: Call) -> list[Launch]:
    """Return torch's scaled_dot_product_attention on cuDNN, of one query: it sees every key."""
    if call.page:
        raise ValueError("torch's attention takes no page table")
    if call.Sq > 1:
        raise ValueError("torch aligns a causal mask top-left: several queries would see few keys")
    heads = inputs.heads_first

    def run(k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(heads.q, k, v, enable_gqa=call.Hkv != call.H)

    return [partial(run, k, v) for k, v in zip(heads.keys, heads.values, strict=True)]


def flex_decode(inputs: Inputs, call: Call) -> list[Launch]:
    """Return torch's compiled flex_attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    if call.page:
        raise ValueError("flex_attention reads pages through a mod and a mask of its own")
    heads = inputs.heads_first
    keywords: dict[str, Any] = {"enable_gqa": call.Hkv != call.H}
    if call.Sq > 1:
        offset = call.S - call.Sq
        keywords["block_mask"] = create_block_mask(
            lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx, None, None, call.Sq, call.S
        )
    return [
        partial(peers.compiled_flex(), heads.q, k, v, **keywords)
        for k, v in zip(heads.keys, heads.values, strict=True)
    ]


def copies(inputs: Inputs, call: Call) -> list[Launch]:
    """Return copies of K, each to memory of its own: as many bytes read and written as K and V."""
    return [partial(torch.empty_like(k).copy_, k) for k in inputs.keys]


DECODE: dict[str, Callable[[Inputs, Call], list[Launch]]] = {
    "fovea": fovea_decode,
    "fa3": fa3_decode,
    "cudnn": cudnn_decode,
    "flex": flex_decode,
    "copy": copies,
}


class Recorded:
    """All calls of an implementation as one CUDA graph; launching it returns the first output."""

    def __init__(self, make: Callable[[], list[Launch]]) -> None:
        calls = make()
        # Compiles, loads and settles outside the capture.
        calls[0]()
        calls[-1]()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = [call() for call in calls]

    def __call__(self) -> Any:
        """Launch every call; what is returned is there when the stream comes to it."""
        self._graph.replay()
        return self._outputs[0]


def main() -> None:
    """Run the benchmark as the command line says."""
    options = parse()
    run = Run(options, "decode", "GB/s")
    names = ["fovea", *options.peers, "copy"]
    for call in chosen(options):
        inputs = Inputs.random(call, getattr(torch, options.dtype))
        makers = {name: partial(Recorded, partial(DECODE[name], inputs, call)) for name in names}
        launches, outputs = peers.ready(makers)
        outputs.pop("copy", None)
        checks = peers.largest_difference(outputs)
        del outputs
        rates = protocol.rates(run.measure(launches), call.turns * call.kv_bytes / 1e9)
        if "copy" in rates:
            rates["fovea_of_copy"] = round(rates["fovea"] / rates["copy"], 3)
        run.add({**call.row(), "dtype": options.dtype, **rates, **checks}, names, str(call))
        # The next call's K and V may need the memory that these graphs and copies hold.
        del inputs, makers, launches
        torch.cuda.empty_cache()
    run.end()


def chosen(options: argparse.Namespace) -> tuple[Call, ...]:
    """Return the calls that the command line asks for."""
    calls = CALLS if options.all else QUICK_CALLS
    for word in options.call.split():
        calls = tuple(call for call in calls if word in str(call).split())
    if not calls:
        known = "; ".join(map(str, CALLS))
        raise SystemExit(f"no call matches {options.call!r} (known: {known}); drop a word or --all")
    return calls


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--all", action="store_true", help=f"all {len(CALLS)} calls")
    parser.add_argument(
        "--call", default="", metavar="WORDS", help='those that match, such as "B4 S32768"'
    )
    parser.add_argument(
        "--peers",
        type=lambda text: [name for name in text.split(",") if name],
        default=["fa3", "cudnn", "flex"],
        metavar="NAMES",
        help="comma-separated, of fa3, cudnn, flex (default: all)",
    )
    options = parser.parse_args()
    unknown = set(options.peers) - {"fa3", "cudnn", "flex"}
    if unknown:
        parser.error(f"--peers {','.join(unknown)} is not valid (allowed: fa3, cudnn, flex)")
    return options


if __name__ == "__main__":
    main()
