"""`fovea demo`: one screen that shows what fovea does on this machine.

Lives here: the order of the parts and their layout. Invariant: each part says on what it ran; one
that cannot run here says why instead, and no figure is printed that was not just obtained.
"""

import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

import fovea
from fovea.arch import SM90, arch_of
from fovea.cli import peers
from fovea.cli.accuracy import judge
from fovea.cli.call import Shape
from fovea.cli.demo_call import DemoCall, make_call, shown_source
from fovea.cli.kernel import compile_forward, resource_table
from fovea.cli.timing import ratio_text, time_interleaved
from fovea.problem import Request, make_dense
from fovea.version import __version__


def _square(heads: int, seqlen: int, head_dim: int) -> Shape:
    return Shape(
        batch=1,
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        head_dim=head_dim,
        head_dim_v=head_dim,
    )


GPU_SHAPE, GPU_WINDOW = _square(16, 8192, 128), 1024
CPU_SHAPE, CPU_WINDOW = _square(8, 1024, 64), 256
EMULATED_SHAPE, EMULATED_WINDOW = _square(1, 192, 64), 100
# The oracle is dense in float64: two heads are enough to judge by, and fit beside a large call.
JUDGED_HEADS = 2


def run() -> None:
    """Show ALiBi + sliding window + documents: speed, error, its kernel, the emulator."""
    console = Console(highlight=False)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    call = make_call(
        GPU_SHAPE if is_gpu else CPU_SHAPE, GPU_WINDOW if is_gpu else CPU_WINDOW, device
    )
    machine = torch.cuda.get_device_name(device) if is_gpu else "a CPU, no GPU visible"
    console.print(f"[bold]fovea {__version__}[/] on {machine}, torch {torch.__version__}\n")
    console.print("[bold]ALiBi + sliding window + documents: five lines of Python, and the call[/]")
    console.print(Syntax(shown_source(), "python", background_color="default", padding=(0, 2)))
    _part(console, "Speed and error", lambda: _speed_and_error(console, call, device))
    _part(console, "Gradients", lambda: _gradients(console, call))
    _part(console, "Kernel", lambda: _kernel(console, call, device))
    if not is_gpu:
        _part(console, "Emulator", lambda: _emulator(console))


def _part(console: Console, title: str, show: Callable[[], None]) -> None:
    """Run one part; one that this machine cannot run says why."""
    console.print()
    try:
        show()
    except (NotImplementedError, ModuleNotFoundError) as error:
        console.print(f"[bold]{title}[/]: not run here: {error}")


def _speed_and_error(console: Console, call: DemoCall, device: torch.device) -> None:
    is_gpu = device.type == "cuda"
    flex = peers.flex(call.q, call.k, call.v, **call.keywords, compiled=is_gpu)
    timings = time_interleaved({"fovea": call.run, "flex": flex}, device)
    backend = fovea.explain(call.q, call.k, call.v, **call.keywords).backend
    errors = {"fovea": _error(call, call.run()), "flex": _error(call, flex())}
    names = {
        "fovea": f"fovea, {backend}",
        "flex": f"torch flex, {'compiled' if is_gpu else 'uncompiled'}",
    }
    console.print(f"[bold]Speed and error[/]  {call.text}, forward")
    table = Table(box=None, padding=(0, 1, 0, 2))
    table.add_column("")
    for heading in ("median ms", "speed", "max error against float64"):
        table.add_column(heading, justify="right")
    for name, text in names.items():
        seconds = timings[name].median_s
        ratio = ratio_text(timings["flex"].median_s / seconds)
        table.add_row(text, f"{seconds * 1e3:.2f}", ratio, f"{errors[name]:.1e}")
    console.print(table)


def _error(call: DemoCall, out: torch.Tensor) -> float:
    q, k, v = (tensor[:, :, :JUDGED_HEADS] for tensor in (call.q, call.k, call.v))
    problem = make_dense(q, k, v, Request(**call.keywords))
    return judge(out[:, :, :JUDGED_HEADS], problem).error


def _gradients(console: Console, call: DemoCall) -> None:
    inputs = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
    slope = call.slope.detach().requires_grad_()
    bias, blocks = call.mods_for(slope)
    if slope.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = fovea.attention(*inputs, score_mod=bias, block_mask=blocks)
    grads = torch.autograd.grad(out.float().square().sum(), [*inputs, slope])
    if out.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    backward = fovea.explain(*inputs, score_mod=bias, block_mask=blocks).backward_backend
    assert all(grad.isfinite().all() for grad in grads)
    console.print(
        f"[bold]Gradients[/]  of q, k, v and the captured slope: {seconds:.2f} s with the forward, "
        f"the first time; backward by {backward}"
    )


def _kernel(console: Console, call: DemoCall, device: torch.device) -> None:
    arch = arch_of(device) or SM90
    kernel = compile_forward(make_dense(call.q, call.k, call.v, Request(**call.keywords)), arch)
    console.print(
        f"[bold]Kernel[/]  the same call for {arch.target}, from {kernel.origin} "
        f"in {kernel.seconds:.2f} s"
    )
    console.print(resource_table(kernel))


def _emulator(console: Console) -> None:
    from fovea.cli.emulation import emulate  # needs numpy and llvmlite

    call = make_call(EMULATED_SHAPE, EMULATED_WINDOW, torch.device("cpu"))
    problem = make_dense(call.q, call.k, call.v, Request(**call.keywords))
    compile_forward(problem, SM90)  # in the cache by now, unless the plan differs
    done = emulate(problem, SM90, seed=0)
    console.print(f"[bold]Emulator[/]  that kernel's PTX, {call.text}")
    console.print(f"  no fault, no race; {done.seconds:.1f} s")
    console.print(
        f"  {done.count('instructions.')} warp instructions, "
        f"{done.count('instructions.mma')} of them wgmma, "
        f"{done.count('tensor_load_bytes') / 1024:.0f} KiB loaded by TMA"
    )
    console.print(f"  max error against float64 {done.accuracy}")
