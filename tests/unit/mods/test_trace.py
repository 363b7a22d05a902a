"""Captures, run-time scalars, and reuse of traces."""

import gc
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fovea.mods import closures
from fovea.mods.evaluate import Positions, evaluate
from fovea.mods.trace import TracedMod, trace_mask_mod, trace_score_mod

GLOBAL_TABLE = torch.arange(4.0)
GLOBAL_WINDOW = 3
SETTINGS = {"window": 3}


@pytest.fixture(autouse=True)
def no_remembered_traces() -> None:
    closures.clear()


def value(traced: TracedMod, q: int = 5, kv: int = 3, score: float = 2.0) -> Any:
    zero = torch.tensor(0)
    return evaluate(
        traced.graph,
        Positions(b=zero, h=zero, q_idx=torch.tensor(q), kv_idx=torch.tensor(kv)),
        score=torch.tensor(score),
        captures=traced.captures,
        scalars=traced.scalars,
    ).item()


def window(w: int) -> Any:
    return lambda b, h, q, kv: q - kv < w


# -------------------------------------------------------------------------------- scalars


def test_trace_captured_int_is_runtime_scalar() -> None:
    narrow, wide = trace_mask_mod(window(2)), trace_mask_mod(window(3))
    assert narrow.graph is wide.graph
    assert (narrow.scalars, wide.scalars) == ((2,), (3,))
    assert narrow.graph.scalars == ("i64",)
    assert (value(narrow), value(wide)) == (False, True)


def test_trace_literal_global_and_attribute_are_constants() -> None:
    class Holder:
        window = 3

    for mod in (
        lambda b, h, q, kv: q - kv < 3,
        lambda b, h, q, kv: q - kv < GLOBAL_WINDOW,
        lambda b, h, q, kv: q - kv < SETTINGS["window"],
        lambda b, h, q, kv: q - kv < Holder.window,
    ):
        traced = trace_mask_mod(mod)
        assert traced.scalars == ()
        assert "const:i64{3}" in traced.graph.text()


def test_trace_scalars_through_functions_partials_defaults_and_keywords() -> None:
    def helper(w: int) -> Any:
        def inside(distance: Any, *, scale: int = 2) -> Any:
            return distance * scale < w

        return inside

    inner = helper(10)

    def mod(b: Any, h: Any, q: Any, kv: Any, offset: int = 1, *, other: float = 0.5) -> Any:
        return inner(q - kv + offset) & (kv > other)

    assert trace_mask_mod(mod).scalars == (1, 2, 10, 0.5)
    assert trace_mask_mod(partial(mod, offset=4)).scalars == (4, 2, 10, 0.5)
    first = trace_mask_mod(partial(lambda w, b, h, q, kv: q - kv < w, 7))
    assert first.scalars == (7,)
    assert first.graph == trace_mask_mod(window(7)).graph


