"""Derive the coefficients of fovea's polynomials and print them with their error.

A function g with g(0) = 1 is approximated on [0, 1] by `1 + c1 f + c2 f^2 + ... + cn f^n`:

* exp2: g(f) = 2^f. The constant term gives `exp2(0) == 1` exactly (the largest P of a row).
* tanh: g(f) = tanh(x) / x where f = 2 x^2. The constant term gives `tanh(x) == x` where x is tiny.
* cap: the same where f = (x / 0.75)^2, for what a soft cap makes of scores well below it.
* sine: g(f) = sin(x) / x where f = x^2, the same way; cosine: g(f) = cos(x).

The coefficients minimise the largest relative error: a Remez exchange in float64, then the rounding
to float32 is refined by a search over neighbours. `src/fovea/plan/numerics.py` holds the result; a
test runs this file again and compares.

    python scripts/derive_polynomials.py
"""

import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

GRID_POINTS = 20001

Function = Callable[[Tensor], Tensor]


def tanh_over_x(square: Tensor) -> Tensor:
    """Return tanh(x) / x of x^2, 1 at 0."""
    x = square.sqrt()
    return torch.where(square > 0, torch.tanh(x) / x, 1.0)


def tanh_over_x_up_to_half(part: Tensor) -> Tensor:
    """Return tanh(x) / x of 2 x^2, 1 at 0."""
    return tanh_over_x(part * 0.5)


def tanh_over_x_below_a_cap(part: Tensor) -> Tensor:
    """Return tanh(x) / x of (x / 0.75)^2, 1 at 0."""
    return tanh_over_x(part * 0.75**2)


def sine_over_x(square: Tensor) -> Tensor:
    """Return sin(x) / x of x^2, 1 at 0."""
    x = square.sqrt()
    return torch.where(square > 0, torch.sin(x) / x, 1.0)


def cosine(square: Tensor) -> Tensor:
    """Return cos(x) of x^2."""
    return torch.cos(square.sqrt())


def relative_error(g: Function, coefficients: Tensor, f: Tensor) -> Tensor:
    """Return `p(f) / g(f) - 1` in float64.

    Shapes:
        coefficients: (degree,), c1 first; f: any shape.
    """
    p = torch.zeros_like(f)
    for c in coefficients.flip(0):
        p = (p + c) * f
    return (p + 1) / g(f) - 1


def solve_levelled(g: Function, points: Tensor) -> tuple[Tensor, float]:
    """Return coefficients whose relative error alternates with equal size over `points`.

    Shapes:
        points: (degree + 1,), ascending, in (0, 1].
    """
    degree = points.numel() - 1
    powers = torch.stack([points**k for k in range(1, degree + 1)], dim=1)
    signs = torch.tensor([(-1.0) ** i for i in range(degree + 1)], dtype=torch.float64)
    target = g(points)
    matrix = torch.cat([powers, (-signs * target).unsqueeze(1)], dim=1)
    solution = torch.linalg.solve(matrix, target - 1)
    return solution[:-1], float(solution[-1].abs())


def extrema(g: Function, coefficients: Tensor, count: int) -> Tensor:
    """Return the `count` places of largest error, one for each run of equal sign, ascending.

    The error is 0 at f = 0 by construction, so the first run starts just behind it.
    """
    f = torch.linspace(0, 1, GRID_POINTS, dtype=torch.float64)[1:]
    error = relative_error(g, coefficients, f)
    changes = (torch.nonzero(error[1:].sign() != error[:-1].sign()).flatten() + 1).tolist()
    places: list[float] = []
    for begin, end in itertools.pairwise([0, *changes, f.numel()]):
        places.append(float(f[begin + int(error[begin:end].abs().argmax())]))
    if len(places) < count:
        raise RuntimeError(f"{len(places)} alternations, {count} needed; start from other points")
    return torch.tensor(places[-count:], dtype=torch.float64)


def remez(g: Function, degree: int) -> Tensor:
    """Return the minimax coefficients c1..cn in float64."""
    count = degree + 1
    # Chebyshev points of (0, 1]: near the optimum already.
    angles = torch.arange(count, 0, -1, dtype=torch.float64) - 0.5
    points = (torch.cos(angles * torch.pi / (count + 0.5)) + 1) / 2
    points = points.sort().values
    grid = torch.linspace(0, 1, GRID_POINTS, dtype=torch.float64)
    worst = level = float("inf")
    for _ in range(50):
        coefficients, level = solve_levelled(g, points)
        worst = float(relative_error(g, coefficients, grid).abs().max())
        if worst - level <= 1e-6 * level:
            return coefficients
        points = extrema(g, coefficients, count)
    raise RuntimeError(f"no convergence: error {worst:.3e}, level {level:.3e}")


def round_to_float32(g: Function, coefficients: Tensor) -> tuple[Tensor, float]:
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
        error = float(relative_error(g, candidate.double(), f).abs().max())
        if error < best_error:
            best, best_error = candidate, error
    return best, best_error


def derive(g: Function, degree: int) -> tuple[tuple[float, ...], float]:
    """Return the float32 coefficients c1..cn of one degree and their largest relative error."""
    coefficients, error = round_to_float32(g, remez(g, degree))
    return tuple(float(c) for c in coefficients), error


POLYNOMIALS: dict[str, tuple[Function, int]] = {
    "exp2": (torch.exp2, 4),
    "tanh": (tanh_over_x_up_to_half, 5),
    "cap": (tanh_over_x_below_a_cap, 4),
    "sine": (sine_over_x, 3),
    "cosine": (cosine, 4),
}


def main() -> None:
    """Print coefficients and error of each polynomial."""
    for name, (g, degree) in POLYNOMIALS.items():
        coefficients, error = derive(g, degree)
        sys.stdout.write(f"{name} {coefficients}\nlargest relative error {error:.4e}\n")


if __name__ == "__main__":
    main()
