"""Mutated PTX never does worse than an EmulatorError."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator import Options

CASES = Path(__file__).parents[1] / "isa" / "cases"
JUNK = ["0", "-1", "0xffffffffffff", "%p", "{", "}", "[", "]", "@", "!", ".", "1.5", "$L", "|"]
BARRIERS = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry case(.param .u64 in, .param .u64 out)
{
    .shared .align 8 .b8 bar[16]; .shared .align 128 .b8 data[256];
    .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .pred %p<4>;
    ld.param.u64 %rd1, [in]; mov.u32 %r1, bar; mov.u32 %r2, data; mov.u32 %r3, %tid.x;
    setp.eq.u32 %p1, %r3, 0;
    @%p1 mbarrier.init.shared.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r1], 256;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r2], [%rd1], 256, [%r1];
    W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
    @!%p2 bra W;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2+16];
    bar.red.popc.u32 %r4, 1, 32, %p1;
    atom.shared.add.u32 %r5, [%r2], %r4;
    ret;
}
"""


def _mutate(text: str, source: random.Random) -> str:
    tokens = re.findall(r"\s+|[%.$\w:]+|.", text)
    for _ in range(source.randint(1, 3)):
        place, kind = source.randrange(len(tokens)), source.randrange(4)
        if kind == 0:
            del tokens[place]
        elif kind == 1:
            tokens[place] = source.choice(tokens)
        elif kind == 2:
            tokens.insert(place, source.choice(tokens))
        else:
            tokens[place] = source.choice(JUNK)
    return "".join(tokens)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_text_runs_or_raises_an_emulator_error(seed: int) -> None:
    source = random.Random(seed)
    files = sorted(CASES.glob("*/*.ptx"))[seed::37]
    texts = [re.sub(r"^//.*\n", "", path.read_text(), flags=re.MULTILINE) for path in files]
    texts += [BARRIERS] * len(texts)
    outcomes: set[str] = set()
    for _ in range(120):
        data, out = np.zeros((32, 8), np.uint64), np.zeros((32, 8), np.uint64)
        try:
            module = emulator.load_ptx(_mutate(source.choice(texts), source))
            module.launch("case", 1, 32, args=[data, out], options=Options(max_steps=2000))
            outcomes.add("ran")
        except emulator.EmulatorError as error:
            outcomes.add(type(error).__name__)
    assert "PtxError" in outcomes
    assert "EmulatorError" not in outcomes  # the bare class stands for an internal error
