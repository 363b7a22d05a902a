"""The list of shapes and the words that pick from it."""

import json
from pathlib import Path

import pytest

from benchmarks.shapes import DENSE_SHAPES, QUICK_SHAPES, WIDE_SHAPES, Shape, select


def test_dense_shapes_are_27_and_distinct():
    assert len(set(DENSE_SHAPES)) == len(DENSE_SHAPES) == 27
    assert set(QUICK_SHAPES) <= set(DENSE_SHAPES)


def test_dense_shapes_hold_16k_tokens_or_more_and_about_as_much_work_each():
    assert {s.B * s.S for s in DENSE_SHAPES} == {16384, 8192, 32768}
    assert {s.H * s.D for s in DENSE_SHAPES if s.Hkv == s.H} == {2048}


def test_result_rows_name_their_shape_as_shapes_do():
    shape = Shape(1, 32, 8, 8192, 128, True)
    assert json.loads(json.dumps(shape.row())) == {
        "B": 1, "H": 32, "Hkv": 8, "S": 8192, "D": 128, "causal": True,
    }  # fmt: skip
    assert str(shape) == "B1 H32 Hkv8 S8192 D128 causal"


def test_wide_shapes_name_and_count_both_head_dims():
    shape = WIDE_SHAPES[1]
    assert str(shape) == "B1 H8 S8192 D64 Dv512 causal"
    assert shape.row()["Dv"] == 512
    assert shape.forward_flops() == 8 * 8192**2 * (64 + 512)
    assert select(["Dv512", "D64", "full"], WIDE_SHAPES) == (WIDE_SHAPES[0],)


@pytest.mark.parametrize(
    ("words", "count"),
    [("D128 S16384", 2), ("causal", 15), ("full", 12), ("B1 H16 S16384 D128 causal", 1), ("", 27)],
)
def test_select_takes_shapes_that_match_every_word(words, count):
    assert len(select(words.split())) == count


@pytest.mark.parametrize("words", ["D", "X5", "D12x", "causally"])
def test_select_of_an_unknown_word_raises(words):
    with pytest.raises(ValueError, match="S16384 D128 causal"):
        select(words.split())


def test_select_without_a_match_raises():
    with pytest.raises(ValueError, match="no shape matches 'D100'"):
        select(["D100"])


def test_flops_of_a_causal_forward_are_half():
    full, causal = Shape(1, 2, 2, 64, 8, False), Shape(1, 2, 2, 64, 8, True)
    assert full.forward_flops() == 4 * 2 * 8 * 64 * 64 == 2 * causal.forward_flops()


def test_every_result_file_has_a_stamp_and_rows_with_a_shape():
    for path in (Path(__file__).parents[3] / "benchmarks" / "results").glob("*/*.json"):
        result = json.loads(path.read_text())
        assert {"gpu", "power_limit_watts", "driver", "torch", "cuda", "commit", "date",
                "command"} <= set(result["stamp"]), path  # fmt: skip
        assert result["unit"], path
        assert result["rows"], path
