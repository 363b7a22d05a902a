"""The generic and the async proxy: clean with the fence of the right space, reported without it."""

import pytest
from race_kernels import check, races

_STORE = """shl.b32 %v, %t, 4; add.u32 %v, %v, %s;
    st.shared.v4.b32 [%v], {%t, %t, %t, %t};
    @@
    bar.sync 0;
    @%q cp.async.bulk.global.shared::cta.bulk_group [%b], [%s], 1024;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
_LOAD = """@%q mbarrier.init.shared.b64 [%m], 1;
    bar.sync 0;
    @%q st.global.b32 [%a], 77;
    @@
    @%q mbarrier.arrive.expect_tx.shared.b64 %x, [%m], 1024;
    @%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%a], 1024, [%m];
    W: mbarrier.try_wait.parity.shared.b64 %e, [%m], 0; @!%e bra W;"""


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [(_STORE, ".shared::cta", ".global"), (_LOAD, ".global", ".shared::cta")],
    ids=["shared", "global"],
)
def test_proxy_fence_covers_its_state_space_alone(body: str, right: str, wrong: str) -> None:
    check(body, f"fence.proxy.async{right};")
    check(body, "fence.proxy.async;")
    assert races(body.replace("@@", f"fence.proxy.async{wrong};")) == 20


@pytest.mark.parametrize("barrier", ["bar.sync 0;", ""])
def test_cp_async_then_bulk_store_needs_a_proxy_fence(barrier: str) -> None:
    check(
        f"""@%q cp.async.cg.shared.global [%s], [%a], 16;
        cp.async.wait_all;
        @@
        {barrier}
        @%q cp.async.bulk.global.shared::cta.bulk_group [%b], [%s], 16;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;""",
        "fence.proxy.async.shared::cta;",
    )


@pytest.mark.parametrize(
    "write", ["st.volatile.shared.b32 [%s], 5;", "red.shared.add.u32 [%s], 5;"]
)
def test_strong_write_then_bulk_store_needs_a_proxy_fence(write: str) -> None:
    check(
        f"""@%q st.shared.v4.b32 [%s], {{%t, %t, %t, %t}};
        fence.proxy.async.shared::cta;
        @%q {write}
        @@
        @%q cp.async.bulk.global.shared::cta.bulk_group [%b], [%s], 16;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;""",
        "fence.proxy.async.shared::cta;",
    )


def test_result_of_a_bulk_reduction_needs_more_than_its_read_wait() -> None:
    body = """@%q st.shared.v4.b32 [%s], {%m, %m, %m, %m};
        fence.proxy.async.shared::cta;
        @%q cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%b], [%s], 16;
        @%q cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%b], [%s], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group@@ 0;
        @%q ld.global.b32 %v, [%b];"""
    assert races(body.replace("@@", "")) == 0
    assert races(body.replace("@@", ".read")) == 20
