"""Control flow: bra, brx.idx, ret, exit, trap and friends.

The decoders only name the jump; the block compiler writes it (`machine/blocks.py`).
"""

from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Decoded, Inline, Instruction, Jump


@instruction("bra{.uni} target", source="PTX ISA 9.7.12.3", evidence="manual-only", kind="control")
def bra(ins: Instruction) -> Jump:
    """Jump to a label; lanes that do not take it meet the others at the post-dominator."""
    return Jump("bra")


@instruction(
    "brx.idx{.uni} index, tlist", source="PTX ISA 9.7.12.4", evidence="manual-only", kind="control"
)
def brx_idx(ins: Instruction) -> Jump:
    """Jump to the label at an index of a list."""
    return Jump("brx")


@instruction("ret{.uni}", source="PTX ISA 9.7.12.6", evidence="manual-only", kind="control")
def ret(ins: Instruction) -> Jump:
    """Return from the kernel: the lanes exit."""
    return Jump("ret")


@instruction(
    "call{.uni} a{, b}{, c}{, d}", source="PTX ISA 9.7.12.5", evidence="manual-only", kind="control"
)
def call(ins: Instruction) -> Jump:
    """Call a device function of the module, vprintf or __assertfail; not through a pointer."""
    return Jump("call")


@instruction("exit", source="PTX ISA 9.7.12.7", evidence="manual-only", kind="control")
def exit_(ins: Instruction) -> Jump:
    """End the lanes that execute it."""
    return Jump("exit")


@instruction("trap", source="PTX ISA 9.7.19.8", evidence="manual-only", kind="control")
def trap(ins: Instruction) -> Jump:
    """Abort the launch with a Trap fault."""
    return Jump("trap")


@instruction("brkpt", "pmevent{.mask} a", source="PTX ISA 9.7.19.2", evidence="manual-only",
             kind="control")  # fmt: skip
def no_effect(ins: Instruction) -> Decoded:
    """Change nothing a program can observe here: there is no debugger, and no time."""
    return Inline(())
