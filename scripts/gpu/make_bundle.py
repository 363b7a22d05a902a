"""Compile the kernels of every GPU test case into a bundle for a machine without a compiler.

From the repository's root, again whenever kernel sources change (what did not change is cached).
Variants that most cases use come first, and the bundle is written again after every few, so that
one which is interrupted has the most useful part:
    PYTHONPATH=src python scripts/gpu/make_bundle.py [--output .carry/cases] [--only WORDS]
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))

from cases import CASES
from special import bundle_problems

from fovea.api.variants import origins
from fovea.arch import arch_named
from fovea.compile.aot import write_bundle
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan.forward import ForwardPlan
from fovea.plan.select import forward_plan, unsupported

_STEP = 6  # variants between two writings of the bundle


def main() -> int:
    """Write the bundle; return the number of cases that have no plan."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(".carry/cases"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    arch = arch_named("sm90")
    named = {case.name: case.build("cpu", is_small=True).problem() for case in CASES}
    named |= bundle_problems()
    plans: Counter[ForwardPlan] = Counter()
    lacking: list[str] = []
    for name, problem in named.items():
        if options.only not in name:
            continue
        lack = unsupported(problem, arch)
        if lack is not None:
            lacking.append(f"{name}: {lack}")
        else:
            # What lists show is found on a GPU, and depends on the size.
            plans.update({forward_plan(call, arch) for call, _ in origins(problem, arch)})
    target = CompileTarget(arch=arch.target, host_triple=native_host_triple())
    variants = [ForwardVariant(plan) for plan, _ in plans.most_common()]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for end in (*range(_STEP, len(variants), _STEP), len(variants)):
        bundle = write_bundle(variants[:end], [target], options.output, workers=options.workers)
        calls = sum(plans[variant.plan] for variant in variants[:end])
        summary = f"{options.output}: {bundle.summary()}, for {calls} of {plans.total()} calls"
        sys.stdout.write(f"{summary}\n")
        sys.stdout.flush()
    for line in lacking:
        sys.stdout.write(f"no kernel: {line}\n")
    return len(lacking)


if __name__ == "__main__":
    sys.exit(main())
