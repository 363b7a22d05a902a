"""The code of `docs/emulator.md` runs as a reader would run it, and does what the page says."""

import re
from pathlib import Path

import numpy as np
import pytest

from fovea import emulator

PAGE = Path(__file__).parents[2] / "docs" / "emulator.md"


@pytest.fixture
def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_code_of_the_page_runs(blocks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks[:-1]:
        exec(block, names)
    assert (tmp_path / "trace.json").stat().st_size > 0
    assert "past the end of args[0] (800 bytes)" in capsys.readouterr().out
    assert names["result"].steps > 0


def test_tile_of_the_page_without_its_loop_is_a_race_in_every_schedule(blocks):
    (block,) = [block for block in blocks if "tile_ptx" in block]
    assert block.count("@!%done bra WAIT;") == 1
    names: dict = {"np": np, "emulator": emulator}
    exec(block, names)  # silent, and right
    text = names["tile_ptx"].replace("@!%done bra WAIT;", "")
    for seed in range(20):
        # a copy that has not begun by then is read before it is written
        with pytest.raises(
            (emulator.RaceError, emulator.UninitialisedRead), match="decides nothing"
        ):
            emulator.load_ptx(text).launch(
                "tile", 1, 128, args=names["args"], memory=names["memory"],
                options=emulator.Options(seed=seed),
            )  # fmt: skip


def test_instruction_of_the_page_runs(blocks):
    exec(blocks[-1], {"__name__": "fovea.emulator.isa.average"})
    text = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{
    .reg .b64 %out, %at; .reg .b32 %i, %v;
    ld.param.u64 %out, [out];
    mov.u32 %i, %tid.x;
    average.u32 %v, %i, 10;
    mul.wide.u32 %at, %i, 4;
    add.u64 %out, %out, %at;
    st.global.b32 [%out], %v;
    ret;
}
"""
    out = np.zeros(32, np.uint32)
    result = emulator.load_ptx(text).launch("k", 1, 32, args=[out])
    np.testing.assert_array_equal(out, (np.arange(32) + 10) // 2)
    assert result.counters["instructions.alu"] > 0


def test_every_error_of_the_page_exists_and_none_is_left_out():
    table = PAGE.read_text().partition("| error | means |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([A-Z][A-Za-z]+)`", table))
    public = {name for name in emulator.__all__ if isinstance(getattr(emulator, name), type)}
    errors = {name for name in public if issubclass(getattr(emulator, name), Exception)}
    assert named == errors - {"EmulatorError", "Fault"}


def test_every_path_of_the_page_exists():
    root = PAGE.parents[1]
    paths = re.findall(r"`((?:src|scripts|tests|examples)/[\w/.]+)`", PAGE.read_text())
    assert len(paths) >= 6
    assert [path for path in paths if not (root / path).exists()] == []
