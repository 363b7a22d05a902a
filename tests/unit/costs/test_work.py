"""What units have to do: against the roofline that FlashAttention-4's paper gives."""

import pytest

from fovea.costs.counted import Cycles
from fovea.costs.machine import B200, B300, H200, machine_of
from fovea.costs.work import Product, added, copy_work, scaled, warpgroup_work


def test_products_of_a_blackwell_tile_take_what_the_paper_says():
    scores = Product(m=128, n=128, k=128, a_is_shared=True).work(B200)
    output = Product(m=128, n=128, k=128, a_is_shared=False).work(B200)
    both = added(scores, output)
    # arXiv 2603.05451, forward, M = N = D = 128: MMA 1024, shared memory 768.
    assert both == {"tensor": 1024.0, "shared": 768.0}


def test_a_pair_of_ctas_reads_half_of_b():
    alone = Product(m=128, n=128, k=128, a_is_shared=False)
    paired = Product(m=128, n=128, k=128, a_is_shared=False, b_share=0.5)
    assert paired.work(B200)["shared"] == alone.work(B200)["shared"] / 2
    assert paired.work(B200)["tensor"] == alone.work(B200)["tensor"]


def test_a_hopper_product_takes_twice_the_clocks():
    product = Product(m=64, n=128, k=64, a_is_shared=True)
    assert product.work(H200)["tensor"] == 2 * product.work(B200)["tensor"] == 256.0


def test_exponentials_of_blackwell_ultra_take_half_the_clocks():
    cycles = Cycles(issue=100, fma=50, alu=20, mufu=896)
    assert warpgroup_work(B200, cycles, 0.0)["mufu"] == 896
    assert warpgroup_work(B300, cycles, 0.0)["mufu"] == 448


def test_serial_share_adds_the_other_pipes_to_the_exponentials():
    cycles = Cycles(issue=100, fma=50, alu=20, mufu=800)
    assert warpgroup_work(H200, cycles, 0.0)["vector"] == 800
    assert warpgroup_work(H200, cycles, 1.0)["vector"] == 870


def test_a_copy_uses_port_and_shared_memory():
    assert copy_work(H200, 32768) == {"l2": 512.0, "shared": 256.0}


def test_works_are_scaled_and_added():
    assert added(scaled({"a": 2.0}, 3), {"a": 1.0, "b": 1.0}) == {"a": 7.0, "b": 1.0}


def test_the_cache_gives_more_bytes_a_clock_at_a_lower_clock():
    assert H200.l2_bytes_at(1980) == 27.0
    assert H200.l2_bytes_at(990) == 54.0


def test_nominal_clocks_give_the_peaks_of_the_data_sheets():
    assert H200.peak_tflops == pytest.approx(989, rel=0.01)
    assert B200.peak_tflops == pytest.approx(2250, rel=0.01)


def test_unknown_machine_names_those_there_are():
    with pytest.raises(ValueError, match=r"arch='sm80'.*sm90 \| sm100 \| sm103"):
        machine_of("sm80")
