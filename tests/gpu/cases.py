"""Named attention calls that together use every feature of the forward kernels.

Lives here: inputs and options of each dense call, at a size for a GPU and at one for making its
plan or for the emulator. Not here: packed calls (`packed_cases.py`, in the list too), running and
judging them (`judge.py`). Invariant: both sizes of a case
have the same plan, so a bundle made from the small ones serves the large ones; the numbers depend
on nothing but the case.
"""

from dataclasses import replace
from typing import Any

from call import FP16, Case
from case_inputs import (
    expanded,
    heads_first,
    huge_keys,
    huge_values,
    poisoned,
    ramp,
    unaligned,
    zeros,
)
from case_options import (
    MakeOptions,
    alibi,
    any_capture,
    any_order,
    block_mask,
    bool_capture,
    checkerboard,
    dense_bias,
    document,
    empty_and_host,
    exact,
    far_ranges,
    fixed,
    gather_of_gather,
    joined,
    key_bias,
    late_keys,
    late_rows,
    many_row_values,
    masking_score,
    neighbours,
    partial_lists,
    random_blocks,
    ranges_by_head,
    relative_bias,
    row_reduction,
    scattered_by_head,
    sink,
    sink_large,
    small_integers,
    small_tanh,
    softcap_mod,
    t5_bias,
    tanh_mod,
    temperature,
    wild_integers,
    window_mod,
)
from packed_cases import PACKED_CASES, PackedCase

from fovea.testing.inputs import Shape

# Both of a kind in one class of lengths (`select.length_of`), where the plan changes.
LARGE = Shape(batch=2, seqlen_q=700, seqlen_kv=1000, heads_q=4, heads_kv=2, head_dim=128)
LARGE_64 = replace(LARGE, head_dim=64)
LARGE_256 = replace(LARGE, head_dim=256)
SMALL = Shape(batch=1, seqlen_q=129, seqlen_kv=300, heads_q=2, heads_kv=1, head_dim=128)
SMALL_64 = replace(SMALL, head_dim=64)
SMALL_256 = replace(SMALL, head_dim=256)
_LONG = {"shape": replace(LARGE, seqlen_kv=4100), "small": replace(SMALL, seqlen_kv=2100)}
_LONG_64 = {name: replace(shape, head_dim=64) for name, shape in _LONG.items()}
_MEDIUM = {"shape": replace(LARGE, seqlen_kv=2000), "small": replace(SMALL, seqlen_kv=1100)}
_MEDIUM_64 = {name: replace(shape, head_dim=64) for name, shape in _MEDIUM.items()}
_MEDIUM_256 = {name: replace(shape, head_dim=256) for name, shape in _MEDIUM.items()}


# --- the list -------------------------------------------------------------------------------------

CAUSAL = fixed(causal=True)
WINDOW = fixed(window=(200, 30))
CAUSAL_WINDOW = fixed(causal=True, window=(150, None))


def _case(name: str, options: MakeOptions | None = None, **fields: Any) -> Case:
    chosen = {"shape": LARGE, "small": SMALL, "options": options or fixed(), **fields}
    return Case(name=name, **chosen)


_SMALL_FEW = replace(SMALL, seqlen_q=1, seqlen_kv=2100, heads_q=16)


def _sized(shape: Shape, **changes: Any) -> Shape:
    return replace(shape, **changes)


def _both(**changes: Any) -> dict[str, Shape]:
    return {"shape": replace(LARGE, **changes), "small": replace(SMALL, **changes)}


def _few(
    seqlen_q: int, group: int, *, seqlen_kv: int | None = None, **changes: Any
) -> dict[str, Shape]:
    """Return sizes with few queries whose keys are cut into parts, on a GPU and the emulator."""
    large = {"batch": 2, "heads_q": 2 * group, "heads_kv": 2, "seqlen_kv": seqlen_kv or 1999}
    small = {"batch": 1, "heads_q": group, "heads_kv": 1, "seqlen_kv": seqlen_kv or 700}
    return {
        "shape": replace(LARGE, seqlen_q=seqlen_q, **large, **changes),
        "small": replace(SMALL, seqlen_q=seqlen_q, **small, **changes),
    }


_D64 = {"shape": LARGE_64, "small": SMALL_64}
_D256 = {"shape": LARGE_256, "small": SMALL_256}

