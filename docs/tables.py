"""Write the generated parts of the documentation into its pages.

Lives here: the parts that are text; pictures are `gallery.py`'s. A generated part stands between
`<!-- begin generated: NAME -->` and `<!-- end generated: NAME -->` and is never edited by hand.

Usage: python docs/tables.py           write
       python docs/tables.py --check   fail where a page is out of date
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import command_tables
import gallery
import model_tables
import torch

import fovea
from fovea import env
from fovea.arch import ARCHS
from fovea.mods.handlers import OPERATORS
from fovea.plan import draw, sm100
from fovea.plan.features import ForwardFeatures

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests"
FUNCTIONS = (
    *("attention", "attention_varlen", "flex_attention"),
    *("create_block_mask", "explain", "precompile"),
)
RESULTS = DOCS.parent / "benchmarks" / "results" / "h200"


def environment() -> str:
    """Return the table of environment variables, from the docstring of fovea.env."""
    rows = [line for line in (env.__doc__ or "").splitlines() if line.startswith("|")]
    return "\n".join(re.sub(r"\b(FOVEA_\w+)\b", r"`\1`", row) for row in rows)


def rule_tests(rule: int) -> str:
    """Return the line that names the tests guarding one rule of the meaning."""
    files = sorted((TESTS / "unit" / "semantics").glob(f"test_rule_{rule:02d}_*.py"))
    if not files:
        return "*No test guards this rule yet.*"
    return "Test: " + ", ".join(f"`{file.relative_to(TESTS.parent)}`" for file in files)


def mods() -> str:
    """Return the gallery: each mod's picture, call and meaning, by family."""
    lines: list[str] = []
    for title, section in gallery.sections().items():
        lines += ["", f"## {title}", "", "| | call | meaning |", "|---|---|---|"]
        for example in section:
            picture = f"![{example.name}](pictures/{example.name}.png)"
            name = gallery.function_of(example)
            call = "<br>".join(dict.fromkeys((f"`{example.caption}`", *maker_signature(name))))
            lines.append(f"| {picture} | {call} | {mod_meaning(name)} |")
    helpers = ", ".join(f"`{name}`" for name in gallery.undrawn())
    lines += ["", "## Makers of tables", "", f"For the mods above: {helpers}."]
    return "\n".join(lines).strip()


def maker_signature(name: str) -> list[str]:
    """Return a maker with its parameters and their defaults; nothing for what is a mod itself."""
    parameters = inspect.signature(getattr(fovea.mods, name)).parameters.values()
    if not parameters or next(iter(parameters)).name in ("score", "b"):
        return []
    shown: list[str] = []
    for parameter in parameters:
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        text = f"{star}{parameter.name}"
        if parameter.default is not parameter.empty:
            value = parameter.default
            text += f"={f'torch.{value.__name__}' if callable(value) else repr(value)}"
        shown.append(text)
    return [f"`{name}({', '.join(shown)})`"]


def mod_meaning(name: str) -> str:
    """Return the first sentence of a mod's docstring, and its formula, as one table cell."""
    document = inspect.getdoc(getattr(fovea.mods, name)) or ""
    summary = document.split("\n\n")[0].removeprefix("Return ").replace("\n", " ")
    formula = re.search(r"^Formula: (.*?)(?=^\S+:|\Z)", document, re.DOTALL | re.MULTILINE)
    cell = f"{summary[0].upper()}{summary[1:]}"
    if formula is not None:
        text = " ".join(formula[1].split()).rstrip(".").replace("`", "")
        cell += f"<br>`{text}`"
    return cell.replace("|", "\\|")


