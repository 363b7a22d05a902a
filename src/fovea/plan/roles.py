"""Warp roles of a kernel: who runs, on which warps, with how many registers.

Lives here: the `Role` value and the check that a set of roles fits the register file. Not
here: what a role does (`kernels/<arch>/<pass>/<role>.py`). Invariant: the roles of a kernel tile
its warps without a gap, each a whole number of warpgroups, since those share a register budget.
"""

from dataclasses import dataclass

WARP_SIZE = 32
WARPGROUP_THREADS = 128
WARPS_PER_WARPGROUP = WARPGROUP_THREADS // WARP_SIZE
REGISTERS_PER_SM = 65536  # 32-bit; CUDA C++ programming guide, compute capability 9.0 and 10.0
REGISTERS_PER_THREAD_MAX = 255
SETMAXNREG_GRANULE = 8  # PTX ISA, setmaxnreg: the count is a multiple of 8 in 24..256


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A group of warps that runs one role function.

    `registers` is what each thread holds after `setmaxnreg`.
    """

    name: str
    first_warpgroup: int
    num_warpgroups: int
    registers: int

    def __post_init__(self) -> None:
        """Check the register budget against what `setmaxnreg` accepts."""
        assert 24 <= self.registers <= 256, self
        assert self.registers % SETMAXNREG_GRANULE == 0, self

    @property
    def threads(self) -> int:
        """Threads of this role."""
        return self.num_warpgroups * WARPGROUP_THREADS


def check_roles(roles: tuple[Role, ...], register_threads: int | None = None) -> None:
    """Check that roles tile the CTA and fit what it gets of the register file at launch.

    That is their threads' share of one divided among `register_threads`, by default the CTA's own.

    Raises:
        AssertionError: a gap between roles, or more registers than one SM has.
    """
    expected_warpgroup = 0
    for role in roles:
        assert role.first_warpgroup == expected_warpgroup, f"gap before role {role.name}"
        expected_warpgroup += role.num_warpgroups
    threads = sum(role.threads for role in roles)
    # setmaxnreg moves registers inside what the CTA was launched with, an even share rounded down
    # to the granule; asking for more waits forever.
    sharers = register_threads or threads
    share = REGISTERS_PER_SM // sharers // SETMAXNREG_GRANULE * SETMAXNREG_GRANULE
    used = sum(role.threads * role.registers for role in roles)
    assert used <= share * threads, f"roles need {used} registers, a CTA has {share * threads}"
