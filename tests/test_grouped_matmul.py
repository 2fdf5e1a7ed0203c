"""Grouped matmuls: interpreted Pallas and the XLA reference against PyTorch's autograd over a loop of experts; JAX's
ragged_dot and megablox; and the real TPU compiler at the recipes' shapes."""

import functools
import os

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # only compiles: may share the machine with another libtpu

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from jax import lax
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu import megablox
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from torch.fx.experimental.proxy_tensor import make_fx

import kernels
from kernels import GroupedBlocks, grouped_matmul, paired_grouped_matmul

OPS = torch.ops.tpu
GROUPED, GROUPED_BACKWARD = OPS.grouped_matmul.default, OPS.grouped_matmul_backward.default
PAIRED, PAIRED_BACKWARD = OPS.paired_grouped_matmul.default, OPS.paired_grouped_matmul_backward.default
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
cases = functools.partial(settings, deadline=None, derandomize=True, phases=[Phase.generate],
                          suppress_health_check=list(HealthCheck))


@functools.cache
def layer(kind, blocks):
    """Forward and backward of both ops, compiled once per kind and blocks."""
    table = kernels.lowerings(kind, grouped_blocks=blocks)

    def run(x, gate, up, g, sizes):
        y = table[GROUPED](x, gate, sizes)
        grads = table[GROUPED_BACKWARD](g, x, gate, sizes)
        h, a, b = table[PAIRED](x, gate, up, sizes)
        return y, *grads, h, *table[PAIRED_BACKWARD](g, x, gate, up, sizes, a, b)

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


NAMES = "y", "dx", "dw", "h", "paired dx", "dgate", "dup"


def looped(x, gate, up, g, sizes):
    """The same by autograd in fp32, one expert after the other."""
    inputs = [t.float().requires_grad_() for t in (x, gate, up)]
    x, gate, up = inputs
    xs = x[:sum(sizes)].split(sizes)

    def rows(parts):
        return F.pad(torch.cat(parts), (0, 0, 0, len(x) - sum(sizes)))

    y = rows([x @ w for x, w in zip(xs, gate)])
    h = rows([F.silu(x @ w) * (x @ u) for x, w, u in zip(xs, gate, up)])
    return (y, *torch.autograd.grad(y, (x, gate), g.float(), retain_graph=True),
            h, *torch.autograd.grad(h, inputs, g.float(), retain_graph=True))


def to_jax(x):
    return jnp.asarray(x.float().numpy(), jnp.bfloat16) if x.dtype == torch.bfloat16 else jnp.asarray(x.numpy())


def check(kind, sizes, n, D, F_, blocks, dtype=torch.float32, seed=0):
    rng = np.random.default_rng(seed)
    E = len(sizes)
    tensors = [torch.from_numpy(rng.normal(size=s)).to(dtype) for s in ((n, D), (E, D, F_), (E, D, F_), (n, F_))]
    got = layer(kind, blocks)(*(to_jax(t) for t in tensors), jnp.asarray(sizes, jnp.int32))
    for name, a, want in zip(NAMES, got, looped(*tensors, sizes)):
        a, want = np.array(a.astype(jnp.float32), np.float64), want.double().detach().numpy()
        assert np.isfinite(a).all(), name
        error = np.linalg.norm(a - want) / max(np.linalg.norm(want), 1e-6)
        assert error <= (1e-5 if dtype == torch.float32 else 2e-2), f"{name}: relative error {error:.1e}, sizes {sizes}"
        if name in ("y", "h", "dx", "paired dx"):
            assert not a[sum(sizes):].any(), f"{name}: rows behind the last group"


def split(rng, n, E):
    """n rows among E groups: evenly, with empty ones, or all to one."""
    share = rng.choice([rng.dirichlet(np.ones(E)), rng.dirichlet(np.full(E, 0.2)), np.eye(E)[rng.integers(E)]], axis=0)
    return rng.multinomial(n, share).tolist()


