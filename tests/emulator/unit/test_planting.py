"""Planted faults: what is found in a text, and that nothing else changes."""

import pytest

from fovea.emulator.planting import plant_faults


@pytest.mark.parametrize(
    ("statement", "variants"),
    [
        ("fence.proxy.async.shared::cta;", {"fence": ""}),
        ("@%p wgmma.wait_group.sync.aligned 0;", {"wait": ""}),
        ("cp.async.bulk.commit_group;", {"commit": ""}),
        ("mbarrier.arrive.shared.b64 _, [%r1];", {"arrive": ""}),
        (
            "@p mbarrier.arrive.expect_tx.shared.b64 _, [%r1+8], 64;",
            {"expect_tx": "@p mbarrier.arrive.shared.b64 _, [%r1+8];"},
        ),
        (
            "mbarrier.try_wait.parity.shared::cta.b64 P1, [%r1], %r2, 100;",
            {
                "wait": "setp.eq.u32 P1, 0, 0;",
                "result": "{ .reg .pred planted; mbarrier.try_wait.parity.shared::cta.b64 planted, "
                "[%r1], %r2, 100; setp.eq.u32 P1, 0, 0; }",
                "phase": "{ .reg .b32 planted; xor.b32 planted, %r2, 1; "
                "mbarrier.try_wait.parity.shared::cta.b64 P1, [%r1], planted, 100; }",
            },
        ),
        (
            "@%q mbarrier.init.shared.b64 [%r1], 128;",
            {
                "count": "{ .reg .b32 planted; add.u32 planted, 128, 1; "
                "@%q mbarrier.init.shared.b64 [%r1], planted; }"
            },
        ),
        ("bar.sync 0;", {"barrier": ""}),
        (
            "bar.sync \t%r1, 128;",
            {
                "barrier": "",
                "count": "{ .reg .b32 planted; add.u32 planted, 128, 32; bar.sync %r1, planted; }",
            },
        ),
        ("add.u32 %a, %b, %c;", {}),
        ("// fence.proxy.async;", {}),
        ("bar.warp.sync -1;", {}),
    ],
)
def test_statement_gives_the_variants_of_its_kind(statement: str, variants: dict[str, str]) -> None:
    before, after = "{\n.reg .b32 %r<3>; LABEL: ", "\nret; }\n"
    faults = plant_faults(before + statement + after)
    assert {f.kind: f.text for f in faults} == {
        kind: before + text + after for kind, text in variants.items()
    }
    assert all(fault.line == 2 for fault in faults)


def test_variant_keeps_the_lines_of_the_text() -> None:
    text = "add.u32 %r1, %r1, 1;\n@%p mbarrier.arrive.shared.b64\n  _,\n  [%r1];\nret;\n"
    (fault,) = plant_faults(text)
    assert fault.text.splitlines()[4] == "ret;"
    assert fault.statement == "@%p mbarrier.arrive.shared.b64 _, [%r1];"
