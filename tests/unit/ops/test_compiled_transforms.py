"""torch.func transforms inside torch.compile: an error, or eagerly and right; never compiled."""

import pytest
import torch

import fovea


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs():
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8), (4,))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def loss(q, k, v, slopes):
    return fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * slopes[h]).square().sum()


def test_transform_in_one_graph_raises():
    function = torch.compile(
        lambda *x: torch.func.grad(loss)(*x), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"torch\.func transform inside torch\.compile"):
        function(*inputs())


@pytest.mark.parametrize(("argument", "requires_grad"), [(0, False), (3, True)])
def test_gradient_with_graph_breaks_is_that_of_eager(argument, requires_grad):
    tensors = inputs()
    tensors[argument - 1].requires_grad_(requires_grad)
    gradient = torch.func.grad(loss, argnums=argument)
    found = torch.compile(lambda *x: gradient(*x), backend="eager")(*tensors)
    torch.testing.assert_close(found, gradient(*tensors))


def test_vmap_with_graph_breaks_is_that_of_eager():
    q, k, v, _ = inputs()
    many = torch.stack([q, q + 1, q - 1])

    def attend(x):
        return torch.vmap(lambda one: fovea.attention(one, k, v))(x)

    torch.testing.assert_close(torch.compile(attend, backend="eager")(many), attend(many))
