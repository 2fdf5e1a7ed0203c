"""Latents, text embeddings and a batch's random numbers for FLUX.

    data = load(config)                       # drawn shapes with captions: nothing to download
    data = load(config, "latents/")           # *.npz or *.safetensors shards
    data.batch(step, 32)                      # {"latents": (32, C, H, W), "noise", "text", "pooled", "t", "guidance"}

    python flux_data.py --flux DIR --images DIR --out latents/      # makes shards with the user's encoders

Notable:
- batch() is a pure function of (seed, step), row by row: noise, timestep and dropped caption of a row are the
  same on any number of hosts, and the captured step has no random numbers of its own
- a shard holds latents (n, C, H, H), text (n, S, text_dim) and pooled (n, pooled_dim), any float dtype, the latents
  already normalized ((z - shift_factor) * scaling_factor). A .safetensors is memory-mapped, an .npz held in memory
- a file empty.npz or empty.safetensors with text (S, text_dim) and pooled (pooled_dim,) is the empty caption, else zeros
"""

import argparse
import functools
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.data import ConcatDataset, TensorDataset

from data import DataError, _shuffle
from flux import SIZES, shift_of, shift_time

COLORS = {"red": (230, 50, 50), "green": (50, 190, 70), "blue": (60, 90, 240), "yellow": (240, 215, 50),
          "purple": (160, 60, 200), "white": (240, 240, 240)}
SHAPES = ("circle", "square", "triangle")
SHIFT = 4.0  # neighbouring pixels say the same, so a shape shows through much noise and is decided near t = 1
DROP = 0.1  # of the captions are dropped, for classifier-free guidance (arXiv:2207.12598, section 5)


