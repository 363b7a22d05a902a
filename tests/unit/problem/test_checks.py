"""Wrong arguments: which error, and that it names argument, value, allowed values and a way out."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import fovea
from fovea.mods.trace import trace_score_mod
from fovea.problem import Request, VarlenRequest, make_dense, make_varlen
from fovea.problem.checks import check_captures


def tensors(seqlen_q=6, seqlen_kv=9, heads_q=4, heads_kv=2, head_dim=8, dtype=torch.float32):
    q = torch.randn(2, seqlen_q, heads_q, head_dim, dtype=dtype)
    k = torch.randn(2, seqlen_kv, heads_kv, head_dim, dtype=dtype)
    return q, k, torch.randn(2, seqlen_kv, heads_kv, head_dim, dtype=dtype)


def check_text(error: pytest.ExceptionInfo, *parts: str) -> None:
    text = str(error.value)
    for part in (*parts, "allowed: "):
        assert part in text
    # The way out comes last.
    assert text.rstrip(".").split(");")[-1].strip()


def plain_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


WRONG_SHAPES = {
    "rank of q": (lambda q, k, v: (q[0], k, v), "q.shape=(6, 4, 8)"),
    "rank of v": (lambda q, k, v: (q, k, v[0]), "v.shape=(9, 2, 8)"),
    "batch of k": (lambda q, k, v: (q, k[:1], v), "batch of k and v=(1, 2)"),
    "seqlen of v": (lambda q, k, v: (q, k, v[:, :5]), "seqlen of v=5"),
    "heads of v": (lambda q, k, v: (q, k, v[:, :, :1]), "heads of v=1"),
    "head ratio": (lambda q, k, v: (q[:, :, :3], k, v), "heads of q=3"),
    "fewer heads in q": (lambda q, k, v: (q[:, :, :1], k, v), "heads of q=1"),
    "no heads": (lambda q, k, v: (q[:, :, :0], k, v), "heads of q=0"),
    "no heads anywhere": (lambda q, k, v: (x[:, :, :0] for x in (q, k, v)), "heads of k and v=0"),
    "head_dim of k": (lambda q, k, v: (q, k[..., :4], v), "head_dim of k=4"),
    "head_dim 0": (lambda q, k, v: (q[..., :0], k[..., :0], v), "(0, 8)"),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_dense_shape_wrong_raises_value_error(name):
    change, part = WRONG_SHAPES[name]
    with pytest.raises(ValueError, match="is not valid") as error:
        fovea.attention(*change(*tensors()))
    check_text(error, part)


def test_head_dim_above_576_raises_value_error():
    with pytest.raises(ValueError, match="1 to 576") as error:
        fovea.attention(*tensors(head_dim=577))
    check_text(error, "(577, 577)")


def test_head_dim_256_with_any_head_dim_v_is_taken():
    q, k, _ = tensors(head_dim=256)
    assert fovea.attention(q, k, k[..., :1]).shape == (2, 6, 4, 1)


def test_dtype_integer_raises_type_error():
    q, k, v = tensors()
    with pytest.raises(TypeError) as error:
        fovea.attention(q.int(), k.int(), v.int())
    check_text(error, "q.dtype=torch.int32", "torch.bfloat16")


def test_dtype_float8_raises_unsupported_error():
    q, k, v = (t.to(torch.float8_e4m3fn) for t in tensors())
    with pytest.raises(fovea.UnsupportedError) as error:
        fovea.attention(q, k, v)
    check_text(error, "q.dtype=torch.float8_e4m3fn")


def test_dtypes_mixed_raise_type_error_that_offers_autocast():
    q, k, v = tensors()
    with pytest.raises(TypeError, match=r"torch\.autocast") as error:
        fovea.attention(q, k.bfloat16(), v)
    check_text(error, "k.dtype=torch.bfloat16", "torch.float32, the dtype of q")


def test_devices_mixed_raise_value_error():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="is not valid") as error:
        fovea.attention(q, k, v.to("meta"))
    check_text(error, "v.device=meta", "cpu, the device of q")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_input_that_is_no_tensor_raises_type_error(name):
    arguments = dict(zip("qkv", tensors(), strict=True)) | {name: [1.0]}
    with pytest.raises(TypeError) as error:
        fovea.attention(**arguments)
    check_text(error, f"{name}=list")


def test_sparse_layout_raises_type_error():
    q, k, v = tensors()
    with pytest.raises(TypeError) as error:
        fovea.attention(q, k.to_sparse(), v)
    check_text(error, "k.layout=torch.sparse_coo")


@pytest.mark.parametrize("causal", ["left", 2, "True"])
def test_causal_unknown_raises_value_error(causal):
    with pytest.raises(ValueError, match="is not valid") as error:
        fovea.attention(*tensors(), causal=causal)
    check_text(error, f"causal={causal!r}", "bottom_right", "top_left")


@pytest.mark.parametrize("window", [(-1, 0), (3, -2), (-1, -1)])
def test_window_negative_raises_value_error_that_offers_none(window):
    with pytest.raises(ValueError, match="pass None where FlashAttention takes -1") as error:
        fovea.attention(*tensors(), window=window)
    check_text(error, str(min(window)))


@pytest.mark.parametrize("window", [3, (1, 2, 3), "ab c", (1.5, 0), (True, 0)])
def test_window_of_wrong_type_raises_type_error(window):
    with pytest.raises(TypeError) as error:
        fovea.attention(*tensors(), window=window)
    check_text(error, "window")


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_number_not_finite_raises_value_error(name, value):
    with pytest.raises(ValueError, match="is not valid") as error:
        fovea.attention(*tensors(), **{name: value})
    check_text(error, f"{name}={value}", "finite")


@pytest.mark.parametrize("value", [0, 0.0, -2.0])
def test_softcap_not_positive_raises_value_error(value):
    with pytest.raises(ValueError, match="pass None for no softcap") as error:
        fovea.attention(*tensors(), softcap=value)
    check_text(error, "above 0")


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", ["1", True, [1.0]])
def test_number_of_wrong_type_raises_type_error(name, value):
    with pytest.raises(TypeError) as error:
        fovea.attention(*tensors(), **{name: value})
    check_text(error, f"{name}={value!r}")


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_number_tensor_that_requires_grad_raises_and_offers_a_score_mod(name):
    value = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(ValueError, match=f"put a learnable {name} into a score_mod"):
        fovea.attention(*tensors(), **{name: value})


@pytest.mark.parametrize("value", [torch.ones(1), torch.tensor(True), torch.tensor(1j)])
def test_number_tensor_of_wrong_kind_raises_value_error(value):
    with pytest.raises(ValueError, match="0-d tensor of a real dtype"):
        fovea.attention(*tensors(), scale=value)


@pytest.mark.parametrize("value", [0.3, torch.tensor(0.3, dtype=torch.float64)])
def test_scale_as_number_and_as_tensor_give_the_same(value):
    q, k, v = tensors()
    expected = fovea.attention(q * 0.3 * 8**0.5, k, v)
    torch.testing.assert_close(fovea.attention(q, k, v, scale=value), expected)


@pytest.mark.parametrize("scale", [0.0, -0.5, 2])
def test_scale_of_any_finite_value_is_taken(scale):
    q, k, v = tensors(heads_kv=4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=float(scale)
    ).transpose(1, 2)
    torch.testing.assert_close(fovea.attention(q, k, v, scale=scale), expected)


WRONG_SINKS = {
    "shape": (torch.zeros(3), ValueError, "sink.shape=(3,)"),
    "rank": (torch.zeros(4, 1), ValueError, "sink.shape=(4, 1)"),
    "dtype": (torch.zeros(4, dtype=torch.int64), TypeError, "sink.dtype=torch.int64"),
    "device": (torch.zeros(4, device="meta"), ValueError, "sink.device=meta"),
    "type": (1.0, TypeError, "sink=float"),
}


@pytest.mark.parametrize("name", WRONG_SINKS)
def test_sink_wrong_raises(name):
    sink, kind, part = WRONG_SINKS[name]
    with pytest.raises(kind) as error:
        fovea.attention(*tensors(), sink=sink)
    check_text(error, part)


def test_deterministic_of_wrong_type_raises_type_error():
    with pytest.raises(TypeError) as error:
        fovea.attention(*tensors(), deterministic=1)
    check_text(error, "deterministic=1")


def test_return_aux_of_torch_raises_type_error_that_names_flex_attention():
    from torch.nn.attention.flex_attention import AuxRequest

    with pytest.raises(TypeError, match=r"fovea\.flex_attention") as error:
        fovea.attention(*tensors(), return_aux=AuxRequest(lse=True))
    check_text(error, "return_aux=AuxRequest")


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_mod_that_is_no_function_raises_type_error(name):
    with pytest.raises(TypeError) as error:
        fovea.attention(*tensors(), **{name: torch.ones(3)})
    check_text(error, f"{name}=Tensor", "q_idx, kv_idx")


def test_mask_mod_as_score_mod_raises_type_error_about_arity():
    with pytest.raises(TypeError, match="5 positional arguments"):
        fovea.attention(*tensors(), score_mod=plain_mask)


def test_score_mod_as_mask_mod_raises_type_error_about_arity():
    with pytest.raises(TypeError, match="4 positional arguments"):
        fovea.attention(*tensors(), mask_mod=lambda score, b, h, q_idx, kv_idx: q_idx > kv_idx)


def test_mask_mod_that_returns_a_number_raises_type_error():
    with pytest.raises(TypeError, match="return value of mask_mod"):
        fovea.attention(*tensors(), mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx)


def test_score_mod_that_returns_a_tuple_raises_type_error():
    with pytest.raises(TypeError, match="return value of score_mod"):
        fovea.attention(*tensors(), score_mod=lambda score, b, h, q_idx, kv_idx: (score, b))


def test_capture_on_another_device_raises_value_error_with_the_users_line():
    q, table = tensors()[0], torch.zeros(4)
    mod = trace_score_mod(lambda s, b, h, q_idx, kv_idx: s + table[h])
    moved = replace(mod, captures=(table.to("meta"),))
    with pytest.raises(ValueError, match=r"test_checks\.py") as error:
        check_captures("score_mod", moved, q)
    check_text(error, "meta", "captured by score_mod")


@pytest.mark.parametrize(
    ("capture", "is_taken"),
    [(torch.tensor(0.5), True), (torch.tensor(0.5, requires_grad=True), False)],
)
def test_capture_of_one_number_may_be_on_the_host(capture, is_taken):
    """As in torch's own operations; q is not looked at beyond its device."""
    mod = trace_score_mod(lambda s, b, h, q_idx, kv_idx: s * capture)
    other = SimpleNamespace(device=torch.device("cuda", 0))
    if is_taken:
        assert check_captures("score_mod", mod, other) is mod
        return
    with pytest.raises(ValueError, match="one number without grad"):
        check_captures("score_mod", mod, other)


