import dataclasses
import math

import jax
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import PartitionSpec as P

import graph_trainer
import kernels
import llama3
import lowering
import muse_glimmer
import qwen3
import qwen3_moe
import simple_fsdp
from llama3 import LLAMA_3_1, Llama3
from muse_glimmer import MuseGlimmer
from qwen3 import Qwen3
from qwen3_moe import Qwen3MoE

T, VOCAB = 32, 64
SMALL = {
    "llama3": (Llama3, llama3.Config(2, 32, 4, 2, 8, 48, VOCAB, rope_scaling=LLAMA_3_1)),
    "llama3-tied": (Llama3, llama3.Config(2, 32, 4, 2, 8, 48, VOCAB, tied=True)),
    "qwen3": (Qwen3, qwen3.Config(2, 32, 4, 2, 16, 48, VOCAB)),
    "qwen3-tied": (Qwen3, qwen3.Config(2, 32, 4, 2, 16, 48, VOCAB, tied=True)),
    "qwen3_moe": (Qwen3MoE, qwen3_moe.Config(2, 32, 4, 2, 16, 24, 8, 2, VOCAB)),
    "muse_glimmer": (MuseGlimmer, muse_glimmer.Config(8, 32, 4, 2, 8, 48, VOCAB, window=10)),
}


def build(name, scan=False, device_mesh=None):
    model_class, config = SMALL[name]
    with torch.device("meta"):
        model = model_class(config)
    if device_mesh:
        simple_fsdp.fully_shard(model, device_mesh, keep_fp32=model.keep_fp32, reduce_op="sum")
    if scan:
        model.layers = graph_trainer.ScanLayers(model.layers)
    return model


def capture_step(model, rows, psum=lambda x, dims=None: x):
    batch = {k: torch.empty(rows, T, dtype=torch.int32, device="meta") for k in ("segment_ids", "targets", "tokens")}
    # eps: with a tiny one, Adam makes whole steps of the signs of gradients that are rounding noise around zero
    step = graph_trainer.train_step(model, graph_trainer.AdamW(lr=1e-3, warmup=1, eps=1e-3), psum)
    return graph_trainer.capture(step, graph_trainer.state_spec(model), batch)


# --------------------------------------------------------------------------------- the same losses in every layout


