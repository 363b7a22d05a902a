"""Pictures of a Blackwell plan as text: the graph of its roles, the map of its tensor memory.

Lives here: the drawing, from a plan alone. Not here: what a plan holds (`sm100.py`) and the pages
that show it (`docs/tables.py`). Invariant: nothing is drawn that the plan does not say.
"""

from fovea.plan.sm100 import QUERY_WARPS, ForwardPlan
from fovea.plan.tensor_memory import TENSOR_COLUMNS

_READERS = ("softmax", "epilogue")  # of announcements, beside the warps that issue something


def role_graph(plan: ForwardPlan) -> str:
    """Return a Mermaid flowchart: roles, and what each tells another, with stages and arrivals."""
    lines = ["```mermaid", "flowchart LR"]
    threads = {
        role.name: f"{role.threads} threads, {role.registers} registers" for role in plan.roles
    }
    for role in _READERS:
        lines.append(f'    {role}["{role}<br>{threads[role]}"]')
    issuers = {"load": "a warp", "mma": "a warp"}
    if plan.packs_heads:
        issuers["queries"] = f"{QUERY_WARPS} warps"
    for role, warps in issuers.items():
        lines.append(f'    {role}["{role}<br>{warps}, {plan.roles[-1].registers} registers"]')
    for edge in plan.edges:
        size = f", {edge.stage_bytes // 1024} KiB" if edge.stage_bytes else ""
        giver = "queries" if edge.name == "q" and plan.packs_heads else "load"
        takers = ("mma",) if edge.name != "work" else tuple(issuers)[1:] + _READERS
        for taker in takers:
            lines.append(f'    {giver} -->|"{edge.name}: ring of {edge.stages}{size}"| {taker}')
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
