"""Splash attention and fused linear cross-entropy: interpreted Pallas against the references, PyTorch's own
functions and JAX's splash attention; and the real TPU compiler at real shapes."""

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
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from torch.fx.experimental.proxy_tensor import make_fx

import kernels
from kernels import CrossEntropyBlocks, SplashBlocks, linear_cross_entropy, splash_attention

OPS = torch.ops.tpu
PALLAS = kernels.lowerings("pallas")
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
cases = functools.partial(settings, deadline=None, derandomize=True, phases=[Phase.generate],
                          suppress_health_check=list(HealthCheck))


def to_jax(x):
    if not isinstance(x, torch.Tensor):
        return x
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.float().numpy(), jnp.bfloat16)
    return jnp.asarray(x.numpy(), jnp.int32 if x.dtype == torch.int64 else None)


def interpreted(op, *args):
    """The Pallas kernel of an op, interpreted on torch tensors; compiled once per static arguments. The last: its blocks."""
    arrays = [to_jax(a) for a in args if isinstance(a, torch.Tensor)]
    statics = tuple(None if isinstance(a, torch.Tensor) else a for a in args)
    tensors = tuple(isinstance(a, torch.Tensor) for a in args)
    outs = jitted(op, statics, tensors)(*arrays)
    return [torch.from_numpy(np.array(o.astype(jnp.float32))) for o in outs]


@functools.cache
def jitted(op, statics, tensors):
    def run(*arrays):
        arrays = iter(arrays)
        *args, blocks = (next(arrays) if t else s for t, s in zip(tensors, statics))
        name = "splash_blocks" if isinstance(blocks, SplashBlocks) else "ce_blocks"
        return kernels.lowerings("interpret", **{name: blocks})[op](*args)
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def assert_close(got, want, tolerance, what):
    got, want = got.double(), want.double()
    assert torch.isfinite(got).all(), what
    error = (got - want).norm() / want.norm().clamp(min=1e-6)
    assert error <= tolerance, f"{what}: relative error {error:.1e}"


# ------------------------------------------------------------------------------------- splash attention


def attention_case(rng, B, K, G, T, S, D, dtype, documents):
    r = lambda *shape: torch.from_numpy(rng.normal(size=shape)).to(dtype)  # noqa: E731
    ids = None
    if documents == "packed":
        ids = torch.from_numpy(np.sort(rng.integers(0, 4, (B, T)), axis=1)).int()
    elif documents == "scattered":
        ids = torch.from_numpy(rng.integers(0, 3, (B, T))).int()
    return r(B, K * G, T, D), r(B, K, S, D), r(B, K, S, D), ids, r(B, K * G, T, D)


def check_attention(q, k, v, ids, g, causal, window, softcap, blocks):
    tolerance = 1e-5 if q.dtype == torch.float32 else 2e-2
    options = (causal, window, softcap, 0.3)
    out, lse = interpreted(OPS.splash_attention.default, q, k, v, ids, *options, blocks)
    wide = [x.float() for x in (q, k, v)]
    want_out, want_lse = OPS.splash_attention(*wide, ids, *options)
    assert_close(out, want_out, tolerance, "out")
    nothing = want_lse == torch.inf
    assert torch.equal(lse == torch.inf, nothing) and not out[nothing].any()
    assert_close(lse[~nothing], want_lse[~nothing], tolerance, "lse")
    grads = interpreted(OPS.splash_attention_backward.default, g, q, k, v, ids, out.to(q.dtype), lse, *options, blocks)
    wants = OPS.splash_attention_backward(g.float(), *wide, ids, want_out, want_lse, *options)
    for name, grad, want in zip(("dq", "dk", "dv"), grads, wants):
        assert_close(grad, want, tolerance, name)


@cases(max_examples=32)
@given(st.data())
def test_attention_equals_its_reference_over_random_shapes_and_masks(data):
    draw = data.draw
    block_q, block_kv = draw(st.sampled_from([8, 16])), draw(st.sampled_from([8, 16]))
    causal, window = draw(st.booleans()), draw(st.sampled_from([0, 0, 3, 11, 30]))
    documents = draw(st.sampled_from([None, "packed", "packed", "scattered"]))
    T = 16 * draw(st.integers(1, 3))
    S = T if documents else 16 * draw(st.integers(1, 3))
    blocks = SplashBlocks(block_q, block_kv, draw(st.sampled_from([8, block_q])), 8, block_q, block_kv, block_q, 8,
                          draw(st.sampled_from([16, 4096])))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
    B, K, G, D = (draw(st.integers(1, 2)) for _ in range(4))
    softcap = draw(st.sampled_from([0.0, 0.0, 2.0]))
    for seed in range(5):  # other numbers and documents, same program
        rng = np.random.default_rng(seed)
        check_attention(*attention_case(rng, B, K, G, T, S, 8 * D, dtype, documents), causal, window, softcap, blocks)


