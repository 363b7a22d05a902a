"""Choice of the backend that runs a problem, and the calls into it.

Lives here: names of backends, what `backend=None` means, the warning on landing on the reference,
and FOVEA_CHECK. Not here: what a kernel takes (`plan/select.py`), autograd (`ops/`). Invariant: a
backend that the caller named either runs the forward or raises; `backend=None` alone moves on.
"""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fovea import env
from fovea.arch import ARCHS, Arch, arch_named, arch_of
from fovea.errors import FoveaWarning, UnsupportedError, invalid
from fovea.problem import (
    AttentionProblem,
    ForwardResult,
    GradientNeeds,
    Gradients,
    Results,
    check_contents,
)
from fovea.problem.parts import Numbers
from fovea.reference import gathers, tiled_backward, tiled_forward

# (tensors, numbers, keeps_lse) -> results; see `problem.parts` and `ops.eager.run`.
Launch = Callable[[Sequence[Tensor | None], Numbers, bool], Results]

_EMULATORS = {f"emulator:{name}": name for name in ARCHS}
BACKENDS = ("reference", "cuda", *_EMULATORS)


class Choice(NamedTuple):
    """Which backend runs, and why.

    Attributes:
        backend, backward_backend: forward and first-order backward, one of `BACKENDS`.
        reason: one sentence for people, on the forward.
        arch: architecture of the kernels; None for the reference.
        is_nondeterministic: deterministic results were asked for with warn_only, and this backend
            has none.
    """

    backend: str
    reason: str
    backward_backend: str
    arch: Arch | None = None
    is_nondeterministic: bool = False


_ON_CPU = Choice("reference", "the tensors are not on a GPU", "reference")
_ASKED_REFERENCE = Choice("reference", "asked for", "reference")

_has_warned = False


def check_backend(backend: object) -> str | None:
    """Return `backend` if it names one or is None.

    Raises:
        ValueError: it names none.
    """
    # By type first: an array compares with a string element by element.
    if backend is None or (isinstance(backend, str) and backend in BACKENDS):
        return backend
    raise ValueError(
        invalid("backend", repr(backend), ", ".join(("None", *BACKENDS)), "pass one of them")
    )


def choose(problem: AttentionProblem, backend: str | None) -> Choice:
    """Return the backend that runs `problem`; warn once where CUDA tensors go to the reference.

    Raises:
        ValueError: no such backend.
        UnsupportedError: the named backend does not take this problem.
    """
    if backend is None:
        if not problem.q.is_cuda:
            return _ON_CPU
        choice = _choose_freely(problem)
        if choice.backend == "reference":
            _warn_of_reference(choice.reason)
        return choice
    return decide(problem, backend)


def decide(problem: AttentionProblem, backend: str | None) -> Choice:
    """Return what `choose` does, without its warning."""
    if backend is None:
        return _choose_freely(problem) if problem.q.is_cuda else _ON_CPU
    check_backend(backend)
    if backend == "reference":
        return _ASKED_REFERENCE
    arch = _arch_for(problem, backend)
    lack = lack_of(problem, backend, arch)
    if lack is None:
        return Choice(backend, "asked for", "reference", arch)
    if problem.deterministic_warns and _takes_nondeterministic(problem, backend, arch):
        return Choice(backend, "asked for", "reference", arch, True)
    raise UnsupportedError(
        f"backend='{backend}' does not take this call: {lack}; pass backend=None to let fovea "
        "choose, or backend='reference'."
    )


def forward(problem: AttentionProblem, choice: Choice) -> ForwardResult:
    """Run the forward of a problem on the chosen backend.

    Raises:
        ValueError: tensor contents out of range; looked at on a CPU always, since nothing has to be
            waited for there, elsewhere under FOVEA_CHECK=1.
    """
    if env.check() or problem.q.is_cpu:
        check_contents(problem)
        if choice.backend != "reference":  # which checks gathers as it runs
            gathers.check_gathers(problem)
    if choice.is_nondeterministic:
        problem = _without_determinism(problem, choice)
    # Autocast would round the products inside the reference, which are meant to be fp32.
    if torch._C._is_any_autocast_enabled():  # pyright: ignore[reportPrivateUsage]
        with _without_autocast(problem.q.device.type):
            return _forward(problem, choice)
    return _forward(problem, choice)


