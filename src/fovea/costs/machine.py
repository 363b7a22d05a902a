"""Rates of the units of one SM, for each GPU that the model knows, each with its source.

Lives here: numbers of hardware alone. Not here: what a kernel asks of a unit (`work.py`), latencies
fitted to measurements (`calibration.py`). Invariant: a rate is per SM and clock of the SM, unless
its name says otherwise; what nobody measured says so.
"""

from dataclasses import dataclass

from fovea.arch import SM90, SM100, SM103
from fovea.errors import invalid

SUB_PARTITIONS = 4  # of an SM, each with a warp scheduler; warp w runs on w % 4 (CUDA C++ guide)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU as the model sees it.

    Attributes:
        num_sms: streaming multiprocessors.
        tensor_flops: bfloat16 matrix FLOPs a clock, dense; a multiply-add is two.
        exponentials: results of MUFU.EX2 a clock.
        shared_bytes: bytes that shared memory reads or writes a clock.
        tensor_load_bytes, tensor_store_bytes: bytes between registers and tensor memory a clock;
            0 where there is none.
        port_bytes: bytes a clock that one SM can take from the L2 cache.
        l2_bytes: bytes a clock that the L2 cache delivers to each SM while all ask, at `l2_mhz`.
        l2_mhz: SM clock at which that was observed; the cache has a clock of its own, so at a
            lower SM clock more bytes come each SM clock.
        nominal_mhz: SM clock at which the dense bfloat16 peak of the data sheet is reached.
    """

    name: str
    num_sms: int
    tensor_flops: int
    exponentials: int
    shared_bytes: int
    tensor_load_bytes: int
    tensor_store_bytes: int
    port_bytes: int
    l2_bytes: float
    l2_mhz: float
    nominal_mhz: float

    def l2_bytes_at(self, mhz: float) -> float:
        """Return the bytes an SM clock from the L2 cache at a clock of the SMs."""
        return self.l2_bytes * self.l2_mhz / mhz

    @property
    def peak_tflops(self) -> float:
        """Dense bfloat16 peak at the nominal clock."""
        return self.num_sms * self.tensor_flops * self.nominal_mhz * 1e-6


# Sources. Matrix FLOPs, exponentials and shared memory a clock: FlashAttention-4 (arXiv
# 2603.05451), table of the hardware; exponentials of an H200 measured, 16 too. SMs: data sheets.
# nominal_mhz: 989 TFLOP/s of an H100 or H200 and 2250 of a B200, by SMs and FLOPs a clock.
# L2, H200: 27 bytes a clock and SM at 1980 MHz, measured, docs/notes/hopper_forward.md (waits for
# K). Its port: 64 bytes a clock, as NVIDIA's A100 white paper gives for a slice; an assumption.
H200 = Machine(
    name="H200",
    num_sms=SM90.num_sms,
    tensor_flops=4096,
    exponentials=16,
    shared_bytes=128,
    tensor_load_bytes=0,
    tensor_store_bytes=0,
    port_bytes=64,
    l2_bytes=27.0,
    l2_mhz=1980.0,
    nominal_mhz=1830.0,
)
# Assumptions, no measurement of ours. Tensor memory: 128 lanes, a thread its own, 32 bits a clock
# each way; at half that rate it would still be busy a quarter of the time. L2: an SM gets what an
# H200's gets.
B200 = Machine(
    name="B200",
    num_sms=SM100.num_sms,
    tensor_flops=8192,
    exponentials=16,
    shared_bytes=128,
    tensor_load_bytes=512,
    tensor_store_bytes=512,
    port_bytes=64,
    l2_bytes=27.0,
    l2_mhz=1980.0,
    nominal_mhz=1856.0,
)
# Exponentials of compute capability 10.3 come at twice the rate (flash-attn-4 turns its software
# exponential off there); SMs and peak as public benchmarks of that board use them.
B300 = Machine(
    name="B300",
    num_sms=SM103.num_sms,
    tensor_flops=8192,
    exponentials=32,
    shared_bytes=128,
    tensor_load_bytes=512,
    tensor_store_bytes=512,
    port_bytes=64,
    l2_bytes=27.0,
    l2_mhz=1980.0,
    nominal_mhz=1856.0,
)
MACHINES = {"sm90": H200, "sm100": B200, "sm103": B300}


def machine_of(arch: str) -> Machine:
    """Return the machine that stands for an architecture.

    Raises:
        ValueError: there is none.
    """
    found = MACHINES.get(arch)
    if found is None:
        raise ValueError(invalid("arch", repr(arch), " | ".join(MACHINES), "name one of them"))
    return found