def traced_functions() -> str:
    """Return the torch functions that a mod may call, from the tracer's own table."""
    spaces = {
        "`torch`, or as methods": torch,
        "`torch.nn.functional`": torch.nn.functional,
        "`torch.special`": torch.special,
        "methods alone": torch.Tensor,
    }
    lines = ["| in | functions |", "|---|---|"]
    listed: set[str] = set()
    for title, space in spaces.items():
        names = [
            name
            for name in dir(space)
            if not name.startswith("_")
            and not name.endswith("_")
            and name not in listed
            and isinstance(getattr(space, name), Hashable)
            and getattr(space, name) in OPERATORS
        ]
        listed |= set(names)
        lines.append(f"| {title} | {' '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)


def functions() -> str:
    """Return one line for each public function: its name, its summary and where it is."""
    lines = ["| function | summary | in |", "|---|---|---|"]
    for name in FUNCTIONS:
        function = getattr(fovea, name)
        parts = (inspect.getdoc(function) or "").split("\n\n")
        source = inspect.getsourcefile(function)
        assert source is not None
        path = Path(source).resolve().relative_to(DOCS.parent.resolve())
        summary = parts[0].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| `fovea.{name}` | {summary} | `{path}` |")
    return "\n".join(lines)


def stubs() -> str:
    """Return what mkdocs turns into the functions' whole docstrings."""
    return "\n".join(f"::: fovea.{name}" for name in FUNCTIONS)


def support() -> str:
    """Return what each architecture takes, as the code that chooses a kernel answers."""
    archs = [f"{arch} ({arch.product}) forward" for arch in ARCHS.values()]
    lines = [f"| {' | '.join(['call', *archs, 'gradients'])} |", "|---" * (len(archs) + 2) + "|"]
    reasons: dict[str, int] = {}
    for name, arguments in support_cases().items():
        told = fovea.explain(**arguments)
        cells = [name]
        for kernel in told.kernels:
            if kernel.lack is None:
                cells.append("kernel")
            else:
                cells.append(f"ref ({reasons.setdefault(kernel.lack, len(reasons) + 1)})")
        lines.append(f"| {' | '.join([*cells, str(told.backward_backend)])} |")
    lines.append("")
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines)


