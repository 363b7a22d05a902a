"""Release and acquire through memory: both sides, their fences and their scopes."""

import numpy as np
import pytest
from race_kernels import HEAD

from fovea import emulator
from fovea.emulator import Options

_SEEDS = 12
# One warp (shared memory) or CTA (global memory) writes %d and then the flag %f; another one waits
# for the flag and reads.
_SHARED = """mov.u32 %d, s; add.u32 %f, %d, 64; setp.eq.u32 %w, %t, 0; setp.eq.u32 %q, %t, 32;
    @%w st.shared.b32 [%f], 0; @%w st.shared.b32 [%f+16], 0; bar.sync 0;"""
_GLOBAL = """mov.u64 %d, %a; add.u64 %f, %a, 64; mov.u32 %x, %ctaid.x; setp.eq.u32 %p, %t, 0;
    setp.eq.and.u32 %w, %x, 0, %p; setp.eq.and.u32 %q, %x, 1, %p;"""
_BODY = """
    @%w st.{space}.b32 [%d], 5;
    {before}
    @!%w bra READ;
    {write}
    READ: @!%q bra END;
    LOOP: {read} setp.eq.u32 %p, %v, 0; @%p bra LOOP;
    {after}
    ld.{space}.b32 %v, [%d];
    END:"""


def reports(
    space: str, write: str, read: str, *, before: str = "", after: str = "", cluster: int = 1
) -> int:
    """Return in how many seeds the reading of what was written is reported as a race."""
    bits = 32 if space == "shared" else 64
    start = _SHARED if space == "shared" else _GLOBAL
    body = _BODY.format(space=space, write=write, read=read, before=before, after=after)
    text = (
        f"{HEAD}.visible .entry k(.param .u64 a)\n{{\n.shared .align 128 .b8 s[128];\n"
        f".reg .b{bits} %d, %f; .reg .b64 %a; .reg .b32 %t, %x, %v, %y; .reg .pred %p, %q, %w;\n"
        f"ld.param.u64 %a, [a]; mov.u32 %t, %tid.x;\n{start}{body}\nret;\n}}\n"
    ).replace("SPACE", space)
    module = emulator.load_ptx(text)
    grid, found = (1 if space == "shared" else 2), 0
    for seed in range(_SEEDS):
        try:
            args = [np.zeros(64, np.uint32)]
            module.launch("k", grid, 64, cluster, args=args, options=Options(seed=seed))
        except emulator.RaceError:
            found += 1
    return found


def store(qualifiers: str) -> str:
    return f"st.{qualifiers}.SPACE.b32 [%f], 1;"


def load(qualifiers: str) -> str:
    return f"ld.{qualifiers}.SPACE.b32 %v, [%f];"


_RELEASES = [
    (store("release.gpu"), store("relaxed.gpu")),
    (store("release.gpu"), store("volatile")),
    ("fence.acq_rel.gpu;" + store("relaxed.gpu"), store("relaxed.gpu") + "fence.acq_rel.gpu;"),
    ("membar.gl;" + store("volatile"), "fence.acquire.gpu;" + store("volatile")),
    ("atom.release.gpu.SPACE.exch.b32 %y, [%f], 1;", "atom.SPACE.exch.b32 %y, [%f], 1;"),
    ("red.release.gpu.SPACE.add.u32 [%f], 1;", "red.relaxed.gpu.SPACE.add.u32 [%f], 1;"),
    ("atom.acq_rel.gpu.SPACE.or.b32 %y, [%f], 1;", "atom.acquire.gpu.SPACE.or.b32 %y, [%f], 1;"),
    ("fence.release.gpu; red.SPACE.add.u32 [%f], 1;", "red.SPACE.add.u32 [%f], 1;"),
]
_ACQUIRES = [
    (load("acquire.gpu"), "", load("relaxed.gpu"), ""),
    (load("relaxed.gpu"), "fence.acquire.gpu;", load("relaxed.gpu"), "fence.release.gpu;"),
    (load("volatile"), "fence.acq_rel.gpu;", load("volatile"), ""),
    (load("volatile"), "membar.sys;", "fence.acq_rel.gpu;" + load("volatile"), ""),
    (
        "atom.acquire.gpu.SPACE.or.b32 %v, [%f], 0;",
        "",
        "atom.release.gpu.SPACE.or.b32 %v, [%f], 0;",
        "",
    ),
]


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize(("right", "wrong"), _RELEASES)
def test_only_a_release_hands_on_what_was_written(space: str, right: str, wrong: str) -> None:
    assert reports(space, right, load("acquire.gpu")) == 0
    assert reports(space, wrong, load("acquire.gpu")) == _SEEDS


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize(("right", "after", "wrong", "wrong_after"), _ACQUIRES)
def test_only_an_acquire_takes_what_was_handed_on(
    space: str, right: str, after: str, wrong: str, wrong_after: str
) -> None:
    assert reports(space, store("release.gpu"), right, after=after) == 0
    assert reports(space, store("release.gpu"), wrong, after=wrong_after) == _SEEDS


