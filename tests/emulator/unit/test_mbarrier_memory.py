"""The memory of an mbarrier: nothing else before its mbarrier.inval, which waits for every use."""

import pytest
from race_kernels import check, launch, races

from fovea.emulator import IllegalOperand, RaceError

_INIT = "@%q mbarrier.init.shared.b64 [%m], 1; bar.sync 0;"
_INVAL = "@%q mbarrier.inval.shared.b64 [%m];"


@pytest.mark.parametrize(
    "access",
    [
        "st.shared.b32 [%m+4], 0;",
        "st.shared.b32 [%m+4], 5;",
        "ld.shared.b64 %x, [%m];",
        "atom.shared.add.u32 %v, [%m], 1;",
    ],
)
def test_memory_of_an_mbarrier_needs_its_invalidation_first(access: str) -> None:
    check(f"{_INIT} @@ @%q {access}", _INVAL)
    with pytest.raises(IllegalOperand, match="touches the mbarrier initialised by PTX line"):
        launch(f"{_INIT} @%q {access}")


def test_all_lanes_of_a_warp_may_initialise_one_mbarrier() -> None:
    assert races("@%p mbarrier.init.shared.b64 [%m], 1; bar.sync 0;") == 0


def test_memory_of_an_mbarrier_is_another_warps_behind_a_barrier() -> None:
    check(f"{_INIT} {_INVAL} @@ @!%p st.shared.b32 [%m], %t;", "bar.sync 0;")


def test_invalidation_waits_for_every_use() -> None:
    arrive = "@!%p mbarrier.arrive.shared.b64 %x, [%m], 1;"
    body = f"{_INIT.replace('], 1', '], 64')} {arrive} @@ {_INVAL}"
    check(body, "bar.sync 0;")
    assert races(body.replace("@@", "bar.arrive 1, 64;")) == 20
    with pytest.raises(RaceError, match="nothing orders that before it is made invalid"):
        launch(body.replace("@@", "nanosleep.u32 100;" * 9), seed=3)


def test_invalidation_waits_for_the_bytes_of_a_copy() -> None:
    check(
        f"""{_INIT}
        @%q mbarrier.arrive.expect_tx.shared.b64 %x, [%m], 1024;
        @%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%s], [%a], 1024, [%m];
        @@
        {_INVAL}""",
        "W: mbarrier.try_wait.parity.shared.b64 %e, [%m], 0; @!%e bra W; bar.sync 0;",
    )