@cases(max_examples=12)
@given(st.data())
def test_interpreted_kernels_and_reference_equal_a_loop_over_experts(data):
    draw = data.draw
    n, E = draw(st.sampled_from([16, 40, 64, 75])), draw(st.integers(1, 5))
    D, F_ = draw(st.sampled_from([(8, 24), (24, 8), (256, 384), (128, 256)]))
    cut = lambda size: 128 if size % 128 == 0 else size  # noqa: E731
    rows = [draw(st.sampled_from([32, 64][:1 + (n > 32)])) for _ in range(3)]
    blocks = GroupedBlocks(rows[0], draw(st.sampled_from([cut(F_), F_])), rows[1], cut(D), rows[2], cut(D), cut(F_))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
    for seed in range(20 if D < 100 else 4):  # other numbers and group sizes, same program
        rng = np.random.default_rng(seed)
        sizes = split(rng, rng.choice([n, n, n // 2]), E)
        check("interpret", sizes, n, D, F_, blocks, dtype, seed)
        check("reference", sizes, n, D, F_, None, dtype, seed)


@pytest.mark.parametrize("sizes", [
    [0, 0, 0], [64, 0, 0], [0, 0, 64], [0, 31, 0], [32, 0, 32], [1, 62, 1], [32, 0, 0],
    [16, 16, 32], [48, 0, 16], [16, 0, 0], [17, 15, 31], [15, 18, 31],  # borders at or beside the half of a tile of 32
    [3, 7, 30], [20, 6, 6], [40, 4, 0]])  # less than half a tile, in one half or across it; then nobody's rows
def test_empty_groups_one_group_with_everything_and_borders_on_tiles_and_halves(sizes):
    check("interpret", sizes, 64, 24, 40, GroupedBlocks(32, 40, 32, 24, 32, 24, 40))
    check("reference", sizes, 64, 24, 40, None)


def test_what_lies_behind_the_last_group_does_not_matter():
    blocks, sizes = GroupedBlocks(32, 16, 32, 16, 32, 16, 16), jnp.array([10, 9], jnp.int32)
    x, w = np.ones((40, 16), np.float32), np.ones((2, 16, 16), np.float32)
    broken = x.copy()
    broken[19:] = np.nan
    for kind in ("interpret", "reference"):
        want = layer(kind, blocks)(x, w, w, x, sizes)
        for a, b in zip(layer(kind, blocks)(broken, w, w, broken, sizes), want):
            np.testing.assert_array_equal(a, b)


def test_they_equal_ragged_dot_and_megablox():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(256, 128)).astype(np.float32), rng.normal(size=(3, 128, 256)).astype(np.float32)
    sizes = jnp.array([100, 0, 156], jnp.int32)
    table = kernels.lowerings("interpret", grouped_blocks=GroupedBlocks(128, 128, 128, 128, 128, 128, 128))
    got = table[GROUPED](jnp.array(x), jnp.array(w), sizes)
    np.testing.assert_allclose(got, lax.ragged_dot(x, w, sizes), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got, megablox.gmm(x, w, sizes, tiling=(128, 128, 128), interpret=True), rtol=1e-4, atol=1e-4)


def test_a_tile_is_visited_once_for_each_group_in_it():
    n_visits, (group, tile, begin, end, part) = kernels.visits(jnp.array([20, 0, 12, 8]), 48, 16, every_group=False)
    visits = [tuple(int(x[i]) for x in (group, tile, begin, end)) for i in range(int(n_visits))]
    assert visits == [(0, 0, 0, 20), (0, 1, -16, 4), (2, 1, 4, 16), (3, 2, 0, 8), (4, 2, 8, 16)]
    parts = part[:len(visits)].tolist()  # the third group lies in both halves
    assert parts == [kernels.WHOLE, kernels.LOWER, kernels.WHOLE, kernels.LOWER, kernels.NOTHING]


def test_ops_pass_opcheck():
    x, w = torch.randn(12, 8, requires_grad=True), torch.randn(3, 8, 6, requires_grad=True)
    sizes = torch.tensor([4, 0, 7], dtype=torch.int32)
    torch.library.opcheck(GROUPED, (x, w, sizes))
    torch.library.opcheck(PAIRED, (x, w, torch.randn(3, 8, 6, requires_grad=True), sizes))


def test_make_fx_sees_one_node_forward_and_one_backward():
    def step(x, gate, up, sizes):
        return torch.autograd.grad(paired_grouped_matmul(x, gate, up, sizes).sum(), (x, gate, up))

    args = torch.randn(12, 8, requires_grad=True), *torch.randn(2, 3, 8, 6, requires_grad=True)
    graph = make_fx(step, tracing_mode="fake")(*args, torch.tensor([4, 0, 7], dtype=torch.int32)).graph
    assert sum(str(n.target).startswith("tpu.") for n in graph.nodes) == 2


def test_wrong_shapes_dtypes_and_blocks_raise_before_compiling():
    x, w, sizes = torch.randn(16, 8), torch.randn(3, 8, 6), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"grouped_matmul: x \(16, 8\), weights \[\(3, 6, 8\)\]"):
        grouped_matmul(x, w.mT, sizes)
    with pytest.raises(ValueError, match=r"group_sizes \(2,\)"):
        paired_grouped_matmul(x, w, w, sizes[:2])

    def multiply(D, F_, blocks, dtypes=(jnp.bfloat16, jnp.bfloat16)):
        x, w = (jax.ShapeDtypeStruct(s, d) for s, d in zip(((4096, D), (8, D, F_)), dtypes))
        table = kernels.lowerings("pallas", grouped_blocks=blocks)
        jax.eval_shape(lambda x, w, s: table[GROUPED](x, w, s), x, w, jax.ShapeDtypeStruct((8,), jnp.int32))

    with pytest.raises(ValueError, match=r"columns=512 does not fit: .*, one of 768, 384"):
        multiply(2048, 768, GroupedBlocks(256, 512, 256, 2048, 256, 1024, 768))
    with pytest.raises(ValueError, match=r"rows=100 does not fit: .*rows: 32"):
        multiply(2048, 768, GroupedBlocks(256, 768, 100, 2048, 256, 1024, 768))
    with pytest.raises(ValueError, match=r"MiB of VMEM"):
        multiply(8192, 8192, GroupedBlocks(256, 8192, 256, 128, 256, 128, 128))
    with pytest.raises(ValueError, match=r"x is bfloat16 and the weights float32"):
        multiply(2048, 768, None, (jnp.bfloat16, jnp.float32))


@pytest.mark.parametrize("chip, D, F_", [("v5e", 2048, 768), ("v5p", 2048, 768), ("v6e", 2048, 768), ("tpu7x", 2048, 768),
                                         ("tpu7x", 4096, 1536)])
def test_a_layer_of_experts_compiles_at_the_recipes_shapes(chip, D, F_):
    E, n = 128, 32768
    table = kernels.lowerings("pallas", chip=chip)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    mesh = Mesh(np.array(devices), ("fsdp",))

    def experts(g, x, gate, up, down, sizes):
        h, a, b = table[PAIRED](x, gate, up, sizes)
        dh, ddown = table[GROUPED_BACKWARD](g, h, down, sizes)
        return table[GROUPED](h, down, sizes), ddown, *table[PAIRED_BACKWARD](dh, x, gate, up, sizes, a, b)

    args = [(n, D), (n, D), (E, D, F_), (E, D, F_), (E, F_, D)]
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, P())) for s in args]
    sizes = jax.ShapeDtypeStruct((E,), jnp.int32, sharding=NamedSharding(mesh, P()))
    fn = jax.shard_map(experts, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    compiled = jax.jit(fn).lower(*args, sizes).compile()
    # a, b, h, da, db and dh; no copy of a weight, transposed or padded
    assert compiled.memory_analysis().temp_size_in_bytes < 6.5 * n * F_ * 2
