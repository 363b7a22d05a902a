"""How a launch is emulated: one frozen object.

Lives here: the choices a caller has. Not here: what they do. Invariant: two launches with equal
options, PTX and inputs give equal results, reports and counters.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Choices of one launch.

    Attributes:
        seed: orders warps and asynchronous work; each seed is another legal schedule. With odd
            ones a warpgroup of each CTA seldom runs while others can, each group in turn.
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
        for name in ("seed", "max_segments", "num_sms", "max_steps"):
            value = getattr(self, name)
            if name == "max_steps" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                wanted = "an int or None" if name == "max_steps" else "an int"
                raise TypeError(f"{name}={value!r} must be {wanted}, got {type(value).__name__}")
        for name in ("detect_races", "detect_uninitialised", "trace", "exact_mma"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be True or False")
        for name in ("async_delay", "tensor_load_wait"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"{name}={value!r} must be a str, got {type(value).__name__}")
        if self.async_delay not in ("random", "eager", "late"):
            raise ValueError(
                f"async_delay={self.async_delay!r} is not one of 'random', 'eager', 'late'"
            )
        if self.tensor_load_wait not in ("auto", "explicit", "implicit"):
            raise ValueError(
                f"tensor_load_wait={self.tensor_load_wait!r} is not one of 'auto', 'explicit', "
                "'implicit'"
            )
        if self.max_segments < 1:
            raise ValueError(f"max_segments={self.max_segments} must be at least 1")
        if self.num_sms < 1:
            raise ValueError(f"num_sms={self.num_sms} must be at least 1")
