"""Derive the coefficients of fovea's software exp2 and print them with their error.

`2**f` on [0, 1) is approximated by `1 + c1 f + c2 f^2 + ... + cn f^n`; the constant term is 1 so
that `exp2(0) == 1` exactly (the largest P of a row). The coefficients minimise the largest relative
error: a Remez exchange in float64, then the rounding to float32 is refined by a search over
neighbours. `src/fovea/plan/numerics.py` holds the result; a test runs this file again and compares.

    python scripts/derive_exp2_polynomial.py [degree]
"""

import itertools
import sys

import torch
from torch import Tensor

LN_2 = 0.6931471805599453
GRID_POINTS = 20001


def relative_error(coefficients: Tensor, f: Tensor) -> Tensor:
    """Return `p(f) / 2**f - 1` in float64.

    Shapes:
        coefficients: (degree,), c1 first; f: any shape.
    """
    p = torch.zeros_like(f)
    for c in coefficients.flip(0):
        p = (p + c) * f
    return (p + 1) * torch.exp2(-f) - 1


def solve_levelled(points: Tensor) -> tuple[Tensor, float]:
    """Return coefficients whose relative error alternates with equal size over `points`.

    Shapes:
        points: (degree + 1,), ascending, in (0, 1].
    """
    degree = points.numel() - 1
    powers = torch.stack([points**k for k in range(1, degree + 1)], dim=1)
    signs = torch.tensor([(-1.0) ** i for i in range(degree + 1)], dtype=torch.float64)
    target = torch.exp2(points)
    matrix = torch.cat([powers, (-signs * target).unsqueeze(1)], dim=1)
    solution = torch.linalg.solve(matrix, target - 1)
    return solution[:-1], float(solution[-1].abs())


def extrema(coefficients: Tensor, count: int) -> Tensor:
    """Return the `count` places of largest error, one for each run of equal sign, ascending.

    The error is 0 at f = 0 by construction, so the first run starts just behind it.
    """
    f = torch.linspace(0, 1, GRID_POINTS, dtype=torch.float64)[1:]
    error = relative_error(coefficients, f)
    changes = (torch.nonzero(error[1:].sign() != error[:-1].sign()).flatten() + 1).tolist()
    places: list[float] = []
    for begin, end in itertools.pairwise([0, *changes, f.numel()]):
        places.append(float(f[begin + int(error[begin:end].abs().argmax())]))
    if len(places) < count:
        raise RuntimeError(f"{len(places)} alternations, {count} needed; start from other points")
    return torch.tensor(places[-count:], dtype=torch.float64)


def remez(degree: int) -> Tensor:
    """Return the minimax coefficients c1..cn in float64."""
    count = degree + 1
    # Chebyshev points of (0, 1]: near the optimum already.
    angles = torch.arange(count, 0, -1, dtype=torch.float64) - 0.5
    points = (torch.cos(angles * torch.pi / (count + 0.5)) + 1) / 2
    points = points.sort().values
    grid = torch.linspace(0, 1, GRID_POINTS, dtype=torch.float64)
    worst = level = float("inf")
    for _ in range(50):
        coefficients, level = solve_levelled(points)
        worst = float(relative_error(coefficients, grid).abs().max())
        if worst - level <= 1e-6 * level:
            return coefficients
        points = extrema(coefficients, count)
    raise RuntimeError(f"no convergence: error {worst:.3e}, level {level:.3e}")


def round_to_float32(coefficients: Tensor) -> tuple[Tensor, float]:
    """Return the best of the 3^n float32 neighbours, and its largest relative error."""
    f = torch.linspace(0, 1, GRID_POINTS, dtype=torch.float64)
    nearest = coefficients.float()
    neighbours = [
        torch.nextafter(nearest, torch.full_like(nearest, -torch.inf)),
        nearest,
        torch.nextafter(nearest, torch.full_like(nearest, torch.inf)),
    ]
    best, best_error = nearest, float("inf")
    for choice in itertools.product(range(3), repeat=nearest.numel()):
        candidate = torch.stack([neighbours[c][i] for i, c in enumerate(choice)])
        error = float(relative_error(candidate.double(), f).abs().max())
        if error < best_error:
            best, best_error = candidate, error
    return best, best_error


def derive(degree: int) -> tuple[tuple[float, ...], float]:
    """Return the float32 coefficients c1..cn of one degree and their largest relative error."""
    coefficients, error = round_to_float32(remez(degree))
    return tuple(float(c) for c in coefficients), error


def main() -> None:
    """Print coefficients and error of the degree given on the command line (default 4)."""
    degree = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    coefficients, error = derive(degree)
    sys.stdout.write(f"degree {degree}: {coefficients}\nlargest relative error {error:.4e}\n")


if __name__ == "__main__":
    main()
