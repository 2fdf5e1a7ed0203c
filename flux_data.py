"""Latents, text embeddings and a batch's random numbers for FLUX.

    data = load(config)                       # drawn shapes with captions: nothing to download
    data = load(config, "latents/")           # *.npz or *.safetensors shards
    data.batch(step, 32)                      # {"latents": (32, C, H, W), "noise", "text", "pooled", "t", "guidance"}

    python flux_data.py --flux DIR --images DIR --out latents/      # makes shards with the user's encoders

Notable:
- batch() is a pure function of (seed, step), row by row: noise, timestep and dropped caption of a row are the
  same on any number of hosts, and the captured step has no random numbers of its own
- a shard holds latents (n, C, H, W), text (n, S, text_dim) and pooled (n, pooled_dim), any float dtype, the latents
  already normalized ((z - shift_factor) * scaling_factor). A file empty.npz or empty.safetensors with text
  (S, text_dim) and pooled (pooled_dim,) is the empty caption (zeros where there is none)
"""

import argparse
import functools
import json
import zlib
from pathlib import Path

import numpy as np

from data import DataError, _shuffle
from flux import SIZES, shift_of, shift_time

COLORS = {"red": (230, 50, 50), "green": (50, 190, 70), "blue": (60, 90, 240), "yellow": (240, 215, 50),
          "purple": (160, 60, 200), "white": (240, 240, 240)}
SHAPES = ("circle", "square", "triangle")
DROP = 0.1  # of the captions are dropped, for classifier-free guidance (arXiv:2207.12598, section 5)


