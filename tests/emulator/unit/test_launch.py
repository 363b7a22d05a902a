"""Loading and launching: bad PTX and bad launches are errors at the right place."""

import re
from pathlib import Path

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator import LaunchError, Options
from fovea.emulator.ptx.module import TARGETS

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
COPY = (
    HEAD
    + """.visible .entry copy(.param .u64 a, .param .u64 b, .param .f32 s)
{
    .reg .b64 %a, %b, %o; .reg .b32 %t; .reg .f32 %f, %s;
    ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; ld.param.f32 %s, [s];
    mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; add.u64 %a, %a, %o; add.u64 %b, %b, %o;
    ld.global.f32 %f, [%a]; mul.f32 %f, %f, %s; st.global.f32 [%b], %f; ret;
}
"""
)


def _load_body(body: str) -> emulator.Module:
    return emulator.load_ptx(f"{HEAD}.visible .entry k()\n{{\n{body}\nret;\n}}\n")


def test_launch_scales_an_array() -> None:
    source = np.arange(64, dtype=np.float32)
    target = np.zeros(64, np.float32)
    result = emulator.load_ptx(COPY).launch("copy", 1, 64, args=[source, target, 1.5])
    np.testing.assert_array_equal(target, source * 1.5)
    assert result.counters["instructions.memory"] == 2 * 5
    assert result.kernel == "copy"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("int main() {}", 1, "unexpected 'int'"),
        (HEAD + ".visible .entry k() { add.u32 %a, 1, 2; ret; }", 4, "register %a is not declared"),
        (HEAD + ".visible .entry k() { .reg .b32 %a; ret;", 4, "not closed"),
        (HEAD + ".visible .entry k() {\n bra NOWHERE;\n}", 5, "no such label"),
        (HEAD + "\n.entry k() { .reg .b32 %a; .reg .b32 %a; }", 5, "declared twice"),
        (HEAD + ".entry k() { ` }", 4, "unexpected character"),
    ],
)
def test_malformed_ptx_is_reported_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(emulator.PtxError, match=message) as info:
        emulator.load_ptx(text).launch("k", 1, 32)
    assert info.value.line == line


def test_text_without_directives_is_not_ptx() -> None:
    with pytest.raises(emulator.PtxError, match="is it PTX"):
        emulator.load_ptx("")


def test_unknown_instruction_names_itself_and_its_line() -> None:
    with pytest.raises(emulator.UnsupportedForm, match=r"frobnicate\.u32") as info:
        _load_body(".reg .b32 %a;\nfrobnicate.u32 %a, %a;").launch("k", 1, 32)
    assert info.value.line == 7
    assert info.value.opcode == "frobnicate.u32"


def test_unknown_form_lists_the_known_ones() -> None:
    with pytest.raises(emulator.UnsupportedForm, match=r"popc\.type d, a"):
        _load_body(".reg .b32 %a;\npopc.b16 %a, 3;").launch("k", 1, 32)


def test_form_of_another_target_is_refused() -> None:
    body = ".reg .b64 %a;\nmov.b64 %a, 0;\nadd.rn.f32x2 %a, %a, %a;"
    with pytest.raises(emulator.UnsupportedForm, match="exists on sm_100"):
        _load_body(body).launch("k", 1, 32)


def test_wrong_register_width_is_refused() -> None:
    with pytest.raises(emulator.PtxError, match=r"register %a,.* is \.b32") as info:
        _load_body(".reg .b32 %a;\nadd.u64 %a, %a, 1;").launch("k", 1, 32)
    assert info.value.line == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "nope"}, "not in the module"),
        ({"args": [np.zeros(4, np.float32)]}, "3 parameters, args has 1"),
        ({"grid": 0}, "grid="),
        ({"block": 2048}, "block="),
        ({"cluster": 3}, "not a multiple of cluster"),
        ({"shared_bytes": 1 << 20}, "exceed the 232448 bytes"),
        ({"shared_bytes": -1}, "an int of 0 or more"),
        ({"args": ["x", 1, 1.0]}, "has type str"),
        ({"args": [b"123", 1, 1.0]}, "has 3 bytes, the parameter has 8"),
        ({"args": [1 << 70, 1, 1.0]}, "does not fit"),
        ({"args": [2.5, 1, 1.0]}, r"2\.5 is a float, the parameter is \.u64 a: pass int"),
        ({"args": [np.float64(2.5), 1, 1.0]}, "is a float"),
        ({"options": {}}, r"options=\{\} is not valid .*an emulator\.Options"),
    ],
)
def test_bad_launch_is_refused(change: dict, message: str) -> None:
    data = np.zeros(32, np.float32)
    call = {"kernel": "copy", "grid": 1, "block": 32, "args": [data, data, 1.0]} | change
    with pytest.raises(emulator.LaunchError, match=message):
        emulator.load_ptx(COPY).launch(**call)