WRONG_BLOCK_MASKS = {
    "q length": ((2, 4, 7, 9), "(7, 9)"),
    "kv length": ((2, 4, 6, 10), "(6, 10)"),
    "batch": ((3, 4, 6, 9), "batch"),
    "heads": ((2, 2, 6, 9), "heads"),
}


@pytest.mark.parametrize("name", WRONG_BLOCK_MASKS)
def test_block_mask_of_wrong_extent_raises_value_error(name):
    sizes, part = WRONG_BLOCK_MASKS[name]
    block_mask = create_block_mask(plain_mask, *sizes, device="cpu")
    with pytest.raises(ValueError, match="block_mask") as error:
        fovea.attention(*tensors(), block_mask=block_mask)
    check_text(error, part)


def test_block_mask_of_wrong_type_raises_type_error():
    with pytest.raises(TypeError, match="BlockMask") as error:
        fovea.attention(*tensors(), block_mask=torch.ones(6, 9, dtype=torch.bool))
    check_text(error, "block_mask=Tensor")


def test_block_mask_on_another_device_raises_value_error():
    block_mask = create_block_mask(plain_mask, 1, 1, 6, 9, device="cpu").to("meta")
    with pytest.raises(ValueError, match=r"block_mask\.to\('cpu'\)"):
        fovea.attention(*tensors(), block_mask=block_mask)


