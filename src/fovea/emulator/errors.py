"""Exceptions of the emulator.

    EmulatorError
    |- PtxError                 the text itself is wrong: syntax, undeclared names, operand types
    |  |- UnsupportedForm       valid PTX (as far as we know) that the emulator does not implement
    |  `- OperandTypeError      a register whose declared type the instruction does not take
    |- LaunchError              wrong arguments, geometry or shared memory of a launch
    |- LauncherError            a host launcher that cannot be loaded, or that reports a failure
    `- Fault                    raised while a kernel runs; knows line, CTA, warp, lane, address
       |- UninitialisedRead, OutOfBounds, Misaligned, IllegalOperand, Trap
       |- RaceError             two accesses that nothing orders
       |- DeadlockError         no warp can go on
       `- StepLimitExceeded

Invariant: every Fault names the PTX line it happened at, in fields and in the message.
"""

from dataclasses import dataclass


class EmulatorError(Exception):
    """Anything the emulator reports about PTX, a launch or a run."""


class PtxError(EmulatorError):
    """The PTX text is wrong.

    Attributes:
        line: 1-based line of the PTX text (0 if the text as a whole is meant).
    """

    def __init__(self, message: str, line: int = 0):
        super().__init__(f"PTX line {line}: {message}" if line else message)
        self.line = line


class UnsupportedForm(PtxError, NotImplementedError):
    """An instruction, or a form of it, that the emulator does not implement.

    Attributes:
        opcode: the mnemonic with all its qualifiers.
    """

    def __init__(self, message: str, line: int, opcode: str):
        super().__init__(message, line)
        self.opcode = opcode


class OperandTypeError(PtxError):
    """A register, or a vector of registers, that an instruction does not take by its declared type.

    Attributes:
        form: the form of the instruction, in the manual's notation.
        operand: the operand's name in the form.
        register: the register's name.
        declared: its declared type, without the dot.
        allowed: the types, with their dots, that the operand takes.
    """

    def __init__(
        self,
        text: str,
        *,
        line: int,
        form: str,
        operand: str,
        register: str,
        declared: str,
        allowed: tuple[str, ...],
        is_mixed: bool = False,
    ):
        message = f"`{text}`: register {register}, operand {operand} of `{form}`, is .{declared}"
        if is_mixed:
            message += ", and others of its vector as types that do not agree with it"
        super().__init__(
            f"{message} (allowed: {', '.join(allowed)}). Declare it as one of these, convert the "
            "value with cvt, or move its bits with mov into a register of bits of the same size",
            line,
        )
        self.form, self.operand, self.register = form, operand, register
        self.declared, self.allowed = declared, allowed


class LaunchError(EmulatorError, ValueError):
    """A wrong argument of a function of the emulator, or a launch that no GPU would accept."""


class LauncherError(EmulatorError, RuntimeError):
    """A host launcher that cannot be loaded, or that reports a failure of its own."""


@dataclass(slots=True, kw_only=True)
class Where:
    """Where in the program and in the machine a fault happened; unknown parts are None."""

    kernel: str = ""
    line: int = 0
    text: str = ""
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lane: int | None = None
    address: int | None = None
    space: str = ""

    def __str__(self) -> str:
        parts = [f"PTX line {self.line}"] if self.line else []
        if self.cta is not None:
            parts.append(f"CTA {self.cta}")
        if self.warp is not None:
            parts.append(f"warp {self.warp}")
        if self.lane is not None:
            parts.append(f"lane {self.lane}")
        if self.address is not None:
            parts.append(f"{self.space or 'generic'} address {self.address:#x}")
        place = ", ".join(parts)
        return f"{place}: `{self.text}`" if self.text else place


class Fault(EmulatorError):
    """A kernel did something wrong while running.

    Attributes:
        where: program and machine location.
        last_writer: text naming the last writer of the data concerned, if known.
    """

    def __init__(self, message: str, where: Where | None = None, last_writer: str = ""):
        self.message = message
        self.where = where or Where()
        self.last_writer = last_writer
        place = str(self.where)
        text = f"{message} (at {place})" if place else message
        if last_writer:
            text += f"; last writer: {last_writer}"
        super().__init__(text)

    @property
    def line(self) -> int:
        """The PTX line of the fault."""
        return self.where.line


class UninitialisedRead(Fault):
    """A register, shared-memory byte or tensor-memory cell was read before it was written."""


class OutOfBounds(Fault):
    """An access outside every allocation, or outside the one its base points into."""


class Misaligned(Fault):
    """An address that is not a multiple of what the access needs."""


class IllegalOperand(Fault):
    """A run-time operand value the instruction does not allow (descriptor, count, lane mask)."""


class Trap(Fault):
    """The kernel executed `trap` or failed a device assertion."""


class RaceError(Fault):
    """Two conflicting accesses that no barrier, fence or wait orders.

    Attributes:
        other: text naming the earlier access.
        rule: which rule was broken, e.g. "generic write before async read needs fence.proxy.async".
    """

    def __init__(
        self,
        message: str,
        where: Where | None = None,
        other: str = "",
        rule: str = "",
        last_writer: str = "",
    ):
        super().__init__(message, where, last_writer)
        self.other = other
        self.rule = rule


class DeadlockError(Fault):
    """No warp can go on.

    Attributes:
        waiting: one text per waiting warp: which barrier, phase, count, who should arrive.
    """

    def __init__(self, message: str, where: Where | None = None, waiting: tuple[str, ...] = ()):
        super().__init__("\n  ".join((message, *waiting)), where)
        self.waiting = waiting


class StepLimitExceeded(Fault):
    """The launch used up `Options.max_steps`."""