def test_queries_that_see_nothing_give_zeros_and_no_nan():
    q, k, v, _, g = attention_case(np.random.default_rng(0), 1, 1, 1, 32, 16, 8, torch.float32, None)
    blocks = SplashBlocks(8, 8, 8, 8, 8, 8, 8, 8)
    check_attention(q, k, v, None, g, True, 4, 0.0, blocks)  # queries 19.. see keys 16.., which are not there
    out, _ = interpreted(OPS.splash_attention.default, q, k, v, None, True, 4, 0.0, 0.3, blocks)
    assert not out[:, :, 19:].any() and out[:, :, :19].any()


@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_scaled_dot_product_attention(causal):
    q, k, v, _, g = attention_case(np.random.default_rng(0), 2, 2, 2, 32, 32, 16, torch.float32, None)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    wants = torch.autograd.grad(want, inputs, g)
    got = splash_attention(q, k, v, causal=causal)
    assert_close(got, want, 1e-5, "reference")
    for a, b in zip(torch.autograd.grad(got, inputs, g), wants):
        assert_close(a, b, 1e-5, "reference's gradient")
    q, k, v = (x.detach() for x in inputs)
    options = (causal, 0, 0.0, 0.25, SplashBlocks(16, 8, 8, 8, 16, 8, 8, 8, 64))
    out, lse = interpreted(OPS.splash_attention.default, q, k, v, None, *options)
    assert_close(out, want, 1e-5, "kernel")
    for a, b in zip(interpreted(OPS.splash_attention_backward.default, g, q, k, v, None, out, lse, *options), wants):
        assert_close(a, b, 1e-5, "kernel's gradient")


@pytest.mark.parametrize("window", [0, 128])
def test_attention_equals_jaxs_own_splash_attention(window):
    T, H = 256, 2
    q, k, v, ids, g = attention_case(np.random.default_rng(0), 1, 1, H, T, T, 128, torch.float32, "packed")
    masks = splash_attention_mask.CausalMask((T, T))
    if window:
        masks = splash_attention_mask.LocalMask((T, T), (window - 1, 0), 0)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=128, block_kv=128, block_q_dkv=128, block_kv_dkv=128, block_q_dq=128, block_kv_dq=128)
    theirs = splash_attention_kernel.make_splash_mqa_single_device(
        splash_attention_mask.MultiHeadMask([masks] * H), block_sizes=sizes, interpret=True)
    segments = splash_attention_kernel.SegmentIds(to_jax(ids[0]), to_jax(ids[0]))
    scale = 128 ** -0.5
    want, vjp = jax.vjp(lambda q, k, v: theirs(q * scale, k, v, segments), *(to_jax(x) for x in (q[0], k[0, 0], v[0, 0])))
    options = (True, window, 0.0, scale, SplashBlocks(*[128] * 8, 256))
    out, lse = interpreted(OPS.splash_attention.default, q, k, v, ids, *options)
    assert_close(out[0], torch.from_numpy(np.array(want)), 1e-5, "out")
    grads = interpreted(OPS.splash_attention_backward.default, g, q, k, v, ids, out, lse, *options)
    for grad, want in zip(grads, vjp(to_jax(g[0]))):
        assert_close(grad.reshape(want.shape), torch.from_numpy(np.array(want)), 1e-5, "gradient")


def test_blocks_that_the_mask_empties_are_not_visited():
    steps = lambda **mask: kernels.splash_steps(1, 4096, block_q=256, block_kv=256, keys=range(4096),  # noqa: E731
                                                **{"causal": True, "window": 0, "segment_ids": None} | mask)
    assert len(steps()[0]) == 16 * 17 // 2
    assert len(steps(window=256)[0]) == 16 + 15
    assert len(steps(causal=False)[0]) == 256
    documents = jnp.arange(4096)[None] // 512  # 8 of 2 × 2 blocks, 3 of them causal
    q_of, kv_of, flags = steps(segment_ids=documents)
    working = np.array(flags) & (kernels.PARTIAL | kernels.FULL) > 0
    assert working.sum() == 8 * 3
    fetches = 1 + (np.diff(np.array(kv_of)) != 0).sum()
    assert fetches <= working.sum()  # a step without work fetches nothing


# --------------------------------------------------------------------------- fused linear cross-entropy


