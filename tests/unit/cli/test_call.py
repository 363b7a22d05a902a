"""Calls as the command line writes them."""

import re
from pathlib import Path

import pytest
import torch

from fovea import mods

pytest.importorskip("typer", reason="the extra cli is not installed")

from fovea.cli.call import Call, Shape, parse_mod, parse_window, parse_words
from fovea.cli.options import read_arch, read_call

DEFAULT = Shape(
    batch=1, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_kv=1024, head_dim=64, head_dim_v=64
)


def test_words_name_every_size_and_the_dtype():
    words = ["B2", "H12", "Hkv3", "S100", "Skv70", "D40", "Dv24", "fp32"]
    shape, dtype = parse_words(words, DEFAULT)
    call = Call(shape=shape, dtype=dtype, keywords={})
    q, k, v = call.make_inputs(torch.device("cpu"))
    assert {x.dtype for x in (q, k, v)} == {torch.float32}
    assert str(call) == " ".join(words)
    assert (q.shape, k.shape, v.shape) == ((2, 100, 12, 40), (2, 70, 3, 40), (2, 70, 3, 24))


def test_key_side_follows_the_query_side_unless_named():
    shape, _ = parse_words(["H16", "S512", "D128"], DEFAULT)
    assert (shape.heads_kv, shape.seqlen_kv, shape.head_dim_v) == (16, 512, 128)


def test_words_left_out_come_from_the_default_and_bf16():
    assert parse_words([], DEFAULT) == (DEFAULT, torch.bfloat16)


def test_inputs_with_the_same_seed_are_the_same():
    call = Call(shape=DEFAULT, dtype=torch.bfloat16, keywords={})
    first, again, other = (
        call.make_inputs(torch.device("cpu"), seed=seed)[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("words", [["B"], ["X3"], ["S-4"], ["S4", "S5"], ["16"], ["int8"]])
def test_word_that_is_wrong_raises_with_the_forms(words):
    with pytest.raises(ValueError, match=r"CALL=.*Hkv S Skv.* fp16"):
        parse_words(words, DEFAULT)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("h8", r"write H8 \(case matters\)"),
        ("s1024", "write S1024 "),
        ("SKV7", "write Skv7 "),
        ("hkv2", "write Hkv2 "),
        ("top_left", "--causal-top-left"),
        ("window1024", "give --window 1023,0"),
        ("alibi", "a mod is an option"),
        ("pages", "--page-size N"),
        ("bfloat16", "write bf16"),
        ("FP32", "write fp32"),
        ("S0x", "letters of a size and its number"),
        ("X5", "letters of a size and its number"),
        ("D99999999999999999999", "up to 2147483647"),
    ],
)
def test_word_that_is_nearly_right_raises_and_says_what_to_write(word, hint):
    with pytest.raises(ValueError, match=hint):
        parse_words([word], DEFAULT)


def test_word_given_twice_raises_and_says_so():
    with pytest.raises(ValueError, match="write S once"):
        parse_words(["S4", "S5"], DEFAULT)


def test_inputs_beyond_the_memory_of_the_machine_raise_before_they_are_made():
    shape, dtype = parse_words(["S2147483647", "H1024"], DEFAULT)
    with pytest.raises(ValueError, match=r"S2147483647 .* GiB, is not valid .*smaller sizes"):
        Call(shape=shape, dtype=dtype, keywords={}).make_inputs(torch.device("cpu"))


def test_block_mask_takes_the_place_of_the_mask_mod():
    call = Call(shape=DEFAULT, dtype=torch.float32, keywords={"mask_mod": mods.causal, "causal": 1})
    blocked = call.with_block_mask(torch.device("cpu"))
    assert set(blocked.keywords) == {"causal", "block_mask"}
    assert blocked.keywords["block_mask"].shape == (1, 1, 1024, 1024)
    assert blocked.keywords["block_mask"].mask_mod is mods.causal
    assert blocked.with_block_mask(torch.device("cpu")) is blocked


@pytest.mark.parametrize("text", ["sm90", "sm_90", "sm_90a", "sm90a", "SM_90A"])
def test_arch_is_read_as_a_compile_target_too(text):
    assert read_arch(text).name == "sm90"


@pytest.mark.parametrize("text", ["sm_100a", "sm100f"])
def test_arch_of_blackwell_is_read_as_a_compile_target_too(text):
    assert read_arch(text).name == "sm100"


def test_unknown_arch_raises_with_those_known():
    with pytest.raises(ValueError, match=r"sm90 \| sm100 \| sm103"):
        read_arch("sm_80a")


@pytest.mark.parametrize("text", ["document(torch.arange(4))", "document([0, 1])"])
def test_mod_that_needs_a_tensor_raises_and_points_to_a_file(text):
    with pytest.raises(ValueError, match=r"--mask-mod=.*FILE\.py:NAME"):
        parse_mod("--mask-mod", text)


def test_two_dtypes_raise():
    with pytest.raises(ValueError, match=r"CALL='bf16 fp16'"):
        parse_words(["bf16", "fp16"], DEFAULT)


@pytest.mark.parametrize(
    ("text", "window"), [(None, None), ("5,0", (5, 0)), ("-,3", (None, 3)), ("-,-", (None, None))]
)
def test_window_text_names_both_sides(text, window):
    assert parse_window(text) == window