def test_trace_scalar_arithmetic_happens_on_the_host() -> None:
    def make(w: int, c: float) -> Any:
        return lambda s, b, h, q, kv: s * (2 * w + 1) / c**2 + (w // 2 - -w % 4)

    traced = trace_score_mod(make(5, 0.5))
    assert traced.scalars == (11, 0.25, 5 // 2 - -5 % 4)
    assert trace_score_mod(make(6, 2.0)).scalars == (13, 4.0, 6 // 2 - -6 % 4)
    assert value(traced) == 2.0 * 11 / 0.25 + (5 // 2 - -5 % 4)


def test_trace_same_scalar_used_twice_has_one_slot() -> None:
    def make(w: int) -> Any:
        return lambda b, h, q, kv: (q - kv < w) & (kv - q < w)

    assert trace_mask_mod(make(3)).scalars == (3,)


def test_trace_equal_ints_of_two_cells_stay_apart() -> None:
    def make(left: int, right: int) -> Any:
        return lambda b, h, q, kv: (q - kv < left) & (kv - q < right)

    assert trace_mask_mod(make(3, 3)).scalars == (3, 3)
    assert trace_mask_mod(make(3, 4)).scalars == (3, 4)


def test_trace_branch_on_captured_int_specialises_on_the_outcome() -> None:
    def make(w: int) -> Any:
        def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
            if w > 4:
                return q - kv < w
            return q >= kv

        return mod

    wide, narrow, wider = trace_mask_mod(make(5)), trace_mask_mod(make(3)), trace_mask_mod(make(9))
    assert wide.specialised == ("((w > 4) != 0) is True",)
    assert narrow.specialised == ("((w > 4) != 0) is False",)
    assert wider.graph is wide.graph
    assert (wide.scalars, narrow.scalars, wider.scalars) == ((5,), (), (9,))


def test_trace_python_use_of_captured_int_specialises_on_its_value() -> None:
    def make(n: int, c: float) -> Any:
        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            for step in range(n):
                s = s + step
            return s * math.sqrt(c)

        return mod

    traced = trace_score_mod(make(3, 4.0))
    assert traced.specialised == ("n is 3", "c is 4.0")
    assert (value(traced), value(trace_score_mod(make(4, 9.0)))) == (10.0, 24.0)


def test_trace_captured_int_passes_isinstance_and_indexes_lists() -> None:
    tables = [torch.tensor([1.0]), torch.tensor([2.0])]

    def make(which: int) -> Any:
        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            assert isinstance(which, int)
            return s + tables[which][b]

        return mod

    assert (value(trace_score_mod(make(0))), value(trace_score_mod(make(1)))) == (3.0, 4.0)


def test_trace_shape_of_captured_tensor_is_runtime_scalar() -> None:
    def make(table: Tensor) -> Any:
        return lambda s, b, h, q, kv: s + table[q % table.shape[0]]

    first, second = (
        trace_score_mod(make(torch.arange(3.0))),
        trace_score_mod(make(torch.arange(4.0))),
    )
    assert first.graph is second.graph
    assert (first.scalars, second.scalars) == ((3,), (4,))


def test_trace_captured_scalar_indexes_a_captured_tensor_at_run_time() -> None:
    def make(layer: int) -> Any:
        return lambda s, b, h, q, kv: s + GLOBAL_TABLE[layer]

    assert trace_score_mod(make(1)).graph is trace_score_mod(make(2)).graph
    assert (value(trace_score_mod(make(1))), value(trace_score_mod(make(3)))) == (3.0, 5.0)


def test_trace_captured_object_keeps_its_attributes_when_it_is_callable() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.tensor([3.0]))

        def forward(self, w: int) -> Any:
            def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
                return s + self.table[b] * w

            return trace_score_mod(mod)

    traced = Model()(4)
    assert traced.scalars == (4,)
    assert value(traced) == 14.0


def test_trace_default_of_a_method_is_runtime_scalar() -> None:
    class Holder:
        def __call__(self, s: Any, b: Any, h: Any, q: Any, kv: Any, w: int = 3) -> Any:
            return s * w

        def method(self, s: Any, b: Any, h: Any, q: Any, kv: Any, w: int = 4) -> Any:
            return s * w

    assert trace_score_mod(Holder()).scalars == (3,)
    assert trace_score_mod(Holder().method).scalars == (4,)
    assert trace_score_mod(partial(Holder(), w=5)).scalars == (5,)


def test_trace_captured_bool_is_constant() -> None:
    def make(flag: bool) -> Any:
        return lambda b, h, q, kv: (q >= kv) if flag else (q < kv)

    assert (value(trace_mask_mod(make(True))), value(trace_mask_mod(make(False)))) == (True, False)


# ---------------------------------------------------------------------------------- reuse


def test_trace_is_reused_while_only_values_change() -> None:
    def make(table: Tensor, c: float) -> Any:
        return lambda s, b, h, q, kv: s * c + table[b]

    table = torch.tensor([1.0])
    first = trace_score_mod(make(table, 2.0))
    table.fill_(10.0)
    second = trace_score_mod(make(table, 3.0))
    assert second.graph is first.graph
    assert second.captures[0] is table
    assert value(second) == 16.0
    third = trace_score_mod(make(torch.tensor([5.0, 6.0]), 3.0))
    assert third.graph is first.graph
    assert value(third) == 11.0


def test_trace_reuse_sees_changed_cells_globals_attributes_and_containers() -> None:
    class Holder:
        def __init__(self) -> None:
            self.scale = 2.0

        def mod(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return s * self.scale

    holder, table = Holder(), {"scale": 2.0}
    numbers = [2.0]

    def by_dict(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * table["scale"]

    def by_list(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * numbers[0]

    def by_global(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * GLOBAL_WINDOW

    assert [value(trace_score_mod(m)) for m in (holder.mod, by_dict, by_list, by_global)] == [
        4,
        4,
        4,
        6,
    ]
    holder.scale, table["scale"], numbers[0] = 5.0, 5.0, 5.0
    globals()["GLOBAL_WINDOW"] = 4
    try:
        results = [value(trace_score_mod(m)) for m in (holder.mod, by_dict, by_list, by_global)]
    finally:
        globals()["GLOBAL_WINDOW"] = 3
    assert results == [10, 10, 10, 8]


def test_trace_reuse_sees_changed_attributes_of_a_captured_module() -> None:
    class Config:
        scale = 2.0

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.tensor([3.0]))
            self.config = Config()
            self.shift = 1

    model = Model()

    def run() -> Any:
        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return s * model.config.scale + model.table[b] + model.shift

        return trace_score_mod(mod)

    first = run()
    assert value(first) == 8.0
    assert run().graph is first.graph
    assert run().captures[0] is model.table
    model.table = torch.nn.Parameter(torch.tensor([5.0]))
    assert run().graph is first.graph
    assert value(run()) == 10.0
    model.shift = 2
    assert value(run()) == 11.0
    model.config.scale = 3.0
    assert value(run()) == 13.0
    model.table.requires_grad_(False)
    assert run().graph.captures[0].requires_grad is False


def test_trace_reuse_sees_changed_attributes_of_classes() -> None:
    class Local:
        scale = 2.0

    def captured(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * Local.scale

    def by_global(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * Settings.scale

    assert [value(trace_score_mod(mod)) for mod in (captured, by_global)] == [4.0, 4.0]
    Local.scale = Settings.scale = 3.0
    try:
        assert [value(trace_score_mod(mod)) for mod in (captured, by_global)] == [6.0, 6.0]
    finally:
        Settings.scale = 2.0


class Settings:
    scale = 2.0


def test_trace_that_reads_global_state_is_not_reused() -> None:
    def by_grad(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * 2 if torch.is_grad_enabled() else s

    def by_globals(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * globals()["GLOBAL_WINDOW"]

    assert [value(trace_score_mod(mod)) for mod in (by_grad, by_globals)] == [4.0, 6.0]
    globals()["GLOBAL_WINDOW"] = 4
    try:
        with torch.no_grad():
            assert [value(trace_score_mod(mod)) for mod in (by_grad, by_globals)] == [2.0, 8.0]
    finally:
        globals()["GLOBAL_WINDOW"] = 3


def test_trace_of_object_used_as_a_whole_is_not_reused() -> None:
    class Holder:
        window = 3

    holder = Holder()

    def read(thing: Any) -> int:
        return thing.window

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv < read(holder)) & (kv < holder.window)

    assert value(trace_mask_mod(mod), 5, 2) is False
    holder.window = 4
    assert value(trace_mask_mod(mod), 5, 2) is True


def test_trace_reuse_sees_rebound_nonlocal() -> None:
    w = 3

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv < w

    assert trace_mask_mod(mod).scalars == (3,)
    w = 1
    assert trace_mask_mod(mod).scalars == (1,)


def test_trace_reuse_sees_changed_dtype_rank_grad_and_aliasing() -> None:
    def make(x: Tensor, y: Tensor) -> Any:
        return lambda s, b, h, q, kv: s + x[b] * y[b]

    a, c = torch.tensor([2.0]), torch.tensor([3.0])
    assert value(trace_score_mod(make(a, a))) == 6.0
    assert len(trace_score_mod(make(a, a)).captures) == 1
    assert value(trace_score_mod(make(a, c))) == 8.0
    halves = trace_score_mod(make(a.half(), c))
    assert [spec.dtype for spec in halves.graph.captures] == ["f16", "f32"]
    grads = trace_score_mod(make(a, c.clone().requires_grad_()))
    assert [spec.requires_grad for spec in grads.graph.captures] == [False, True]


def test_trace_reuse_sees_changed_extent_of_a_reduced_row() -> None:
    def make(rows: Tensor) -> Any:
        return lambda b, h, q, kv: (rows[b] == kv).any()

    assert value(trace_mask_mod(make(torch.tensor([[1, 2]])))) is False
    assert value(trace_mask_mod(make(torch.tensor([[1, 2, 3]])))) is True


def test_trace_of_tensor_made_inside_is_not_reused() -> None:
    source = torch.tensor([1.0])

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + torch.exp(source)[b]

    first = value(trace_score_mod(mod))
    source.fill_(0.0)
    assert value(trace_score_mod(mod)) == 3.0 != first


def test_trace_of_item_is_not_reused() -> None:
    source = torch.tensor(1.0)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + source.item()

    assert value(trace_score_mod(mod)) == 3.0
    source.fill_(5.0)
    assert value(trace_score_mod(mod)) == 7.0


def test_trace_reuse_survives_code_objects_that_were_freed() -> None:
    for n in range(40):
        space: dict[str, Any] = {}
        exec(f"def mod(s, b, h, q, kv): return s * {n}", space)
        assert value(trace_score_mod(space["mod"])) == 2.0 * n
        del space
        gc.collect(0)


def test_trace_reuse_sees_default_dtype() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + q / 3

    assert "f64" not in trace_score_mod(mod).graph.text()
    torch.set_default_dtype(torch.float64)
    try:
        assert "div:f64" in trace_score_mod(mod).graph.text()
    finally:
        torch.set_default_dtype(torch.float32)


def test_trace_recursive_and_side_effecting_functions_are_traced_each_time() -> None:
    calls = []

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        calls.append(1)
        return s

    trace_score_mod(mod)
    trace_score_mod(mod)
    assert len(calls) == 2

    def power(s: Any, n: int) -> Any:
        return s if n == 0 else s * power(s, n - 1)

    assert value(trace_score_mod(lambda s, b, h, q, kv: power(s, 3))) == 16.0


def test_trace_warm_call_does_not_run_the_function() -> None:
    from fovea.mods import alibi

    mod = alibi(8)
    trace_score_mod(mod)
    plans = {id(plan) for plans in closures._plans.values() for plan in plans}
    assert trace_score_mod(mod).graph is trace_score_mod(alibi(16)).graph
    assert {id(plan) for plans in closures._plans.values() for plan in plans} == plans


def test_trace_source_names_file_line_and_function() -> None:
    traced = trace_mask_mod(window(2))
    assert re.fullmatch(r".*test_trace\.py:\d+ window\.<locals>\.<lambda>", traced.source)


def test_trace_list_that_holds_itself_is_followed_anew_on_each_call() -> None:
    ring: list[Any] = [2.0]
    ring.append(ring)
    ring.append(lambda x: x)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * ring[1][0]

    assert value(trace_score_mod(mod)) == 4.0
    ring[0] = 3.0
    assert value(trace_score_mod(mod)) == 6.0
