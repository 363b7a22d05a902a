"""Our own kernels with words changed: they run, or end in a located error, and nothing else."""

import random
import re
from functools import cache

import pytest
import torch

from fovea.arch import arch_named
from fovea.compile.cache import get_artifact
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.emulator import EmulatorError, Fault, Options, PtxError, load_launcher
from fovea.plan.select import forward_plan
from fovea.problem.parts import numbers_of, tensors_of
from fovea.runtime.arguments import ForwardLaunch
from fovea.testing.inputs import Shape
from fovea.testing.problems import dense_problem

_JUNK = ("0", "-1", "0xffffffffffff", "%p", "{", "}", "[", "]", "@", "!", ".", "1.5", "$L", "|",
         ";", "4294967295", "18446744073709551615")  # fmt: skip
_STEPS = 4000  # more than a correct launch takes: two CTAs on sm90


@cache
def _kernel(arch_name: str):
    """Return the pieces of a compiled kernel's text, and a function that runs a changed text."""
    arch = arch_named(arch_name)
    problem = dense_problem(
        Shape(seqlen_q=130, seqlen_kv=200, heads_q=1, heads_kv=1, head_dim=64), dtype=torch.bfloat16
    )
    plan = forward_plan(problem, arch)
    target = CompileTarget(arch=arch.target, host_triple=native_host_triple())
    artifact = get_artifact(ForwardVariant(plan), target)
    text = artifact.ptx if isinstance(artifact.ptx, str) else artifact.ptx.decode()

    def run(changed: str, seed: int) -> None:
        launcher = load_launcher(artifact.launcher_object, changed)
        options = Options(seed=seed, max_steps=_STEPS)
        launch = ForwardLaunch(
            problem, plan, 2, lambda *arguments: launcher(*arguments, options=options)
        )
        launch(tensors_of(problem), numbers_of(problem))

    return re.findall(r"\s+|[%$\w:]+|\.[\w:]+|.", text), run


def _mutate(pieces: list[str], seed: int) -> str:
    """Change words: to nothing, to another of the text, to junk; odd seeds exchange registers."""
    source, changed = random.Random(seed), list(pieces)
    words = [n for n, piece in enumerate(pieces) if not piece.isspace()]
    registers = [n for n in words if re.fullmatch(r"%r\d+", pieces[n])]
    for _ in range(source.randint(1, 3)):
        place, other = source.choice(words), source.choice(words)
        kind = source.randrange(4)
        if seed % 2:
            changed[source.choice(registers)] = pieces[source.choice(registers)]
        elif kind == 0:
            changed[place] = " "
        elif kind == 1:
            changed[place], changed[other] = changed[other], changed[place]
        elif kind == 2:
            changed[place] += " " + pieces[other]
        else:
            changed[place] = source.choice(_JUNK)
    return "".join(changed)


@pytest.mark.parametrize(
    ("arch_name", "seeds"),
    [
        ("sm90", range(4)),
        *(pytest.param(arch, range(4, 12), marks=pytest.mark.slow) for arch in ("sm90", "sm100")),
    ],
)
def test_changed_kernel_runs_or_raises_a_located_error(arch_name: str, seeds: range) -> None:
    pieces, run = _kernel(arch_name)
    run("".join(pieces), 0)  # as it is, it is right
    ends: set[str] = set()
    for seed in seeds:
        found: Exception | None = None
        try:
            run(_mutate(pieces, seed), seed)
        except EmulatorError as error:
            found = error
        ends.add(type(found).__name__)
        assert type(found) is not EmulatorError, found  # the bare class: an internal error
        if isinstance(found, PtxError | Fault):
            assert found.line or ".address_size" in str(found), found
    assert "PtxError" in ends, "some texts must be wrong"