# Head dims beyond 256: V in slices, all scores made for each.
_D64_V512, _D512 = {"head_dim": 64, "head_dim_v": 512}, {"head_dim": 512}
_WIDE: tuple[tuple[str, MakeOptions | None, dict[str, int], dict[str, Any]], ...] = (
    ("d64 dv512", None, _D64_V512, {}),
    ("d64 dv512 causal", CAUSAL, _D64_V512, {}),
    ("d64 dv512 fp16 sink", sink, {**_D64_V512, "heads_q": 4, "heads_kv": 4}, {"dtype": FP16}),
    ("d64 dv512 window max_score", WINDOW, _D64_V512, {"wants_max_score": True}),
    ("d64 dv512 alibi", alibi, _D64_V512, {}),
    ("d64 dv512 rising 300", CAUSAL, _D64_V512, {"transform": ramp(-300.0, 300.0)}),
    ("d64 dv512 huge values", None, _D64_V512, {"transform": huge_values}),
    ("d64 dv512 bits", exact(neighbours), _D64_V512, {}),
    ("d512", None, _D512, {}),
    ("d512 causal", CAUSAL, _D512, {}),
    ("d512 causal fp16", CAUSAL, _D512, {"dtype": FP16}),
    ("d512 softcap", fixed(softcap=5.0), _D512, {}),
    ("d512 late keys", late_keys, _D512, {}),
    ("d512 ranges document", exact(document), _D512, {}),
    ("d512 blocks alibi", joined(random_blocks(128, 128), alibi), _D512, {}),
    ("d512 rising 300", None, _D512, {"transform": ramp(-300.0, 300.0)}),
    ("d512 NaN around", CAUSAL, {"head_dim": 500, "head_dim_v": 484}, {"transform": poisoned}),
    ("d264 dv320 window", CAUSAL_WINDOW, {"head_dim": 264, "head_dim_v": 320}, {}),
    ("d384 dv128", CAUSAL, {"head_dim": 384, "head_dim_v": 128}, {}),
    ("d256 dv512", CAUSAL, {"head_dim": 256, "head_dim_v": 512}, {}),
    ("d576 dv512", CAUSAL, {"head_dim": 576, "head_dim_v": 512, "heads_kv": 1}, {}),
)

