"""The syntax tree of a PTX module: operands, statements, variables, kernels.

Lives here: plain frozen values the parser makes. Not here: meaning
(`isa/`) or layout of variables (`ptx/module.py`).
Invariant: every node that can be wrong at run time carries the 1-based line of the PTX text.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Register:
    """A register by its declared name; `uid` is unique across scopes of one function."""

    name: str
    uid: str
    type: str


@dataclass(frozen=True, slots=True)
class SpecialRegister:
    """A read-only register of the machine, such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal. `bits` is set for `0f`/`0d` literals (raw IEEE bits), `value` otherwise."""

    value: int | float
    bits: int | None = None
    bits_type: str | None = None


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, parameter or function plus a byte offset.

    Attributes:
        byte: which byte of the address an initial value is (None: the whole address).
        is_element: written `name[index]`, which loads and stores take as an address.
    """

    name: str
    offset: int = 0
    byte: int | None = None
    is_element: bool = False


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple["Operand", ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """`[base+offset]`; of a list `[a, {b, c}]` (coordinates) the further parts are in `rest`."""

    base: "Register | Symbol | Immediate"
    offset: int = 0
    rest: tuple["Operand", ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: two destinations of one instruction."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True, slots=True)
class Negated:
    """`!p` as an operand."""

    item: Register


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: the value is dropped."""


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target, resolved to its unique name."""

    name: str


Operand = (
    Register
    | SpecialRegister
    | Immediate
    | Symbol
    | Vector
    | Memory
    | Pair
    | Negated
    | Sink
    | Label
)


@dataclass(frozen=True, slots=True)
class Guard:
    """`@p` or `@!p`."""

    register: Register
    is_negated: bool


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction as written: `@guard opcode operands;`.

    Attributes:
        used_bytes: bit n says whether byte n of what is loaded is used (None: all are).
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    text: str
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LabelMark:
    """`label:` between statements."""

    name: str
    line: int


Initial = int | Symbol  # the bits of an element, or an address in it


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable or parameter declaration of a state space."""

    space: str
    type: str
    name: str
    align: int
    count: int | None  # None: unsized (`extern .shared x[]`)
    initial: tuple[Initial, ...] = ()  # of the first elements; the others are zero
    line: int = 0
    is_extern: bool = False


@dataclass(slots=True)
class Function:
    """A kernel (`.entry`) or device function (`.func`) with its body."""

    name: str
    is_entry: bool
    parameters: list[Variable]
    line: int
    results: list[Variable] = field(default_factory=list[Variable])
    body: list[Statement | LabelMark] = field(default_factory=list[Statement | LabelMark])
    variables: list[Variable] = field(default_factory=list[Variable])
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    is_defined: bool = True


@dataclass(slots=True)
class ModuleSyntax:
    """A whole PTX text."""

    version: str = ""
    target: str = ""
    address_size: int = 64
    variables: list[Variable] = field(default_factory=list[Variable])
    functions: dict[str, Function] = field(default_factory=dict[str, Function])
