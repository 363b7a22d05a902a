"""What a part says where the extra that it needs is not installed, seen in a fresh interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

PROGRAM = """
import contextlib, io, json, sys

class Blocker:
    '''Makes packages look as if they were not installed.'''

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
real_find_spec = __import__("importlib.util").util.find_spec
def find_spec(name, package=None):
    return None if name.partition(".")[0] in {blocked!r} else real_find_spec(name, package)
sys.modules["importlib.util"].find_spec = find_spec

import torch, fovea
from fovea.compile import key
key.compiler_version = lambda: None
q = torch.randn(1, 8, 2, 64, dtype=torch.bfloat16)

def emulator(): import fovea.emulator
def launcher():
    from fovea.emulator.host_object import HostObject
    HostObject(b"", {{}}, frozenset())
def backend(): fovea.attention(q, q, q, backend="emulator:sm90")
def compiler():
    from fovea.compile.compiler import compile_variant
    from fovea.compile.target import CompileTarget
    class Variant: name = "anything"
    compile_variant(Variant(), CompileTarget(arch="sm_90a"))
def many():
    import tempfile
    from pathlib import Path
    from fovea.compile.cache import Cache
    from fovea.compile import aot
    real = aot.compile_many
    aot.compile_many = lambda jobs, **k: real(jobs, cache=Cache(Path(tempfile.mkdtemp()), 1 << 20))
    fovea.precompile(q, q, q, bundle=Path(tempfile.mkdtemp()) / "bundle")
def ffi():
    key.compiler_version = lambda: "4.8"
    compiler()
def running():
    from fovea.runtime import module
    module._tvm_ffi()
def picture():
    from fovea.mods import picture
    picture.draw(next(iter(picture.EXAMPLES)))
def transformers(): fovea.integrations.transformers.register()
def command():
    from fovea.cli.main import main
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        assert main(["bench"]) == 2
    raise RuntimeError(errors.getvalue())

said = {{}}
parts = (emulator, launcher, backend, compiler, many, ffi, running)
for part in (*parts, picture, transformers, command):
    try:
        part()
    except Exception as error:
        said[part.__name__] = [[kind.__name__ for kind in type(error).__mro__], str(error)]
print(json.dumps(said))
"""

EXTRA = "pip install 'fovea-attention[{}]'"
# part -> type of the error, what its text holds
SAYS = {
    "emulator": ("ModuleNotFoundError", "'numpy'", EXTRA.format("emulator")),
    "backend": ("UnsupportedError", "numpy", EXTRA.format("emulator")),
    "compiler": ("UnsupportedError", "'nvidia-cutlass-dsl'", EXTRA.format("cuda")),
    "many": ("UnsupportedError", "'nvidia-cutlass-dsl'", EXTRA.format("cuda")),
    "ffi": ("UnsupportedError", "'apache-tvm-ffi'", EXTRA.format("cuda")),
    "running": ("UnsupportedError", "'apache-tvm-ffi'", EXTRA.format("cuda")),
    "picture": ("ModuleNotFoundError", "'matplotlib'", EXTRA.format("cli")),
    "transformers": ("ModuleNotFoundError", "'transformers'", "pip install transformers"),
    "command": ("RuntimeError", "'typer'", EXTRA.format("cli")),
}
SAYS_WITH_NUMPY = {
    "launcher": ("LauncherError", "'llvmlite'", EXTRA.format("emulator")),
    "backend": ("UnsupportedError", "llvmlite", EXTRA.format("emulator")),
}
OPTIONAL = ("llvmlite", "matplotlib", "rich", "transformers", "tvm_ffi", "typer")


def _said(blocked: tuple[str, ...]) -> dict[str, list]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(blocked=blocked)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def said() -> dict[str, list]:
    return _said(("numpy", *OPTIONAL))


@pytest.fixture(scope="module")
def said_with_numpy() -> dict[str, list]:
    return _said(OPTIONAL)


def _check(found: list, kind: str, *texts: str) -> None:
    assert kind in found[0], found
    for text in texts:
        assert text in found[1], found


@pytest.mark.parametrize("part", SAYS)
def test_part_without_its_packages_names_the_extra(said, part):
    _check(said[part], *SAYS[part])


@pytest.mark.parametrize("part", SAYS_WITH_NUMPY)
def test_part_with_numpy_alone_names_what_else_is_missing(said_with_numpy, part):
    _check(said_with_numpy[part], *SAYS_WITH_NUMPY[part])
