"""flux.py, flux_data.py, sample.py's pictures: held against diffusers, every layout the same losses, data and sampling."""

import dataclasses
import json

import diffusers
import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from safetensors.torch import save_file
from test_models import matmul_flops

import checkpoint
import flux
import flux_data
import graph_trainer
import kernels
import lowering
import sample
import simple_fsdp
from flux import Config, Flux

diffusers.utils.logging.set_verbosity_error()
SMALL = Config(2, 3, 64, 4, (4, 6, 6), 4, 24, 16, 5)
SCHNELL = dataclasses.replace(SMALL, guidance=False)
B, H, W = 2, 8, 12


def theirs(config):
    """diffusers' model of a Config, all weights random: its own initialization leaves biases at zero."""
    torch.manual_seed(0)
    h = {k: v for k, v in config.to_hf().items() if k not in ("_class_name", "n_text")}
    model = diffusers.FluxTransformer2DModel(**h)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def inputs(config):
    torch.manual_seed(1)
    return (torch.randn(B, config.channels, H, W), torch.randn(B, config.n_text, config.text_dim),
            torch.randn(B, config.pooled_dim), torch.rand(B), torch.tensor([1.0, 3.5]))


@pytest.mark.parametrize("config", [SMALL, SCHNELL], ids=["dev", "schnell"])
def test_velocity_and_every_gradient_are_diffusers(config):
    ref, model = theirs(config), Flux(config)
    model.load_state_dict(ref.state_dict())
    latents, text, pooled, t, guidance = inputs(config)
    pack, unpack = diffusers.FluxPipeline._pack_latents, diffusers.FluxPipeline._unpack_latents
    ids = diffusers.FluxPipeline._prepare_latent_image_ids(B, H // 2, W // 2, "cpu", torch.float32)
    want = ref(pack(latents, B, config.channels, H, W), text, pooled, t, ids, torch.zeros(config.n_text, 3),
               guidance if config.guidance else None, return_dict=False)[0]
    want = unpack(want, 8 * H, 8 * W, 8)
    got = model(latents, text, pooled, t, guidance)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()

    direction = torch.randn_like(want)
    for y in (got, want):
        (y * direction).sum().backward()
    grads = {name: p.grad for name, p in ref.named_parameters()}
    for name, p in model.named_parameters():
        assert (p.grad - grads[name]).abs().max() < 1e-4 * grads[name].abs().max(), name


def build(config, scan=False, device_mesh=None):
    with torch.device("meta"):
        model = Flux(config)
    if device_mesh:
        simple_fsdp.fully_shard(model, device_mesh, reduce_op="sum")
    if scan:
        for name, module in list(model.named_children()):
            if isinstance(module, flux.Layers):
                setattr(model, name, graph_trainer.ScanLayers(module))
    return model


@pytest.mark.parametrize("scan,devices", [(False, 1), (True, 8)])
def test_diffusers_weights_go_in_and_out_bit_for_bit(tmp_path, scan, devices):
    ref = theirs(SMALL)
    ref.save_pretrained(tmp_path / "in", max_shard_size="100KB")  # several files
    config = dataclasses.replace(Config.from_hf(json.loads((tmp_path / "in/config.json").read_text())), n_text=5)
    assert config == SMALL
    model = build(config, scan, simple_fsdp.capture_mesh(devices) if devices > 1 else None)
    params = checkpoint.load_hf(str(tmp_path / "in"), model, lowering.make_mesh(1, devices, jax.devices()[:devices]))
    out = tmp_path / "out"
    checkpoint.save_hf(str(out), model, params)
    back = diffusers.FluxTransformer2DModel.from_pretrained(out)
    assert back.state_dict().keys() == ref.state_dict().keys()
    assert all(torch.equal(p, back.state_dict()[name]) for name, p in ref.state_dict().items())
    assert Config.from_hf(json.loads((out / "config.json").read_text())) == SMALL


# ------------------------------------------------------------------------------------------------- training


def capture_step(model, batch, lr=3e-3, psum=lambda x, dims=None: x):
    spec = {name: torch.empty(x.shape, device="meta") for name, x in batch.items()}
    step = graph_trainer.train_step(model, graph_trainer.AdamW(lr=lr, warmup=1), psum)
    return graph_trainer.capture(step, graph_trainer.state_spec(model), spec)


def train(config, steps, rows, scan=False, devices=1, init=None, side=16, lr=3e-3):
    """-> (steps, 2) losses and gradient norms on drawn shapes."""
    data = flux_data.shapes(config, side=side)
    device_mesh = simple_fsdp.capture_mesh(devices) if devices > 1 else None
    mesh = lowering.make_mesh(1, devices, jax.devices()[:devices])
    model = build(config, scan, device_mesh)
    model.init = init or model.init
    psum = (lambda x, dims=None: simple_fsdp.all_sum(x, device_mesh, dims)) if device_mesh else (lambda x, dims=None: x)
    batch = data.batch(0, rows, slice(0, rows // devices))
    graph = capture_step(model, batch, lr, psum)
    params = {k: lowering.partition_spec(p) for k, p in model.named_parameters()}
    specs = {"m": params, "params": params, "step": P(), "v": params}
    axes = {device_mesh.get_group("fsdp").group_name: "fsdp"} if device_mesh else {}
    program = lowering.Program(graph, mesh, (specs, dict.fromkeys(batch, P(mesh.axis_names))),
                               (specs, dict.fromkeys(["loss", "aux_loss", "grad_norm", "lr"], P())),
                               kernels.lowerings("reference") | lowering.collectives(axes), donate=1)
    program.lower()
    program.compile()
    state, out = lowering.initial_state(model, mesh, 0), []
    sharding = jax.sharding.NamedSharding(mesh, P(mesh.axis_names))
    for number in range(steps):
        state, metrics = program(state, jax.device_put(data.batch(number, rows), sharding))
        out.append([float(metrics[k]) for k in ("loss", "grad_norm")])
    return np.array(out)


def test_unrolled_two_scans_and_8_devices_give_the_same_losses():
    """From weights none of which is zero: at AdaLN-Zero's start no gradient reaches the blocks. Both scans must send the
    modulation vector its gradient, or time and text embeddings would get none from the blocks."""
    config = dataclasses.replace(SMALL, channels=12, n_single_layers=2)
    unrolled = train(config, 3, 8, init=lambda name: (0.1, 0.2))
    for scan, devices in [(True, 1), (False, 8)]:
        got = train(config, 3, 8, scan, devices, init=lambda name: (0.1, 0.2))
        np.testing.assert_allclose(got, unrolled, rtol=1e-4)


def test_a_bf16_scan_gives_the_unrolled_gradient_of_the_modulation_vector():
    """The scan's sum over layers is in fp32, unrolled autograd's in bf16: they agree to bf16's 1/128."""
    config = dataclasses.replace(SMALL, n_single_layers=8)
    grads = []
    for scan in (False, True):
        torch.manual_seed(0)
        model = Flux(config).bfloat16()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
        if scan:
            weights = dict(model.named_parameters())
            model = build(config, scan=True)
            real = {}
            for name, p in model.named_parameters():
                head, _, tail = name.partition(".stack.")
                real[name] = torch.nn.Parameter(torch.stack([weights[f"{head}.{i}.{tail}"] for i in range(len(p))])
                                                if tail else weights[name])
            with torch.nn.utils.stateless._reparametrize_module(model, real):
                model(*inputs(config)).square().sum().backward()
            grads.append(real["time_text_embed.text_embedder.linear_2.weight"].grad)
        else:
            model(*inputs(config)).square().sum().backward()
            grads.append(model.time_text_embed.text_embedder.linear_2.weight.grad)
    assert (grads[0] - grads[1]).abs().max() < 2e-2 * grads[0].abs().max()


def test_a_few_steps_reduce_the_loss():
    config = dataclasses.replace(flux.SIZES["debug"], n_layers=1, n_single_layers=1, dim=96, n_heads=3)
    loss = train(config, 40, 16, scan=True, side=16)[:, 0]
    assert loss[-5:].mean() < 0.6 * loss[:5].mean()


@pytest.mark.parametrize("size,count", [("12b", 11_901_408_320), ("12b-schnell", 11_891_178_560)])
def test_full_size_captures_with_exactly_diffusers_parameters(size, count):
    config = flux.SIZES[size]
    h = {k: v for k, v in config.to_hf().items() if k not in ("_class_name", "n_text")}
    with torch.device("meta"):
        ref = diffusers.FluxTransformer2DModel(**h)
        model = Flux(config)
    assert Config.from_hf(config.to_hf()) == config
    shapes = {name: p.shape for name, p in ref.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    batch = model.batch_spec(1, config.n_text + 4096)  # 1024 × 1024 pixels
    assert batch["latents"].shape == (1, 16, 128, 128)
    graph = capture_step(build(config, scan=True), batch)
    held = sum(n.meta["val"].numel() for n in graph.gm.graph.find_nodes(op="placeholder"))
    assert held == 3 * count + 1 + sum(x.numel() for x in batch.values())
    print(f"FLUX {size}: {count:,} parameters, {len(graph.gm.graph.nodes):,} nodes")


@pytest.mark.parametrize("config", [SMALL, SCHNELL], ids=["dev", "schnell"])
def test_flops_are_the_captured_graphs_own(config):
    """Less the gradients of the batch's own tensors, which nobody needs. test_models' count knows no biases (addmm), and
    takes attention for causal."""
    rows, T = 2, config.n_text + H * W // 4
    batch = dict(zip(("latents", "text", "pooled", "t", "guidance"), inputs(config)))
    gm = capture_step(build(config), batch | {"noise": batch["latents"].clone()}).gm
    linears = [[n.meta["val"].shape for n in node.args[1:]] for node in gm.graph.nodes
               if str(node.target) == "aten.addmm.default"]
    counted = (matmul_flops(gm) + sum(2 * m * k * n for (m, k), (_, n) in linears)) / rows
    D, blocks = config.dim, config.n_layers + config.n_single_layers
    of_batch = 2 * D * (config.n_text * config.text_dim + H * W * config.channels + config.pooled_dim
                        + 256 * (1 + config.guidance))
    want = build(config).flops_per_token(T) * T
    assert counted + of_batch + 6 * blocks * T * T * D == pytest.approx(want, rel=1e-12)


# ----------------------------------------------------------------------------------------------------- data


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def test_a_batch_depends_on_seed_step_and_row_alone():
    a, b = flux_data.shapes(flux.SIZES["debug"]), flux_data.shapes(flux.SIZES["debug"])
    whole = a.batch(3, 8)
    b.batch(0, 4)
    halves = [b.batch(3, 8, rows) for rows in (slice(0, 4), slice(4, 8))]
    spec = Flux(flux.SIZES["debug"]).batch_spec(8, a.seq)
    assert {k: x.shape for k, x in whole.items()} == {k: tuple(x.shape) for k, x in spec.items()}
    assert same(whole, {k: np.concatenate([h[k] for h in halves]) for k in whole})
    assert not same(whole, a.batch(4, 8))
    assert not same(whole, flux_data.shapes(flux.SIZES["debug"], seed=1).batch(3, 8))
    assert all(x.dtype == np.float32 for x in whole.values()) and list(whole) == sorted(whole)
    assert all(same(x(), y()) for x, y in zip(a.val_batches(100, 9), flux_data.shapes(flux.SIZES["debug"], seed=1).val_batches(100, 9)))


def test_timesteps_are_shifted_logit_normal_and_a_tenth_of_the_captions_is_dropped():
    data = flux_data.shapes(flux.SIZES["debug"], side=4)
    batch = data.batch(0, 4000)
    logit = np.log(batch["t"] / (1 - batch["t"])) - np.log(data.shift)
    assert abs(logit.mean()) < 0.06 and abs(logit.std() - 1) < 0.05
    dropped = (batch["pooled"] == 0).all(1)
    assert abs(dropped.mean() - 0.1) < 0.02
    assert (batch["text"][dropped] == data.empty[0].astype(np.float32)).all()
    assert (data.val_batches(64, 1)[0]()["pooled"] != 0).any(1).all()


def test_a_drawn_shape_has_its_captions_colour_and_comes_back_from_its_latents():
    for i in range(20):
        caption, image = flux_data.draw(i, 32)
        latents = torch.from_numpy(flux_data.shapes(flux.SIZES["debug"]).row(i)[0])
        np.testing.assert_allclose(torch.pixel_shuffle(latents, 2).numpy(), image, atol=1e-12)
        pixels = image / 2 + 0.5
        inside = pixels[:, pixels.sum(0) == pixels.sum(0).max()].mean(1) * 255
        np.testing.assert_allclose(inside, flux_data.COLORS[caption.split()[1]], atol=1)


@pytest.mark.parametrize("kind", ["npz", "safetensors-f32", "safetensors-bf16"])
def test_shards_give_back_their_rows(tmp_path, kind):
    rng = np.random.default_rng(0)
    rows = {"latents": rng.standard_normal((30, 4, 8, 8)), "text": rng.standard_normal((30, 5, 24)),
            "pooled": np.arange(30)[:, None] + np.zeros((30, 16))}
    dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
    rows = {k: torch.tensor(x).to(dtype) for k, x in rows.items()}
    for i, part in enumerate((slice(0, 10), slice(10, 30))):
        shard = {k: x[part].contiguous() for k, x in rows.items()}
        if kind == "npz":
            np.savez(tmp_path / f"{i}.npz", **{k: x.numpy() for k, x in shard.items()})
        else:
            save_file(shard, tmp_path / f"{i}.safetensors")
    np.savez(tmp_path / "empty.npz", text=np.full((5, 24), 7), pooled=np.full(16, -1))
    data = flux_data.load(SMALL, str(tmp_path))
    assert (data.n, data.n_val) == (29, 1)
    batch = data.batch(0, 29)
    which = batch["pooled"][:, 0].astype(int)
    kept = which >= 0
    assert sorted(which[kept]) == [i for i in range(1, 30) if i in which] and 0 < (~kept).sum() < 10
    for name in ("latents", "text"):
        assert np.array_equal(batch[name][kept], rows[name].float().numpy()[which[kept]])
    assert (batch["text"][~kept] == 7).all()
    assert data.val_batches(4, 1)[0]()["pooled"][:, 0].tolist() == [0] * 4


def test_bad_shards_are_refused_in_one_line(tmp_path):
    def refused(part, path=tmp_path):
        with pytest.raises(flux_data.DataError) as e:
            flux_data.load(SMALL, str(path))
        assert part in str(e.value) and "--data" in str(e.value) and "\n" not in str(e.value)

    refused("none holds 0 rows", tmp_path / "none")
    refused("holds 0 rows")
    good = {"latents": np.zeros((3, 4, 8, 8)), "text": np.zeros((3, 5, 24)), "pooled": np.zeros((3, 16))}
    for name, bad in [("latents", np.zeros((3, 16, 8, 8))), ("text", np.zeros((3, 6, 24))), ("pooled", np.zeros((2, 16))),
                      ("latents", np.zeros((3, 4, 6, 8)))]:
        np.savez(tmp_path / "a.npz", **(good | {name: bad}))
        refused("a.npz")
    np.savez(tmp_path / "a.npz", **good)
    for name, content in [("b.npz", b""), ("b.npz", b"PK garbage"), ("b.safetensors", b""), ("b.safetensors", b"x" * 100)]:
        (tmp_path / name).write_bytes(content)
        refused(name)
        (tmp_path / name).unlink()
    np.savez(tmp_path / "b.npz", **(good | {"latents": np.zeros((3, 4, 6, 6))}))  # another width than a.npz
    refused("b.npz")
    np.savez(tmp_path / "b.npz", text=np.zeros((3, 5, 24)))
    refused("b.npz")
    (tmp_path / "b.npz").unlink()
    np.savez(tmp_path / "empty.npz", text=np.zeros((5, 24)))
    refused("empty.npz")


def test_a_folder_that_is_no_flux_and_a_shape_with_too_many_words_are_one_line(tmp_path, capsys):
    theirs(SMALL).save_pretrained(tmp_path / "model")
    flags = ["--model", "flux", "--hf", str(tmp_path / "model")]
    for more, part in [([], "4 latent channels, not pixels: give --flux"), (["--flux", str(tmp_path)], f"--flux {tmp_path}: "),
                       (["--flux", "/nowhere"], "--flux /nowhere: ")]:
        assert sample.main([*flags, *more]) == 2
        err = capsys.readouterr().err
        assert part in err and err.startswith("sample.py: error: ") and err.count("\n") == 1
    with pytest.raises(flux_data.DataError, match="has 6 words: give at most 5"):
        flux_data.embed("one two three four five six", SMALL)


# ------------------------------------------------------------------------------------------------- sampling


def test_sampling_is_diffusers_pipeline(tmp_path):
    """The same noise through FluxPipeline with its Euler scheduler, from embeddings to latents."""
    ref = theirs(SMALL)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256,
        max_image_seq_len=4096)
    vae = diffusers.AutoencoderKL(block_out_channels=(8, 8, 8, 8), norm_num_groups=4, latent_channels=4,
                                  down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4)
    pipe = diffusers.FluxPipeline(scheduler, vae, None, None, None, None, ref)
    pipe.set_progress_bar_config(disable=True)
    _, text, pooled, _, _ = inputs(SMALL)
    noise = np.random.Generator(np.random.Philox(0)).standard_normal((B, 4, H, W)).astype(np.float32)
    pack, unpack = pipe._pack_latents, pipe._unpack_latents
    want = pipe(prompt_embeds=text, pooled_prompt_embeds=pooled, height=8 * H, width=8 * W, num_inference_steps=6,
                guidance_scale=3.5, latents=pack(torch.tensor(noise), B, 4, H, W), output_type="latent").images
    want = unpack(want, 8 * H, 8 * W, 8).numpy()

    model = build(SMALL)
    simple_fsdp.fully_shard(model, None)
    params = {name: jax.numpy.asarray(p.detach().numpy()) for name, p in ref.named_parameters()}
    both = [np.concatenate([x, np.zeros_like(x)]) for x in (text.numpy(), pooled.numpy())]
    got = sample.euler(model, params, lowering.make_mesh(1, 1, jax.devices()[:1]), *both, (4, H, W), steps=6, guidance=3.5)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_the_command_writes_a_picture_of_a_saved_model(tmp_path):
    config = dataclasses.replace(SMALL, channels=12)
    theirs(config).save_pretrained(tmp_path / "model")
    argv = ["--model", "flux", "--hf", str(tmp_path / "model"), "--steps", "2", "--pixels", "16", "--prompt", "a red circle"]
    assert sample.main([*argv, "--out", str(tmp_path / "a.png")]) is None
    assert (tmp_path / "a.png").stat().st_size > 100


def test_a_grid_of_pictures_is_written(tmp_path):
    from PIL import Image

    images = np.stack([np.full((3, 8, 8), v) for v in (0.0, 1.0, 0.5)])
    sample.write_grid(images, tmp_path / "grid.png", ["black", "white", "grey"], columns=2, scale=2)
    sheet = np.asarray(Image.open(tmp_path / "grid.png"))
    assert sheet[10, 10].tolist() == [0] * 3 and sheet[10, 32].tolist() == [255] * 3 and sheet[46, 10].tolist() == [128] * 3


def test_a_users_encoders_make_shards_and_pictures(tmp_path):
    """Tiny random autoencoder, T5 and CLIP in FLUX.1's folder layout; its tokenizers are stand-ins, which know two words."""
    import tokenizers
    import transformers
    from PIL import Image

    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8, 8), norm_num_groups=4, latent_channels=4, scaling_factor=0.3611,
        shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4)
    clip = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8,
                max_position_embeddings=12, eos_token_id=1)
    t5 = dict(d_model=24, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=8)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "cat": 3}, "<unk>"))
    words.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", model_max_length=12)
    diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), vae, transformers.CLIPTextModel(transformers.CLIPTextConfig(**clip)),
        words, transformers.T5EncoderModel(transformers.T5Config(**t5)), words, None).save_pretrained(tmp_path / "flux")
    (tmp_path / "pictures").mkdir()
    for i in range(3):
        Image.new("RGB", (40 + i, 30), (80 * i, 0, 0)).save(tmp_path / f"pictures/{i}.png")
        (tmp_path / f"pictures/{i}.txt").write_text("cat" if i else "dog")

    pipe = flux_data.open_flux(str(tmp_path / "flux"))
    flux_data.write_shards(pipe, 5, tmp_path / "pictures", tmp_path / "shards", 32, rows=2)
    data = flux_data.load(SMALL, str(tmp_path / "shards"))
    assert (data.n, data.n_val, data.seq) == (2, 1, 5 + 4)
    with torch.no_grad():
        text, pooled, _ = pipe.encode_prompt(["cat"], ["cat"], max_sequence_length=5)
    for mine, stored in zip((text[0], pooled[0]), data.row(2)[1:]):
        np.testing.assert_allclose(stored, mine, rtol=2e-3, atol=1e-3)  # stored in fp16
    theirs(SMALL).save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "n_text": 5}))
    argv = ["--model", "flux", "--hf", str(tmp_path / "model"), "--flux", str(tmp_path / "flux"), "--prompt", "cat",
            "--steps", "1", "--pixels", "32", "--out", str(tmp_path / "cat.png")]
    assert sample.main(argv) is None
    assert Image.open(tmp_path / "cat.png").size == (32 + 12, 32 + 14 + 12)
