"""Fences, register budgets, grid dependency, and other instructions of the machine itself.

Source: PTX ISA 9.7.13.5-8 (fences), 9.7.19 (miscellaneous). Invariant: a fence of the proxy kind
changes what the async proxy may touch; memory itself is sequential here.
"""

from typing import Any

from fovea.emulator.errors import IllegalOperand
from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Array, Decoded, Inline, Instruction
from fovea.emulator.machine.warp import Wait
from fovea.emulator.memory_order import SCOPES
from fovea.emulator.memory_order import fence as fence_memory

_SCOPES = "cta cluster gpu sys"
# what a fence is restricted to decides its side and scope
_ACQUIRE = ".acquire.sync_restrict::shared::cluster.cluster"
_RELEASE = ".release.sync_restrict::shared::cta.cluster"


@instruction("fence.proxy.async", "fence.proxy.async.space",
             f"fence.proxy.async::generic{_ACQUIRE}", f"fence.proxy.async::generic{_RELEASE}",
             source="PTX ISA 9.7.13.5", evidence="manual-only", kind="sync", targets="sm_90+",
             space="global shared::cta shared::cluster shared::{cta,cluster}")  # fmt: skip
def fence_proxy_async(ins: Instruction) -> Decoded:
    """Order generic accesses seen so far before those of the async proxy, in one space or all.

    `.shared::cta` covers the cluster's shared memory here: more than it promises.
    """
    space = ins["space"] or ("shared" if "sync_restrict" in ins.opcode else "")

    def run(w: Any, mask: Array) -> None:
        w.access.clock.fence_proxy(space)
        w.access.tick()  # what the warp does next is not fenced

    return run


@instruction("fence.mbarrier_init.release.cluster", source="PTX ISA 9.7.13.5",
             targets="sm_90+",
             evidence="manual-only", kind="sync")  # fmt: skip
def fence_mbarrier_init(ins: Instruction) -> Decoded:
    """Let the next cluster barrier tell of the mbarriers that the warp has initialised.

    Within the CTA any barrier does; compilers that use no clusters emit no such fence.
    """

    def run(w: Any, mask: Array) -> None:
        fenced = w.state.setdefault("fence.mbarrier_init", [])
        fenced += w.state.pop("mbarrier.init", ())

    return run


@instruction("fence{.sem}.scope", "membar.level", "fence.proxy.alias", "membar.proxy.alias",
             source="PTX ISA 9.7.13.5", evidence="manual-only", kind="sync",
             sem="sc acq_rel acquire release", scope=_SCOPES, level="cta gl sys")  # fmt: skip
@instruction("fence.proxy.tensormap::generic.release.scope", f"fence{_ACQUIRE}",
             f"fence{_RELEASE}", source="PTX ISA 9.7.13.5", evidence="manual-only", kind="sync",
             targets="sm_90+", scope=_SCOPES)  # fmt: skip
def fence(ins: Instruction) -> Decoded:
    """Make relaxed stores and arrivals after it release, relaxed loads and waits before it acquire.

    Evidence: that `fence.proxy.alias` does so too is inferred; the manual does not promise it.
    """
    side = ins["sem"] or next((s for s in ("acquire", "release") if ins.has(s)), "")
    scope = SCOPES[ins["scope"] or ins["level"] or ("cluster" if side else "sys")]
    takes, hands = side != "release", side != "acquire"
    return lambda w, mask: fence_memory(w, scope, is_acquire=takes, is_release=hands)


@instruction(
    "fence.proxy.tensormap::generic.acquire.scope [addr], size",
    source="PTX ISA 9.7.13.5",
    targets="sm_90+",
    evidence="manual-only",
    kind="sync",
    scope=_SCOPES,
)
def fence_proxy_tensormap_acquire(ins: Instruction) -> Decoded:
    """Order a tensor map's modification before its use; the size must be 128."""
    address, size = ins.address("addr"), ins.immediate("size")
    if size != 128:
        raise ins.error(f"size {size} must be 128")
    return lambda w, mask: (address(w), w.access.clock.fence_proxy())[1]


@instruction("setmaxnreg.action.sync.aligned.u32 count", source="PTX ISA 9.7.19.5",
             evidence="manual-only", kind="sync", targets="sm_90a,sm_100a,sm_100f,sm_101a,sm_103a,"
             "sm_103f,sm_110a,sm_120a", action="inc dec")  # fmt: skip
def setmaxnreg(ins: Instruction) -> Decoded:
    """Change the warp's register budget; an increase waits until the CTA's pool has room."""
    count, is_increase = ins.immediate("count"), ins["action"] == "inc"
    if not 24 <= count <= 256 or count % 8:
        raise ins.error(f"register count {count} must be a multiple of 8 in 24..256")

    def run(w: Any, mask: Array) -> Wait | None:
        current = w.max_registers
        if not current:  # ptxas ignores setmaxnreg where it cannot know the registers at launch
            return None
        if count < current if is_increase else count > current:
            raise IllegalOperand(
                f"setmaxnreg.{ins['action']} {count} with {current} registers now", w.where(ins)
            )
        if not is_increase:
            w.max_registers = count
            w.machine.notify()
            return None

        def is_free() -> bool:
            return count - w.max_registers <= _free_registers(w)

        def take() -> None:
            w.max_registers = count

        def describe() -> str:
            return (
                f"setmaxnreg.inc {count}: the CTA was launched with "
                f"{w.machine.program.launch_registers} registers a thread in "
                f"{len(w.cta.warps)} warps, of which "
                f"{_free_registers(w)} a thread of one warp are free and "
                f"{count - w.max_registers} are needed"
            )

        return Wait(is_free, describe, take, name="setmaxnreg")

    return run


def _free_registers(w: Any) -> int:
    """Return the registers, counted for one thread of a warp, that no warp of the CTA holds.

    The pool is what the CTA was launched with. Those of warps that have exited count as free.
    """
    held = sum(warp.max_registers for warp in w.cta.warps if not warp.is_finished)
    return w.machine.program.launch_registers * len(w.cta.warps) - held


@instruction("griddepcontrol.action", source="PTX ISA 9.7.13.14", targets="sm_90+",
             evidence="manual-only",
             kind="sync", action="wait launch_dependents")  # fmt: skip
def griddepcontrol(ins: Instruction) -> Inline:
    """Nothing to wait for: launches run one after the other."""
    return Inline(())


@instruction("nanosleep.u32 t", source="PTX ISA 9.7.19.1", evidence="manual-only", kind="control")
def nanosleep(ins: Instruction) -> Decoded:
    """Let others run: time is not modelled."""
    read = ins.read("t", "u32")

    def run(w: Any, mask: Array) -> None:
        read(w)

    return run
