"""How a launch is emulated: one frozen object.

Lives here: the choices a caller has. Not here: what they do. Invariant: two launches with equal
options, PTX and inputs give equal results, reports and counters.
"""

from dataclasses import dataclass

from fovea.emulator.arguments import wrong

# the smallest number each option takes, and what all of them are
_NUMBERS = {
    "seed": (0, "an int of 0 or more"),
    "max_segments": (1, "an int of 1 or more"),
    "num_sms": (1, "an int of 1 or more"),
    "max_steps": (1, "an int of 1 or more, or None for no limit"),
}
_WORDS = {
    "async_delay": ("random", "eager", "late"),
    "tensor_load_wait": ("auto", "explicit", "implicit"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Choices of one launch.

    Attributes:
        seed: orders warps and asynchronous work; each seed (0 or more) is another legal schedule.
            With odd ones a warpgroup of each CTA seldom runs while others can, each group in turn.
        detect_races: vector clocks on shared, tensor and global memory within a cluster, and the
            last writers of global memory between clusters.
        detect_uninitialised: reads of shared, tensor and local memory before a write raise; those
            of shared memory and of registers only where the bytes decide something.
        max_steps: scheduler steps before `StepLimitExceeded`; None for no limit.
        max_segments: the most code segments a warp runs before another may (1 or more).
        async_delay: "random" (any legal moment), "eager" (at issue), "late" (only when needed).
            Eager requests to cancel a launch succeed while there is one, others may be declined.
        num_sms: clusters in flight at a time never exceed it; also what `%nsmid` says.
        tensor_load_wait: "explicit": only `tcgen05.wait::ld` orders a load from tensor memory
            before what overwrites or frees it, the manual's rule; "implicit": every `tcgen05.ld`
            waits for itself; "auto": implicit for a kernel without a single wait that CuTe-DSL
            has made or that has at least 8 such loads (they leave it to register dependencies),
            else explicit.
        trace: collect events for `Result.write_trace` (Perfetto JSON).
        exact_mma: use the published bit-exact accumulation of tensor cores for every product; by
            default only wgmma in f16, bf16 and tf32 has it, others are summed in float32.
    """

    seed: int = 0
    detect_races: bool = True
    detect_uninitialised: bool = True
    max_steps: int | None = 20_000_000
    max_segments: int = 8
    async_delay: str = "random"
    num_sms: int = 132
    tensor_load_wait: str = "auto"
    trace: bool = False
    exact_mma: bool = False

    def __post_init__(self) -> None:
        for name, (low, allowed) in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and "None" in allowed:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise wrong(name, value, allowed, f"write Options({name}={max(low, 1)})")
        for name in ("detect_races", "detect_uninitialised", "trace", "exact_mma"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise wrong(name, value, "True or False", f"write Options({name}=True)")
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in words:
                allowed = ", ".join(repr(word) for word in words)
                raise wrong(name, value, allowed, f"write Options({name}={words[0]!r})")
