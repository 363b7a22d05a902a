import platform

import pytest

from fovea.compile.target import ARCHS, CompileTarget, arch_for_capability, native_host_triple


def test_target_without_a_triple_is_for_this_machine() -> None:
    assert CompileTarget(arch="sm_90a").host_triple == native_host_triple()
    assert platform.machine() in native_host_triple()


def test_target_with_an_unknown_arch_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"arch='sm_90'.*sm_90a \| sm_100a \| sm_103a"):
        CompileTarget(arch="sm_90")


def test_target_with_an_unknown_triple_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"host_triple='riscv64'.*x86_64-unknown-linux-gnu"):
        CompileTarget(arch="sm_90a", host_triple="riscv64")


def test_machine_without_launchers_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ValueError, match="riscv64-unknown-linux-gnu"):
        CompileTarget(arch="sm_90a")


def test_targets_are_values() -> None:
    assert CompileTarget(arch="sm_90a") == CompileTarget(
        arch="sm_90a", host_triple=native_host_triple()
    )
    assert len({CompileTarget(arch=a) for a in ARCHS}) == 3
    assert str(CompileTarget(arch="sm_90a", host_triple="aarch64-unknown-linux-gnu")) == (
        "sm_90a on aarch64"
    )


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((8, 0), None)],
)
def test_capability_names_its_arch(capability: tuple[int, int], arch: str | None) -> None:
    assert arch_for_capability(*capability) == arch
