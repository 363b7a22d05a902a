"""Numbers that meet uint8, int8 and their like: promotion, wrapping and refusals are torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fovea.errors import TraceError
from fovea.mods.divisors import check_divisors
from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.trace import trace_mask_mod, trace_score_mod

BYTES = torch.arange(8).to(torch.uint8)
CHARS = torch.tensor([-128, -127, -3, -1, 0, 1, 3, 127]).to(torch.int8)


def evaluated(function: Any, operand: Tensor) -> tuple[torch.dtype, Tensor]:
    """Return the dtype and the values of function(operand[kv_idx]), traced."""
    seen: list[torch.dtype] = []

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        value = function(operand[k])
        seen.append(value.dtype)
        return value.double()

    traced = trace_score_mod(mod, torch.float64)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    positions = Positions(b=zero, h=zero, q_idx=zero, kv_idx=torch.arange(len(operand)))
    score = torch.zeros(1, 1, 1, len(operand), dtype=torch.float64)
    value = evaluate(
        traced.graph, positions, score=score, captures=traced.captures, scalars=traced.scalars
    )
    return seen[0], value.expand_as(score).flatten()


TAKEN: dict[str, Any] = {
    "add": lambda x: x + 300,
    "add_then_compare": lambda x: x + 300 > 100,
    "rsub": lambda x: 300 - x,
    "mul": lambda x: x * -129,
    "floordiv": lambda x: x // 300,
    "rfloordiv": lambda x: 300 // (x | 1),
    "mod": lambda x: x % 300,
    "and": lambda x: x & 300,
    "or": lambda x: x | -1,
    "xor": lambda x: x ^ 511,
    "least": lambda x: x - 128,
    "eq": lambda x: x == 300,
    "eq_wrapped": lambda x: x == 259,
    "eq_minus_one": lambda x: (x - 1) == -1,
    "lt": lambda x: x < 256,
    "gt": lambda x: x > -250,
    "beyond_32_bits": lambda x: x + 2**40,
    "base": lambda x: 300 ** x.abs(),
    "fmod": lambda x: torch.fmod(x, 3),
    "fmod_negative": lambda x: torch.fmod(x, -3),
    "fmod_wide": lambda x: torch.fmod(x, 200),
    "fmod_row": lambda x: torch.fmod(x, x | 1),
    "trunc": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "trunc_negative": lambda x: torch.div(x, -3, rounding_mode="trunc"),
    "trunc_wide": lambda x: torch.div(x, 200, rounding_mode="trunc"),
    "trunc_row": lambda x: torch.div(x, x | 2, rounding_mode="trunc"),
    "floor": lambda x: torch.div(x, -3, rounding_mode="floor"),
    "add_alpha_wider": lambda x: torch.add(x.int(), x, alpha=300),
    "wide_constant_cast": lambda x: torch.tensor(300).to(x.dtype) + x,
    "negative_constant_cast": lambda x: torch.tensor(-1).to(torch.uint8) + x,
    "where_of_minus_one": lambda x: torch.where(x.to(torch.uint8) > 3, x.to(torch.uint8), -1),
    "new_tensor": lambda x: x.new_tensor(3.7) + x,
    "int16": lambda x: x.to(torch.int16) + 40000,
    "int32": lambda x: x.int() + 2**33,
    "int32_compare": lambda x: x.int() < 2**33,
}


@pytest.mark.parametrize("operand", [BYTES, CHARS], ids=["uint8", "int8"])
@pytest.mark.parametrize("name", TAKEN)
def test_number_meeting_a_small_integer_gives_what_torch_gives(name: str, operand: Tensor) -> None:
    wanted = torch.stack([TAKEN[name](element) for element in operand])
    dtype, found = evaluated(TAKEN[name], operand)
    assert dtype == wanted.dtype
    assert torch.equal(found, wanted.double())


REFUSED: dict[str, Any] = {
    "where": lambda x: torch.where(x > 3, x, 300),
    "clamp": lambda x: x.clamp(-5, 300),
    "masked_fill": lambda x: x.masked_fill(x > 3, 300),
    "full_like": lambda x: torch.full_like(x, 300),
    "new_full": lambda x: x.new_full((), 300),
    "new_tensor": lambda x: x.new_tensor(300),
    "tensor": lambda x: x + torch.tensor(300, dtype=torch.uint8),
    "exponent": lambda x: x**300,
    "alpha": lambda x: torch.add(x, x, alpha=300),
    "alpha_of_integers": lambda x: torch.add(x, x, alpha=2.5),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=300),
}


@pytest.mark.parametrize("name", REFUSED)
def test_number_that_torch_refuses_raises_a_trace_error(name: str) -> None:
    with pytest.raises(RuntimeError):  # torch's own
        REFUSED[name](BYTES)
    with pytest.raises(TraceError, match=r"test_small_integers\.py"):
        evaluated(REFUSED[name], BYTES)


def test_number_beyond_64_bits_raises() -> None:
    with pytest.raises(TraceError, match="does not fit"):
        evaluated(lambda x: x + 2**70, BYTES)


@pytest.mark.parametrize("function", [lambda x: x // 256, lambda x: x % 256])
def test_division_by_a_number_that_wraps_to_zero_raises(function: Any) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        function(BYTES)
    with pytest.raises(TraceError, match="by 0"):
        evaluated(function, BYTES)


def test_captured_divisor_that_wraps_to_zero_raises_however_it_was_traced_before() -> None:
    def made(n: int) -> Any:
        return lambda b, h, q, k: BYTES[k] // n == q

    check_divisors("mask_mod", trace_mask_mod(made(255)))
    with pytest.raises(ValueError, match="not 0 as u8"):
        check_divisors("mask_mod", trace_mask_mod(made(256)))


WEAK: dict[str, Any] = {
    "lerp_half": lambda x: torch.lerp(x.half(), x.half() * 2, 0.3),
    "lerp_double": lambda x: torch.lerp(x.double(), x.double() * 3, 0.7),
    "xlogy": lambda x: torch.xlogy(x.half(), 3),
    "logit": lambda x: torch.logit(x.double() / 8, 1e-6),
    "copysign": lambda x: torch.copysign(x, -1),
}


@pytest.mark.parametrize("name", WEAK)
def test_number_in_a_composite_keeps_the_dtype_of_its_operand(name: str) -> None:
    wanted = torch.stack([WEAK[name](element) for element in BYTES])
    dtype, found = evaluated(WEAK[name], BYTES)
    assert dtype == wanted.dtype
    resolution = 1e-15 if wanted.dtype == torch.float64 else torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted.double(), rtol=resolution, atol=0.0)


def test_byte_index_is_refused_as_a_bool_index_is() -> None:
    table = torch.arange(8.0)
    with pytest.raises(TraceError, match=r"u8.*torch\.where"):
        evaluated(lambda x: table[x], BYTES)
    _, found = evaluated(lambda x: table[x.long()], BYTES)
    assert torch.equal(found, table.double())
