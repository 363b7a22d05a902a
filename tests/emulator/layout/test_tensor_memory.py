import numpy as np
import pytest

from fovea.emulator.layout.tensor_memory import access_table, accumulator_blocks


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"])
@pytest.mark.parametrize("repeat", [1, 2, 8])
def test_each_cell_of_a_block_is_held_by_one_register(shape, repeat):
    access = access_table(shape, repeat)
    halves = 0 if access.halves is None else access.halves
    cells = (halves * access.lanes + access.rows) * access.columns + access.cells
    count = 1 if access.halves is None else 2
    assert sorted(cells.ravel().tolist()) == list(range(count * access.lanes * access.columns))


def test_16x256b_is_the_accumulator_fragment_of_mma():
    access = access_table("16x256b", 2)
    for register in range(8):
        for thread in range(32):
            row = thread // 4 + 8 * (register // 2 % 2)
            column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
            assert access.rows[register, thread] == row
            assert access.cells[register, thread] == column


def test_16x128b_has_a_column_per_thread_and_rows_eight_apart():
    access = access_table("16x128b", 2)
    assert [int(x) for x in access.rows[:, 5]] == [1, 9, 1, 9]
    assert [int(x) for x in access.cells[:, 5]] == [1, 1, 5, 5]


def test_16x64b_alternates_threads_between_the_halves_of_the_lanes():
    access = access_table("16x64b", 2)
    got = [(int(r), int(c)) for r, c in zip(access.rows[1], access.cells[1])]
    assert got[:6] == [(0, 2), (8, 2), (0, 3), (8, 3), (1, 2), (9, 2)]


def test_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="64x64b"):
        access_table("64x64b", 1)


@pytest.mark.parametrize(
    ("rows", "group", "count"), [(128, 1, 1), (64, 1, 4), (256, 2, 1), (128, 2, 2)]
)
def test_accumulator_blocks_cover_the_matrix_once(rows, group, count):
    columns = 48
    blocks = accumulator_blocks(rows, columns, group)
    covered = np.zeros((rows // group, columns), int)
    lanes = np.zeros((128, columns), int)
    for block in blocks:
        (row, n), (first, width) = block.rows, block.columns
        covered[row : row + n, first : first + width] += 1
        lanes[block.lane : block.lane + n, :width] += 1
    assert len(blocks) == count
    assert (covered == 1).all()
    assert lanes.max() == 1


def test_accumulator_blocks_of_another_size_are_refused():
    with pytest.raises(ValueError, match="M=256 with cta_group::1"):
        accumulator_blocks(256, 64, 1)