def losses(name, scan, devices):
    """Three training steps' losses and gradient norms: the same weights, the same batches of two documents a row."""
    device_mesh = simple_fsdp.capture_mesh(devices) if devices > 1 else None
    mesh = lowering.make_mesh(1, devices, jax.devices()[:devices])
    model = build(name, scan, device_mesh)
    psum = (lambda x, dims=None: simple_fsdp.all_sum(x, device_mesh, dims)) if device_mesh else (lambda x, dims=None: x)
    graph = capture_step(model, 8 // devices, psum)
    params = {k: lowering.partition_spec(p) for k, p in model.named_parameters()}
    batches = dict.fromkeys(("segment_ids", "targets", "tokens"), P(mesh.axis_names))
    specs = {"m": params, "params": params, "step": P(), "v": params}
    axes = {device_mesh.get_group("fsdp").group_name: "fsdp"} if device_mesh else {}
    program = lowering.Program(graph, mesh, (specs, batches),
                               (specs, dict.fromkeys(["loss", "aux_loss", "grad_norm", "lr"], P())),
                               kernels.lowerings("reference") | lowering.collectives(axes), donate=1)
    program.lower()
    program.pieces[0].executable = program.pieces[0].lowered.compile({"xla_backend_optimization_level": 0})  # half the time
    state, rng, out = lowering.initial_state(model, mesh, 0), np.random.default_rng(0), []
    for _ in range(3):
        tokens = rng.integers(0, VOCAB, (8, T + 1)).astype(np.int32)
        targets = tokens[:, 1:].copy()
        targets[:, 19] = -100
        batch = {"segment_ids": np.broadcast_to(np.arange(T) > 19, (8, T)).astype(np.int32), "targets": targets,
                 "tokens": tokens[:, :-1]}
        batch = lowering.shard_batch(lambda rows: {k: x[rows] for k, x in batch.items()}, (8, T), mesh)
        state, metrics = program(state, batch)
        out.append([float(metrics[k]) for k in ("loss", "aux_loss", "grad_norm")])
    return np.array(out)


@pytest.mark.parametrize("name", ["llama3", "qwen3-tied", "qwen3_moe", "muse_glimmer"])
def test_unrolled_scanned_and_8_device_training_give_the_same_losses(name):
    """Sums in another order: 1e-5 relative for losses, 1e-4 for gradient norms (Muse Glimmer's differ by 5e-5 after two
    steps, the others' less than 1e-5: its branches, each as large as the residual stream, pass rounding on)."""
    unrolled = losses(name, scan=False, devices=1)
    assert unrolled[0, 0] == pytest.approx(math.log(VOCAB), rel=0.1)
    for scan, devices in [(True, 1), (False, 8)]:
        got = losses(name, scan, devices)
        np.testing.assert_allclose(got[:, :2], unrolled[:, :2], rtol=1e-5)
        np.testing.assert_allclose(got[:, 2], unrolled[:, 2], rtol=1e-4)


# ------------------------------------------------------------------------------------- sizes, parameters, FLOPs

PARAMETERS = [  # published counts
    (Llama3, "8b", 8_030_261_248), (Llama3, "70b", 70_553_706_496), (Llama3, "405b", 405_853_388_800),
    (Qwen3, "0.6b", 596_049_920), (Qwen3, "1.7b", 1_720_574_976), (Qwen3, "4b", 4_022_468_096),
    (Qwen3, "8b", 8_190_735_360), (Qwen3, "14b", 14_768_307_200), (Qwen3, "32b", 32_762_123_264),
    (Qwen3MoE, "30b-a3b", 30_532_122_624), (Qwen3MoE, "235b-a22b", 235_093_634_560),
    (MuseGlimmer, "30b", 27_854_780_928),  # the text model; with its vision tower about 30B
]


@pytest.mark.parametrize("model_class,size,count", PARAMETERS, ids=lambda x: x if isinstance(x, str) else "")
def test_each_size_captures_whole_with_exactly_transformers_parameters(model_class, size, count):
    config = model_class.sizes[size]
    with torch.device("meta"):
        model = model_class(config)
        assert sum(p.numel() for p in model.parameters()) == count
        h = config.to_hf()
        theirs = transformers.AutoConfig.for_model(**h)
        if model_class is MuseGlimmer:
            text = transformers.AutoModel.from_config(theirs.text_config)
            assert sum(p.numel() for p in text.parameters()) + config.vocab * config.dim == count
        else:
            theirs = transformers.AutoModelForCausalLM.from_config(theirs)
            assert sum(p.numel() for p in theirs.parameters()) == count
    assert model_class.Config.from_hf(h) == config
    model.layers = graph_trainer.ScanLayers(model.layers)
    graph = capture_step(model, rows=1)
    inputs = sum(n.meta["val"].numel() for n in graph.gm.graph.find_nodes(op="placeholder"))
    assert inputs == 3 * count + 1 + 3 * T  # weights and both moments, the step, a row of the batch
    print(f"{model_class.__name__} {size}: {count:,} parameters, {len(graph.gm.graph.nodes):,} nodes")


def matmul_flops(gm):
    """FLOPs of a captured graph's matmuls, by the shapes of its nodes. Attention by the pairs its mask leaves (half
    the square, or the window's band of that); its backward counted as twice its forward, recomputation not."""
    def shape(node):
        return tuple(node.meta["val"].shape)

    total = 0
    for node in gm.graph.nodes:
        name, a = str(node.target), node.args
        if name == "aten.mm.default":
            (m, k), (_, n) = map(shape, a)
            total += 2 * m * k * n
        elif name == "aten.bmm.default":
            (b, m, k), (_, _, n) = map(shape, a)
            total += 2 * b * m * k * n
        elif name.startswith("tpu.splash_attention"):
            backward = "backward" in name
            B, H, S, D = shape(a[backward])
            window = a[8 if backward else 5] or S
            pairs = S * S / 2 if window >= S else window * S - window * window / 2
            total += (2 if backward else 1) * 4 * B * H * D * pairs
        elif name.startswith("tpu.linear_cross_entropy"):
            backward = "backward" in name
            (n, d), (v, _) = map(shape, a[backward:backward + 2])
            total += (2 if backward else 1) * 2 * n * d * v
        elif name.startswith("tpu.grouped_matmul"):
            backward = "backward" in name
            (n, d), (_, _, f) = map(shape, a[backward:backward + 2])
            total += (2 if backward else 1) * 2 * n * d * f
        elif name.startswith("tpu.paired_grouped_matmul"):
            backward = "backward" in name
            (n, d), (_, _, f) = map(shape, a[backward:backward + 2])
            total += (2 if backward else 1) * 4 * n * d * f
    return total


@pytest.mark.parametrize("name", SMALL)
def test_flops_per_token_are_the_captured_graphs_own(name):
    model = build(name)
    counted = matmul_flops(capture_step(model, rows=2).gm) / (2 * T)
    assert counted == pytest.approx(model.flops_per_token(T), rel=1e-12)


# ------------------------------------------------------------------------------------------------ Muse Glimmer


def muse_glimmer_numpy(c, w, tokens, segment_ids):
    """Logits (T, vocab) of one row, float64, from DESIGN.md's description alone: one head and one query at a time."""
    def norm(x, eps, scale=1.0):
        return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + eps) * scale

    def rope(x, t):
        half = len(x) // 2
        angle = t * c.rope_theta ** (-np.arange(half) / half)
        a, b = x[:half], x[half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    x = norm(w["embed_tokens.weight"][tokens], c.norm_eps)
    n, d = len(tokens), c.head_dim
    for layer in range(c.n_layers):
        def weight(name):
            return w[f"layers.{layer // 4}.{layer % 4}.{name}.weight"]

        is_global = (c.n_layers - 1 - layer) % 4 == 0
        h = norm(x, c.norm_eps, weight("input_layernorm") + 1)
        q, k, v = ((h @ weight(f"self_attn.{p}_proj").T).reshape(n, -1, d) for p in "qkv")
        q = norm(q, c.norm_eps)
        k = norm(k, c.norm_eps)
        out = np.zeros_like(q)
        for head in range(c.n_heads):
            kv = head // (c.n_heads // c.n_kv_heads)
            for t in range(n):
                seen = [s for s in range(t + 1)
                        if segment_ids[s] == segment_ids[t] and (is_global or t - s < c.window)]
                query = q[t, head] if is_global else rope(q[t, head], t)
                query = query * 43.7840518911 / np.sqrt(128)
                keys = np.stack([k[s, kv] if is_global else rope(k[s, kv], s) for s in seen])
                scores = keys @ query / np.sqrt(d)
                p = np.exp(scores - scores.max())
                out[t, head] = (p / p.sum()) @ v[seen, kv]
        gate = 1 / (1 + np.exp(-(h @ weight("self_attn.gate_proj").T)))
        y = (out.reshape(n, -1) * gate) @ weight("self_attn.o_proj").T
        x = x + norm(y, 1e-8, weight("post_attention_layernorm") + 1)
        h = norm(x, c.norm_eps, weight("pre_feedforward_layernorm") + 1)
        g = h @ weight("mlp.gate_proj").T
        y = (g / (1 + np.exp(-g)) * (h @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
        x = x + norm(y, 1e-8, weight("post_feedforward_layernorm") + 1)
    x = norm(x, c.norm_eps, w["norm.weight"])
    return 20 * np.tanh(0.19611613513 * (x @ w["lm_head.weight"].T) / 20)


def test_muse_glimmer_is_its_description_in_plain_numpy():
    model_class, config = SMALL["muse_glimmer"]
    torch.manual_seed(0)
    model = model_class(config)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, std=0.3)
    tokens = torch.randint(0, VOCAB, (2, T))
    segment_ids = (torch.arange(T) > 21).int().expand(2, T)
    weights = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    with torch.no_grad():
        got = model.logits(model(tokens, segment_ids)).numpy()
    for row in range(2):
        want = muse_glimmer_numpy(config, weights, tokens[row].numpy(), segment_ids[row].numpy())
        assert np.abs(got[row] - want).max() < 1e-4 * np.abs(want).max()
    # and its loss is the cross-entropy of these logits
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": segment_ids}
    nll = torch.nn.functional.cross_entropy(torch.from_numpy(got).flatten(0, 1), tokens.flatten())
    assert model.loss(batch)[0].item() == pytest.approx(nll.item(), rel=1e-5)


def test_muse_glimmer_counts_its_pattern_back_from_the_last_layer():
    def pattern(n_layers):
        with torch.device("meta"):
            model = MuseGlimmer(dataclasses.replace(SMALL["muse_glimmer"][1], n_layers=n_layers))
        attentions = [m for m in model.modules() if isinstance(m, muse_glimmer.Attention)]
        return [(a.window, a.local) for a in attentions]

    assert pattern(8) == ([(10, True)] * 3 + [(0, False)]) * 2
    assert pattern(2) == [(10, True), (0, False)]
    with pytest.raises(ValueError, match="6 is no multiple"):
        pattern(6)


def test_llama_3_1_scales_its_slow_frequencies_only():
    """The bounds in transformers' words: wavelengths above 8192 are 8 times as long, those below 8192 / 4 stay."""
    positions = torch.tensor([1])
    plain = torch.atan2(*reversed([x[0, :64] for x in llama3.rope_table(positions, 128, 5e5)]))
    scaled = torch.atan2(*reversed([x[0, :64] for x in llama3.rope_table(positions, 128, 5e5, LLAMA_3_1)]))
    wavelength = 2 * math.pi / plain
    torch.testing.assert_close(scaled[wavelength < 2048], plain[wavelength < 2048])
    torch.testing.assert_close(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength > 2048) & (wavelength < 8192)
    assert between.sum() > 3
    assert (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()