CASES: tuple[Case | PackedCase, ...] = (
    # one feature each
    _case("dense"),
    _case("dense fp16", dtype=FP16),
    _case("dense d64", **_D64),
    _case("dense d256", **_D256),
    _case("causal", CAUSAL),
    _case("causal d64", CAUSAL, **_D64),
    _case("causal d256 fp16", CAUSAL, dtype=FP16, **_D256),
    _case("causal top left", fixed(causal="top_left")),
    _case(
        "causal dead rows",
        CAUSAL,
        shape=_sized(LARGE, seqlen_q=1100, seqlen_kv=900),
        small=_sized(SMALL, seqlen_q=300, seqlen_kv=129),
    ),
    _case("window", WINDOW),
    _case("window one key", fixed(window=(0, 0))),
    _case("window left only", fixed(window=(77, None))),
    _case("window right only", fixed(window=(None, 5))),
    _case("causal window d64", CAUSAL_WINDOW, **_D64),
    _case("softcap", fixed(softcap=5.0)),
    _case("softcap d256", fixed(softcap=5.0), **_D256),
    _case("scale zero", fixed(scale=0.0)),
    _case("scale negative", fixed(scale=-0.2)),
    _case("sink", sink),
    _case("sink large", sink_large, **_both(heads_q=4, heads_kv=4)),
    _case("max_score", wants_max_score=True),
    _case("max_score causal fp16", CAUSAL, wants_max_score=True, dtype=FP16),
    # sizes
    _case("one query", **_both(seqlen_q=1)),
    _case("one key", **_both(seqlen_kv=1)),
    _case("seven by 127", **_both(seqlen_q=7, seqlen_kv=127)),
    _case("causal 129 by 7", CAUSAL, **_both(seqlen_q=129, seqlen_kv=7)),
    _case("whole tiles", **_both(seqlen_q=256, seqlen_kv=384)),
    _case("medium", **_MEDIUM),
    _case("medium d64", **_MEDIUM_64),
    _case("medium causal d256", CAUSAL, **_MEDIUM_256),
    _case("long", **_LONG),
    _case("long d64", **_LONG_64),
    _case("long whole tiles", **_both(seqlen_q=256, seqlen_kv=2112)),
    _case("long fp16", dtype=FP16, **_LONG),
    _case("long sink", sink, **_LONG),
    _case("long causal d64", CAUSAL, **_LONG_64),
    _case("long window d64", WINDOW, **_LONG_64),
    _case("long rising 300", transform=ramp(-300.0, 300.0), **_LONG),
    _case("long rising 300 causal d64", CAUSAL, transform=ramp(-300.0, 300.0), **_LONG_64),
    _case("gqa 5 heads", CAUSAL, **_both(heads_q=5, heads_kv=1)),
    _case("mha batch 3", CAUSAL, **_both(batch=3, heads_q=2, heads_kv=2)),
    _case("d96 dv72", CAUSAL, **_both(head_dim=96, head_dim_v=72)),
    _case("d40 dv128", **_both(head_dim=40, head_dim_v=128)),
    _case("d5 dv3", **_both(head_dim=5, head_dim_v=3)),
    _case("d100 dv1", CAUSAL, **_both(head_dim=100, head_dim_v=1)),
    _case("d192 dv128", CAUSAL, **_both(head_dim=192, head_dim_v=128)),
    _case("d192 dv128 full", **_both(head_dim=192, head_dim_v=128)),
    _case("d192 dv128 alibi", alibi, **_both(head_dim=192, head_dim_v=128)),
    _case("d192 full", **_both(head_dim=192)),
    _case("d192 window", CAUSAL_WINDOW, **_both(head_dim=192)),
    _case("d64 dv256", **_both(head_dim=64, head_dim_v=256)),
    _case("d128 dv256 causal", CAUSAL, **_both(head_dim=128, head_dim_v=256)),
    *(_case(name, options, **_both(**dims), **fields) for name, options, dims, fields in _WIDE),
    _case("d96 full", **_both(head_dim=96)),
    _case("d96 document", document, **_both(head_dim=96)),
    # layouts
    _case("NaN around", CAUSAL, transform=poisoned),
    _case("NaN around d20", transform=poisoned, **_both(head_dim=20, head_dim_v=36)),
    _case("NaN around window d64", WINDOW, transform=poisoned, **_D64),
    _case("heads first", CAUSAL, transform=heads_first),
    _case("expanded", transform=expanded, **_both(batch=3)),
    _case("unaligned", transform=unaligned),
    # numbers that force a redo, or nearly
    _case("rising 300", transform=ramp(-300.0, 300.0)),
    _case("falling 300", transform=ramp(300.0, -300.0)),
    _case("rising 300 causal", CAUSAL, transform=ramp(-300.0, 300.0)),
    _case("rising 300 gqa", CAUSAL, transform=ramp(-300.0, 300.0), **_both(heads_q=5, heads_kv=1)),
    _case("falling 300 causal d64", CAUSAL, transform=ramp(300.0, -300.0), **_D64),
    _case("rising 90", CAUSAL, transform=ramp(-45.0, 45.0)),
    _case("rising 300 fp16", transform=ramp(-300.0, 300.0), dtype=FP16),
    *(
        _case(f"{name} fp16", options, transform=ramp(-high, high), dtype=FP16, **sizes)
        for name, options, high, sizes in (
            ("falling 300", None, -300.0, {}),
            ("falling 40 causal d64", CAUSAL, -20.0, _D64),
            ("falling 40 causal d256", CAUSAL, -20.0, _D256),
            ("falling 90 alibi causal", joined(CAUSAL, alibi), -45.0, {}),
            ("falling 90 softcap", fixed(softcap=20.0), -45.0, _D64),
            ("falling 90 ranges late", exact(late_rows), -45.0, {}),
            ("falling 90 bits neighbours", exact(neighbours, 64), -45.0, {}),
            ("falling 90 blocks causal", joined(random_blocks(128, 128), CAUSAL), -45.0, {}),
        )
    ),
    _case("huge keys causal window fp16", CAUSAL_WINDOW, transform=huge_keys, dtype=FP16, **_D64),
    _case("huge keys", transform=huge_keys),
    _case("huge keys causal window", CAUSAL_WINDOW, transform=huge_keys, **_D64),
    _case("huge values", transform=huge_values),
    _case("huge values causal fp16", CAUSAL, transform=huge_values, dtype=FP16),
    _case("huge keys sink", sink_large, transform=huge_keys, **_both(heads_q=4, heads_kv=4)),
    _case("zero q", CAUSAL, transform=zeros),
    _case("rising 300 window", WINDOW, transform=ramp(-300.0, 300.0)),
    _case("rising 300 d256", transform=ramp(-300.0, 300.0), **_D256),
    _case(
        "rising 300 dead rows",
        CAUSAL,
        transform=ramp(-300.0, 300.0),
        shape=_sized(LARGE, seqlen_q=1100, seqlen_kv=900),
        small=_sized(SMALL, seqlen_q=300, seqlen_kv=129),
    ),
    _case(
        "window dead rows",
        WINDOW,
        shape=_sized(LARGE, seqlen_q=1100, seqlen_kv=900),
        small=_sized(SMALL, seqlen_q=400, seqlen_kv=129),
    ),
    # score mods
    _case("alibi", alibi),
    _case("causal alibi", joined(CAUSAL, alibi)),
    _case("causal alibi d64 fp16", joined(CAUSAL, alibi), dtype=FP16, **_D64),
    _case("relative bias", relative_bias),
    _case("t5 bias", t5_bias),
    _case("dense bias d64", dense_bias, **_D64),
    _case("key bias d64", key_bias, **_D64),
    _case("temperature", temperature),
    _case("tanh mod", tanh_mod),
    _case("softcap mod", softcap_mod),
    _case("softcap beyond its polynomial", fixed(softcap=0.5)),
    _case("softcap far above", fixed(softcap=1e9)),
    _case("softcap far above fp16", fixed(softcap=1e9), dtype=FP16, wants_max_score=True),
    _case("small tanh", small_tanh),
    _case(
        "softcap mod beyond d64 causal",
        joined(CAUSAL, softcap_mod),
        transform=ramp(-300.0, 300.0),
        **_D64,
    ),
    _case("masking score", masking_score),
    _case("gather of gather", gather_of_gather),
    _case("row reduction", row_reduction),
    _case("many row values", many_row_values),
    _case("wild integers", wild_integers),
    _case("small integers", small_integers),
    _case("empty and host captures", empty_and_host),
    _case("alibi rising", joined(CAUSAL, alibi), transform=ramp(-300.0, 300.0)),
    _case("masking score rising", masking_score, transform=ramp(-300.0, 300.0)),
    # mask mods
    _case("document mask", document),
    _case("bool padding", bool_capture, **_both(batch=2)),
    _case("any of a row", any_capture),
    _case("late keys", late_keys),
    _case("late keys d64 rising", late_keys, transform=ramp(-300.0, 300.0), **_D64),
    # block lists
    _case("blocks window", block_mask(window_mod)),
    _case("blocks late", block_mask(late_rows)),
    _case("blocks late rising", block_mask(late_rows), transform=ramp(-300.0, 300.0)),
    _case("blocks document d64", block_mask(document), **_D64),
    _case("blocks random", random_blocks(128, 128), **_both(batch=2, heads_q=4)),
    _case("blocks random rising", random_blocks(128, 128), transform=ramp(-300.0, 300.0)),
    _case("blocks any order", any_order, **_both(batch=2, heads_q=4)),
    _case("blocks partial alone", partial_lists),
    _case("blocks random d256", random_blocks(256, 64), **_D256),
    _case("blocks random wide fp16", random_blocks(384, 256), dtype=FP16),
    # block masks as ranges of keys, or as limits
    _case("exact window", exact(window_mod)),
    _case("ranges late rising", exact(late_rows), transform=ramp(-300.0, 300.0)),
    _case("ranges document d64", exact(document), **_D64),
    _case("ranges document d256", exact(document), **_D256),
    _case("ranges by head", exact(ranges_by_head), **_both(batch=2, heads_q=4)),
    _case("ranges far", exact(far_ranges)),
    _case("ranges far d64 fp16", exact(far_ranges), dtype=FP16, **_D64),
    _case("ranges alibi causal", joined(exact(document), alibi, CAUSAL)),
    _case("ranges document small blocks", exact(document, (64, 32))),
    _case("NaN around ranges", exact(late_rows), transform=poisoned),
    # block masks as bits
    _case("bits neighbours", exact(neighbours)),
    _case("bits neighbours small blocks d64", exact(neighbours, (32, 16)), **_D64),
    _case("bits neighbours rising", exact(neighbours, 64), transform=ramp(-300.0, 300.0)),
    _case("bits scattered d256", exact(scattered_by_head), **_D256),
    _case("bits scattered by head", exact(scattered_by_head), **_both(batch=2, heads_q=4)),
    _case("bits scattered fp16", exact(scattered_by_head), dtype=FP16),
    _case("bits alibi causal sink", joined(exact(neighbours), alibi, CAUSAL, sink)),
    _case("bits relative bias small blocks", joined(exact(neighbours, 32), relative_bias)),
    _case("NaN around bits", exact(scattered_by_head, 64), transform=poisoned),
    # together
    _case("window sink", joined(WINDOW, sink)),
    _case("causal softcap", joined(CAUSAL, fixed(softcap=20.0))),
    _case("softcap score mask", joined(fixed(softcap=20.0), alibi, checkerboard)),
    _case("blocks alibi", joined(block_mask(late_rows), alibi)),
    _case("blocks causal gqa", joined(random_blocks(128, 128), CAUSAL), **_both(heads_q=4)),
    _case("blocks mask window sink", joined(random_blocks(128, 128), late_keys, WINDOW, sink)),
    _case(
        "everything",
        joined(random_blocks(128, 128), late_keys, CAUSAL_WINDOW, sink, fixed(softcap=20.0), alibi),
        wants_max_score=True,
    ),
    _case(
        "dead rows sink softcap",
        joined(CAUSAL, sink, fixed(softcap=20.0)),
        shape=_sized(LARGE, seqlen_q=1100, seqlen_kv=900),
        small=_sized(SMALL, seqlen_q=300, seqlen_kv=129),
    ),
    _case("scale negative mask", joined(fixed(scale=-0.1), late_keys, CAUSAL)),
    _case("NaN around blocks alibi", joined(block_mask(late_rows), alibi), transform=poisoned),
    # few queries: heads of a group in a tile, keys in parts
    _case("few one causal", CAUSAL, **_few(1, 4)),
    _case("few one mha fp16", dtype=FP16, **_few(1, 1)),
    _case("few two of seven", **_few(2, 7)),
    _case("few five of eight causal", CAUSAL, **_few(5, 8)),
    _case("few 17 window sink", joined(WINDOW, sink), **_few(17, 4)),
    _case("few 64 causal", CAUSAL, **_few(64, 5)),
    _case("few d64 window", CAUSAL_WINDOW, **_few(3, 8, head_dim=64)),
    _case("few d256 causal", CAUSAL, **_few(2, 4, head_dim=256)),
    _case("few d512 causal", CAUSAL, **_few(2, 4, seqlen_kv=900, head_dim=512)),
    _case("few d64 dv512", **_few(1, 2, seqlen_kv=900, head_dim=64, head_dim_v=512)),
    _case("few d20 dv36 NaN around", transform=poisoned, **_few(3, 4, head_dim=20, head_dim_v=36)),
    _case("few dead rows", joined(CAUSAL, sink), **_few(40, 3, seqlen_kv=29)),
    _case("few max_score fp16", CAUSAL, wants_max_score=True, dtype=FP16, **_few(5, 4)),
    _case("few rising 300", transform=ramp(-300.0, 300.0), **_few(5, 4)),
    _case("few falling 300 causal", CAUSAL, transform=ramp(300.0, -300.0), **_few(5, 4)),
    _case("few huge values", transform=huge_values, **_few(3, 4)),
    _case("few scale negative", fixed(scale=-0.2), **_few(2, 4)),
    _case("few softcap alibi", joined(CAUSAL, fixed(softcap=20.0), alibi), **_few(3, 8)),
    _case("few relative bias", joined(CAUSAL, relative_bias), **_few(3, 4)),
    _case("few late keys", joined(late_keys, sink), wants_max_score=True, **_few(5, 4)),
    _case("few padding", bool_capture, **_few(1, 4)),
    _case("few many tiles", CAUSAL, **_few(1, 16, seqlen_kv=40000) | {"small": _SMALL_FEW}),
    # gradients
    _case("gradients causal", CAUSAL, checks_gradients=True),
    _case("gradients sink window", joined(WINDOW, sink), checks_gradients=True),
    _case("gradients relative bias", joined(CAUSAL, relative_bias), checks_gradients=True),
    _case("gradients blocks", random_blocks(128, 128), checks_gradients=True, dtype=FP16),
    *PACKED_CASES,
)


def case_named(name: str) -> Case | PackedCase:
    """Return the case of this name."""
    return next(case for case in CASES if case.name == name)
