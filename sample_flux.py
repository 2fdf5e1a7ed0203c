"""Pictures from a FLUX: Euler steps from noise to data, as one XLA program a step.

    latents = sample(model, params, *embeddings(captions, config), shape=(12, 16, 16))
    write_grid(flux_data.pixels(latents), "shapes.png", captions)

Called by `python sample.py --model flux`. With a diffusers folder of FLUX.1 (`Encoders`), the captions go through
its T5 and CLIP and the latents through its autoencoder; without one, the shapes' word vectors and pixels.
"""

import numpy as np
import torch
from jax.sharding import PartitionSpec as P

import flux
import flux_data
import graph_trainer
import kernels
import lowering


def embeddings(captions, config):
    """-> text (2B, n_text, text_dim) and pooled (2B, pooled_dim): the captions', then the empty caption's."""
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
    program = lowering.Program(graph, lowering.make_mesh(), tuple({k: P() for k in s} for s in specs), P(),
                               kernels.lowerings("reference"))
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
