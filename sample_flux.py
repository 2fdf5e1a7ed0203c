"""Pictures from a FLUX: Euler steps from noise to data, as one XLA program a step.

    python sample_flux.py --hf out --prompt "a red circle" --prompt "a blue square" --out shapes.png

--hf is what `train.py --save-hf` wrote, or the transformer/ folder of a FLUX.1. With --flux, a whole FLUX.1 in
diffusers' layout, the captions go through its T5 and CLIP and the latents through its autoencoder; without it, the
model is one of drawn shapes, with word vectors for text and pixels for latents.
"""

import argparse
import os
import sys

import lowering  # first: it sets libtpu's environment before jax loads

import jax
import numpy as np
import torch
from jax.sharding import PartitionSpec as P

import checkpoint
import flux
import flux_data
import graph_trainer
import kernels
import simple_fsdp


def embeddings(captions, config):
    """Of shapes -> text (2B, n_text, text_dim) and pooled (2B, pooled_dim): the captions', then the empty caption's."""
    pairs = [flux_data.embed(c, config) for c in [*captions, *[""] * len(captions)]]
    return tuple(np.stack(x).astype(np.float32) for x in zip(*pairs))


def sample(model, params, text, pooled, shape, *, steps=28, shift=None, cfg=1.0, guidance=1.0, seed=0):
    """-> latents (B, *shape) fp32, numpy.

    model: a flux.Flux on meta, not sharded (simple_fsdp.cast), scanned or not; params: {name: jax.Array} of it;
    text, pooled: see embeddings; shape: (C, H, W) of the latents. guidance: what the model is told (3.5 is
    usual for FLUX.1-dev); cfg: classifier-free guidance, 1 takes the captions as they are; shift: of the
    steps' times towards the noise (None: FLUX's for this size; the shapes want their own, Shapes.shift).
    """
    B, (_, H, W) = len(text) // 2, shape
    batch = {"cfg": np.full(B, cfg), "guidance": np.full(B, guidance), "latents": None, "pooled": pooled,
             "t": np.zeros(B), "t_next": np.zeros(B), "text": text}
    batch["latents"] = np.random.Generator(np.random.Philox(seed)).standard_normal((B, *shape))
    batch = {name: np.asarray(x, np.float32) for name, x in batch.items()}
    specs = ({k: torch.empty(tuple(v.shape), device="meta") for k, v in params.items()},
             {k: torch.empty(v.shape, device="meta") for k, v in batch.items()})
    graph = graph_trainer.capture(flux.euler_step(model), *specs)
    program = lowering.Program(graph, lowering.make_mesh(1, 1, jax.devices()[:1]),
                               tuple({k: P() for k in s} for s in specs), P(), kernels.lowerings("reference"))
    program.lower()
    program.compile()
    times = [flux.shift_time(1 - i / steps, shift or flux.shift_of(H * W // 4)) for i in range(steps + 1)]
    for t, t_next in zip(times, times[1:]):
        batch |= {"t": np.full(B, t, np.float32), "t_next": np.full(B, t_next, np.float32)}
        batch["latents"] = program(params, batch)
    return np.asarray(batch["latents"])


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


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hf", required=True, metavar="DIR", help="config.json and safetensors")
    p.add_argument("--flux", metavar="DIR", help="FLUX.1 in diffusers' layout: its text encoders and its autoencoder")
    p.add_argument("--prompt", action="append", metavar="TEXT", help="can be repeated (default: every shape)")
    p.add_argument("--out", default="flux.png")
    p.add_argument("--pixels", type=int, help="width and height, a multiple of 16 (default: 32, with --flux 1024)")
    p.add_argument("--steps", type=int, default=28)
    p.add_argument("--cfg", type=float, help="classifier-free guidance (default: 3, with --flux 1)")
    p.add_argument("--guidance", type=float, help="the scale that the model is told (default: 1, with --flux 3.5)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on TPU, float32 on CPU")
    args = p.parse_args(argv)
    captions = args.prompt or [f"a {color} {shape}" for shape in flux_data.SHAPES for color in flux_data.COLORS]
    pixels = args.pixels or (1024 if args.flux else 32)
    if args.flux and not args.prompt:
        p.error("--flux needs a --prompt")
    if pixels < 16 or pixels % 16 or args.steps < 1:
        p.error(f"--pixels {pixels} must be a multiple of 16 and --steps {args.steps} at least 1")
    try:
        config = flux.Config.from_hf(checkpoint.read_json(args.hf, "config.json"))
        with torch.device("meta"):
            model = flux.Flux(config)
        dtype = args.dtype or ("bfloat16" if jax.devices()[0].platform == "tpu" else "float32")
        simple_fsdp.cast(model, param_dtype=getattr(torch, dtype))
        params = checkpoint.load_hf(args.hf, model, lowering.make_mesh(1, 1, jax.devices()[:1]))
        if args.flux:
            encoders = flux_data.Encoders(args.flux, config)
            text, pooled = encoders.text([*captions, *[""] * len(captions)])
            shape, shift, cfg, guidance = (config.channels, pixels // 8, pixels // 8), None, 1.0, 3.5
        else:
            text, pooled = embeddings(captions, config)
            shape, shift, cfg, guidance = (config.channels, pixels // 2, pixels // 2), flux_data.Shapes.shift, 3.0, 1.0
        latents = sample(model, params, text, pooled, shape, steps=args.steps, shift=shift, seed=args.seed,
                         cfg=cfg if args.cfg is None else args.cfg,
                         guidance=guidance if args.guidance is None else args.guidance)
    except (checkpoint.CheckpointError, flux_data.DataError, KeyError, ValueError, OSError) as e:
        print(f"sample_flux.py: error: {e}", file=sys.stderr)
        return 2
    images = encoders.decode(latents) if args.flux else flux_data.pixels(latents)
    write_grid(images, args.out, captions, columns=min(6, len(captions)), scale=1 if args.flux else 3)
    print(f"{len(captions)} pictures: {os.path.abspath(args.out)}")


if __name__ == "__main__":
    sys.exit(main())
