"""Size limits of the style guide, as tests, so that a limit is not prose.

An exemption names one file or function and says why; one that is no longer needed fails too.
A function's length leaves its docstring out: a long explanation is not a long function.
"""

import ast
from collections.abc import Iterator

FILE_LINES = 500
INIT_LINES = 80
HOST_FUNCTION_LINES = 60
DEVICE_FUNCTION_LINES = 120
KERNEL_LINES = 160  # kernel.py::kernel, role dispatch only
ARGUMENTS = 8

_NAMES = "a list of the library's public names, one a line"
EXEMPT_FILES: dict[str, str] = {
    "src/fovea/mods/__init__.py": _NAMES,
}
EXEMPT_FUNCTIONS: dict[str, str] = {}
_SIGNATURE = "the public signature; keyword-only after the tensors"
_DROP_IN = "the signature of the function it stands in for"
EXEMPT_ARGUMENTS: dict[str, str] = {
    "src/fovea/api/attention.py::attention": _SIGNATURE,
    "src/fovea/api/attention.py::attention_varlen": _SIGNATURE,
    "src/fovea/api/flex.py::flex_attention": _DROP_IN,
    "src/fovea/cli/compile.py::run": "one argument for each option of the command",
    "src/fovea/cli/emulate.py::run": "one argument for each option of the command",
    "src/fovea/cli/explain.py::run": "one argument for each option of the command",
    "src/fovea/flash_attn.py::flash_attn_func": _DROP_IN,
    "src/fovea/flash_attn.py::flash_attn_varlen_func": _DROP_IN,
    "src/fovea/flash_attn.py::flash_attn_with_kvcache": _DROP_IN,
    "src/fovea/kernels/sm100/forward/kernel.py::ForwardKernel.__call__": "the launcher's arguments",
    "src/fovea/kernels/sm90/forward/kernel.py::ForwardKernel.__call__": "the launcher's arguments",
    "src/fovea/tiling/block_mask.py::create_block_mask": _DROP_IN,
    "tests/foreign/more_triton_kernels.py::attention_gradients": "a kernel takes each tensor",
    "tests/foreign/more_triton_kernels.py::layer_norm_gradients": "a kernel takes each tensor",
}

type_of_function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, type_of_function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, type_of_function):
            yield prefix + node.name, node
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def _length(function: type_of_function) -> int:
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def _line_limit(path: str, name: str) -> int:
    if not path.startswith("src/fovea/kernels/"):
        return HOST_FUNCTION_LINES
    if path.endswith("/kernel.py") and name.split(".")[-1] == "kernel":
        return KERNEL_LINES
    return DEVICE_FUNCTION_LINES


def _num_arguments(function: type_of_function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def _is_kernel_entry(function: type_of_function) -> bool:
    return any("kernel" in ast.unparse(decorator) for decorator in function.decorator_list)


def _check(sizes: dict[str, tuple[int, int]], exempt: dict[str, str]) -> None:
    too_large = {name for name, (size, limit) in sizes.items() if size > limit}
    offences = [f"{name}: {sizes[name][0]} > {sizes[name][1]}" for name in too_large - set(exempt)]
    no_longer_needed = set(exempt) - too_large
    text = "\n".join(sorted(offences))
    assert not offences, f"too large:\n{text}"
    assert not no_longer_needed, f"exemptions without need: {sorted(no_longer_needed)}"


def test_files_keep_to_their_limit(repository):
    sizes = {
        file.path: (
            file.num_lines,
            INIT_LINES if file.path.endswith("__init__.py") else FILE_LINES,
        )
        for file in repository
    }
    _check(sizes, EXEMPT_FILES)


def test_functions_keep_to_their_limit(repository):
    sizes = {
        f"{file.path}::{name}": (_length(function), _line_limit(file.path, name))
        for file in repository
        for name, function in _functions(file.tree)
    }
    _check(sizes, EXEMPT_FUNCTIONS)


def test_argument_lists_keep_to_their_limit(repository):
    sizes = {
        f"{file.path}::{name}": (_num_arguments(function), ARGUMENTS)
        for file in repository
        for name, function in _functions(file.tree)
        if not _is_kernel_entry(function)
    }
    _check(sizes, EXEMPT_ARGUMENTS)