@pytest.mark.parametrize("text", ["5", "5,", "-1,0", "a,b", "1,2,3"])
def test_window_text_that_is_wrong_raises(text):
    with pytest.raises(ValueError, match=r"--window=.*LEFT,RIGHT"):
        parse_window(text)


def test_mod_of_the_library_is_called_with_its_arguments():
    mask = parse_mod("--mask-mod", "sliding_window(3)")
    expected = mods.sliding_window(3)
    index = torch.arange(12)
    got = mask(0, 0, index[:, None], index[None])
    assert torch.equal(got, expected(0, 0, index[:, None], index[None]))
    assert 0 < got.sum() < got.numel()


def test_mod_of_a_file_is_taken_as_it_is(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def twice(score, b, h, q_idx, kv_idx):\n    return 2 * score\n")
    assert parse_mod("--score-mod", f"{file}:twice")(4.0, 0, 0, 0, 0) == 8.0


@pytest.mark.parametrize(
    "text", ["no_such_mod", "sliding_window(x)", "1 + 1", "a.b(3)", "missing.py:f", "alibi("]
)
def test_mod_that_is_wrong_raises_and_names_the_option(text):
    with pytest.raises(ValueError, match="--mask-mod="):
        parse_mod("--mask-mod", text)


def test_mod_of_a_file_is_called_with_its_arguments(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def add(n):\n"
        "    def mod(score, b, h, q_idx, kv_idx):\n        return score + n\n"
        "    return mod\n"
    )
    assert parse_mod("--score-mod", f"{file}:add(3)")(4.0, 0, 0, 0, 0) == 7.0


def test_maker_without_its_arguments_raises_and_names_them():
    with pytest.raises(ValueError, match=r"--score-mod='alibi' .*'alibi\(...\)'.*heads"):
        parse_mod("--score-mod", "alibi")


def test_misspelt_mod_raises_with_the_name_meant():
    with pytest.raises(ValueError, match="write alibi") as raised:
        parse_mod("--score-mod", "alibbi(8)")
    assert len(str(raised.value)) < 200


def test_unknown_mod_of_a_file_raises_with_the_functions_there(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import math\nLIMIT = 3\ndef twice(score, b, h, i, j):\n    return 2 * score\n")
    with pytest.raises(ValueError, match=r"allowed: twice\)"):
        parse_mod("--score-mod", f"{file}:zzz")


@pytest.mark.parametrize(
    ("text", "call", "line"),
    [
        ("x = 1\ndef f(score)\n", "f", "line 2 .*SyntaxError"),
        ("\n\nimport no_such_module\n", "f", "line 3 .*ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "f", "line 1 .*SystemExit"),
        ("def f():\n    return 1 / 0\n", "f()", "line 2 .*ZeroDivisionError"),
        ("def f(a):\n    return a\n", "f()", "TypeError"),
    ],
)
@pytest.mark.parametrize("is_relative", [False, True])
def test_file_that_fails_is_one_error_with_its_line(
    text, call, line, is_relative, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = Path("bad.py") if is_relative else tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"--score-mod=.*allowed: .*{line}"):
        parse_mod("--score-mod", f"{file}:{call}")


@pytest.mark.parametrize(
    ("option", "text", "other"),
    [
        ("--score-mod", "causal", "--mask-mod"),
        ("--score-mod", "sliding_window(3)", "--mask-mod"),
        ("--mask-mod", "alibi(4)", "--score-mod"),
        ("--score-mod", "FILE:visible", "--mask-mod"),
        ("--mask-mod", "FILE:twice", "--score-mod"),
    ],
)
def test_mod_of_the_other_kind_names_the_other_option(option, text, other, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def visible(b, h, i, j):\n    return i >= j\ndef twice(s, b, h, i, j):\n    return 2 * s\n"
    )
    with pytest.raises(ValueError, match=f"give it as {other}"):
        parse_mod(option, text.replace("FILE", str(file)))


@pytest.mark.parametrize(
    ("row", "shape", "causal"),
    [
        ("B4 H32/8 S4096 D128 causal", "B4 H32 Hkv8 S4096 D128", True),
        ("B2 H16/16 S8192 D64 full", "B2 H16 S8192 D64", None),
        ("B1 H32/8 Sq1 S32768 D128", "B1 H32 Hkv8 S1 Skv32768 D128", None),
        ("Sq3 D64", "B1 H16 S3 D64", None),
    ],
)
def test_shape_of_a_row_of_the_benchmark_tables_is_read(row, shape, causal):
    call = read_call(row.split(), None, None, None, (None, None))
    assert str(call.shape) == shape
    assert call.keywords.get("causal") == causal


def test_shapes_in_the_benchmark_tables_of_the_documentation_are_read():
    page = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    rows = re.findall(r"^\| (B\d+ [^|,]*?(?:D\d+|causal|full)) \|", page, re.MULTILINE)
    assert len(rows) >= 40
    for row in rows:
        read_call(row.split(), None, None, None, (None, None))


@pytest.mark.parametrize(
    ("words", "causal"), [("causal full", None), ("causal", True), ("full", False)]
)
def test_mask_named_twice_raises(words, causal):
    with pytest.raises(ValueError, match=f"CALL='{words}'.*leave the others out"):
        read_call(words.split(), causal, None, None, (None, None))


def test_mod_that_has_no_near_name_raises_with_all_of_them():
    with pytest.raises(ValueError, match=r"--score-mod='nosuch'.*alibi.*t5_bias"):
        parse_mod("--score-mod", "nosuch(3)")
