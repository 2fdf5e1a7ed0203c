"""Text or pictures from a Hugging Face folder of any of the models.

    python sample.py --hf Qwen3-0.6B --prompt "The capital of France is" --max-new 32 --greedy
    python sample.py --hf out --tokens 1,2,3 --temperature 0.8 --top-p 0.95
    python sample.py --model flux --hf out --prompt "a red square" --prompt "a blue circle" --out shapes.png

Notable features:
- the models know nothing of caches: while one is captured, `Cached` answers its calls of splash attention from
  keys and values that are kept. So every model that calls the kernel can be sampled from, windows and all
- reading the prompt and adding a token are one function, captured for two lengths: like a training step, each is
  one graph and one XLA program, with the cache as its state, updated in place
- a picture is Euler steps from noise to data, one program a step. A FLUX of `train.py --save-hf` draws shapes, from word
  vectors to pixels; FLUX.1's transformer/ folder wants --flux, the whole folder, for its text encoders and autoencoder
- one sequence or batch of pictures, one device
"""

import argparse
import math
import os
import sys

import lowering  # first: it sets libtpu's environment before jax loads

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec as P
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import checkpoint
import data
import flux
import flux_data
import graph_trainer
import kernels
import simple_fsdp
from train import MODELS, UsageError, command


def load_model(folder, model_class, config, dtype):
    """-> the model of a folder on meta, {name: jax.Array} of it in `dtype` on one device, the mesh of that."""
    mesh = lowering.make_mesh(devices=jax.devices()[:1])
    with torch.device("meta"):
        model = model_class(config)
    simple_fsdp.fully_shard(model, None, param_dtype=getattr(torch, dtype), keep_fp32=model.keep_fp32)
    return model, checkpoint.load_hf(folder, model, mesh, jnp.dtype(dtype)), mesh


def compile_step(step, mesh, *args, donate=0):
    """step, captured for nested arrays like `args`, as one XLA program on a mesh of one device."""
    spec = tree_map(lambda x: torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device="meta"), args)
    graph = graph_trainer.capture(step, *spec)
    program = lowering.Program(graph, mesh, tree_map(lambda _: P(), spec), [P()] * graph.out_spec.num_leaves,
                               kernels.lowerings("reference"), donate=donate)
    program.lower()
    program.compile()
    return program


