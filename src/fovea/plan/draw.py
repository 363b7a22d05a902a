"""Pictures of a Blackwell plan as text: the graph of its roles, the map of its tensor memory.

Lives here: the drawing, from a plan alone. Not here: what a plan holds (`sm100.py`) and the pages
that show it (`docs/tables.py`). Invariant: nothing is drawn that the plan does not say.
"""

from fovea.plan.sm100 import ForwardPlan
from fovea.plan.tensor_memory import TENSOR_COLUMNS

_RING_ROLES = {"work": ("mma", "softmax", "epilogue")}  # who takes from a ring, else the MMA warp


def role_graph(plan: ForwardPlan) -> str:
    """Return a Mermaid flowchart: roles, and what each tells another, with stages and arrivals."""
    lines = ["```mermaid", "flowchart LR"]
    threads = {
        role.name: f"{role.threads} threads, {role.registers} registers" for role in plan.roles
    }
    for role in ("softmax", "epilogue"):
        lines.append(f'    {role}["{role}<br>{threads[role]}"]')
    for warp in ("load", "mma"):
        lines.append(f'    {warp}["{warp}<br>a warp, {plan.roles[-1].registers} registers"]')
    for edge in plan.edges:
        size = f", {edge.stage_bytes // 1024} KiB" if edge.stage_bytes else ""
        for taker in _RING_ROLES.get(edge.name, ("mma",)):
            lines.append(f'    load -->|"{edge.name}: ring of {edge.stages}{size}"| {taker}')
    for signal in plan.signals:
        told = f"{signal.name}: {signal.stages} barriers of {signal.arrivals}"
        lines.append(f'    {signal.producer} -->|"{told}"| {signal.consumer}')
    return "\n".join([*lines, "```"])


def tensor_map(plan: ForwardPlan) -> str:
    """Return a table of the columns of tensor memory."""
    lines = ["| columns | holds | width | part of |", "|---|---|---|---|"]
    for region in sorted(plan.tensor_regions, key=lambda region: (region.first, -region.columns)):
        lines.append(
            f"| {region.first}-{region.end - 1} | {region.name.upper()} | {region.columns} | "
            f"{region.aliases.upper()} |"
        )
    used = sum(region.columns for region in plan.tensor_regions if not region.aliases)
    return "\n".join([*lines, "", f"{used} of {TENSOR_COLUMNS} columns are in use."])
