"""Which shardings of its tensors a call can run on without communication (DTensor).

Lives here: the rules of both operators. Not here: when they are registered (`watchers.py`).
Invariant: a shard never changes what a mod sees: `b` and `h` count within the whole call, so an
axis that a mod reads stays whole.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fovea.errors import invalid
from fovea.ops.program import Program, parse
from fovea.problem import AttentionProblem

# Placements of one strategy: outputs, then one entry for each tensor argument, in order.
type_of_strategy = tuple[list[Any], list[Any]]


def register() -> None:
    """Register the rules with DTensor; imports torch.distributed.tensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator  # pyright: ignore[reportPrivateUsage]
    for name, rule in (
        ("attention_forward", forward_shardings),
        ("attention_backward", backward_shardings),
    ):
        operator = getattr(torch.ops.fovea, name).default
        names = [argument.name for argument in operator._schema.arguments]
        # torch's public register_sharding does neither of two things needed here: the program,
        # which rules read, has to be a part of the key under which DTensor keeps their results,
        # and a result that is a list has as many placements as tensors.
        info = RuntimeSchemaInfo(names.index("ints"), needs_pytree=True)
        strategy = partial(_strategy, rule, names.index("k"))
        propagator.register_op_strategy(operator, strategy, info)


def problem_of_mixed(error: RuntimeError, problem: AttentionProblem) -> str | None:
    """Return what to say where DTensors met plain tensors, None of another error of torch."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return None
    named = [("q", problem.q), ("k", problem.k), ("v", problem.v), ("sink", problem.sink)]
    for name, mod in (
        ("score_mod", problem.score_mod),
        ("mask_mod", problem.mask_mod),
        ("block_mask", problem.block_mask_mod),
    ):
        for capture in () if mod is None else mod.captures:
            named.append((f"a tensor of shape {tuple(capture.shape)} captured by {name}", capture))
    # What is neither of these is of a block mask, or bounds of packed sequences.
    plain = [name for name, x in named if x is not None and type(x).__name__ != "DTensor"]
    return invalid(
        plain[0] if plain else "a block list or a bound",
        "a plain tensor beside DTensors",
        "DTensors alone",
        "pass distribute_tensor(x, mesh, [Replicate()]), or sharded where no mod reads the axis; "
        "or make the call inside torch.distributed.tensor.experimental.implicit_replication()",
    )


def _strategy(rule: Callable[..., list[type_of_strategy]], place_of_k: int, schema: Any) -> Any:
    """Return DTensor's strategy object for one call."""
    from torch.distributed.tensor._op_schema import OpStrategy, TupleStrategy
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    def spec_of(strategy: Any) -> Any:
        if isinstance(strategy, OpStrategy):
            return strategy.strategies[0].output_spec
        if isinstance(strategy, TupleStrategy):
            return tuple(spec_of(child) for child in strategy.children)
        return strategy

    found = rule(*(spec_of(arg) for arg in schema.args_schema))
    placements = [[*outputs, *inputs] for outputs, inputs in found]
    mesh = schema.get_mesh_from_args()
    before_k = [arg for arg in schema.args_schema[:place_of_k] if isinstance(arg, OpStrategy)]
    heads_kv = spec_of(schema.args_schema[place_of_k]).shape[-2]

    def splits_heads_evenly(inputs: Any, outputs: Any) -> bool:
        # Uneven shards of q and of k would pair heads of different groups.
        del outputs
        shards = 1
        for extent, placement in zip(mesh.shape, inputs[len(before_k)].placements, strict=True):
            if placement.is_shard() and not placement.is_shard(0):
                shards *= extent
        return heads_kv % shards == 0

    return expand_to_full_mesh_op_strategy(
        mesh,
        schema,
        placements,
        input_index=len(found[0][0]),
        is_valid_strategy_cb=splits_heads_evenly,
    )


def forward_shardings(*args: Any) -> list[type_of_strategy]:
    """Return the acceptable (output, input) placements of fovea::attention_forward."""
    return [
        ([s.out, s.stats, s.stats if s.has_max_score else s.whole], s.inputs())
        for s in _strategies(args)
    ]


def backward_shardings(*args: Any) -> list[type_of_strategy]:
    """Return the acceptable (output, input) placements of fovea::attention_backward."""
    dout, dlse, *inputs, out, lse, captures, constants, ints, program, flags = args
    del out, lse
    found: list[type_of_strategy] = []
    for s in _strategies((*inputs, captures, constants, ints, program)):
        given = [*([] if dout is None else [s.out]), *([] if dlse is None else [s.stats])]
        num_first = 4 if s.has_sink else 3
        first, rest = s.inputs()[:num_first], s.inputs()[num_first:]
        grads = [s.q, s.grad_of(s.k), s.grad_of(s.v), s.grad_of(s.sink)]
        outputs = [grad if flag else s.whole for grad, flag in zip(grads, flags[:4], strict=True)]
        outputs += [s.grad_of(s.whole) if flag else s.whole for flag in flags[4:]]
        found.append((outputs, [*given, *first, s.out, s.stats, *rest]))
    return found


class _Strategy:
    """Placements of the tensors of one call; `split` is where q is cut, None for nowhere."""

    def __init__(self, args: tuple[Any, ...], program: Program, split: str | None) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard

        self.whole, self.partial = Replicate(), Partial()
        self.has_max_score = program.wants_max_score
        self.has_sink = args[3] is not None
        self.num_captures = len(args[4])
        self.num_lists = program.list_tensors.count("1")
        self.num_others = len(args[5]) - self.num_lists
        whole = self.whole
        self.q = self.k = self.v = self.out = self.stats = self.sink = self.lists = whole
        self.is_split = split is not None
        if split == "batch":
            self.q = self.k = self.v = self.out = self.stats = Shard(0)
        elif split is not None:
            is_packed = program.varlen_tensors != ""
            self.q = self.out = Shard(1 if is_packed else 2)
            self.stats = Shard(0 if is_packed else 1)
            self.sink = Shard(0)
            if split == "heads":
                self.k = self.v = Shard(len(args[1].shape) - 2)
        if self.num_lists and split is not None:
            axis = 0 if split == "batch" else 1
            self.lists = whole if args[5][-1].shape[axis] == 1 else Shard(axis)

    def grad_of(self, placement: Any) -> Any:
        """Return the placement of an input's gradient: shared inputs get a part from each shard."""
        return self.partial if self.is_split and placement is self.whole else placement

    def inputs(self) -> list[Any]:
        """Return the placements of q, k, v, sink if there is one, captures and constants."""
        return [
            *(self.q, self.k, self.v),
            *([self.sink] if self.has_sink else []),
            *[self.whole] * (self.num_captures + self.num_others),
            *[self.lists] * self.num_lists,
        ]


def _strategies(args: tuple[Any, ...]) -> list[_Strategy]:
    program = parse(args[7])
    read = {node.op for mod in program.mods if mod is not None for node in mod[0].nodes}
    splits: list[str | None] = [None]
    if not program.varlen_tensors and "b" not in read:
        splits.append("batch")
    if "h" not in read:
        splits.append("heads")
        if args[1].shape[-2] == 1:
            splits.append("query heads")
    return [_Strategy(args, program, split) for split in splits]