def test_backend_unknown_raises_value_error():
    with pytest.raises(ValueError, match="is not valid") as error:
        fovea.attention(*tensors(), backend="cudnn")
    check_text(error, "backend='cudnn'", "reference", "emulator:sm90")


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_kv"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_extents_are_legal_and_give_zeros(batch, seqlen_q, seqlen_kv):
    q = torch.randn(batch, seqlen_q, 4, 8, requires_grad=True)
    k = torch.randn(batch, seqlen_kv, 2, 8, requires_grad=True)
    v = torch.randn(batch, seqlen_kv, 2, 8, requires_grad=True)
    out, aux = fovea.attention(q, k, v, return_aux=fovea.AuxRequest(lse=True))
    out.sum().backward()
    assert out.shape == q.shape
    assert aux.lse.shape == (batch, 4, seqlen_q)
    if seqlen_kv == 0:
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(aux.lse, torch.full_like(aux.lse, -torch.inf))
    for tensor in (q, k, v):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor)) or seqlen_kv > 0 < seqlen_q


def packed(total_q=7, total_kv=9):
    q = torch.randn(total_q, 4, 8)
    k = torch.randn(total_kv, 2, 8)
    starts_q = torch.tensor([0, 3, total_q], dtype=torch.int32)
    starts_kv = torch.tensor([0, 4, total_kv], dtype=torch.int32)
    return [q, k, k.clone(), starts_q, starts_kv, 4, 5]


