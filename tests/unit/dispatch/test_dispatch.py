"""Which backend runs, what an explicit backend raises, and determinism with warn_only."""

import warnings
from types import SimpleNamespace

import pytest
import torch

import fovea
from fovea import dispatch
from fovea.arch import ARCHS, SM90, arch_named, arch_of
from fovea.plan import select
from fovea.problem import Request, make_dense


class OnGpu:
    """A problem that claims to be on a CUDA device: choosing looks at nothing else of it."""

    def __init__(self, **facts):
        self.q = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
        self.deterministic_warns = False
        self.__dict__.update(facts)


@pytest.fixture
def problem():
    q = torch.randn(1, 4, 2, 8)
    return make_dense(q, q, q, Request())


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that device 0 is a Hopper GPU with everything installed."""
    monkeypatch.setattr(dispatch, "arch_of", lambda device: SM90)
    monkeypatch.setattr(dispatch, "_missing_runtime", lambda backend: None)
    monkeypatch.setattr(dispatch, "_has_warned", False)
    monkeypatch.setattr(select, "unsupported", lambda problem, arch: None)


def test_cpu_tensors_choose_the_reference_without_a_warning(problem):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = dispatch.choose(problem, None)
    assert (choice.backend, choice.backward_backend) == ("reference", "reference")


def test_cuda_tensors_choose_kernels_that_take_them(hopper):
    choice = dispatch.choose(OnGpu(), None)
    assert (choice.backend, choice.backward_backend, choice.arch) == ("cuda", "reference", SM90)


def test_cuda_tensors_that_no_kernel_takes_choose_the_reference_and_warn_once(hopper, monkeypatch):
    monkeypatch.setattr(select, "unsupported", lambda problem, arch: "dtype=torch.float64")
    with pytest.warns(fovea.FoveaWarning, match=r"dtype=torch\.float64"):
        choice = dispatch.choose(OnGpu(), None)
    assert choice.backend == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose(OnGpu(), None).backend == "reference"


def test_cuda_tensors_on_an_unknown_gpu_choose_the_reference(hopper, monkeypatch):
    monkeypatch.setattr(dispatch, "arch_of", lambda device: None)
    with pytest.warns(fovea.FoveaWarning, match="no kernels for this GPU"):
        assert dispatch.choose(OnGpu(), None).backend == "reference"


def test_backend_cuda_never_falls_back(hopper, monkeypatch):
    monkeypatch.setattr(select, "unsupported", lambda problem, arch: "head_dim=320")
    with pytest.raises(fovea.UnsupportedError, match=r"head_dim=320.*backend='reference'"):
        dispatch.choose(OnGpu(), "cuda")


def test_backend_cuda_on_a_gpu_without_kernels_names_the_archs_that_have_them(hopper, monkeypatch):
    monkeypatch.setattr(dispatch, "arch_of", lambda device: None)
    with pytest.raises(fovea.UnsupportedError) as caught:
        dispatch.choose(OnGpu(), "cuda")
    message = str(caught.value)
    for arch in ARCHS.values():
        assert f"{arch.name} ({arch.product})" in message
    assert "backend='reference'" in message


def test_backend_cuda_with_cpu_tensors_raises(problem):
    with pytest.raises(fovea.UnsupportedError, match="q is on cpu"):
        dispatch.choose(problem, "cuda")


def test_backend_emulator_with_cuda_tensors_raises():
    with pytest.raises(fovea.UnsupportedError, match="needs CPU tensors"):
        dispatch.choose(OnGpu(), "emulator:sm90")


def test_missing_package_is_named_with_its_extra(hopper, monkeypatch):
    lack = "tvm_ffi is not installed (pip install 'fovea-attention[cuda]')"
    monkeypatch.setattr(dispatch, "_missing_runtime", lambda backend: lack)
    with pytest.raises(fovea.UnsupportedError, match="pip install"):
        dispatch.choose(OnGpu(), "cuda")


def test_missing_runtime_names_the_package_that_is_absent(monkeypatch):
    found = {"fovea.runtime.cuda": object(), "tvm_ffi": None}
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", found.get)
    text = dispatch._missing_runtime.__wrapped__("cuda")
    how = "pip install 'fovea-attention[cuda]', in a clone '-e .[cuda]'"
    assert text == f"tvm_ffi is not installed ({how})"


@pytest.mark.parametrize("warns", [True, False])
def test_backend_without_determinism_warns_or_raises_as_torch_was_told(monkeypatch, hopper, warns):
    """torch.use_deterministic_algorithms(True, warn_only=warns), and a kernel that cannot."""
    q = torch.randn(1, 4, 2, 8)
    problem = make_dense(q, q, q, Request(deterministic=True))
    problem = dispatch.replace(problem, deterministic_warns=warns)
    monkeypatch.setattr(dispatch, "_EMULATORS", {"emulator:sm90": "sm90"})
    monkeypatch.setattr(
        select,
        "unsupported",
        lambda problem, arch: "deterministic=True" if problem.deterministic else None,
    )
    if not warns:
        with pytest.raises(fovea.UnsupportedError, match="deterministic=True"):
            dispatch.choose(problem, "emulator:sm90")
        return
    choice = dispatch.choose(problem, "emulator:sm90")
    assert choice.is_nondeterministic
    seen = []
    monkeypatch.setattr(dispatch, "_forward", lambda problem, choice: seen.append(problem))
    with pytest.warns(fovea.FoveaWarning, match="warn_only"):
        dispatch.forward(problem, choice)
    assert [p.deterministic for p in seen] == [False]


def test_reference_runs_in_full_precision_under_autocast(problem, monkeypatch):
    seen = []

    def spy(problem, choice):
        seen.append(torch.is_autocast_enabled("cpu"))

    monkeypatch.setattr(dispatch, "_forward", spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dispatch.forward(problem, dispatch.choose(problem, None))
    assert seen == [False]


def test_arch_of_cpu_is_none_and_unknown_names_raise():
    assert arch_of(torch.device("cpu")) is None
    assert arch_named("sm90") is SM90
    with pytest.raises(ValueError, match=r"sm90 \| sm100"):
        arch_named("sm80")
