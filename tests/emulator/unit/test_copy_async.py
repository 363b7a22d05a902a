"""cp.async: groups belong to threads, whichever lanes issue, commit and wait."""

import pytest
from race_kernels import check, races

# lanes 0 to 15 and 16 to 31 of the first warp, and the place of each thread's word
_HALVES = """.reg .pred %l, %h; and.b32 %r, %t, 31; setp.lt.and.u32 %l, %r, 16, %p;
    setp.ge.and.u32 %h, %r, 16, %p;
    cvt.u64.u32 %x, %t; shl.b64 %x, %x, 2; add.u64 %a, %a, %x; shl.b32 %r, %r, 2;
    add.u32 %v, %s, %r;
    """
_COPY = "cp.async.ca.shared.global [%v], [%a], 4;"
_READ = "bar.sync 0; @!%p ld.shared.b32 %v, [%s];"  # by the other warp


@pytest.mark.parametrize(
    ("commit", "right", "wrong"),
    [
        ("cp.async.commit_group;", "@%l cp.async.wait_group 0;", "@%h cp.async.wait_group 0;"),
        ("", "@%l cp.async.wait_all;", "@%h cp.async.wait_all;"),
        (
            "@%l cp.async.commit_group; @%h cp.async.commit_group;",
            "cp.async.wait_group 0;",
            "cp.async.wait_group 1;",
        ),
    ],
)
def test_wait_covers_groups_of_its_own_lanes(commit: str, right: str, wrong: str) -> None:
    body = f"{_HALVES} @%l {_COPY} {commit} @@ {_READ}"
    assert races(body.replace("@@", right)) == 0
    assert races(body.replace("@@", wrong)) == 20


def test_lanes_that_meet_again_share_their_groups() -> None:
    check(
        f"""{_HALVES}
        @%l {_COPY} @%l cp.async.commit_group;
        @%h {_COPY} @%h cp.async.commit_group;
        cp.async.wait_group 0;
        @%p {_COPY}
        cp.async.commit_group;
        @@
        {_READ}""",
        "cp.async.wait_group 0;",
    )