_SCOPES = ["cta", "cluster", "gpu", "sys"]


@pytest.mark.parametrize("scope", _SCOPES)
@pytest.mark.parametrize("cluster", [1, 2])
def test_scope_must_include_the_other_side(scope: str, cluster: int) -> None:
    is_wide = _SCOPES.index(scope) >= (1 if cluster == 2 else 2)
    expected = 0 if is_wide else _SEEDS
    release, acquire = store("release.sys"), load("acquire.sys")
    fence = f"fence.acq_rel.{scope};"
    for write, read, after in (
        (store(f"release.{scope}"), acquire, ""),
        (release, load(f"acquire.{scope}"), ""),
        (fence + store("relaxed.sys"), acquire, ""),
        (release, load("relaxed.sys"), fence),
    ):
        assert reports("global", write, read, after=after, cluster=cluster) == expected
    assert reports("shared", store(f"release.{scope}"), load(f"acquire.{scope}")) == 0


def test_fence_covers_what_its_cta_did_before_a_barrier() -> None:
    """One thread's fence and relaxed atomic speak for all, as grid barriers have it."""
    write = "red.relaxed.gpu.global.add.u32 [%f], 1;"
    read, fence = load("relaxed.gpu"), "fence.acq_rel.gpu;"
    data = "setp.eq.u32 %p, %t, 40; setp.eq.and.u32 %p, %x, 0, %p; @%p st.global.b32 [%d+4], 6;"
    after = f"{fence} ld.global.b32 %v, [%d+4];"
    for before, expected in (
        (f"{data} bar.sync 0; {fence}", 0),
        (f"{data} {fence} bar.sync 0;", 0),  # each its own, as threadFenceReduction has it
        (f"{fence} {data} bar.sync 0;", _SEEDS),
    ):
        assert reports("global", write, read, before=before, after=after) == expected


def test_store_that_is_no_release_ends_what_was_handed_on() -> None:
    again = store("release.gpu").replace("1;", "0;") + store("relaxed.gpu")
    assert reports("global", again, load("acquire.gpu")) == _SEEDS
    update = store("release.gpu").replace("1;", "0;") + "red.SPACE.add.u32 [%f], 1;"
    assert reports("global", update, load("acquire.gpu")) == 0


@pytest.mark.parametrize("space", ["shared", "global"])
def test_weak_access_races_with_a_strong_one(space: str) -> None:
    red = "red.SPACE.add.u32 [%d], 1;"
    read = load("acquire.gpu")
    assert reports(space, red + store("release.gpu"), read) == 0
    assert reports(space, store("release.gpu") + red, read) == _SEEDS
    for weak in ("ld.SPACE.b32 %y, [%f+16];", "st.SPACE.b32 [%f+16], 2;"):
        for strong in (red, store("relaxed.gpu"), store("volatile")):
            strong = strong.replace("%d", "%f+16").replace("[%f]", "[%f+16]")
            after = f"{weak} bra END;"
            assert reports(space, strong + store("release.gpu"), read, after=after) == 0
            assert reports(space, store("release.gpu") + strong, read, after=after) == _SEEDS


@pytest.mark.parametrize("space", ["shared", "global"])
def test_flag_may_be_reset_by_who_has_seen_it(space: str) -> None:
    reset = "st.SPACE.b32 [%f], 0; bra END;"
    assert reports(space, store("relaxed.gpu"), load("relaxed.gpu"), after=reset) == 0


def test_atomics_of_two_ctas_meet_within_their_scope() -> None:
    for scope, cluster, expected in (("gpu", 1, 0), ("cta", 1, _SEEDS), ("cluster", 2, 0)):
        red = f"red.relaxed.{scope}.SPACE.add.u32 [%d+8], 1; "
        both = f"@%w {red} @%q {red}"
        read, write = load("acquire.gpu"), store("release.gpu")
        assert reports("global", write, read, before=both, cluster=cluster) == expected