def launch_of(problem: AttentionProblem, choice: Choice) -> Launch | None:
    """Return what runs calls with this layout, these features and mods without their problem.

    None where there is no such thing: on backends that are slow anyway, for a problem that needs no
    kernel, and where every call has to warn.
    """
    if choice.backend != "cuda" or choice.is_nondeterministic:
        return None
    from fovea.runtime import cuda

    return cuda.launch_of(problem)


def backward(
    problem: AttentionProblem,
    choice: Choice,
    *,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    needs: GradientNeeds,
) -> Gradients:
    """Run the first-order backward of a problem, differentiable where the reference runs it.

    Shapes:
        out, lse: as `forward` returned them; dout, dlse: their gradients, None for zero.
    """
    assert choice.backward_backend == "reference"
    dout = torch.zeros_like(out) if dout is None else dout
    with _without_autocast(problem.q.device.type):
        return tiled_backward.backward(problem, out=out, lse=lse, dout=dout, dlse=dlse, needs=needs)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device_type):  # such as meta, which has none to turn off
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _forward(problem: AttentionProblem, choice: Choice) -> ForwardResult:
    if choice.backend == "reference":
        return tiled_forward.forward(problem)
    if choice.backend == "cuda":
        from fovea.runtime import cuda

        return cuda.forward(problem)
    from fovea.runtime import emulated

    assert choice.arch is not None
    return emulated.forward(problem, choice.arch)


def _choose_freely(problem: AttentionProblem) -> Choice:
    """Return "cuda" where it takes a problem on a GPU, else the reference with a warning."""
    arch = arch_of(problem.q.device)
    lack = lack_of(problem, "cuda", arch)
    if lack is None:
        return Choice(
            "cuda", f"the GPU has kernels ({arch}) that take this call", "reference", arch
        )
    if problem.deterministic_warns and _takes_nondeterministic(problem, "cuda", arch):
        return Choice("cuda", f"the GPU has kernels ({arch})", "reference", arch, True)
    return Choice("reference", f"backend 'cuda' does not take this call: {lack}", "reference")


def _arch_for(problem: AttentionProblem, backend: str) -> Arch | None:
    if backend == "cuda":
        return arch_of(problem.q.device)
    return arch_named(_EMULATORS[backend])


def lack_of(problem: AttentionProblem, backend: str, arch: Arch | None) -> str | None:
    """Return why a kernel backend cannot run a problem, or None if it can."""
    if backend == "cuda":
        if not problem.q.is_cuda:
            return f"q is on {problem.q.device}, and backend 'cuda' needs CUDA tensors"
        if arch is None:
            names = ", ".join(f"{a.name} ({a.product})" for a in ARCHS.values())
            return f"there are no kernels for this GPU (there are for {names})"
    elif problem.q.device.type != "cpu":
        return f"q is on {problem.q.device}, and the emulator needs CPU tensors"
    missing = _missing_runtime(backend)
    if missing is not None:
        return missing
    from fovea.plan import select

    assert arch is not None
    return select.unsupported(problem, arch)


@cache
def _missing_runtime(backend: str) -> str | None:
    """Return what has to be installed before a kernel backend can run, or None."""
    if backend == "cuda":
        module, packages, extra = "fovea.runtime.cuda", ("tvm_ffi",), "cuda"
    else:
        module, packages, extra = "fovea.runtime.emulated", ("numpy", "llvmlite"), "emulator"
    if importlib.util.find_spec(module) is None:
        return f"this version of fovea has no {module}"
    for package in packages:
        if importlib.util.find_spec(package) is None:
            how = f"pip install 'fovea-attention[{extra}]', in a clone '-e .[{extra}]'"
            return f"{package} is not installed ({how})"
    return None


def _takes_nondeterministic(problem: AttentionProblem, backend: str, arch: Arch | None) -> bool:
    return lack_of(replace(problem, deterministic=False), backend, arch) is None


def _without_determinism(problem: AttentionProblem, choice: Choice) -> AttentionProblem:
    warnings.warn(
        f"fovea's backend '{choice.backend}' has no deterministic version of this call; running "
        "the nondeterministic one, since torch.use_deterministic_algorithms has warn_only=True",
        FoveaWarning,
        stacklevel=2,
    )
    return replace(problem, deterministic=False)


def _warn_of_reference(reason: str) -> None:
    """Warn, once a process, that CUDA tensors go to the slow reference."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    warnings.warn(
        f"fovea runs its reference, not a kernel, on CUDA tensors: {reason}. fovea.explain(...) "
        "shows the choice for a call; pass backend='cuda' to get an error instead. Shown once.",
        FoveaWarning,
        stacklevel=2,
    )
