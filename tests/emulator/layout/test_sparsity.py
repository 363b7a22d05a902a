"""Sparse operands: where stored elements belong, and metadata that means nothing."""

import numpy as np
import pytest

from fovea.emulator.layout.sparsity import (
    DISTINCT,
    ONE_OF_TWO,
    ORDERED,
    TENSOR_MEMORY,
    codes_from_registers,
    expand,
)


def test_expand_places_stored_elements_as_the_manual_s_example_does() -> None:
    packed = np.array([[10, 20, 30, 40]])
    codes = np.array([[0b1101, 0b1000]], np.uint32)  # elements 1 and 3, then 0 and 2
    assert expand(packed, codes, ORDERED).tolist() == [[0, 10, 0, 20, 30, 0, 40, 0]]


def test_expand_of_one_element_in_two_knows_two_codes() -> None:
    codes = np.array([[0b1110, 0b0100]], np.uint32)
    assert expand(np.array([[5, 6]]), codes, ONE_OF_TWO).tolist() == [[0, 5, 6, 0]]


@pytest.mark.parametrize(
    ("code", "allowed"), [(0b0101, DISTINCT), (0b0001, ORDERED), (0b0001, TENSOR_MEMORY)]
)
def test_code_that_is_not_defined_is_refused(code: int, allowed: frozenset[int]) -> None:
    with pytest.raises(ValueError, match="row 0, chunk 0"):
        expand(np.array([[1, 2]]), np.array([[code]], np.uint32), allowed)


@pytest.mark.parametrize(("chunks", "selector"), [(4, 4), (8, 2), (16, 1), (8, -1)])
def test_selector_that_names_no_thread_is_refused(chunks: int, selector: int) -> None:
    with pytest.raises(ValueError, match="selector"):
        codes_from_registers(np.zeros(32, np.uint32), selector, chunks, is_narrow=False)


@pytest.mark.parametrize(("is_narrow", "word", "place"), [(False, 1, 4), (True, 3, 0)])
def test_codes_of_the_second_row_of_a_group(is_narrow: bool, word: int, place: int) -> None:
    words = np.zeros(32, np.uint32)
    words[word] = 0b1001 << 4 * place
    codes = codes_from_registers(words, 0, 16, is_narrow=is_narrow)
    expected = np.zeros((16, 16), np.uint32)
    expected[8, 8 if is_narrow else 4] = 0b1001
    np.testing.assert_array_equal(codes, expected)
