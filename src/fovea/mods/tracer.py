"""The tracer: what happens to each torch function that a mod calls.

Lives here: captured tensors and numbers, constants, the refusal of what cannot be traced. Not here:
the meaning of functions (`operators.py`, `indexing.py`, `functions.py`), finding what a function
captures (`closures.py`), the public entry (`trace.py`). Invariant: the code is plain enough for
Dynamo to inline it; whatever Dynamo cannot run stands behind `compiling`.
"""

# User code hands over values of any type: what isinstance leaves of `Any` is unknown to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

import os
import sys
from typing import Any

import torch
from torch import Tensor

from fovea.errors import TraceError
from fovea.mods.builder import FLOATS, GraphBuilder, Term, number_term
from fovea.mods.calls import (
    form_problem,
    function_name,
    operator_by_name,
    plain,
    positional,
    user_line,
)
from fovea.mods.casts import name_of
from fovea.mods.changes import (
    ALIASING,
    OwnTensors,
    changed_by,
    check_stored,
    current_term,
    is_copy,
    wants_in_place,
)
from fovea.mods.factories import FACTORIES
from fovea.mods.functions import INPLACE, NEEDS_VALUE, RANDOM
from fovea.mods.graph import CaptureSpec
from fovea.mods.handlers import OPERATORS, PYTHON_METHODS
from fovea.mods.indexing import RowSource, TensorSource
from fovea.mods.values import (
    CapturedNumber,
    Recipe,
    Traced,
    escaped,
    flat_values,
    make_traced,
)

_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_AUTOGRAD_FUNCTION = os.path.join(_TORCH, "autograd", "function.py")