WRONG_VARLEN = {
    "q is 4-D": (0, lambda x: x[None], ValueError, "q.shape"),
    "k is 4-D without pages": (1, lambda x: x[None], ValueError, "page_table"),
    "int64 bounds": (3, lambda x: x.long(), TypeError, "cu_seqlens_q.dtype=torch.int64"),
    "2-D bounds": (
        4,
        lambda x: x[None],
        ValueError,
        "cu_seqlens_kv.shape=(1, 3) is not valid (allowed: (batch + 1,))",
    ),
    "no bounds": (4, lambda x: None, ValueError, "cu_seqlens_kv=None"),
    "list of bounds": (3, lambda x: x.tolist(), TypeError, "cu_seqlens_q=[0, 3, 7]"),
    "other batch": (4, lambda x: x[:2], ValueError, "cu_seqlens_kv.shape[0]=2"),
    "no entry": (3, lambda x: x[:0], ValueError, "cu_seqlens_q.shape=(0,)"),
    "other device": (4, lambda x: x.to("meta"), ValueError, "cu_seqlens_kv.device=meta"),
    "tensor length": (5, lambda x: torch.tensor(4), TypeError, "max_seqlen_q=a tensor"),
    "negative length": (6, lambda x: -1, ValueError, "max_seqlen_kv=-1"),
    "rows of v": (2, lambda x: x[:3], ValueError, "total rows of v=3"),
}


@pytest.mark.parametrize("name", WRONG_VARLEN)
def test_varlen_argument_wrong_raises(name):
    place, change, kind, part = WRONG_VARLEN[name]
    arguments = packed()
    arguments[place] = change(arguments[place])
    with pytest.raises(kind) as error:
        fovea.attention_varlen(*arguments)
    check_text(error, part)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_kv"])
def test_seqused_of_wrong_length_raises_value_error(name):
    used = torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="is not valid") as error:
        fovea.attention_varlen(*packed(), **{name: used})
    check_text(error, f"{name}.shape[0]=3")


def paged(requires_grad=False):
    q = torch.randn(3, 4, 8, requires_grad=requires_grad)
    cache = torch.randn(5, 4, 2, 8)
    keywords = {
        "seqused_kv": torch.tensor([5, 3], dtype=torch.int32),
        "page_table": torch.tensor([[1, 3], [0, 0]], dtype=torch.int32),
    }
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    return [q, cache, cache.clone(), starts, None, 2, 8], keywords