class Data:
    """What shapes and shards share: a row's random numbers. A subclass has n rows, row(i) -> (latents, text,
    pooled), empty: (text, pooled), shift: how far timesteps move towards the noise (flux.shift_time), and seq: tokens
    in a row, text and image."""

    guidance = 1.0  # the scale that training tells the model: 1 is plain sampling

    def __init__(self, n, n_val, seed):
        self.n, self.n_val, self.seed = n, n_val, seed

    def batch(self, step, batch, rows=slice(None)):
        """Training batch of `step`, fp32. batch: rows of the global batch; rows: the slice of them to build."""
        number = np.arange(step * batch, (step + 1) * batch)[rows]
        return self.build(number, self.n_val + _shuffle(number, self.n, self.seed), self.seed, DROP)

    def val_batches(self, batch, n, rows=slice(None)):
        """At most n batches of rows never trained on, the same noise and timesteps for every seed."""
        steps = range(min(n, -(-self.n_val // batch)))
        numbers = [np.arange(s * batch, (s + 1) * batch)[rows] for s in steps]
        return [self.build(number, number % self.n_val, 2**32, 0.0) for number in numbers]

    def build(self, numbers, indices, seed, drop):
        out = {name: [] for name in ("guidance", "latents", "noise", "pooled", "t", "text")}
        for number, index in zip(numbers, indices):
            rng = np.random.Generator(np.random.Philox(key=[seed % 2**64, number]))  # counter-based
            latents, text, pooled = self.row(int(index))
            if rng.random() < drop:
                text, pooled = self.empty
            t = shift_time(1 / (1 + np.exp(-rng.standard_normal())), self.shift)  # logit-normal (arXiv:2403.03206, 3.1)
            noise = rng.standard_normal(latents.shape)
            for name, x in zip(out, (self.guidance, latents, noise, pooled, t, text)):
                out[name].append(x)
        return {name: np.stack(x).astype(np.float32) for name, x in out.items()}


# ---------------------------------------------------------------------------------------------------- shapes


class Shapes(Data):
    """One coloured shape on black, `side` pixels wide, drawn from its number. The latents are its pixels in -1..1,
    four to a place as in pixel_unshuffle: (12, side / 2, side / 2)."""

    shift = 4.0  # neighbouring pixels say the same, so the shape shows through much noise and is decided near t = 1

    def __init__(self, config, seed=0, side=32):
        super().__init__(100_000, 256, seed)
        self.config, self.side, self.seq = config, side, config.n_text + (side // 4) ** 2
        self.empty = embed("", config)

    def __str__(self):
        return f"drawn shapes, {self.side} x {self.side}: {self.n:,} to train on, {self.n_val} to validate"

    def row(self, i):
        caption, image = draw(i, self.side)
        return space_to_depth(image), *embed(caption, self.config)

    def captions(self):
        return [f"a {color} {shape}" for shape in SHAPES for color in COLORS]


def space_to_depth(x):  # (3, H, W) -> (12, H / 2, W / 2)
    C, H, W = x.shape
    return x.reshape(C, H // 2, 2, W // 2, 2).transpose(0, 2, 4, 1, 3).reshape(4 * C, H // 2, W // 2)


def pixels(latents):
    """Latents of shapes (B, 12, H, W) -> images (B, 3, 2H, 2W) in 0..1."""
    B, C, H, W = latents.shape
    x = latents.reshape(B, C // 4, 2, 2, H, W).transpose(0, 1, 4, 2, 5, 3).reshape(B, C // 4, 2 * H, 2 * W)
    return np.clip(x / 2 + 0.5, 0, 1)


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
def word_vector(word, dim):
    return np.random.Generator(np.random.Philox(zlib.crc32(word.encode()))).standard_normal(dim)


@functools.cache
def embed(caption, config):
    """Stand-ins for T5 and CLIP: each word a random vector of its spelling, at its place (n_text, text_dim); and
    their sum (pooled_dim,). The places left over hold the vector of "", as padding."""
    words = caption.lower().split()
    if len(words) > config.n_text:
        raise DataError(f"the caption {caption!r} has {len(words)} words: give at most {config.n_text}")
    padded = words + [""] * (config.n_text - len(words))
    text = np.stack([word_vector(w, config.text_dim) for w in padded])
    pooled = sum((word_vector(w, config.pooled_dim) for w in words), np.zeros(config.pooled_dim))
    return text, pooled / max(len(words), 1) ** 0.5


# ---------------------------------------------------------------------------------------------------- shards


class Shards(Data):
    """Rows of the *.npz and *.safetensors of a folder. The first twentieth (at most 1,024) validates."""

    def __init__(self, path, config, seed=0):
        folder = Path(path)
        if not folder.is_dir():
            raise DataError(f"--data {path} is not a folder: give one of .npz or .safetensors shards (flux_data.py)")
        self.name, self.empty, self.files, self.starts, total = str(path), None, [], [], 0
        want = {"text": (config.n_text, config.text_dim), "pooled": (config.pooled_dim,)}
        for file in sorted(f for f in folder.iterdir() if f.suffix in (".npz", ".safetensors")):
            arrays = open_shard(file)
            if file.stem == "empty":
                self.empty = arrays["text"], arrays["pooled"]
                continue
            shapes = {name: tuple(arrays[name].shape) for name in ("latents", *want) if name in arrays}
            n, channels, *size = shapes.get("latents", (0, 0, 0))
            if len(size) != 2 or channels != config.channels or any(shapes.get(k) != (n, *s) for k, s in want.items()):
                raise DataError(f"--data {file} holds {shapes}; the model wants n rows of latents ({config.channels}, "
                                f"H, W), text {want['text']} and pooled {want['pooled']}")
            if size[0] != size[1] or size[0] % 2:
                raise DataError(f"--data {file}: latents of {size}; they must be square, their width even")
            if self.files and size != self.size:
                raise DataError(f"--data {file}: latents of {size}, but {self.files[0]} has {self.size}: "
                                "give one folder for each picture size")
            self.size = size
            self.files.append(file)
            self.starts.append(total)
            total += n
        if total < 2:
            raise DataError(f"--data {path} holds {total} rows, and one to train on and one to validate is the least")
        if self.empty is None:
            self.empty = np.zeros((config.n_text, config.text_dim)), np.zeros(config.pooled_dim)
        self.seq = config.n_text + self.size[0] * self.size[1] // 4
        self.shift = shift_of(self.seq - config.n_text)
        n_val = max(1, min(total // 20, 1024))
        super().__init__(total - n_val, n_val, seed)

    def __str__(self):
        return f"--data {self.name}: {len(self.files)} shards, {self.n:,} rows to train on, {self.n_val} to validate"

    def row(self, i):
        shard = int(np.searchsorted(self.starts, i, side="right")) - 1
        arrays, i = open_shard(self.files[shard]), i - self.starts[shard]
        return tuple(np.asarray(arrays[k][i], np.float32) for k in ("latents", "text", "pooled"))


@functools.lru_cache(maxsize=8)
def open_shard(file):
    """{name: array}. A .safetensors is memory-mapped: rows are read as they are asked for. An .npz cannot be: it is
    read whole, and eight are kept."""
    if file.suffix == ".npz":
        with np.load(file) as arrays:
            return dict(arrays)
    with open(file, "rb") as f:  # 8 bytes of size, a JSON header, the tensors
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    raw, arrays = np.memmap(file, mode="r", offset=8 + size), {}
    for name, entry in header.items():
        dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(entry["dtype"])
        if dtype is None:
            raise DataError(f"--data {file}: {name} is {entry['dtype']}; write it as F32, F16 or BF16")
        begin, end = entry["data_offsets"]
        array = raw[begin:end].view(dtype).reshape(entry["shape"])
        arrays[name] = BFloat16(array) if entry["dtype"] == "BF16" else array
    return arrays


class BFloat16:
    """numpy has no bfloat16: a row's 16 bits are the upper half of an fp32."""

    def __init__(self, bits):
        self.bits, self.shape = bits, bits.shape

    def __getitem__(self, i):
        return (self.bits[i].astype(np.uint32) << 16).view(np.float32)

    def __array__(self, dtype=None, copy=None):
        return self[:].astype(dtype or np.float32)


def load(config, path=None, seed=0):
    return Shards(path, config, seed) if path else Shapes(config, seed)


# ---------------------------------------------------------------- the user's autoencoder and text encoders


class Encoders:
    """The autoencoder and text encoders of a FLUX.1 folder in diffusers' layout (vae, text_encoder, text_encoder_2,
    tokenizer, tokenizer_2), through diffusers and transformers, which only this class needs."""

    def __init__(self, folder, config):
        import torch
        from diffusers import AutoencoderKL
        from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

        self.torch, self.n_text = torch, config.n_text
        self.vae = AutoencoderKL.from_pretrained(folder, subfolder="vae").eval()
        self.clip = CLIPTextModel.from_pretrained(folder, subfolder="text_encoder").eval()
        self.t5 = T5EncoderModel.from_pretrained(folder, subfolder="text_encoder_2").eval()
        self.clip_tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
        self.t5_tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer_2")

    def text(self, captions):
        """-> T5's hidden states (B, n_text, text_dim), padding included as FLUX has it, and CLIP's vector
        (B, pooled_dim), fp32 numpy."""
        def tokens(tokenizer, length):
            return tokenizer(captions, padding="max_length", max_length=length, truncation=True,
                             return_tensors="pt").input_ids

        with self.torch.no_grad():
            text = self.t5(tokens(self.t5_tokenizer, self.n_text))[0]
            length = self.clip.config.max_position_embeddings  # 77
            pooled = self.clip(tokens(self.clip_tokenizer, length)).pooler_output
        return text.float().numpy(), pooled.float().numpy()

    def encode(self, images, seed=0):  # (B, 3, H, W) in 0..1 -> normalized latents (B, 16, H / 8, W / 8)
        generator = self.torch.Generator().manual_seed(seed)
        with self.torch.no_grad():
            z = self.vae.encode(self.torch.from_numpy(images * 2 - 1).float()).latent_dist.sample(generator)
        return ((z - self.vae.config.shift_factor) * self.vae.config.scaling_factor).numpy()

    def decode(self, latents):
        z = self.torch.from_numpy(latents) / self.vae.config.scaling_factor + self.vae.config.shift_factor
        with self.torch.no_grad():
            return (self.vae.decode(z)[0] / 2 + 0.5).clamp(0, 1).numpy()


def write_shards(encoders, images, out, size, rows=256):
    """A folder of pictures, each with its caption in a .txt beside it -> .npz shards of `rows` rows, and empty.npz.
    Pictures are scaled and centre-cropped to size × size pixels."""
    from PIL import Image, ImageOps

    files = sorted(f for f in Path(images).iterdir() if f.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))
    missing = [f.name for f in files if not f.with_suffix(".txt").exists()]
    if not files or missing:
        raise DataError(f"--images {images} holds {len(files)} pictures; without a caption's .txt: {missing[:8]}")
    out = Path(out)
    out.mkdir(parents=True)
    text, pooled = encoders.text([""])
    np.savez(out / "empty.npz", text=text[0], pooled=pooled[0])
    for start in range(0, len(files), rows):
        shard = {"latents": [], "text": [], "pooled": []}
        for number, file in enumerate(files[start:start + rows], start):
            image = ImageOps.fit(Image.open(file).convert("RGB"), (size, size))
            pixels = np.asarray(image, np.float32).transpose(2, 0, 1)[None] / 255
            text, pooled = encoders.text([file.with_suffix(".txt").read_text().strip()])
            for name, x in zip(shard, (encoders.encode(pixels, seed=number), text, pooled)):
                shard[name].append(x[0].astype(np.float16))
        np.savez(out / f"{start // rows:05}.npz", **{name: np.stack(x) for name, x in shard.items()})


def main():
    p = argparse.ArgumentParser(description="Pictures with captions -> shards of latents and text embeddings.")
    p.add_argument("--flux", required=True, metavar="DIR", help="FLUX.1 in diffusers' layout")
    p.add_argument("--images", required=True, metavar="DIR", help="pictures and their captions: cat.jpg, cat.txt")
    p.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    p.add_argument("--size", default="12b", choices=SIZES, help="model size: the text's length")
    p.add_argument("--pixels", type=int, default=512, help="width and height, a multiple of 16")
    args = p.parse_args()
    if args.pixels < 16 or args.pixels % 16 or Path(args.out).exists():
        p.error(f"--pixels {args.pixels} must be a multiple of 16, and --out {args.out} a folder that is not there yet")
    try:
        write_shards(Encoders(args.flux, SIZES[args.size]), args.images, args.out, args.pixels)
    except DataError as e:
        p.error(str(e))


if __name__ == "__main__":
    main()