@pytest.mark.parametrize(
    ("directive", "change", "remedy"),
    [
        ("", {"grid": 0}, "along x, y and z; choose"),
        ("", {"block": (32, 32, 2)}, "2048 threads .*; launch more CTAs"),
        ("", {"grid": 32, "cluster": (8, 4)}, "32 CTAs .*; choose a smaller"),
        ("", {"grid": 3, "cluster": 2}, "not a multiple of .*; round it up"),
        ("", {"shared_bytes": 1 << 20}, r"\(allowed: 0 to 232448\); take fewer"),
        ("", {"kernel": "nope"}, r"\(it has: 'copy'\); name one"),
        (".reqntid 64", {}, r"\.reqntid .*; pass block=\(64, 1, 1\)"),
        (".maxntid 16", {}, r"\.maxntid .*; pass at most 16 threads"),
        (".reqnctapercluster 4", {"grid": 2, "cluster": 2}, r"reqnctapercluster .*; leave"),
    ],
)
def test_geometry_that_is_refused_comes_with_a_way_out(
    directive: str, change: dict, remedy: str
) -> None:
    text = COPY.replace(", .param .f32 s)", f", .param .f32 s) {directive}")
    data = np.zeros(32, np.float32)
    call = {"kernel": "copy", "grid": 1, "block": 32, "args": [data, data, 1.0]} | change
    with pytest.raises(LaunchError, match=remedy):
        emulator.load_ptx(text).launch(**call)


def test_required_block_is_enforced() -> None:
    text = COPY.replace(", .param .f32 s)", ", .param .f32 s) .reqntid 64, 1, 1")
    data = np.zeros(64, np.float32)
    with pytest.raises(emulator.LaunchError, match="reqntid"):
        emulator.load_ptx(text).launch("copy", 1, 32, args=[data, data, 1.0])


@pytest.mark.parametrize(
    "bad", [{"async_delay": "soon"}, {"max_segments": 0}, {"num_sms": 0}, {"tensor_load_wait": ""}]
)
def test_bad_option_is_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Options(**bad)


@pytest.mark.parametrize(
    "bad",
    [{"seed": "x"}, {"seed": 1.5}, {"max_steps": "many"}, {"trace": "yes"}, {"detect_races": None}],
)
def test_option_of_the_wrong_type_is_refused(bad: dict) -> None:
    with pytest.raises(LaunchError, match=next(iter(bad))):
        Options(**bad)