@dataclass
class Data:
    name: str
    row: object  # number -> latents, text, pooled
    n: int  # rows to train on, after
    n_val: int  # rows to validate on
    empty: tuple  # text and pooled of the empty caption
    shift: float  # how far timesteps move towards the noise (flux.shift_time)
    seq: int  # tokens in a row, text and image
    seed: int

    def __str__(self):
        return f"{self.name}: {self.n:,} rows to train on, {self.n_val} to validate"

    def batch(self, step, batch, rows=slice(None)):
        """Training batch of `step`, fp32. batch: rows of the global batch; rows: the slice of them to build."""
        numbers = np.arange(step * batch, (step + 1) * batch)[rows]
        return self.build(numbers, self.n_val + _shuffle(numbers, self.n, self.seed), self.seed, DROP)

    def val_batches(self, batch, n):
        """At most n functions of a slice of rows, of a batch never trained on each, the same noise and timesteps for every seed."""
        numbers = [np.arange(s * batch, (s + 1) * batch) for s in range(min(n, -(-self.n_val // batch)))]
        return [lambda rows=slice(None), i=i: self.build(i[rows], i[rows] % self.n_val, 2**32, 0.0) for i in numbers]

    def build(self, numbers, indices, seed, drop):
        out = []
        for number, index in zip(numbers, indices):
            rng = np.random.Generator(np.random.Philox(key=[seed % 2**64, number]))  # counter-based
            latents, text, pooled = self.row(int(index))
            if rng.random() < drop:
                text, pooled = self.empty
            t = shift_time(1 / (1 + np.exp(-rng.standard_normal())), self.shift)  # logit-normal (arXiv:2403.03206, 3.1)
            out.append((1.0, latents, rng.standard_normal(latents.shape), pooled, t, text))  # guidance 1: plain sampling
        names = ("guidance", "latents", "noise", "pooled", "t", "text")
        return {name: np.stack(x).astype(np.float32) for name, x in zip(names, zip(*out))}


def load(config, path=None, seed=0):
    return shards(config, path, seed) if path else shapes(config, seed)


def shapes(config, seed=0, side=32):
    """One coloured shape on black a row, `side` pixels wide. The latents are its pixels in -1..1, four to a place:
    (12, side / 2, side / 2)."""
    def row(i):
        caption, image = draw(i, side)
        return F.pixel_unshuffle(torch.from_numpy(image), 2).numpy(), *embed(caption, config)

    seq = config.n_text + (side // 4) ** 2
    return Data(f"drawn shapes, {side} x {side}", row, 100_000, 256, embed("", config), SHIFT, seq, seed)


def draw(i, side):
    """-> caption and image (3, side, side) in -1..1 of shape number i, its edges smoothed over a pixel."""
    rng = np.random.Generator(np.random.Philox(key=[0, i]))
    color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
    radius = side * rng.uniform(0.28, 0.4)
    x0, y0 = rng.uniform(max(radius, 0.35 * side), min(side - radius, 0.65 * side), 2)
    y, x = np.mgrid[:side, :side] + 0.5
    x, y = x - x0, y - y0
    distance = {  # to the edge, negative inside
        "circle": np.hypot(x, y) - radius,
        "square": np.maximum(abs(x), abs(y)) - 0.85 * radius,
        "triangle": np.maximum(abs(x) * 0.866 - y * 0.5, y) - 0.6 * radius,
    }[shape]
    cover = np.clip(0.5 - distance, 0, 1)  # (side, side)
    rgb = np.array(COLORS[color])[:, None, None] / 127.5 - 1
    return f"a {color} {shape}", -1 + cover * (rgb + 1)


@functools.cache
def embed(caption, config):
    """Stand-ins for T5 and CLIP: each word a random vector of its spelling, at its place (n_text, text_dim); and
    their sum (pooled_dim,). The places left over hold the vector of "", as padding."""
    def vector(word, dim):
        return np.random.Generator(np.random.Philox(zlib.crc32(word.encode()))).standard_normal(dim)

    words = caption.lower().split()
    if len(words) > config.n_text:
        raise DataError(f"the caption {caption!r} has {len(words)} words: give at most {config.n_text}")
    text = np.stack([vector(w, config.text_dim) for w in words + [""] * (config.n_text - len(words))])
    pooled = sum((vector(w, config.pooled_dim) for w in words), np.zeros(config.pooled_dim))
    return text, pooled / max(len(words), 1) ** 0.5


def shards(config, path, seed=0):
    """Rows of the *.npz and *.safetensors of a folder. The first twentieth (at most 1,024) validates."""
    text, pooled = (config.n_text, config.text_dim), (config.pooled_dim,)
    parts, side, empty = [], "H", (np.zeros(text), np.zeros(pooled))
    for file in sorted(f for f in Path(path).glob("*") if f.suffix in (".npz", ".safetensors")):
        try:
            tensors = load_file(file) if file.suffix != ".npz" else {k: torch.from_numpy(x) for k, x in np.load(file).items()}
        except Exception as e:  # safetensors, numpy and zipfile have each their own
            raise DataError(f"--data {file}: {' '.join(str(e).split())}; write it again or take it out") from None
        held = {name: tuple(x.shape) for name, x in tensors.items()}
        n, _, _, width = held["latents"] if len(held.get("latents", ())) == 4 else ("n", "C", "H", side)
        side = width if side == "H" else side  # the first file's
        want = {"latents": (n, config.channels, side, side), "text": (n, *text), "pooled": (n, *pooled)}
        want = {"text": text, "pooled": pooled} if file.stem == "empty" else want
        if any(held.get(name) != shape for name, shape in want.items()):
            raise DataError(f"--data {file} holds {held}; the model and the files before it want {want}")
        if file.stem == "empty":
            empty = tuple(tensors[name].float().numpy() for name in want)
        else:
            parts.append(TensorDataset(*(tensors[name] for name in want)))
    rows = sum(map(len, parts))
    if rows < 2 or side % 2:
        raise DataError(f"--data {path} holds {rows} rows of latents {side} wide; give a folder of .npz or .safetensors "
                        "shards of an even width, with one row to train on and one to validate at least (flux_data.py)")
    n_val, n_image, all_rows = max(1, min(rows // 20, 1024)), side**2 // 4, ConcatDataset(parts)
    return Data(f"--data {path}", lambda i: [x.float().numpy() for x in all_rows[i]], rows - n_val, n_val, empty,
                shift_of(n_image), config.n_text + n_image, seed)


def open_flux(folder):
    """diffusers' pipeline of a FLUX.1 folder without its transformer: the text encoders and the autoencoder."""
    if not Path(folder, "model_index.json").is_file():
        raise DataError(f"--flux {folder}: no model_index.json in it; give a FLUX.1 in diffusers' layout")
    try:
        from diffusers import FluxPipeline

        return FluxPipeline.from_pretrained(folder, transformer=None, local_files_only=True)
    except Exception as e:  # of diffusers, transformers, tokenizers, or that one is not installed
        raise DataError(f"--flux {folder}: {' '.join(str(e).split())}; give a FLUX.1 in diffusers' layout "
                        "(and pip install diffusers transformers)") from None


@torch.no_grad()
def write_shards(pipe, n_text, images, out, size, rows=256):
    """A folder of pictures, each with its caption in a .txt beside it -> .safetensors shards of `rows` rows, and the empty
    caption. Pictures are scaled and centre-cropped to size × size pixels. The folder appears when it is complete."""
    from PIL import Image, ImageOps

    def text(caption):
        return pipe.encode_prompt([caption], [caption], max_sequence_length=n_text)[:2]

    def row(number):
        picture = ImageOps.fit(Image.open(files[number]).convert("RGB"), (size, size))
        z = pipe.vae.encode(pipe.image_processor.preprocess(picture)).latent_dist.sample(torch.Generator().manual_seed(number))
        return (z - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor, *text(captions[number])

    files = sorted(f for f in Path(images).iterdir() if f.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))
    captions = [f.with_suffix(".txt").read_text().strip() for f in files]
    if not files:
        raise DataError(f"{images} holds no .jpg, .jpeg, .png or .webp")
    unfinished = Path(f"{out}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file({name: x[0].half() for name, x in zip(("text", "pooled"), text(""))}, unfinished / "empty.safetensors")
    for start in range(0, len(files), rows):
        columns = zip(*map(row, range(start, min(start + rows, len(files)))))
        shard = {name: torch.cat(x).half().contiguous() for name, x in zip(("latents", "text", "pooled"), columns)}
        save_file(shard, unfinished / f"{start // rows:05}.safetensors")
    unfinished.rename(out)


def main():
    p = argparse.ArgumentParser(description="Pictures with captions -> shards for FLUX.", usage=argparse.SUPPRESS)
    p.add_argument("--flux", required=True, metavar="DIR", help="FLUX.1 in diffusers' layout")
    p.add_argument("--images", required=True, metavar="DIR", help="pictures and their captions: cat.jpg, cat.txt")
    p.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    p.add_argument("--size", default="12b", choices=SIZES, help="model size: the text's length")
    p.add_argument("--pixels", type=int, default=512, help="width and height, a multiple of 16")
    args = p.parse_args()
    if args.pixels < 16 or args.pixels % 16 or Path(args.out).exists():
        p.error(f"--pixels {args.pixels} must be a multiple of 16, and --out {args.out} a folder that is not there yet")
    try:
        write_shards(open_flux(args.flux), SIZES[args.size].n_text, args.images, args.out, args.pixels)
    except DataError as e:
        p.error(str(e))
    except (OSError, UnicodeDecodeError) as e:
        p.error(f"--images {args.images}: {e}")


if __name__ == "__main__":
    main()
