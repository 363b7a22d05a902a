"""Pictures of mods."""

import subprocess
import sys

import pytest
import torch

from fovea.mods.picture import EXAMPLES, draw, values


@pytest.mark.parametrize("name", ["natten_2d", "gemma2"])
def test_draw_shows_the_values_of_the_example(name: str) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = draw(name)
    (image,) = figure.axes[0].images
    shown = torch.tensor(image.get_array().filled(float("nan")))
    grid = values(EXAMPLES[name])[0, 0]
    assert figure.axes[0].get_title() == EXAMPLES[name].caption
    if EXAMPLES[name].kind == "mask":
        assert torch.equal(shown.bool(), grid)
    else:
        assert torch.equal(shown.isnan(), grid.isinf())
    matplotlib.pyplot.close(figure)


def test_import_of_mods_needs_torch_alone() -> None:
    """torch._dynamo, sympy and matplotlib stay out of the way until someone needs them."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import torch; before = set(sys.modules);"
        "import fovea.mods.picture;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - sys.stdlib_module_names - {'torch'}), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['fovea'] False", done.stdout
