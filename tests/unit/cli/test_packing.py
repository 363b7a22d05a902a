"""Inputs of a call as packed sequences and as pages: the same numbers, the same answer."""

import pytest
import torch

pytest.importorskip("typer", reason="the extra cli is not installed")

import fovea
from fovea.cli.call import DEFAULT, Call, parse_words
from fovea.cli.main import main
from fovea.cli.packing import make_inputs

CPU = torch.device("cpu")


def call_of(words, **keywords):
    shape, dtype = parse_words(words.split(), DEFAULT)
    return Call(shape=shape, dtype=dtype, keywords=keywords)


@pytest.mark.parametrize("layout", [{"is_packed": True}, {"page_size": 4}, {"page_size": 16}])
def test_packed_inputs_give_what_the_dense_ones_do(layout):
    call = call_of("B3 H4 Hkv2 S5 Skv11 D8 Dv16 fp64", causal=True)
    dense = make_inputs(call, CPU)
    packed = make_inputs(call, CPU, **layout)
    expected = fovea.attention(*dense[:3], **dense.keywords)
    out = fovea.attention_varlen(*packed[:3], **packed.keywords)
    torch.testing.assert_close(out.unflatten(0, (3, 5)), expected)


def test_dense_inputs_keep_the_keywords_alone():
    call = call_of("B1 H1 S4 D8", causal=True)
    assert make_inputs(call, CPU).keywords == {"causal": True}


def test_page_size_below_one_is_refused():
    with pytest.raises(ValueError, match=r"--page-size=0 .*at least 1"):
        make_inputs(call_of("B1 H1 S4 D8"), CPU, page_size=0)


def test_explain_names_the_kernel_of_a_paged_decode(capsys):
    assert main("explain B2 H8 Hkv2 S1 Skv100 D64 --page-size 16 --arch sm90".split()) == 0
    text = capsys.readouterr().out
    assert "k(14, 16, 2, 64)" in text
    assert "packed_pages16" in text


def test_timeline_of_packed_sequences_is_refused_by_name(capsys):
    assert main("explain S256 D128 --packed --timeline".split()) == 1
    assert "no figure for packed sequences" in capsys.readouterr().err