def support_cases() -> dict[str, dict[str, Any]]:
    """Return the calls that the support table asks about, as arguments of fovea.explain."""

    def call(
        *,
        heads_kv: int = 4,
        seqlens: tuple[int, int] = (256, 256),
        head_dims: tuple[int, int] = (128, 128),
        dtype: torch.dtype = torch.bfloat16,
        **keywords: Any,
    ) -> dict[str, Any]:
        q = torch.empty(1, seqlens[0], 4, head_dims[0], dtype=dtype)
        k = torch.empty(1, seqlens[1], heads_kv, head_dims[0], dtype=dtype)
        v = torch.empty(1, seqlens[1], heads_kv, head_dims[1], dtype=dtype)
        return {"q": q, "k": k, "v": v, **keywords}

    def tilt(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (kv_idx - q_idx)

    blocks = fovea.create_block_mask(even, None, None, 256, 256, "cpu")
    small_blocks = fovea.create_block_mask(even, None, None, 256, 256, "cpu", BLOCK_SIZE=64)
    return {
        "dense, bfloat16": call(),
        "float16": call(dtype=torch.float16),
        "float32": call(dtype=torch.float32),
        'causal="bottom_right"': call(causal=True),
        'causal="top_left"': call(causal="top_left"),
        "window": call(window=(64, 0)),
        "softcap": call(softcap=20.0),
        "sink": call(sink=torch.zeros(4)),
        "score_mod": call(score_mod=tilt),
        "mask_mod": call(mask_mod=even),
        "block_mask, blocks of 128": call(block_mask=blocks),
        "block_mask, blocks of 64": call(block_mask=small_blocks),
        "lse and max_score": call(return_aux=fovea.AuxRequest(lse=True, max_score=True)),
        "grouped heads": call(heads_kv=1),
        "few queries (keys in parts)": call(seqlens=(2, 4096), heads_kv=1),
        "head dim 64": call(head_dims=(64, 64)),
        "head dim 256": call(head_dims=(256, 256)),
        "head dims 192 and 128": call(head_dims=(192, 128)),
        "head dim 512": call(head_dims=(512, 512)),
        "head dims 64 and 512": call(head_dims=(64, 512)),
        "head dim 40": call(head_dims=(40, 40)),
        "scale <= 0": call(scale=-0.1),
        "deterministic": call(deterministic=True),
        **packed_cases(),
    }


def packed_cases() -> dict[str, dict[str, Any]]:
    """Return the calls on packed sequences that the support table asks about."""

    def packed(**keywords: Any) -> dict[str, Any]:
        borders = torch.tensor([0, 100, 256], dtype=torch.int32)
        return {
            **{name: torch.empty(256, 4, 128, dtype=torch.bfloat16) for name in "qkv"},
            "cu_seqlens_q": borders,
            "cu_seqlens_kv": borders,
            "max_seqlen_q": 156,
            "max_seqlen_kv": 156,
            **keywords,
        }

    blocks = fovea.create_block_mask(even, None, None, 156, 156, "cpu")
    used = torch.tensor([90, 156], dtype=torch.int32)
    pages = torch.empty(20, 16, 4, 128, dtype=torch.bfloat16)
    table = torch.zeros(2, 16, dtype=torch.int32)
    narrow_q, narrow = torch.empty(256, 4, 40).bfloat16(), torch.empty(20, 16, 4, 40).bfloat16()
    paged = {"k": pages, "v": pages, "cu_seqlens_kv": None, "page_table": table}
    return {
        "packed sequences": packed(),
        "packed sequences, seqused": packed(seqused_q=used, seqused_kv=used),
        "packed sequences, block_mask": packed(block_mask=blocks, causal=True),
        "paged keys": packed(seqused_kv=used, **paged),
        "paged keys, head dim 40": packed(
            seqused_kv=used, **{**paged, "q": narrow_q, "k": narrow, "v": narrow}
        ),
    }


def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hide every other position: a mask_mod to ask about."""
    return (q_idx + kv_idx) % 2 == 0


def pages_of(folder: str) -> str:
    """Return a list of links to the pages of a folder."""
    pages = sorted(page for page in (DOCS / folder).glob("*.md") if page.name != "README.md")
    titles = [page.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for page in pages]
    links = [f"- [{title}]({page.name})" for title, page in zip(titles, pages, strict=True)]
    return "\n".join(links) or "None yet."


def speed(bench: str, peers: tuple[str, ...]) -> str:
    """Return the table of one committed result: steady rates, and the ratio to the best peer."""
    result = json.loads((RESULTS / f"{bench}.json").read_text(encoding="utf-8"))
    stamp, unit = result["stamp"], result["unit"]
    lines = [
        f"{stamp['gpu']}, {stamp['power_limit_watts']} W, torch {stamp['torch']}, {stamp['date']}: "
        f"`{stamp['command']}`. Steady state in {unit}; in brackets the burst.",
        "",
        f"| shape | fovea | {' | '.join(peers)} | fovea / best peer |",
        f"|---|---|{'---|' * len(peers)}---|",
    ]
    for row in result["rows"]:
        name = row.get("mod") or ("causal" if row["causal"] else "full")
        heads = f"H{row['H']}" + (f"/{row['Hkv']}" if row["Hkv"] != row["H"] else "")
        cells = [f"{row[who]:.0f} ({row[f'{who}_burst']:.0f})" for who in ("fovea", *peers)]
        ratios = [
            row[f"fovea{state}"] / max(row[f"{who}{state}"] for who in peers)
            for state in ("", "_burst")
        ]
        shape = f"B{row['B']} {heads} S{row['S']} D{row['D']} {name}"
        lines.append(f"| {shape} | {' | '.join(cells)} | {ratios[0]:.2f} ({ratios[1]:.2f}) |")
    return "\n".join(lines)


def blackwell_plan(head_dim: int = 128) -> sm100.ForwardPlan:
    """Return a plan that the page on the Blackwell forward shows."""
    dims = (head_dim, head_dim)
    return sm100.make_forward_plan("bfloat16", dims, ForwardFeatures(), arch="sm100")


def decode(name: str, peers: tuple[str, ...] = ("fa3", "cudnn", "flex")) -> str:
    """Return the table of few queries beside the copy rate; a peer that did not run is a dash."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return "Not measured yet."
    result = json.loads(path.read_text(encoding="utf-8"))
    stamp = result["stamp"]
    lines = [
        f"{stamp['gpu']}, {stamp['power_limit_watts']} W, torch {stamp['torch']}, {stamp['date']}: "
        f"`{stamp['command']}`. Steady state in {result['unit']} of K and V.",
        "",
        f"| {' | '.join(('call', 'fovea', *peers, 'copy', 'fovea / copy', 'fovea / best peer'))} |",
        f"|{'---|' * (len(peers) + 5)}",
    ]
    for row in result["rows"]:
        rates = [row[name] for name in peers if name in row]
        cells = [f"{row[name]:.0f}" if name in row else "-" for name in ("fovea", *peers, "copy")]
        cells.append(f"{row['fovea_of_copy']:.2f}" if "fovea_of_copy" in row else "-")
        cells.append(f"{row['fovea'] / max(rates):.2f}" if rates else "-")
        call = f"B{row['B']} H{row['H']}/{row['Hkv']} Sq{row['Sq']} S{row['S']} D{row['D']}"
        if row["page"]:
            call = f"{call}, pages of {row['page']}"
        lines.append(f"| {call} | {' | '.join(cells)} |")
    return "\n".join(lines)


def overhead() -> str:
    """Return the table of what a warm call costs the host."""
    result = json.loads((RESULTS / "overhead.json").read_text(encoding="utf-8"))
    stamp = result["stamp"]
    names = ("raw", "no_grad_above_raw", "grad_above_raw")
    lines = [
        f"{stamp['gpu']}, {stamp['host']}, torch {stamp['torch']}, {stamp['date']}: "
        f"`{stamp['command']}`. Microseconds a call.",
        "",
        "| call | raw launch | above it without grad | above it with grad recorded |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(f"| {row['case']} | {' | '.join(f'{row[name]:.1f}' for name in names)} |")
    return "\n".join(lines)


def varlen() -> str:
    """Return the table of packed sequences: beside FlashAttention-3, and beside our dense rate."""
    result = json.loads((RESULTS / "varlen.json").read_text(encoding="utf-8"))
    stamp = result["stamp"]
    lines = [
        f"{stamp['gpu']}, {stamp['power_limit_watts']} W, torch {stamp['torch']}, {stamp['date']}: "
        f"`{stamp['command']}`. Steady state in {result['unit']}; in brackets the burst.",
        "",
        "| sequences | fovea | fa3 | fovea, dense | x fa3 | x dense |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        kind = "causal" if row["causal"] else "full"
        call = f"B{row['B']} H{row['H']}/{row['Hkv']} D{row['D']} {kind}, {row['S']} tokens"
        cells = [f"{row[who]:.0f} ({row[f'{who}_burst']:.0f})" for who in ("fovea", "fa3", "dense")]
        ratios = [f"{row['fovea'] / row[who]:.2f}" for who in ("fa3", "dense")]
        lines.append(f"| {call} | {' | '.join((*cells, *ratios))} |")
    return "\n".join(lines)


def cublas() -> str:
    """Return a sentence: a long forward beside a square product, in the same run."""
    result = json.loads((RESULTS / "cublas.json").read_text(encoding="utf-8"))
    row, stamp = result["rows"][0], result["stamp"]
    size = row["matrix"]
    rates = [f"{row[who]:.0f} ({row[f'{who}_burst']:.0f})" for who in ("fovea", "cublas")]
    return (
        f"B{row['B']} H{row['H']} S{row['S']} D{row['D']} full beside cuBLAS's product of "
        f"{size} x {size} matrices (`{stamp['command']}`): {rates[0]} and {rates[1]} TFLOP/s, "
        f"{row['fovea'] / row['cublas']:.2f} of it in steady state."
    )


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "decisions/README.md": {"pages": lambda: pages_of("decisions")},
    "notes/README.md": {"pages": lambda: pages_of("notes")},
    "benchmarks.md": {
        "forward": lambda: speed("forward", ("fa3", "cudnn")),
        "cublas": cublas,
        "decode": lambda: decode("decode"),
        "decode pages": lambda: decode("decode_pages", ()),
        "varlen": varlen,
        "forward mods": lambda: speed("forward_mods", ("flex",)),
        "block sparse": lambda: speed("block_sparse", ("flex",)),
        "overhead": overhead,
    },
    "command_line.md": {
        "call": command_tables.call_words,
        "options": command_tables.options,
        "timeline": command_tables.timeline_calls,
    },
    "environment.md": {"environment": environment},
    "mods.md": {"mods": mods, "functions": traced_functions},
    "reference/functions.md": {"functions": functions, "docstrings": stubs},
    "internals/blackwell_forward.md": {
        "roles": lambda: draw.role_graph(blackwell_plan()),
        "tensor memory": lambda: draw.tensor_map(blackwell_plan()),
        "tensor memory 256": lambda: draw.tensor_map(blackwell_plan(256)),
        "timelines": model_tables.timelines,
        "units": model_tables.units,
        "predictions": model_tables.predictions,
    },
    "internals/cost_model.md": {
        "constants": model_tables.constants,
        "errors": model_tables.errors,
    },
    "support.md": {"support": support},
    "semantics.md": {f"rule {n}": lambda n=n: rule_tests(n) for n in range(1, 14)},
}


def fill(page: str, name: str, text: str) -> str:
    """Return a page with one generated part replaced.

    Raises:
        ValueError: the page has no such part.
    """
    begin, end = f"<!-- begin generated: {name} -->", f"<!-- end generated: {name} -->"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"no generated part {name!r}; add {begin} and {end} to the page")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main(*, check: bool) -> int:
    """Write (or only compare) every generated part and return the exit status."""
    stale: list[str] = []
    for file, parts in PARTS.items():
        path = DOCS / file
        old = page = path.read_text(encoding="utf-8")
        for name, make in parts.items():
            page = fill(page, name, make())
        if page == old:
            continue
        stale.append(file)
        if not check:
            path.write_text(page, encoding="utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(stale))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
