"""FLOP formulas and DTensor sharding rules, registered with the first call that could use them.

Lives here: the moment of registration, and the FLOP formulas. Not here: the sharding rules
(`sharding.py`). Invariant: importing fovea imports neither `torch.utils.flop_counter` nor
`torch.distributed.tensor`, which would pull in triton or inductor.
"""

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fovea.ops import sharding
from fovea.ops.program import Program, parse

_registered: set[str] = set()


def register() -> None:
    """Register what torch modules that are loaded could use; quick when there is nothing new."""
    if "torch.utils.flop_counter" in sys.modules:
        _register_flops()
    if "torch.distributed.tensor" in sys.modules and "sharding" not in _registered:
        _registered.add("sharding")
        sharding.register()


# What torch.compiler.assume_constant_result does: Dynamo runs this while it traces, and puts
# nothing into the graph. The decorator itself would import Dynamo with fovea.
register._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _register_flops() -> None:
    from torch.utils import _python_dispatch, flop_counter

    forward = torch.ops.fovea.attention_forward
    backward = torch.ops.fovea.attention_backward
    if "flops" not in _registered:
        _registered.add("flops")
        register_formula = cast(Any, flop_counter).register_flop_formula
        register_formula(forward, get_raw=True)(forward_flops)
        register_formula(backward, get_raw=True)(backward_flops)
    # A counter copies the table when it is made, which may have been before the first call.
    for mode in _python_dispatch._get_current_dispatch_mode_stack():  # pyright: ignore
        counter = getattr(mode, "counter", None)
        table: Any = getattr(counter, "flop_registry", None)
        if table is not None:
            table.setdefault(forward, forward_flops)
            table.setdefault(backward, backward_flops)


def forward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Return the FLOPs of fovea::attention_forward: both products over every pair of rows.

    As torch's formulas do, this counts what a dense call computes: masks and block lists save work
    that is not subtracted.
    """
    del out_val, kwargs
    q, _, v, *_ = args
    return 2 * num_scores(args) * (q.shape[-1] + v.shape[-1])


def backward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Return the FLOPs of fovea::attention_backward: S, dQ, dK, dP and dV over every pair."""
    del out_val, kwargs
    inputs = (*args[2:6], *args[8:12])
    q, _, v, *_ = inputs
    return 2 * num_scores(inputs) * (3 * q.shape[-1] + 2 * v.shape[-1])


def num_scores(args: Sequence[Any]) -> int:
    """Return the number of (query, key) pairs over all heads, masks left aside."""
    q, k, _, _, _, constants, _, text = args
    program = parse(text)
    if not program.varlen_tensors:
        return q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    num_varlen = 1 + program.varlen_tensors.count("1")
    bounds = constants[-num_varlen:]
    return q.shape[1] * _num_packed_pairs(program, bounds)


def _num_packed_pairs(program: Program, bounds: Sequence[Tensor]) -> int:
    names = ("cu_seqlens_kv", "seqused_q", "seqused_kv", "page_table")
    present = [name for name, bit in zip(names, program.varlen_tensors, strict=True) if bit == "1"]
    named = dict(zip(present, bounds[1:], strict=True))
    lengths_q = bounds[0].diff() if "seqused_q" not in named else named["seqused_q"]
    if "seqused_kv" in named:
        lengths_kv = named["seqused_kv"]
    else:
        lengths_kv = named["cu_seqlens_kv"].diff()
    return int((lengths_q.long() * lengths_kv.long()).sum())
