"""`fovea info`, and the command line where the extra `cli` is absent."""

import json
import platform
import sys

import pytest
import torch

from fovea.arch import SM100
from fovea.cli import info
from fovea.cli.main import main
from fovea.plan.select import unsupported
from fovea.problem import Request, make_dense
from fovea.version import __version__


@pytest.fixture
def without_typer(monkeypatch):
    """Make `import typer` fail as where it is not installed."""
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "fovea.cli.application", raising=False)


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


def test_info_without_typer_prints_the_facts_as_json(without_typer, capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fovea"] == __version__


def test_version_without_typer_is_printed(without_typer, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_architectures_are_named_only_where_a_kernel_takes_a_call():
    (line,) = [x for x in info.as_text(info.gather()).splitlines() if "forward kernels" in x]
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    lack = unsupported(make_dense(q, q, q, Request()), SM100)
    assert "sm90 (Hopper)" in line
    assert ("sm100" in line) == (lack is None)


def test_info_without_typer_refuses_an_unknown_option(without_typer, capsys):
    assert main(["info", "--jsn"]) == 2
    assert "usage: fovea info" in capsys.readouterr().err


def test_other_command_without_typer_says_what_to_install(without_typer, capsys):
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "fovea demo needs the package 'typer'" in error
    assert "[cli]" in error


def test_paths_that_lead_nowhere_are_said_to(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setenv("FOVEA_BUNDLE", "/nope")
    monkeypatch.setenv("FOVEA_RUNTIME_LIBRARY", "/nix")
    monkeypatch.setenv("FOVEA_CACHE_DIR", str(file))
    text = info.as_text(info.gather())
    assert "/nope  (no such folder: correct FOVEA_BUNDLE" in text
    assert "/nix  (no such file: correct FOVEA_RUNTIME_LIBRARY" in text
    assert f"{file}  (not a folder: correct FOVEA_CACHE_DIR" in text


@pytest.mark.parametrize(
    ("name", "value"), [("FOVEA_CHECK", "2"), ("FOVEA_QUIET", "si"), ("FOVEA_CACHE_LIMIT", "much")]
)
def test_value_that_no_variable_takes_is_said_to(monkeypatch, tmp_path, name, value):
    monkeypatch.setenv("FOVEA_CACHE_DIR", str(tmp_path))
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv(name, value)
    lines = info.as_text(info.gather()).splitlines()
    said = [line for line in lines if line.startswith(f"{name} ")]
    assert len(said) == 1
    assert repr(value) in said[0]
    assert "unset it" in said[0]


def test_bundle_that_is_there_has_no_remark(monkeypatch, tmp_path):
    monkeypatch.setenv("FOVEA_BUNDLE", str(tmp_path))
    assert not info.gather().problems


def test_bundle_is_shown_with_what_it_holds(tmp_path, monkeypatch):
    entry = {"folder": "a", "name": "k", "arch": "sm_90a", "host_triple": "x86_64-linux"}
    content = {"format": 1, "artifacts": {"1": entry, "2": entry}}
    (tmp_path / "index.json").write_text(json.dumps(content))
    monkeypatch.setenv("FOVEA_BUNDLE", str(tmp_path))
    line = next(x for x in info.as_text(info.gather()).splitlines() if x.startswith("bundle "))
    assert "2 artifacts for sm_90a on x86_64" in line


def test_folder_that_is_no_bundle_is_shown_as_none(tmp_path, monkeypatch):
    monkeypatch.setenv("FOVEA_BUNDLE", str(tmp_path))
    assert f"no bundle in {tmp_path}" in info.as_text(info.gather())