def loss_case(seed, N, D, V, dtype):
    rng = np.random.default_rng(seed)
    targets = torch.from_numpy(np.where(rng.random(N) < 0.3, -100, rng.integers(0, V, N)))
    x, w = (torch.from_numpy(rng.normal(size=s)).to(dtype) for s in ((N, D), (V, D)))
    return x, w, targets, torch.from_numpy(rng.normal(size=N)).float()


@cases(max_examples=20)
@given(st.data())
def test_cross_entropy_equals_its_reference_over_random_shapes(data):
    draw = data.draw
    V = draw(st.sampled_from([5, 31, 32, 64, 257]))
    N = draw(st.one_of(st.integers(1, 40), st.just(min(V, 64))))  # N == V: no shape tells which is which
    D = 8 * draw(st.integers(1, 3))
    sizes = [draw(st.sampled_from([8, 16, 32])) for _ in range(6)]
    widths = [draw(st.sampled_from([8, D])) for _ in range(2)]  # of up to three pieces
    blocks = CrossEntropyBlocks(*sizes[:4], widths[0], *sizes[4:], widths[1])
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
    options = (-100, draw(st.sampled_from([0.0, 1e-2])), draw(st.sampled_from([1.0, 0.2])),
               draw(st.sampled_from([0.0, 5.0])))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for seed in range(5):
        x, w, targets, g = loss_case(seed, N, D, V, dtype)
        loss, lse = interpreted(OPS.linear_cross_entropy.default, x, w, targets, *options, blocks)
        want_loss, want_lse = OPS.linear_cross_entropy(x.float(), w.float(), targets, *options)
        assert_close(loss, want_loss, tolerance, "loss")
        assert_close(lse, want_lse, tolerance, "lse")
        assert not loss[targets == -100].any()
        grads = interpreted(OPS.linear_cross_entropy_backward.default, g, x, w, targets, lse, *options, blocks)
        wants = OPS.linear_cross_entropy_backward(g, x.float(), w.float(), targets, want_lse, *options)
        for name, grad, want in zip(("dx", "dw"), grads, wants):
            assert_close(grad, want, tolerance, name)


def test_cross_entropy_equals_torchs_with_z_loss_multiplier_and_softcap():
    x, w, targets, g = loss_case(0, 24, 16, 257, torch.float32)
    inputs = [x.requires_grad_(), w.requires_grad_()]
    logits = 20 * torch.tanh(0.2 * F.linear(x, w) / 20)
    want = F.cross_entropy(logits, targets, reduction="none")
    want = want + torch.where(targets >= 0, 1e-2 * logits.logsumexp(-1) ** 2, 0)
    wants = torch.autograd.grad(want, inputs, g)
    got = linear_cross_entropy(x, w, targets, z_loss=1e-2, multiplier=0.2, softcap=20.0)
    assert_close(got, want, 1e-5, "reference")
    for a, b in zip(torch.autograd.grad(got, inputs, g), wants):
        assert_close(a, b, 1e-5, "reference's gradient")
    x, w = x.detach(), w.detach()
    options = (-100, 1e-2, 0.2, 20.0, CrossEntropyBlocks(8, 32, 8, 32, 8, 16, 64, 16))
    loss, lse = interpreted(OPS.linear_cross_entropy.default, x, w, targets, *options)
    assert_close(loss, want, 1e-5, "kernel")
    for a, b in zip(interpreted(OPS.linear_cross_entropy_backward.default, g, x, w, targets, lse, *options), wants):
        assert_close(a, b, 1e-5, "kernel's gradient")


# ------------------------------------------------------------------------------- as PyTorch custom ops


def test_rotate_half_and_its_gradient_are_exact_in_torch_and_as_a_product_in_jax():
    def plain(x):
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)

    x, g = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 3, 5, 8)
    assert torch.equal(kernels.rotate_half(x), plain(x))
    assert torch.equal(torch.autograd.grad(kernels.rotate_half(x), x, g)[0], torch.autograd.grad(plain(x), x, g)[0])
    for kind in ("reference", "interpret"):
        for dtype in (torch.float32, torch.bfloat16):
            y = kernels.lowerings(kind)[OPS.rotate_half.default](to_jax(x.detach().to(dtype)))
            assert y.dtype == to_jax(torch.zeros(1, dtype=dtype)).dtype
            assert np.array_equal(np.asarray(y, np.float32), plain(x.detach().to(dtype)).float().numpy())


