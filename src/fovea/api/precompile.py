"""fovea.precompile: compile a call's kernels ahead of time, on a machine without a GPU.

Lives here: from a call to the list of jobs. Not here: compiling, caching and bundles (`compile/`).
Invariant: what is compiled is the list of variants that `fovea.explain` prints for the call.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fovea.api.explain import archs_named, call_problem, packed_keywords
from fovea.api.variants import variants_of
from fovea.errors import UnsupportedError

_OWN = ("archs", "bundle", "workers", "return_aux")  # beside the keywords of a call


def precompile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *packed: Any,
    archs: Sequence[str] = ("sm90",),
    bundle: str | Path | None = None,
    workers: int | None = None,
    return_aux: Any = None,
    **keywords: Any,
) -> tuple[str, ...]:
    """Compile every kernel that calls like this one can run; return the kernels' names.

    Lengths, batch, heads, scalars and contents do not matter: they are arguments of the kernel. So
    small tensors do, or meta tensors. Worker processes are spawned where there is more than one
    kernel, so a script needs `if __name__ == "__main__":`.

    Args:
        q, k, v: tensors of the call's dtype and head dims.
        packed: cu_seqlens_q, ... where they are passed by position, as to `fovea.attention_varlen`.
        archs: architectures to compile for: "sm90", "sm100", "sm103".
        bundle: also write the kernels into this folder, for machines without a compiler, which
            find it through FOVEA_BUNDLE. Otherwise they go to the disk cache alone.
        workers: processes; default one a processor.
        return_aux: as the call takes it; max_score is computed by kernels of its own.
        **keywords: of `fovea.attention`: causal, window, score_mod, ...; and of
            `fovea.attention_varlen`: cu_seqlens_q, max_seqlen_q, page_table, ...

    Raises:
        TypeError, ValueError: wrong input, as the call would raise.
        UnsupportedError: an architecture has no kernel for this call, or no compiler is installed.
    """
    from fovea.compile.pool import compile_many
    from fovea.compile.target import CompileTarget
    from fovea.compile.variant import ForwardVariant
    from fovea.plan import select

    keywords = packed_keywords(packed, keywords)
    problem = call_problem(q, k, v, return_aux, keywords, own=_OWN)
    jobs: list[tuple[ForwardVariant, CompileTarget]] = []
    for arch in archs_named(archs):
        name = arch.name
        lack = select.unsupported(problem, arch)
        if lack is not None:
            raise UnsupportedError(
                f"precompile for {name} has no kernel for this call: {lack}; leave {name!r} out of "
                "archs, or change the call (fovea.explain shows what each architecture takes)."
            )
        target = CompileTarget(arch=arch.target)
        plans = variants_of(problem, arch)
        jobs.extend((ForwardVariant(plan), target) for plan, _ in plans)
    if bundle is not None:
        from fovea.compile.aot import write_bundle

        targets = list(dict.fromkeys(target for _, target in jobs))
        if len(targets) > 1:
            raise UnsupportedError(
                f"bundle={str(bundle)!r} for archs {tuple(archs)} is not supported (allowed: one "
                "architecture a bundle); write one bundle each."
            )
        write_bundle([variant for variant, _ in jobs], targets, Path(bundle), workers=workers)
    else:
        compile_many(jobs, workers=workers)
    return tuple(dict.fromkeys(variant.name for variant, _ in jobs))
