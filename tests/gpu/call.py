"""What a named attention call is: sizes, options and tensors.

Lives here: `Case` for dense calls, and `Call`, which packed ones become too. Not here: the list of
them (`cases.py`, `packed_cases.py`). Invariant: the numbers of a call depend on nothing but its
case and size.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from case_inputs import Transform
from case_options import MakeOptions, Options
from torch import Tensor

import fovea
from fovea.problem import AttentionProblem, Request, VarlenRequest, make_dense, make_varlen
from fovea.testing.inputs import Shape, dense_qkv

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

    def keys(self, *, is_small: bool) -> int:
        """Return how many keys a sequence has."""
        return (self.small if is_small else self.shape).k[1]

    def queries(self, *, is_small: bool) -> int:
        """Return how many queries a sequence has."""
        return (self.small if is_small else self.shape).seqlen_q

    def build(self, device: torch.device | str, *, is_small: bool) -> "Call":
        """Return the call's tensors and options."""
        device = torch.device(device)
        shape = self.small if is_small else self.shape
        q, k, v = dense_qkv(shape, dtype=self.dtype, device=device)
        if self.transform is not None:
            q, k, v = self.transform(q, k, v)
        return Call(q=q, k=k, v=v, options=self.options(shape, device), case=self)


class Named(Protocol):
    """What a call asks of its case."""

    @property
    def name(self) -> str: ...
    @property
    def wants_max_score(self) -> bool: ...
    @property
    def checks_gradients(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A case with its tensors; `where` says where the sequences of a packed one lie."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    case: Named
    where: dict[str, Any] = field(default_factory=dict[str, Any])

    def problem(self) -> AttentionProblem:
        """Return the validated problem."""
        request = Request(wants_lse=True, wants_max_score=self.case.wants_max_score, **self.options)
        if self.where:
            return make_varlen(self.q, self.k, self.v, VarlenRequest(**self.where), request)
        return make_dense(self.q, self.k, self.v, request)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        """Return what the public function does, on these tensors."""
        if self.where:
            return fovea.attention_varlen(q, k, v, **self.where, **keywords)
        return fovea.attention(q, k, v, **keywords)