def test_ops_pass_opcheck():
    r = lambda *shape: torch.randn(shape, requires_grad=True)  # noqa: E731
    ids = torch.arange(16).repeat(2, 1).int() // 5
    torch.library.opcheck(OPS.rotate_half.default, (r(2, 3, 5, 8),))
    torch.library.opcheck(OPS.splash_attention.default, (r(2, 4, 16, 8), r(2, 2, 16, 8), r(2, 2, 16, 8), ids, True, 3, 2.0,
                                                         0.3))
    torch.library.opcheck(OPS.linear_cross_entropy.default, (r(12, 8), r(33, 8), torch.arange(12), -100, 0.1, 0.5, 5.0))


def test_make_fx_sees_one_node_forward_and_one_backward():
    def attention(q, k, v):
        return torch.autograd.grad(splash_attention(q, k, v).sum(), (q, k, v))

    def loss(x, w, targets):
        return torch.autograd.grad(linear_cross_entropy(x, w, targets).sum(), (x, w))

    r = lambda *shape: torch.randn(shape, requires_grad=True)  # noqa: E731
    for fn, args in ((attention, (r(1, 2, 8, 8), r(1, 1, 8, 8), r(1, 1, 8, 8))), (loss, (r(8, 8), r(9, 8), torch.arange(8)))):
        graph = make_fx(fn, tracing_mode="fake")(*args).graph
        graph.eliminate_dead_code()
        ours = [n for n in graph.nodes if str(n.target).startswith("tpu.")]
        others = {str(n.target) for n in graph.nodes if n.op == "call_function"} - {str(n.target) for n in ours}
        assert len(ours) == 2
        # The sum, its gradient and what autograd wraps around any op; no mathematics of attention or loss.
        assert others <= {"<built-in function getitem>", "aten.sum.default", "aten.detach.default", "aten.expand.default",
                          "aten.ones_like.default"}


def test_a_width_that_128_does_not_divide_is_not_cut():
    x, w = (jax.ShapeDtypeStruct((n, 8200), jnp.bfloat16) for n in (512, 1000))
    assert kernels.fit_blocks(CrossEntropyBlocks, None, "linear_cross_entropy", "tpu7x", x, w).dx_width == 8200
    with pytest.raises(kernels.KernelError, match="dx_width=8192 does not fit"):
        kernels.fit_blocks(CrossEntropyBlocks, CrossEntropyBlocks(), "linear_cross_entropy", "tpu7x", x, w)


def test_wrong_shapes_dtypes_and_blocks_raise_before_compiling():
    r = torch.randn
    q, k = r(1, 3, 16, 8), r(1, 2, 16, 8)
    with pytest.raises(ValueError, match=r"K dividing H"):
        splash_attention(q, k, k)
    with pytest.raises(ValueError, match=r"one floating dtype"):
        splash_attention(q, k[:, :1], k[:, :1].bfloat16())
    with pytest.raises(ValueError, match=r"segment_ids \(1, 8\) .*with T=16"):
        splash_attention(q, k[:, :1], k[:, :1], torch.zeros(1, 8).int())
    with pytest.raises(ValueError, match=r"weight \(9, 7\)"):
        linear_cross_entropy(r(4, 8), r(9, 7), torch.arange(4))
    with pytest.raises(ValueError, match="kernels must be"):
        kernels.lowerings("fast")

    def attend(T, D, blocks):
        x = jax.ShapeDtypeStruct((1, 1, T, D), jnp.bfloat16)
        op = kernels.lowerings("pallas", splash_blocks=blocks)[OPS.splash_attention.default]
        jax.eval_shape(lambda q, k, v: op(q, k, v, None, True, 0, 0.0, 1.0), x, x, x)

    with pytest.raises(ValueError, match=r"q=1024 does not fit: .* one of 1536, 768, 512, 384"):
        attend(1536, 128, SplashBlocks())
    with pytest.raises(ValueError, match=r"q=64 does not fit: want a multiple of 128"):
        attend(1024, 128, SplashBlocks(q=64))
    with pytest.raises(ValueError, match=r"forward takes .* MiB of VMEM, tpu7x has 56 MiB for it"):
        attend(32768, 256, SplashBlocks(q=16384, kv=16384))

    def loss(D, blocks):
        x, w = (jax.ShapeDtypeStruct((n, D), jnp.bfloat16) for n in (4096, 128256))
        op = kernels.lowerings("pallas", ce_blocks=blocks)[OPS.linear_cross_entropy.default]
        jax.eval_shape(lambda x, w, t: op(x, w, t, -100, 0.0, 1.0, 0.0), x, w, jax.ShapeDtypeStruct((4096,), jnp.int32))

    with pytest.raises(ValueError, match=r"tokens=100 does not fit"):
        loss(4096, CrossEntropyBlocks(tokens=100))
    with pytest.raises(ValueError, match=r"CrossEntropyBlocks\(tokens=4096, .*MiB of VMEM"):
        loss(16384, CrossEntropyBlocks(tokens=4096))


