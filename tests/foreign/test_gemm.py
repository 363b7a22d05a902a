"""quack's matrix products on the emulator: pairs of CTAs, clusters, FP8, several schedules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "gemm_worker.py"
SEEDS = 5
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def product(sizes, tile, cluster=(1, 1), *, dtype="bfloat16", out_dtype="bfloat16", **options):
    adds_c = options.pop("adds_c", False)
    return {"sizes": sizes, "tile": tile, "cluster": cluster, "dtype": dtype,
            "out_dtype": out_dtype, "adds_c": adds_c, "options": options}  # fmt: skip


FP16 = {"dtype": "float16", "out_dtype": "float16"}
PRODUCTS = {
    "sm_90a": {
        "ragged": product((200, 264, 136), (128, 128)),
        "pingpong": product((256, 256, 128), (64, 128), pingpong=True),
        "cluster": product((256, 256, 192), (128, 128), (2, 1)),
        "multicast_a": product((256, 256, 128), (128, 128), (1, 2), out_dtype="float32"),
        "wide": product((256, 192, 128), (128, 192), adds_c=True, **FP16),
        "tall": product((512, 256, 128), (256, 128)),
        "fp8": product((256, 256, 256), (128, 128), dtype="float8_e4m3fn"),
        "split_k": product((128, 128, 512), (128, 128), split_k=2),
    },
    "sm_100a": {
        "ragged": product((200, 264, 136), (128, 128)),
        "pair": product((256, 256, 192), (256, 128), (2, 1)),
        "pair_wide": product((512, 512, 128), (256, 256), (2, 1)),
        "two_pairs": product((512, 256, 128), (256, 128), (4, 1)),
        "cluster": product((256, 256, 128), (128, 128), (2, 1)),
        "adds_c": product((256, 256, 128), (128, 128), adds_c=True, **FP16),
        "fp8": product((256, 256, 256), (128, 128), dtype="float8_e4m3fn"),
        "split_k": product((128, 128, 512), (128, 128), split_k=2),
        "launch_control": product((512, 384, 128), (128, 128), is_dynamic_persistent=True),
        "launch_control_pair": product(
            (512, 512, 128), (256, 128), (2, 1), is_dynamic_persistent=True
        ),
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function from an architecture to the folder of its run, made on first use."""
    folders = {}

    def run(arch):
        if arch in folders:
            return folders[arch]
        folder = folders[arch] = tmp_path_factory.mktemp(arch)
        request = {"products": PRODUCTS[arch], "seeds": SEEDS}
        (folder / "request.json").write_text(json.dumps(request))
        environment = os.environ | {
            "CUTE_DSL_ARCH": arch,
            "QUACK_ARCH": arch.removeprefix("sm_").removesuffix("a"),
            "QUACK_CACHE_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", WORKER, folder / "request.json"],
            capture_output=True, text=True, check=False, env=environment, timeout=1800,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return folder

    return run


@pytest.mark.parametrize(
    ("arch", "name"), [(arch, name) for arch, of in PRODUCTS.items() for name in of]
)
def test_product_is_right_and_equal_under_schedules(runs, arch, name):
    folder = runs(arch)
    report = json.loads((folder / "report.json").read_text())[name]
    assert report["error"] == ""
    sys.stdout.write(f"{arch} {name}: {report['seconds']:.1f} s with compiling\n")
    found = np.load(folder / f"{name}_results.npz")
    a, b = found["a"].astype(np.float64), found["b"].astype(np.float64)
    asked = PRODUCTS[arch][name]
    expected = a @ b.T + (found["c"] if asked["adds_c"] else 0)
    # float32 sums, a rounding of the output
    bound = (np.abs(a) @ np.abs(b.T) + np.abs(expected)) * 2.0**-20
    bound += np.abs(expected) * ROUNDING[asked["out_dtype"]]
    assert (np.abs(found["out_0"] - expected) <= bound).all()
    for seed in range(1, SEEDS):
        np.testing.assert_array_equal(found[f"out_{seed}"], found["out_0"])