WRONG_PAGED = {
    "without seqused_kv": (lambda a, k: k.pop("seqused_kv"), ValueError, "seqused_kv=None"),
    "with cu_seqlens_kv": (lambda a, k: a.__setitem__(4, a[3]), ValueError, "cu_seqlens_kv=given"),
    "table as a list": (
        lambda a, k: k.update(page_table=k["page_table"].tolist()),
        TypeError,
        "page_table=[[1, 3], [0, 0]] is not valid (allowed: a torch.int32 tensor (batch, max_pages",
    ),
    "1-D table": (
        lambda a, k: k.update(page_table=k["page_table"][0]),
        ValueError,
        "page_table.shape=(2,) is not valid (allowed: (batch, max_pages))",
    ),
    "int64 table": (
        lambda a, k: k.update(page_table=k["page_table"].long()),
        TypeError,
        "page_table.dtype=torch.int64",
    ),
    "table of other batch": (
        lambda a, k: k.update(page_table=k["page_table"][:1]),
        ValueError,
        "page_table.shape[0]=1",
    ),
    "3-D cache": (lambda a, k: a.__setitem__(1, a[1][0]), ValueError, "k.shape=(4, 2, 8)"),
    "caches differ": (
        lambda a, k: a.__setitem__(2, a[2][:3]),
        ValueError,
        "(pages, page_size) of k and v=((5, 4), (3, 4))",
    ),
    "pages of no rows": (
        lambda a, k: a.__setitem__(slice(1, 3), [a[1][:, :0]] * 2),
        ValueError,
        "(pages, page_size) of k and v=((5, 0), (5, 0))",
    ),
}


@pytest.mark.parametrize("name", WRONG_PAGED)
def test_paged_argument_wrong_raises(name):
    arguments, keywords = paged()
    change, kind, part = WRONG_PAGED[name]
    change(arguments, keywords)
    with pytest.raises(kind) as error:
        fovea.attention_varlen(*arguments, **keywords)
    check_text(error, part)


def test_paged_with_gradient_raises_unsupported_error_that_names_who_asks():
    arguments, keywords = paged(requires_grad=True)
    with pytest.raises(fovea.UnsupportedError, match="required by q"):
        fovea.attention_varlen(*arguments, **keywords)


def test_paged_with_a_learned_capture_raises_and_runs_with_it_detached():
    arguments, keywords = paged()
    slope = torch.ones(4, requires_grad=True)

    def bias(by):
        return lambda s, b, h, i, j: s + by[h] * (j - i)

    with pytest.raises(fovea.UnsupportedError, match=r"captured by score_mod.*tensor\.detach\(\)"):
        fovea.attention_varlen(*arguments, **keywords, score_mod=bias(slope))
    out = fovea.attention_varlen(*arguments, **keywords, score_mod=bias(slope.detach()))
    assert not out.requires_grad


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_paged_with_a_capture_that_the_mod_detaches_runs(compiled):
    arguments, keywords = paged()
    slope = torch.ones(4, requires_grad=True)

    def attend(by):
        return fovea.attention_varlen(
            *arguments, **keywords, score_mod=lambda s, b, h, i, j: s + by[h].detach() * (j - i)
        )

    expected = attend(slope.detach())
    call = torch.compile(attend, backend="eager", fullgraph=True) if compiled else attend
    for _ in range(2):  # the second time the eager call is a known one
        out = call(slope)
        assert torch.equal(out, expected)
        assert not out.requires_grad


def test_paged_with_gradient_under_no_grad_runs():
    arguments, keywords = paged(requires_grad=True)
    with torch.no_grad():
        assert fovea.attention_varlen(*arguments, **keywords).shape == (3, 4, 8)


def test_problem_keeps_what_was_given():
    q, k, v = tensors()
    problem = make_dense(q, k, v, Request(causal=True, window=[2, None], softcap=3))
    assert (problem.causal, problem.window, problem.softcap) == ("bottom_right", (2, None), 3.0)
    assert (problem.batch, problem.seqlen_q, problem.seqlen_kv) == (2, 6, 9)
    assert (problem.heads_q, problem.heads_kv, problem.group_size) == (4, 2, 2)
    assert problem.has_default_scale
    assert problem.scale == 8**-0.5
    assert problem.lse_shape == (2, 4, 6)


def test_varlen_problem_takes_extents_from_its_bounds():
    q, k, v, *where = packed()
    problem = make_varlen(q, k, v, VarlenRequest(*where), Request())
    assert (problem.batch, problem.seqlen_q, problem.seqlen_kv) == (2, 4, 5)
    assert problem.lse_shape == (4, 7)


def test_deterministic_follows_the_global_setting():
    q, k, v = tensors()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        warned = make_dense(q, k, v, Request())
        torch.use_deterministic_algorithms(True)
        strict = make_dense(q, k, v, Request())
        refused = make_dense(q, k, v, Request(deterministic=False))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (warned.deterministic, warned.deterministic_warns) == (True, True)
    assert (strict.deterministic, strict.deterministic_warns) == (True, False)
    assert not refused.deterministic