# ---------------------------------------------------------------------------------- the TPU's compiler


def tpu_compile(fn, args, chip):
    """fn compiled for one device of a chip's topology. args: (shape, dtype) pairs."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), P())
    return jax.jit(fn).lower(*(jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in args)).compile()


def attention_step(table, window=0, softcap=0.0, causal=True):
    def step(q, k, v, g, *ids):
        ids, options = ids[0] if ids else None, (causal, window, softcap, q.shape[-1] ** -0.5)
        out, lse = table[OPS.splash_attention.default](q, k, v, ids, *options)
        return out, table[OPS.splash_attention_backward.default](g, q, k, v, ids, out, lse, *options)
    return step


def attention_args(B, H, K, T, D, ids=False):
    args = [((B, n, T, D), jnp.bfloat16) for n in (H, K, K, H)]
    return args + [((B, T), jnp.int32)] if ids else args


@pytest.mark.parametrize("chip", CHIPS)
def test_attention_compiles_at_the_recipes_shapes(chip):
    # Muse Glimmer's, packed documents in a window: all that a mask can hold, so the largest program.
    tpu_compile(attention_step(PALLAS, window=2048), attention_args(1, 32, 2, 8192, 128, ids=True), chip)


def test_attention_compiles_without_a_mask_and_at_head_dimension_64():
    tpu_compile(attention_step(PALLAS, causal=False), attention_args(1, 24, 24, 4608, 128), "tpu7x")  # FLUX
    tpu_compile(attention_step(PALLAS), attention_args(2, 4, 2, 1024, 64), "tpu7x")


def loss_step(table, multiplier=1.0, softcap=0.0):
    def step(x, w, targets, g):
        options = (-100, 0.0, multiplier, softcap)
        loss, lse = table[OPS.linear_cross_entropy.default](x, w, targets, *options)
        return loss, table[OPS.linear_cross_entropy_backward.default](g, x, w, targets, lse, *options)
    return step


def loss_args(N, D, V):
    return [((N, D), jnp.bfloat16), ((V, D), jnp.bfloat16), ((N,), jnp.int32), ((N,), jnp.float32)]


@pytest.mark.parametrize("chip, D, V", [("v5e", 2048, 151936), ("v5p", 4096, 128256), ("v6e", 2048, 257),
                                        ("tpu7x", 16384, 128256)])
def test_cross_entropy_compiles_at_the_recipes_shapes(chip, D, V):
    tpu_compile(loss_step(PALLAS), loss_args(4096, D, V), chip)


def test_attention_of_32k_tokens_has_no_buffer_of_tokens_times_tokens():
    T, H, K, D = 32768, 8, 2, 128
    compiled = tpu_compile(attention_step(PALLAS), attention_args(1, H, K, T, D), "tpu7x")
    # dq's parts, one for each stretch of resident keys, in fp32, and rows; scores of one head would take 4 GiB in fp32.
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * H * T * D * 4 < T * T * 4
    assert f"{T},{T}" not in compiled.as_text()


def test_fused_loss_takes_under_a_tenth_of_the_unfused_memory():
    N, D, V = 16384, 2048, 151936
    args = loss_args(N, D, V)
    fused = tpu_compile(loss_step(PALLAS, 0.2, 20.0), args, "tpu7x")
    plain = tpu_compile(loss_step(kernels.lowerings("reference"), 0.2, 20.0), args, "tpu7x")
    assert fused.memory_analysis().temp_size_in_bytes < plain.memory_analysis().temp_size_in_bytes / 10
    assert f"{N},{V}" not in fused.as_text() and f"{V},{N}" not in fused.as_text()


def test_kernels_run_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    q, k, v, _, _ = attention_case(np.random.default_rng(0), 4, 1, 2, 16, 16, 8, torch.float32, None)
    options, table = (None, True, 0, 0.0, 0.3), kernels.lowerings("interpret", splash_blocks=SplashBlocks(*[8] * 9))
    kernel = jax.shard_map(lambda q, k, v: table[OPS.splash_attention.default](q, k, v, *options)[0], mesh=mesh,
                           in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    out = jax.jit(kernel)(*(to_jax(x) for x in (q, k, v)))
    assert_close(torch.from_numpy(np.array(out)), OPS.splash_attention(q, k, v, *options)[0], 1e-5, "out")