class Cached(TorchFunctionMode):
    """While active, the n-th call of splash attention adds its keys and values to the n-th layer's cache and
    attends to all of that: to the positions up to the query's own, and within the window if there is one.

    cache: a (keys, values) pair a layer, (1, K, S, D) each, replaced as it grows; positions: (T,), of the queries."""

    def __init__(self, cache, positions):
        super().__init__()
        self.cache, self.positions, self.layer = cache, positions, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.tpu.splash_attention:
            return func(*args, **(kwargs or {}))
        q, k, v, _, _, window, softcap, scale = args
        k, v = (torch.ops.aten.index_put(old, [None, None, self.positions], new)
                for old, new in zip(self.cache[self.layer], (k, v)))
        self.cache[self.layer] = k, v
        self.layer += 1

        (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
        s = (q.reshape(B, K, H // K * T, D).float() @ k.float().mT * scale).view(B, H, T, S)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        ahead = torch.arange(S) - self.positions[:, None]  # (T, S)
        hidden = (ahead > 0) | (ahead <= -window) if window else ahead > 0
        s = s.masked_fill(hidden, -torch.inf)
        y = s.softmax(-1).view(B, K, H // K * T, S) @ v.float()
        return y.view(B, H, T, D).to(q.dtype), None


def extend(model):
    """-> step(cache, params, tokens (1, T), start) -> (cache, logits (vocab,) of the next token), to capture.
    start: position of the first of the tokens, all before it being in the cache."""
    def step(cache, params, tokens, start):
        positions = start + torch.arange(tokens.shape[1])
        with torch.no_grad(), _reparametrize_module(model, params), Cached(list(cache), positions) as cached:
            x = model(tokens, None, positions)
            x = x[0] if isinstance(x, tuple) else x  # a mixture of experts also gives its balance
            return cached.cache, model.logits(x[0, -1])

    return step


def generate(model, params, mesh, prompt, max_new, choose, eos=(), programs=None):
    """Yields up to max_new token ids after the list of ids `prompt`, the last of them perhaps one of eos.

    model, params, mesh: see load_model; choose: logits (vocab,) fp32 numpy -> id. programs: a dict that keeps the compiled
    steps, by their number of tokens, for more calls with the same len(prompt) + max_new."""
    c, programs = model.config, {} if programs is None else programs
    shape, dtype = (1, c.n_kv_heads, len(prompt) + max_new, c.head_dim), params["embed_tokens.weight"].dtype
    cache = [tuple(jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, P())) for _ in "kv") for _ in range(c.n_layers)]
    tokens, start = prompt, 0
    for _ in range(max_new):
        args = cache, params, np.int32([tokens]), np.int32(start)
        if len(tokens) not in programs:
            programs[len(tokens)] = compile_step(extend(model), mesh, *args, donate=1)
        cache, logits = programs[len(tokens)](*args)
        start += len(tokens)
        tokens = [int(choose(np.asarray(logits)))]
        yield tokens[0]
        if tokens[0] in eos:
            return


def nucleus(temperature, top_p, seed):
    """-> choose(logits): draws from softmax(logits / temperature), cut to the fewest likeliest tokens whose
    probabilities reach top_p (nucleus sampling, arXiv:1904.09751)."""
    rng = np.random.default_rng(seed)
    return lambda logits: rng.choice(len(logits), p=probabilities(logits, temperature, top_p))


def probabilities(logits, temperature, top_p):
    z = (logits.astype(np.float64) - logits.max()) / temperature
    p = np.exp(z) / np.exp(z).sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]  # of the likelier ones
    p[order[before >= top_p]] = 0
    return p / p.sum()


def eos_ids(folder):
    """The ids that end a text, as transformers' generate finds them: generation_config.json, else config.json."""
    for file in ("generation_config.json", "config.json"):
        h = checkpoint.read_json(folder, file) if os.path.exists(os.path.join(folder, file)) else {}
        eos = h.get("eos_token_id", (h.get("text_config") or {}).get("eos_token_id"))
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            if not all(isinstance(e, int) for e in ids):
                raise UsageError(f"--hf {folder}: {file} has eos_token_id {eos!r}: want an id, or a list of them")
            return ids
    return []


def read_prompt(args, vocab):
    """-> ids of --prompt or --tokens, and ids -> what to print. Without a tokenizer.json a vocabulary of 257 is bytes."""
    if args.tokens is not None:
        flag, ids, show = "tokens", args.tokens, lambda new: ",".join(map(str, new))
    else:
        flag, text, path = "prompt", os.fsencode(args.prompt), os.path.join(args.hf, "tokenizer.json")
        if not text:
            raise UsageError("--prompt is empty: give at least one character")
        if not os.path.exists(path) and vocab != data.Bytes.vocab_size:
            raise UsageError(f"--prompt needs {path}, which is not there: put one there or give --tokens 1,2,3")
        codec = data.Tokenizer(path) if os.path.exists(path) else data.Bytes()
        try:
            ids = codec.encode(text, special=True).tolist()
        except UnicodeDecodeError:
            raise UsageError(f"--prompt {args.prompt!r} is not UTF-8, which {path} needs: convert it") from None
        # decoded together: alone, the new tokens would lose the space before them
        show = lambda new: text.decode(errors="replace") + codec.decode(ids + new)[len(codec.decode(ids)):]  # noqa: E731
    if wrong := [t for t in ids if not 0 <= t < vocab]:
        raise UsageError(f"--{flag}: id {wrong[0]}: {args.hf}'s ids must be 0 to {vocab - 1}")
    return ids, show


def write_text(args, model_class, config, dtype):
    (prompt, show), eos = read_prompt(args, config.vocab), eos_ids(args.hf)
    choose = np.argmax if args.greedy else nucleus(args.temperature, args.top_p, args.seed)
    print(show(list(generate(*load_model(args.hf, model_class, config, dtype), prompt, args.max_new, choose, eos))))


def euler(model, params, mesh, text, pooled, shape, *, steps=28, shift=None, cfg=1.0, guidance=1.0, seed=0):
    """-> latents (B, *shape) fp32, numpy.

    model, params, mesh: see load_model; text (2B, n_text, text_dim), pooled (2B, pooled_dim): the captions', then the
    empty caption's; shape: (C, H, W) of the latents. guidance: what the model is told (3.5 is usual for FLUX.1-dev);
    cfg: classifier-free guidance, 1 takes the captions as they are; shift: of the steps' times towards the noise
    (None: FLUX's for this size; the shapes want their own, flux_data.SHIFT)."""
    B, (_, H, W) = len(text) // 2, shape
    noise = np.random.Generator(np.random.Philox(seed)).standard_normal((B, *shape))
    batch = {"cfg": np.full(B, cfg), "guidance": np.full(B, guidance), "latents": noise, "pooled": pooled, "t": np.zeros(B),
             "t_next": np.zeros(B), "text": text}
    batch = {name: np.asarray(x, np.float32) for name, x in batch.items()}
    program = compile_step(flux.euler_step(model), mesh, params, batch)
    times = [flux.shift_time(1 - i / steps, shift or flux.shift_of(H * W // 4)) for i in range(steps + 1)]
    for t, t_next in zip(times, times[1:]):
        batch |= {"t": np.full(B, t, np.float32), "t_next": np.full(B, t_next, np.float32)}
        batch["latents"] = program(params, batch)
    return np.array(batch["latents"])


def write_grid(images, path, captions, columns=6, scale=3):
    """Writes images (B, 3, H, W) in 0..1 as one PNG, each with its caption under it."""
    from PIL import Image, ImageDraw

    H, W = (scale * s for s in images.shape[2:])
    rows, label, gap = -(-len(images) // columns), 14, 6
    sheet = Image.new("RGB", (columns * (W + gap) + gap, rows * (H + label + gap) + gap), (70, 70, 70))
    pen = ImageDraw.Draw(sheet)
    for i, (image, caption) in enumerate(zip(images, captions)):
        x, y = gap + i % columns * (W + gap), gap + i // columns * (H + label + gap)
        pixels = (np.clip(image, 0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
        sheet.paste(Image.fromarray(pixels).resize((W, H), Image.NEAREST), (x, y))
        pen.text((x, y + H + 1), caption, fill=(255, 255, 255), font_size=11)
    sheet.save(path)


def write_pictures(args, model_class, config, dtype):
    captions = args.prompt or [f"a {color} {shape}" for shape in flux_data.SHAPES for color in flux_data.COLORS]
    both = [*captions, *[""] * len(captions)]
    if args.flux:
        pipe = flux_data.open_flux(args.flux)
        with torch.no_grad():
            text, pooled = pipe.encode_prompt(both, both, max_sequence_length=config.n_text)[:2]
    elif config.channels == 12:
        text, pooled = map(np.stack, zip(*(flux_data.embed(c, config) for c in both)))
    else:
        raise UsageError(f"--hf {args.hf} has {config.channels} latent channels, not pixels: give --flux DIR, its FLUX.1 folder")
    side = (args.pixels or (1024 if args.flux else 32)) // (8 if args.flux else 2)
    cfg, guidance, shift = (1.0, 3.5, None) if args.flux else (3.0, 1.0, flux_data.SHIFT)
    latents = euler(*load_model(args.hf, model_class, config, dtype), text, pooled, (config.channels, side, side),
                    steps=args.steps, shift=shift, seed=args.seed, cfg=cfg if args.cfg is None else args.cfg,
                    guidance=guidance if args.guidance is None else args.guidance)
    if args.flux:
        z = torch.from_numpy(latents) / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
        with torch.no_grad():
            images = pipe.image_processor.postprocess(pipe.vae.decode(z)[0], "pt").numpy()
    else:  # (B, 12, H, W), four pixels to a place
        images = torch.pixel_shuffle(torch.from_numpy(latents), 2).numpy() / 2 + 0.5
    write_grid(images, args.out, captions, columns=min(6, len(captions)), scale=1 if args.flux else 3)
    print(f"{len(captions)} pictures: {os.path.abspath(args.out)}")


def comma_separated_ids(text):
    return [int(t) for t in text.split(",")]


def parse_args(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False, add_help=False)
    p.error = lambda message: (_ for _ in ()).throw(UsageError(message))
    add = p.add_argument
    add("--model", choices=MODELS, help="config.json says it; but flux has flags of its own: --model flux --help")
    pictures = p.parse_known_args(argv)[0].model == "flux"
    add("-h", "--help", action="help")
    add("--hf", metavar="DIR", required=True, help="config.json, safetensors, for text tokenizer.json")
    add("--seed", type=int, default=0)
    add("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on TPU, float32 on CPU")
    if pictures:
        add("--prompt", action="append", metavar="TEXT", help="can be repeated (default: every shape)")
        add("--out", default="flux.png", metavar="FILE.png")
        add("--flux", metavar="DIR", help="FLUX.1 in diffusers' layout: its text encoders and its autoencoder")
        add("--pixels", type=int, help="width and height, a multiple of 16 (default: 32, with --flux 1024)")
        add("--steps", type=int, default=28)
        add("--cfg", type=float, help="classifier-free guidance (default: 3, with --flux 1)")
        add("--guidance", type=float, help="the scale that the model is told (default: 1, with --flux 3.5)")
    else:
        g = p.add_mutually_exclusive_group(required=True)
        g.add_argument("--prompt", metavar="TEXT")
        g.add_argument("--tokens", metavar="1,2,3", type=comma_separated_ids, help="token ids; the answer is ids, too")
        add("--max-new", type=int, default=64, help="tokens to add at most")
        add("--greedy", action="store_true", help="always the likeliest token")
        add("--temperature", type=float, default=1.0)
        add("--top-p", type=float, default=1.0)
    args = p.parse_args(argv)
    for flag, good, want in [
            ("seed", lambda x: x >= 0, "at least 0"), ("max-new", lambda x: 0 < x <= 2**17, "from 1 to 131072"),
            ("temperature", lambda x: 0 < x < math.inf, "above 0 (--greedy takes the likeliest token)"),
            ("top-p", lambda x: 0 < x <= 1, "above 0 and at most 1"), ("steps", lambda x: x > 0, "at least 1"),
            ("pixels", lambda x: x > 0 and x % 16 == 0, "a multiple of 16"),
            ("cfg", math.isfinite, "finite"), ("guidance", math.isfinite, "finite"),
            ("out", lambda x: x.endswith(".png") and os.path.isdir(os.path.dirname(x) or "."), "a .png in an existing folder")]:
        value = getattr(args, flag.replace("-", "_"), None)
        if value is not None and not good(value):
            raise UsageError(f"--{flag} {value} must be {want}")
    if not pictures and args.greedy and (args.temperature != 1.0 or args.top_p != 1.0):
        raise UsageError("--greedy takes the likeliest token: leave out --temperature and --top-p")
    return args


@command
def main(argv):
    args = parse_args(argv)
    h = checkpoint.read_json(args.hf, "config.json")
    kind = h.get("model_type", h.get("_class_name"))  # the latter is diffusers'
    name = next((name for name, model_class in MODELS.items() if model_class.hf_type == kind), None)
    if name is None or args.model not in (None, name) or (args.model is None and name == "flux"):
        raise UsageError(f"--hf {args.hf}: model_type {kind!r} in config.json is "
                         + (f"--model {name}" if name else f"none of {', '.join(m.hf_type for m in MODELS.values())}"))
    config = checkpoint.read_config(args.hf, MODELS[name])
    dtype = args.dtype or ("bfloat16" if jax.devices()[0].platform == "tpu" else "float32")
    (write_pictures if name == "flux" else write_text)(args, MODELS[name], config, dtype)


if __name__ == "__main__":
    sys.exit(main())
