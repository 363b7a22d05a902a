"""The kernels that a call can run, as facts.

Lives here: from a problem to the plans of its kernel and of the variants of it that other lengths
or numbers would select. Not here: choosing (`plan/select.py`), compiling (`precompile.py`).
Invariant: the list of variants of a call is finite, and this is all of it.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fovea.arch import Arch
from fovea.problem import AttentionProblem

if TYPE_CHECKING:
    from fovea.plan.sm90 import ForwardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The forward kernel of a call on one architecture, or why there is none.

    Attributes:
        lack: what the kernels lack for this call; None where one takes it.
        name: of the kernel, as profiles show it.
        tile: query rows and keys of a tile.
        registers: of a thread, by role.
        variants: all kernels that calls like this one can select, this one first, each with what
            selects it.
    """

    arch: Arch
    is_chosen: bool
    lack: str | None
    name: str | None = None
    tile: tuple[int, int] | None = None
    kv_stages: int | None = None
    threads: int | None = None
    registers: tuple[tuple[str, int], ...] = ()
    shared_bytes: int | None = None
    variants: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the text of this kernel."""
        title = f"on {self.arch}"
        if self.tile is None or self.shared_bytes is None:
            return [f"{title:13} no kernel: {self.lack}"]
        registers = ", ".join(f"{role} {count}" for role, count in self.registers)
        return [
            f"{title:13} {self.name}",
            f"{'':13} tile {self.tile[0]} x {self.tile[1]}, {self.kv_stages} K/V stages, "
            f"{self.threads} threads, registers: {registers}, "
            f"{self.shared_bytes / 1024:.0f} KiB shared",
            *(
                f"{'  variants' if i == 0 else '':13} {text}"
                for i, text in enumerate(self.variants)
            ),
        ]


def kernel_of(problem: AttentionProblem, arch: Arch, *, is_chosen: bool = False) -> Kernel:
    """Return the facts of a call's kernel on an architecture."""
    from fovea.plan import select

    lack = select.unsupported(problem, arch)
    if lack is not None:
        return Kernel(arch=arch, is_chosen=is_chosen, lack=lack)
    plan = select.forward_plan(problem, arch)
    return Kernel(
        arch=arch,
        is_chosen=is_chosen,
        lack=None,
        name=plan.name,
        tile=(plan.tile_m, plan.tile_n),
        kv_stages=plan.kv_stages,
        threads=plan.threads,
        registers=tuple((role.name, role.registers) for role in plan.roles),
        shared_bytes=plan.shared_bytes,
        variants=tuple(f"{variant.name}: {condition}" for variant, condition in variants_of(plan)),
    )


def variants_of(plan: "ForwardPlan") -> list[tuple["ForwardPlan", str]]:
    """Return every plan that calls with these features can select, `plan` first, and when."""
    features = plan.features
    found: list[tuple[ForwardPlan, str]] = []
    for is_explicit in (False, True):
        for is_wide in (False, True) if features.graphs else (False,):
            variant = _with_features(
                plan, replace(features, explicit_scale=is_explicit, wide_integers=is_wide)
            )
            words = ["scale <= 0" if is_explicit else "scale > 0"]
            if features.graphs:
                words.append(
                    "mods in 64-bit integers (long sequences, large numbers)"
                    if is_wide
                    else "mods in 32-bit integers"
                )
            found.append((variant, ", ".join(words)))
    found.sort(key=lambda entry: entry[0] != plan)
    return found


def _with_features(plan: "ForwardPlan", features: object) -> "ForwardPlan":
    from fovea.plan.features import ForwardFeatures
    from fovea.plan.sm90 import forward_tile

    assert isinstance(features, ForwardFeatures)
    tile_m, tile_n, kv_stages = forward_tile(plan.head_dim, features)
    return replace(plan, features=features, tile_m=tile_m, tile_n=tile_n, kv_stages=kv_stages)
