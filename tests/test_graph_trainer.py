import pytest
import torch
import torch.nn as nn

import graph_trainer
import lowering
from graph_trainer import CaptureError, ScanLayers, capture


def test_a_branch_on_a_tensors_value_is_refused_by_its_line():
    def f(x):
        if x.sum() > 0:  # the line
            return x
        return -x

    with pytest.raises(CaptureError, match=r"looks at a tensor's value.*test_graph_trainer.py:\d+: if x.sum\(\) > 0"):
        capture(f, torch.ones(3))


def test_an_in_place_op_on_fresh_memory_becomes_functional():
    def f(x):
        y = x * 2
        y.add_(1)
        return y * y

    graph = capture(f, torch.ones(3))
    (out,) = lowering.lower(graph.gm)(torch.arange(3.0).numpy())
    assert out.tolist() == [1, 9, 25]


CONSTANT = torch.zeros(3)
ALIASED = {
    "an input": lambda x: x.add_(1),
    "a view": lambda x: (x * 2)[0].add_(1),
    "memory that a view reads": lambda x: (y := x * 2, v := y[0], y.add_(1), v)[-1],
    "a piece of a split": lambda x: (y := x * 2, y.chunk(3)[0].add_(1), y)[-1],
    "memory that a piece reads": lambda x: (y := x * 2, v := y.chunk(3)[0], y.add_(1), v)[-1],
    "a constant": lambda x: x + CONSTANT.add_(1),
}


@pytest.mark.parametrize("f", ALIASED.values(), ids=ALIASED)
def test_an_in_place_op_that_something_aliases_is_refused(f):
    with pytest.raises(CaptureError, match="in-place op"):
        capture(f, torch.ones(3))


def test_an_output_that_aliases_an_input_is_its_own_value():
    graph = capture(lambda x: (x.view(4), x), torch.ones(2, 2))
    a, b = lowering.lower(graph.gm)(torch.ones(2, 2).numpy())
    assert a.shape == (4,) and b.shape == (2, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(4, 4))

    def forward(self, x, scale):
        y = torch.tanh(x @ self.w) * scale
        return x + y, y.sum()


def test_the_loop_op_is_bit_identical_to_the_python_loop():
    """The loop's eager form, forward and the cut-out recomputing backward, against autograd over a Python loop."""
    torch.manual_seed(0)
    w, x, scale = torch.randn(5, 4, 4), torch.randn(3, 4), torch.tensor(0.5)

    def python(w, x):
        total = 0
        for i in range(5):
            y = torch.tanh(x @ w[i]) * scale
            x, total = x + y, total + y.sum() * i
        return (x * x).sum() + total

    with torch.device("meta"):
        layers = nn.ModuleList(Layer() for _ in range(5))
    scan = ScanLayers(layers)

    def looped(w, x):
        with torch.nn.utils.stateless._reparametrize_module(scan, {"stack.w": w}):
            x, sums = scan(x, scale)
        return (x * x).sum() + (sums * torch.arange(5)).sum()

    def grads(f):
        return lambda w, x: torch.autograd.grad(f(w.requires_grad_(), x.requires_grad_()), (w, x))

    graph = capture(grads(looped), w, x)
    got = graph.gm(w.detach(), x.detach())
    want = grads(python)(w, x)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    loops = [n for n in graph.gm.graph.nodes if n.target is graph_trainer.loop]
    assert [n.args[-1] for n in loops] == [False, True]  # forward, then backward from the last layer
