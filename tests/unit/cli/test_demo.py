"""What the demo shows is what it runs."""

import torch

from fovea.cli.call import Shape
from fovea.cli.demo_call import CALL_LINE, alibi_window_document, make_call, shown_source

SHAPE = Shape(batch=1, heads_q=2, heads_kv=2, seqlen_q=80, seqlen_kv=80, head_dim=16, head_dim_v=16)
WINDOW = 20


def test_shown_lines_are_five_and_the_call():
    lines = shown_source().splitlines()
    assert len(lines) == 6
    assert lines[-1] == CALL_LINE
    assert all(len(line) <= 76 for line in lines)


def test_shown_lines_run_and_give_the_mods_of_the_demo():
    call = make_call(SHAPE, WINDOW, torch.device("cpu"))
    import fovea

    names = {
        "fovea": fovea,
        "slope": call.slope,
        "doc": call.document,
        "window": WINDOW,
        "seqlen": SHAPE.seqlen_q,
        "device": torch.device("cpu"),
        "q": call.q,
        "k": call.k,
        "v": call.v,
    }
    exec(shown_source(), names)
    assert torch.equal(names["out"], call.run())


def test_mask_is_window_and_document_in_every_position():
    call = make_call(SHAPE, WINDOW, torch.device("cpu"))
    _, blocks = alibi_window_document(call.slope, call.document, WINDOW)
    index = torch.arange(SHAPE.seqlen_q)
    got = blocks.mask_mod(0, 0, index[:, None], index[None])
    document = call.document.tolist()
    for i in range(SHAPE.seqlen_q):
        for j in range(SHAPE.seqlen_q):
            assert got[i, j] == (0 <= i - j < WINDOW and document[i] == document[j])


def test_documents_have_uneven_lengths():
    call = make_call(SHAPE, WINDOW, torch.device("cpu"))
    assert torch.bincount(call.document).tolist() == [15, 25, 5, 35]
