"""Time a long full attention forward beside cuBLAS: what the tensor cores give at this power.

    python -m benchmarks.bench_cublas

From the repository's root, with `src` and `.` on PYTHONPATH. Writes cublas.json: a row of one
attention call and one square product of random numbers, in turns.
"""

import torch

from benchmarks import peers, protocol
from benchmarks.run import Run, parser_of
from benchmarks.shapes import Shape

SHAPE = Shape(1, 16, 16, 16384, 128, False)
MATRIX = 8192


def main() -> None:
    """Run the benchmark as the command line says."""
    options = parser_of(__doc__).parse_args()
    run = Run(options, "cublas")
    dtype = getattr(torch, options.dtype)
    attention = peers.fovea_forward(peers.Inputs.random(SHAPE, dtype), SHAPE)
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        torch.randn(MATRIX, MATRIX, device="cuda", dtype=dtype, generator=generator)
        for _ in range(2)
    )
    samples = run.measure({"fovea": attention, "cublas": lambda: a @ b})
    work = {"fovea": SHAPE.forward_flops() / 1e12, "cublas": 2 * MATRIX**3 / 1e12}
    row = {**SHAPE.row(), "dtype": options.dtype, "matrix": MATRIX}
    for name, taken in samples.items():
        row |= protocol.rates({name: taken}, work[name])
    run.add(row, ["fovea", "cublas"], str(SHAPE))
    run.end()


if __name__ == "__main__":
    main()