class Tracer:
    """One trace. `compiling` means that Dynamo is running this code."""

    def __init__(self, compiling: bool, device: torch.device | None):
        self.builder = GraphBuilder()
        self.compiling = compiling
        self.device = torch.device("cpu") if device is None else device
        self.captures: list[Tensor] = []
        self.scalars: list[Any] = []  # recipes; in Dynamo symbolic numbers
        self.scalar_types: list[str] = []
        self.known: dict[int, Term] = {}  # Dynamo only: the term of every node user code has
        # eager only: what a cached trace depends on
        self.leaves: list[Tensor] = []
        self.numbers: list[int | float] = []
        self.names: list[str] = []
        self.guards: list[tuple[Recipe, bool | int | float]] = []
        self.heads: list[Any] = []  # numbers of heads that the mod is made for: recipes, or ints
        self.repeatable = True
        self.own = OwnTensors(compiling)
        self.has_gradient = False  # of what the mod returns
        self.is_recorded = torch.is_grad_enabled()  # by the call itself
        # torch's operators turn a TypeError into "unsupported operand": the reason is kept here
        self.failure: TraceError | None = None

    # ------------------------------------------------------------------------------- arguments

    def term(self, value: Any) -> Term:
        """Return the term of anything that a mod may combine with traced values."""
        if isinstance(value, Term):
            return value
        if isinstance(value, Tensor):
            if self.compiling:
                return self.recovered(value)
            if isinstance(value, Traced):
                if value.fovea_tracer is not self:
                    raise TraceError(
                        "a value that an earlier trace of a mod left behind is not valid (allowed: "
                        "values of this call, tensors, numbers); keep nothing that a mod computes "
                        "in a list, a global or an attribute"
                    )
                return current_term(value)
            return self.lift(value)
        if not self.compiling and type(value) is CapturedNumber:
            return self.scalar(value.fovea_recipe, value.fovea_value)
        if isinstance(value, (bool, int, float)):
            if not self.compiling:
                return number_term(value)
            return number_term(_constant(value)) if _is_static(value) else self.symbolic(value)
        if hasattr(value, "dtype") and hasattr(value, "item"):  # a NumPy number
            return self.term(value.item())
        raise TraceError(
            f"a value of type {type(value).__name__} cannot take part in a mod (allowed: tensors "
            "and numbers); turn it into a tensor outside the mod"
        )

    def readmitted(self, value: Any) -> Any:
        """Return an argument; what escaped from the tracer in Dynamo is traced again."""
        if isinstance(value, tuple):
            return tuple([self.readmitted(part) for part in value])  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(value, Tensor) or isinstance(value, Traced):
            return value
        if value.device.type == "meta" and escaped(value) is not None:
            return self.make(self.recovered(value))
        return value

    def recovered(self, value: Tensor) -> Term:
        """Return a captured tensor's term, or what Dynamo computed without asking us."""
        found = escaped(value)
        if found is None:
            return current_term(value) if isinstance(value, Traced) else self.lift(value)
        what, node = found
        if what == "item":
            raise TraceError(
                "torch.compile cannot follow the unpacking of a traced row or a loop over one; use "
                "row[0], row[1], ... or row.unbind()"
            )
        return OPERATORS[torch.abs](self, self.known[node])

    def capture(self, tensor: Tensor) -> int:
        """Return the number of a captured tensor."""
        for number, known in enumerate(self.captures):
            if known is tensor:
                return number
        name_of(tensor.dtype)
        if tensor.device.type == "meta":
            if any(leaf is tensor for leaf in self.leaves):
                raise TraceError(
                    f"a captured tensor of shape {tuple(tensor.shape)} is on the meta device, "
                    "which holds no numbers; capture one on the device of q"
                )
            raise TraceError(
                "a value escaped the tracer; use torch functions on traced values, row[0] or "
                "row.unbind() in the place of unpacking a row"
            )
        self.captures.append(tensor)
        return len(self.captures) - 1

    def lift(self, tensor: Tensor) -> Term:
        """Return a whole captured tensor as a row over all its dimensions."""
        if tensor.dim() == 0:
            dtype = name_of(tensor.dtype)
            return Term(self.builder.add("load", (), dtype, (self.capture(tensor),)), dtype)
        return OPERATORS[Tensor.__getitem__](self, tensor, ())

    def scalar(self, recipe: Recipe, value: bool | int | float) -> Term:
        """Return the run-time scalar that a recipe gives."""
        dtype = "f64" if isinstance(value, float) else "i64"
        if recipe not in self.scalars:
            self.scalars.append(recipe)
            self.scalar_types.append(dtype)
        node = self.builder.add("scalar", (), dtype, (self.scalars.index(recipe),))
        if isinstance(value, bool):
            zero = self.builder.constant(0, "i64")
            return Term(self.builder.add("ne", (node, zero), "b1"), "b1", (), True)
        return Term(node, dtype, (), True)

    def symbolic(self, value: Any) -> Term:
        """Return the run-time scalar of a number that Dynamo keeps symbolic."""
        dtype = "f64" if isinstance(value, float) else "i64"
        for slot, known in enumerate(self.scalars):
            if self.scalar_types[slot] == dtype and same_symbol(known, value):
                return Term(self.builder.add("scalar", (), dtype, (slot,)), dtype, (), True)
        self.scalars.append(value)
        self.scalar_types.append(dtype)
        slot = len(self.scalars) - 1
        return Term(self.builder.add("scalar", (), dtype, (slot,)), dtype, (), True)

    def source(self, base: Any) -> TensorSource | RowSource:
        """Return what is being indexed."""
        if isinstance(base, Tensor) and not isinstance(base, Traced):
            return TensorSource(self, self.capture(base), base)
        return RowSource(self, self.term(base))

    def fixed_extent(self, source: TensorSource | RowSource, dimension: int) -> int:
        """Return an extent that the graph will contain; a cached trace depends on it."""
        extent = source.extents[dimension]
        if self.compiling:
            return _static_int(extent)
        if isinstance(source, TensorSource):
            self.depend_on_size(self.captures[source.capture], dimension)
        return int(extent)

    def depend_on_size(self, tensor: Tensor, dimension: int) -> None:
        """Remember that the trace holds only while a captured tensor has this extent."""
        for number, leaf in enumerate(self.leaves):
            if leaf is tensor:
                guard = (("size", number, dimension), int(tensor.shape[dimension]))
                if guard not in self.guards:
                    self.guards.append(guard)
                return
        self.repeatable = False

    def fix(self, recipe: Recipe, value: bool | int | float) -> None:
        """Remember that the trace holds only while a captured number has this value."""
        guard = (recipe, value)
        if guard not in self.guards:
            self.guards.append(guard)

    def fixed(self, value: Any) -> Any:
        """Return a Python number, specialising a captured one to its present value."""
        return value.fixed() if not self.compiling and type(value) is CapturedNumber else value

    def divisor(self, value: Any) -> int | float | None:
        """Return 0 where a Python number is 0, and remember that the trace depends on that."""
        if not self.compiling and type(value) is CapturedNumber:
            self.fix(("truth", value.fovea_recipe), bool(value.fovea_value))
            return value.fovea_value
        return self.term(value).value

    # -------------------------------------------------------------------------------- dispatch

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a torch function called by the mod."""
        if self.compiling:
            return self.apply(function, args, kwargs)
        try:
            return self.apply(function, args, kwargs)
        except TraceError as error:
            if getattr(error, "fovea_located", False):
                raise
            raise self.located(error) from None
        except TypeError as error:
            if function not in OPERATORS and function not in INPLACE:
                raise
            raise self.located(
                f"{function_name(function)} was called in a form that cannot be traced "
                f"({form_problem(error)}); use its plainest form"
            ) from error

    def located(self, error: TraceError | str) -> TraceError:
        """Return an error that names the user's line."""
        located = TraceError(f"{error} [{user_line()}]")
        located.fovea_located = True  # pyright: ignore[reportAttributeAccessIssue]
        self.failure = located
        return located

    def apply(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the traced result, or the plain one where nothing traced is involved."""
        if self.compiling:
            args = tuple([self.readmitted(value) for value in args])
        if not self.involves_traced(args, kwargs):
            if function in FACTORIES and FACTORIES[function][0](args, kwargs):
                return self.wrap(FACTORIES[function][1](self, *args, **kwargs))
            return self.run_plain(function, args, kwargs)
        if kwargs.get("out") is not None:
            raise TraceError(
                "out= cannot be traced in a mod; leave it out and use the value that the function "
                "returns"
            )
        args, kwargs = positional(args, kwargs)
        name = function.__name__
        if self.compiling:
            if name == "pow_":
                return self.mutate(args[0], PYTHON_METHODS["pow"](self, *args, **kwargs), name)
            # before any look-up of the function: Dynamo cannot guard its absence from a table
            if name in PYTHON_METHODS:
                return self.aliased(name, args, PYTHON_METHODS[name](self, *args, **kwargs))
        if function in INPLACE:
            return self.mutate(args[0], INPLACE[function](self, *args, **kwargs), name)
        if function in OPERATORS:
            result = OPERATORS[function](self, *args, **kwargs)
            if wants_in_place(name, args, kwargs):
                return self.mutate(args[0], result, name)
            return (
                self.wrap(result)
                if is_copy(name, args, kwargs)
                else self.aliased(name, args, result)
            )
        return self.refuse(function, args, kwargs)

    def involves_traced(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether any argument is traced, those inside tuples too."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Traced):
                return True
            if isinstance(value, (tuple, list)):
                for inner in value:  # pyright: ignore[reportUnknownVariableType]
                    if isinstance(inner, Traced):
                        return True
        return False

    def wrap(self, result: Any) -> Any:
        """Return what user code gets for a handler's result."""
        if isinstance(result, Term):
            term = result
            if term.node < 0 or term.weak:
                term = self.builder.cast(term, term.dtype)
            return self.make(term)
        if isinstance(result, tuple):
            return tuple(self.wrap(part) for part in result)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return result

    def aliased(self, name: str, args: tuple[Any, ...], result: Any) -> Any:
        """Return what user code gets; a view shares its base's changes in place."""
        place = 1 if name == "einsum" else 0
        base = args[place] if len(args) > place else None
        if name not in ALIASING or not isinstance(base, Traced):
            return self.wrap(result)
        if isinstance(result, tuple):
            return tuple([self.aliased(name, args, part) for part in result])
        if not isinstance(result, Term):
            return result
        old = base.fovea_term
        if result.node == old.node and result.dtype == old.dtype and result.dims == old.dims:
            return base
        view = self.wrap(result)
        if result.dtype == old.dtype:
            view.fovea_share = base.fovea_share
            view.fovea_version = base.fovea_version
        return view

    def make(self, term: Term) -> Traced:
        """Return the value of user code for a term."""
        term = self.as_recorded(term)
        if self.compiling:
            self.known[term.node] = term
        return make_traced(self, term, self.builder.shape(term))

    def as_recorded(self, term: Term) -> Term:
        """Return what a term counts for in a backward: nothing where the mod turned gradients off.

        Raises:
            TraceError: inside an autograd.Function, whose own backward would be lost.
        """
        if torch.is_grad_enabled() or term.dtype not in FLOATS:
            return term
        # A call without gradients too: what it traces may serve one with them.
        if self.has_gradient and _is_in_function():
            raise TraceError(
                "a torch.autograd.Function has a backward of its own, which a mod cannot keep; "
                "write the value with detach(), say x + (f(x) - x).detach() for a straight-through "
                "estimate"
            )
        if not self.is_recorded:
            return term
        if term.node < 0 or term.weak:
            term = self.builder.cast(term, term.dtype)
        node = self.builder.add("detach", (term.node,), term.dtype)
        return Term(node, term.dtype, term.dims)

    def mutate(self, receiver: Any, term: Term, name: str) -> Any:
        """Store the result of an in-place function, in the receiver's dtype, and return it."""
        if not isinstance(receiver, Traced):
            raise TraceError(
                "a captured tensor cannot be changed inside a mod; use the function without the "
                "trailing underscore"
            )
        check_stored(self.builder, name, receiver.fovea_term, term)
        term = self.as_recorded(term)
        receiver.fovea_term = self.builder.cast(term, receiver.fovea_term.dtype)
        share = receiver.fovea_share
        share.version = share.version + 1
        share.line = "" if self.compiling else f" at {user_line()}"
        receiver.fovea_version = share.version
        return receiver

    def run_plain(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function of real tensors and numbers, computed at once."""
        name = function.__name__ if self.compiling else function.__name__.partition(".")[0]
        for tensor in changed_by(name, args, kwargs):
            self.own.check(function_name(function), tensor)
        if self.compiling:
            return self.own.noted(name, args, function(*args, **kwargs))
        values = list(flat_values(args, kwargs))
        numbers = [value for value in values if type(value) is CapturedNumber]
        if function is Tensor.__getitem__ and numbers:
            return self.wrap(OPERATORS[function](self, *args, **kwargs))
        if function in RANDOM:
            raise TraceError(
                f"{function_name(function)} gives other numbers on every call and cannot be part "
                "of a mod; draw them outside and capture the tensor"
            )
        if getattr(function, "__name__", "") == "__get__":
            return self.property_of(function, args)
        if function in (Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__):
            for dimension in range(args[0].dim()):
                self.depend_on_size(args[0], dimension)
        else:
            # A tensor made inside the mod, or a stride: another call must ask anew.
            self.repeatable = False
        result = function(*plain(args), **plain(kwargs))
        return self.own.noted(name, values, result)

    def property_of(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Return an attribute of a captured tensor; extents are run-time scalars."""
        name = function.__self__.__name__
        if name == "shape":
            for number, leaf in enumerate(self.leaves):
                if leaf is args[0]:
                    return tuple(
                        CapturedNumber(size, ("size", number, dimension), self)
                        for dimension, size in enumerate(leaf.shape)
                    )
        if name not in ("dtype", "device", "ndim", "requires_grad", "is_cuda", "layout"):
            self.repeatable = False
        return function(*args)

    def refuse(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise for what cannot be traced."""
        name = function_name(function)
        if not self.compiling:
            known = operator_by_name(function)
            if known is not None:
                result = known(self, *args, **kwargs)
                return self.aliased(function.__name__.partition(".")[0], args, result)
        if function is divmod:
            raise TraceError(
                "divmod of a traced value is not defined in torch; write x // y and x % y"
            )
        if function is Tensor.__array__:
            raise TraceError(
                "a NumPy array meets a traced value, which is known at run time only; capture "
                "torch.from_numpy(array) in its place"
            )
        if function is Tensor.__index__:
            raise TraceError(
                f"{name} needs the value of a traced tensor, which is known at run time only: it "
                "indexes a Python list or tuple, or bounds a slice or a range; capture "
                "torch.tensor(the_list), made outside the mod, and index that, or use torch.where"
            )
        if function in NEEDS_VALUE:
            raise TraceError(
                f"{name} needs the value of a traced tensor, which is known at run time only (an "
                "if, and, or, not, min, max, int, float or a function of math asks for it); use "
                "torch.where, &, |, ~, torch.minimum, torch.maximum, .long(), or torch.sin and its "
                "like in place of math.sin"
            )
        raise TraceError(
            f"{name} cannot be traced in a mod; write it with elementwise torch functions, or "
            "compute it outside and capture the resulting tensor"
        )


def _is_in_function() -> bool:
    """Return whether an autograd.Function is running its forward."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename == _AUTOGRAD_FUNCTION:
            return True
        frame = frame.f_back
    return False


def _is_static(value: Any) -> bool:
    """Return whether Dynamo knows a number's value."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(value)


def _constant(value: Any) -> Any:
    """Return a static number as Dynamo's constant: one that a guard fixed may still be a symbol."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(value)


def same_symbol(known: Any, value: Any) -> bool:
    """Return whether two symbolic numbers are one expression; no guard is added."""
    if isinstance(value, float):
        return known is value
    difference = known - value
    return _is_static(difference) and difference == 0


def _static_int(value: Any) -> int:
    """Return an extent that Dynamo specialises on."""
    return int(value)


def capture_spec(tensor: Tensor) -> CaptureSpec:
    """Return what a graph knows of a captured tensor."""
    floating = tensor.dtype.is_floating_point
    return CaptureSpec(name_of(tensor.dtype), tensor.dim(), floating and tensor.requires_grad)
