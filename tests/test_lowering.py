import re

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lowering
from graph_trainer import capture
from lowering import LoweringError

torch.manual_seed(0)
x, y, w = torch.randn(4, 6), torch.rand(4, 6) + 0.5, torch.randn(6, 5)
ids, flags = torch.randint(0, 4, (3, 2)), torch.rand(4, 6) > 0.5

OPS = {  # what it covers: the PyTorch program
    "arithmetic": lambda x, y, w, ids, flags: (x + y, x - 2 * y, 3 - x, x / y, -x, x.abs(), x.sign(), x * True, torch.add(x, y, alpha=3)),
    "integer arithmetic": lambda x, y, w, ids, flags: (ids // 3, ids % 3, (ids - 2) // 3, torch.div(ids - 2, 3, rounding_mode="trunc"), ids / 2),
    "functions": lambda x, y, w, ids, flags: (x.square(), y.sqrt(), y.rsqrt(), y.reciprocal(), x.exp(), y.log(), x.sin(), x.cos(), x.tanh(), x.sigmoid()),
    "powers": lambda x, y, w, ids, flags: (x ** 3, y ** 0.5, y ** x, 2.0 ** x),
    "choices": lambda x, y, w, ids, flags: (torch.minimum(x, y), torch.maximum(x, y), x.clamp(-1, 1), x.clamp(min=0), x.clamp_max(0.5),
                        torch.where(flags, x, y), torch.where(flags, x, 0.0), x.masked_fill(flags, 7.0), torch.lerp(x, y, 0.3)),
    "logic": lambda x, y, w, ids, flags: (x > y, x == x, x != y, x <= 0.5, flags & (x > 0), flags | (x > 0), ~flags, flags.logical_not(), x.isfinite()),
    "shapes": lambda x, y, w, ids, flags: (x.view(2, 12), x.t(), x.transpose(0, 1), x.permute(1, 0), x[None].expand(3, -1, -1), x.unsqueeze(1).squeeze(1),
                       torch.cat([x, y], 1), torch.stack([x, y], 1), x.reshape(-1), x[1:3, ::2], x[:, -1], x[-2:]),
    "pieces": lambda x, y, w, ids, flags: (*x.split(2), *x.split([1, 5], dim=1), *x.unbind(1), *x.chunk(3, dim=-1)),
    "creation": lambda x, y, w, ids, flags: (torch.full((2, 2), 3), torch.zeros(2), torch.ones(2, dtype=torch.int32), torch.zeros_like(x), torch.ones_like(ids),
                         torch.full_like(x, 2), torch.arange(5), torch.arange(2, 9, 3), torch.arange(3.0), x.new_zeros(2)),
    "matmuls": lambda x, y, w, ids, flags: (x @ w, torch.bmm(x[None], w[None]), F.linear(x, w.t(), torch.ones(5)), x[0].dot(y[0])),
    "reductions": lambda x, y, w, ids, flags: (x.sum(), x.sum(0), x.sum((0, 1), keepdim=True), x.mean(), x.mean(-1, keepdim=True), x.amax(1), x.argmax(1),
                           flags.any(), x.cumsum(1), flags.sum(), x.bfloat16().sum(0, dtype=torch.float32), torch.stack([x, x * x]).sum(0), torch.stack([x, x * x]).bfloat16().sum(0, True)),
    "indexing": lambda x, y, w, ids, flags: (F.embedding(ids, x), x[ids], x.index_put((ids[:, 0],), y[:3]), x.gather(1, ids[:, :1].expand(3, 2)),
                         torch.zeros(4, 6).scatter_add(0, ids, y[:3, :2]), torch.zeros(4, 6).scatter(1, ids[:, :1], 1.0)),
    "sorting": lambda x, y, w, ids, flags: (*x.topk(3), *x.sort(stable=True), x.argsort(descending=True), *x.topk(2, largest=False)),
    "nn": lambda x, y, w, ids, flags: (x.softmax(-1), x.log_softmax(-1), F.silu(x), F.gelu(x), F.gelu(x, approximate="tanh"), F.one_hot(ids, 4)),
    "traps": lambda x, y, w, ids, flags: (torch.div(-x * 7, 2.0, rounding_mode="trunc"), torch.div(x, y, rounding_mode=None), torch.arange(0, 1, 0.25),
                      *torch.tensor([5, 0, 3], dtype=torch.uint8).topk(2, largest=False), (x / 0 * 0).sign(), torch.tensor([100, 100], dtype=torch.int8).cumsum(0),
                      torch.addmm(torch.ones(4, 5), x, w, beta=2, alpha=3)),
    "dtypes": lambda x, y, w, ids, flags: (x.bfloat16() * torch.tensor(2.0), x.half().float(), x.to(torch.int32), ids.bool(), x.bfloat16() + x),
}


@pytest.mark.parametrize("name", OPS)
def test_the_table_gives_pytorchs_results_shapes_and_dtypes(name):
    """fp32 elementwise functions differ by a few ulp between the two libraries: 1e-5. bf16 results to one of its ulps, 8e-3."""
    inputs = x, y, w, ids, flags
    graph = capture(OPS[name], *inputs)
    got = lowering.lower(graph.gm)(*(jax.numpy.asarray(t.numpy()) for t in inputs))
    for i, (g, want) in enumerate(zip(got, OPS[name](*inputs), strict=True)):
        assert g.shape == tuple(want.shape) and g.dtype == lowering.DTYPES[want.dtype], (i, g.dtype, want.dtype)
        np.testing.assert_allclose(np.asarray(g, np.float32), want.float().numpy(), rtol=8e-3 if want.dtype == torch.bfloat16 else 1e-5,
                                   atol=1e-6, err_msg=f"output {i}")


GRADIENTS = {
    "elementwise": lambda x: (x.exp() * x.sin() / (x * x + 1)).sum() + x.tanh().sigmoid().sum() + x.abs().sqrt().sum(),
    "pieces": lambda x: (x[1:, ::2].square().sum() + x[:, -1].sum() * x.chunk(2, -1)[0].sum() + torch.stack([x, x]).cumsum(0).sum()),
    "nn": lambda x: (x.softmax(-1) * x.log_softmax(0)).sum() + (F.silu(x) * F.gelu(x) * F.gelu(x, approximate="tanh")).sum(),
    "embedding": lambda x: ((F.embedding(ids, x, padding_idx=1) ** 2).sum() + (F.embedding(ids, x, scale_grad_by_freq=True) ** 3).sum()),
    "indexing": lambda x: (F.embedding(ids, x) ** 2).sum() + (x[ids] ** 3).sum() + x.gather(1, ids).sum() + x.topk(2)[0].square().sum(),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_table_gives_pytorchs_gradients(name):
    f = lambda x: torch.autograd.grad(GRADIENTS[name](x.requires_grad_()), x)
    (got,) = lowering.lower(capture(f, x.clone()).gm)(x.detach().numpy())
    np.testing.assert_allclose(got, f(x.clone())[0].numpy(), rtol=1e-5, atol=1e-5)


class Cholesky(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.cholesky(x @ x.t())


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_bf16_to_fp32_is_computed_in_fp32(name):
    """Accelerators' fused form, bf16 in and fp32 out; the CPU cannot trace it. bf16 arithmetic would be off by 4e-3."""
    half = (x * 4).bfloat16()
    array = jax.numpy.asarray(half.float().numpy(), jax.numpy.bfloat16)
    got = lowering.TABLE[f"aten._{name}.default"](array, -1, True)
    np.testing.assert_allclose(got, getattr(half.float(), name)(-1).numpy(), rtol=1e-5)


def test_an_op_without_a_lowering_is_named_with_its_line_and_what_to_add():
    graph = capture(Cholesky(), x)
    with pytest.raises(LoweringError, match=r'no lowering for aten.linalg_cholesky_ex.default at test_lowering.py:\d+ Cholesky.forward: add a line'):
        lowering.lower(graph.gm)


WIDE, HALF = torch.tensor([-2**40]), torch.tensor([0.5], dtype=torch.bfloat16)


def test_a_constant_beyond_int32_raises_instead_of_wrapping():
    for f, named in ((lambda: torch.full((2,), 2**40), "aten.full.default"), (lambda: WIDE + 1, "constant")):
        with pytest.raises(LoweringError, match=f"{named}.*does not fit int32"):
            lowering.lower(capture(f).gm)()


def test_a_constant_in_bfloat16_is_taken_as_it_is():
    (out,) = lowering.lower(capture(lambda x: x * HALF, x).gm)(x.numpy())
    np.testing.assert_array_equal(out, x.numpy() * 0.5)


def test_a_lowering_of_the_wrong_shape_is_caught_while_lowering():
    graph = capture(lambda x: x.exp(), x)
    with pytest.raises(LoweringError, match=r"gave \(6, 4\), PyTorch gives \(4, 6\)"):
        lowering.lower(graph.gm, {"aten.exp.default": lambda x: x.T})(x.numpy())


def test_hlo_names_the_models_lines():
    class Exp(torch.nn.Module):
        def forward(self, x):
            return x.exp()

    text = jax.jit(lowering.lower(capture(Exp(), x).gm)).lower(x.numpy()).as_text(debug_info=True)
    assert re.search(r"test_lowering.py:\d+ test_hlo_names_the_models_lines/aten.exp.default/exp", text)