def test_scalar_argument_has_the_parameters_type() -> None:
    text = (
        HEAD
        + """.visible .entry k(.param .u64 out, .param .u32 n, .param .f32 x, .param .b32 y)
{
    .reg .b64 %o; .reg .b32 %n, %y; .reg .f32 %x;
    ld.param.u64 %o, [out]; ld.param.u32 %n, [n]; ld.param.f32 %x, [x]; ld.param.b32 %y, [y];
    st.global.u32 [%o], %n; st.global.f32 [%o+4], %x; st.global.b32 [%o+8], %y; ret;
}
"""
    )
    module = emulator.load_ptx(text)
    ones = np.float32(1).view(np.uint32)
    for n, x, y, bits in (
        (7, 1, 1.0, ones),  # bits of no type take the value's own
        (np.int64(7), np.int32(1), np.float32(1), ones),
        (np.uint32(7), np.float64(1), 5, 5),
    ):
        out = np.zeros(3, np.uint32)
        module.launch("k", 1, 1, args=[out, n, x, y])
        assert out.tolist() == [7, ones, bits]
    for wrong in (300.5, 3.0, np.float32(3)):
        with pytest.raises(emulator.LaunchError, match=r"args\[1\]=.* is a float"):
            module.launch("k", 1, 1, args=[np.zeros(3, np.uint32), wrong, 1.0, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_cpu_tensor_is_an_argument(dtype: str) -> None:
    import torch

    tensor = torch.zeros(128, dtype=getattr(torch, dtype))
    source = np.frombuffer(np.ones(128, np.float32).tobytes()[: tensor.nbytes], np.float32).copy()
    count = len(source)
    emulator.load_ptx(COPY).launch("copy", 1, count, args=[source, tensor, 2.0])
    assert (tensor.view(torch.float32) == 2).all()


def test_tensor_that_cannot_be_reached_says_the_way_out() -> None:
    import torch

    data = np.zeros(32, np.float32)
    module = emulator.load_ptx(COPY)
    with pytest.raises(emulator.LaunchError, match=r"detach\(\)\.cpu\(\)"):
        module.launch("copy", 1, 32, args=[data, torch.zeros(32, requires_grad=True), 1.0])
    with pytest.raises(emulator.LaunchError, match=r"args\[1\]\.contiguous\(\)"):
        module.launch("copy", 1, 32, args=[data, torch.zeros(32, 2)[:, 0], 1.0])


def test_result_has_a_short_repr() -> None:
    data = np.zeros(1024, np.float32)
    result = emulator.load_ptx(COPY).launch("copy", 32, 32, args=[data, data.copy(), 1.0])
    assert len(repr(result)) < 120
    assert repr(result).startswith(f"Result(kernel='copy', steps={result.steps}, <")


def test_pointer_inside_bytes_leads_to_registered_memory() -> None:
    data = np.arange(32, dtype=np.float32)
    memory = emulator.GlobalMemory()
    address = memory.register(data, "data")
    pointer = address.to_bytes(8, "little")
    out = np.zeros(32, np.float32)
    module = emulator.load_ptx(COPY)
    module.launch("copy", 1, 32, args=[pointer, out, 3.0], memory=memory)
    np.testing.assert_array_equal(out, 3 * data)


def test_global_and_constant_variables_keep_their_initial_values() -> None:
    text = (
        HEAD
        + """.global .align 4 .u32 counter = 5;
.const .align 4 .f32 table[2] = {0f3F800000, 2.5};
.visible .entry k(.param .u64 out)
{
    .reg .b64 %o; .reg .b32 %c; .reg .f32 %f;
    ld.param.u64 %o, [out]; ld.global.u32 %c, [counter]; ld.const.f32 %f, [table+4];
    st.global.u32 [%o], %c; st.global.f32 [%o+4], %f; st.global.u32 [counter], 9; ret;
}
"""
    )
    module = emulator.load_ptx(text)
    out = np.zeros(2, np.uint32)
    module.launch("k", 1, 1, args=[out])
    assert out[0] == 5
    assert out[1:].view(np.float32)[0] == 2.5
    assert module.global_variable("counter").view(np.uint32)[0] == 9


def test_trace_is_perfetto_json(tmp_path) -> None:
    import json

    body = "bar.sync 0;"
    text = f"{HEAD}.visible .entry k()\n{{\n{body}\nret;\n}}\n"
    result = emulator.load_ptx(text).launch("k", 1, 128, options=Options(trace=True))
    result.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event["name"] == "wait barrier 0" for event in events)
    runs = [event["args"] for event in events if event["name"] == "run"]
    assert {"PTX line": 6, "instruction": "bar.sync 0"}.items() <= runs[0].items()


def test_trace_without_option_is_refused(tmp_path) -> None:
    result = _load_body("").launch("k", 1, 32)
    with pytest.raises(ValueError, match="trace=True"):
        result.write_trace(tmp_path / "trace.json")


def test_counters_sum_bytes_by_state_space() -> None:
    body = """.shared .align 16 .b8 s[1024]; .reg .b32 %a, %t, %v<4>;
    mov.u32 %t, %tid.x; shl.b32 %t, %t, 4; mov.u32 %a, s; add.u32 %a, %a, %t;
    st.shared.v4.b32 [%a], {%t, %t, %t, %t}; ld.shared.v4.b32 {%v0, %v1, %v2, %v3}, [%a];
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%v0, %v1, %v2, %v3}, [%a];"""
    result = _load_body(body).launch("k", 1, 32)
    assert result.counters["shared_store_bytes"] == 32 * 16
    assert result.counters["shared_load_bytes"] == 32 * 16 + 4 * 128
    assert result.counters_by_warp[(0, 0, 0), 0]["instructions.memory"] == 3


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_of_the_page_is_accepted(target: str) -> None:
    data = np.arange(8, dtype=np.float32)
    out = np.zeros(8, np.float32)
    module = emulator.load_ptx(COPY.replace("sm_90a", target))
    module.launch("copy", 1, 8, args=[data, out, 2.0])
    np.testing.assert_array_equal(out, 2 * data)
    page = (Path(__file__).parents[3] / "docs" / "emulator.md").read_text()
    section = page.partition("## Targets")[2].partition("## ")[0]
    assert set(re.findall(r"sm_\d+[af]?", section)) == set(TARGETS)


@pytest.mark.parametrize("target", ["sm_70", "sm_75", "sm_121", "sm_90b", "compute_90"])
def test_other_targets_are_refused(target: str) -> None:
    with pytest.raises(emulator.PtxError, match=rf"{target} is not known .*sm_120a"):
        emulator.load_ptx(COPY.replace("sm_90a", target))


@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("sm_120a", "tcgen05.wait::ld.sync.aligned;"),
        ("sm_120a", "wgmma.fence.sync.aligned;"),
        ("sm_110a", "wgmma.fence.sync.aligned;"),
        ("sm_100a", "wgmma.fence.sync.aligned;"),
        ("sm_90a", "tcgen05.wait::ld.sync.aligned;"),
        ("sm_100", "tcgen05.wait::ld.sync.aligned;"),
        (
            "sm_120",
            ".reg .b32 %a<6>; .reg .f32 %d<4>;\nmma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32"
            ".e4m3.e4m3.f32 {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, {%a4, %a5}, "
            "{%d0, %d1, %d2, %d3};",
        ),
    ],
)
def test_form_that_a_target_lacks_is_refused_there(target: str, body: str) -> None:
    text = f"{HEAD.replace('sm_90a', target)}.entry k()\n{{\n{body}\nret;\n}}\n"
    with pytest.raises(emulator.UnsupportedForm):
        emulator.load_ptx(text).launch("k", 1, 32)
