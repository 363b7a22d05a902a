"""Import law beside the layer contract (which is in pyproject.toml, run by lint-imports)."""

import ast
import re

# The files that hold a warp role's run(), by architecture.
ROLES = {
    "sm90": {"load", "compute", "store_dq"},
    "sm100": {"load", "mma", "softmax", "correction", "compute", "reduce_dq", "epilogue"},
}


def _offences(library, is_offence) -> list[str]:
    return [
        f"{file.path}:{line} imports {name}"
        for file in library
        for line, name in file.imported_names()
        if is_offence(file, name)
    ]


def test_cutlass_is_imported_only_by_kernels_and_the_compiler(library):
    """Everything else must run where the compiler is absent."""

    def is_offence(file, name):
        allowed = file.module.startswith("fovea.kernels") or file.module in (
            "fovea.compile.compiler",
            "fovea.compile.aot",
        )
        return name.split(".")[0] == "cutlass" and not allowed

    assert _offences(library, is_offence) == []


def test_sm90_and_sm100_never_import_each_other(library):
    """What both need lives beside them (kernels/device, plan/pipeline), not in one of them."""

    def is_offence(file, name):
        here = re.search(r"\.(sm90|sm100)(\.|$)", file.module + ".")
        there = re.search(r"\.(sm90|sm100)(\.|$)", name + ".")
        return bool(here and there and here.group(1) != there.group(1))

    assert _offences(library, is_offence) == []


def test_roles_never_import_roles(library):
    """Roles meet only in the plan's pipeline edges; kernel.py alone knows them all."""

    def is_offence(file, name):
        parts = file.module.split(".")
        roles = ROLES.get(parts[2], set()) if len(parts) > 4 and parts[1] == "kernels" else set()
        folder = ".".join(parts[:-1]) + "."
        return (
            parts[-1] in roles
            and name.startswith(folder)
            and name[len(folder) :].split(".")[0] in roles
        )

    assert _offences(library, is_offence) == []


def test_environment_is_read_only_in_env(library):
    """One file lists every variable, so that the docs and the cache key can."""
    offences = [
        f"{file.path}:{node.lineno}"
        for file in library
        if file.module != "fovea.env"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id)
        in ("environ", "environb", "getenv", "getenvb")
    ]
    assert offences == []


def test_no_drawer_modules(library):
    """A file is named by its noun."""
    drawers = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
    assert [file.path for file in library if file.module.split(".")[-1] in drawers] == []
