"""`fovea info`, and the command line where the extra `cli` is absent."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from fovea.cli import info
from fovea.version import __version__

SOURCE = Path(__file__).parents[3] / "src"


def _run_without_typer(*words: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('typer', 'rich', 'click')))\n"
        "from fovea.cli.main import main\n"
        f"sys.exit(main({list(words)!r}))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )


def test_facts_name_this_machine():
    facts = info.gather()
    assert facts.fovea == __version__
    assert facts.python == platform.python_version()
    assert facts.torch == torch.__version__
    assert len(facts.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert facts.backends["reference"] == "ready"


def test_text_has_one_line_for_each_backend_and_extra():
    text = info.as_text(info.gather())
    for word in ("backend cuda", "backend emulator", "extra cli", "cache", "GPU"):
        assert sum(line.startswith(word + " ") for line in text.splitlines()) == 1


def test_missing_package_is_named_by_each_backend_that_needs_it():
    packages = dict.fromkeys(name for names in info.EXTRAS.values() for name in names)
    hopper = info.Gpu(index=0, name="H", capability="9.0", memory_gib=1.0, arch="sm90")
    backends = info._backends(packages, [hopper], has_bundle=False)
    assert "apache-tvm-ffi" in backends["cuda"]
    assert "llvmlite" in backends["emulator"]
    assert "nvidia-cutlass-dsl" in backends["compiler"]


def test_compiled_kernels_alone_are_enough_for_cuda_with_a_bundle():
    packages = {name: "1" for names in info.EXTRAS.values() for name in names}
    packages["nvidia-cutlass-dsl"] = None
    hopper = info.Gpu(index=0, name="H", capability="9.0", memory_gib=1.0, arch="sm90")
    assert info._backends(packages, [hopper], has_bundle=True)["cuda"] == "ready"
    assert "FOVEA_BUNDLE" in info._backends(packages, [hopper], has_bundle=False)["cuda"]


def test_info_without_typer_prints_the_facts_as_json():
    done = _run_without_typer("info", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fovea"] == __version__


def test_other_command_without_typer_says_what_to_install():
    done = _run_without_typer("demo")
    assert done.returncode == 2
    assert "fovea demo needs the package 'typer'" in done.stderr
    assert "[cli]" in done.stderr
