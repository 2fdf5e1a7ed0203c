"""FLUX.1 in one file: sizes, the MMDiT, initialization, rectified-flow loss, FLOPs.

    python train.py --model flux --steps 300      # drawn shapes with captions (flux_data.py)

Notable features:
- 19 double blocks (text and image have their own weights and meet in attention), then 38 single blocks (one
  stream, attention and MLP side by side); every block is modulated by a vector of time, guidance and CLIP text
- text and image tokens are one tensor all the way, text first: that is what a scan carries. `--scan` makes two
  loops, whose shared vector gets the sum of the layers' gradients
- rectified flow: the noise, the timesteps and the dropped captions come in with the batch (flux_data.py), so
  the captured step is a pure function and a run is repeatable
- parameter names are diffusers' FluxTransformer2DModel's own, so weights go in and out by name
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.stateless import _reparametrize_module

from kernels import splash_attention
from llama3 import Layers, RMSNorm, normalize


@dataclass(frozen=True)
class Config:
    n_layers: int  # double blocks
    n_single_layers: int
    dim: int
    n_heads: int
    rope_axes: tuple  # head channels that rotate with (nothing, row, column); their sum is the head dimension
    channels: int  # of the latents; a token is 2 × 2 latent pixels
    text_dim: int  # T5
    pooled_dim: int  # CLIP
    n_text: int  # text tokens in a row of the data
    guidance: bool = True  # dev is told its guidance scale; schnell is not
    mlp_ratio: int = 4
    rope_theta: float = 1e4
    norm_eps: float = 1e-6

    @classmethod
    def from_hf(cls, h):
        """The Config of diffusers' config.json. n_text is ours: without it, T5's length in FLUX.1-dev and -schnell."""
        if h.get("patch_size", 1) != 1 or h.get("out_channels") not in (None, h["in_channels"]):
            raise ValueError("patch_size and out_channels must be 1 and in_channels: other FLUX variants are not here")
        heads, guidance = h["num_attention_heads"], h["guidance_embeds"]
        return cls(h["num_layers"], h["num_single_layers"], heads * h["attention_head_dim"], heads, tuple(h["axes_dims_rope"]),
                   h["in_channels"] // 4, h["joint_attention_dim"], h["pooled_projection_dim"],
                   h.get("n_text", 512 if guidance else 256), guidance)

    def to_hf(self):
        return {"_class_name": "FluxTransformer2DModel", "patch_size": 1, "in_channels": 4 * self.channels,
                "out_channels": None, "num_layers": self.n_layers, "num_single_layers": self.n_single_layers,
                "attention_head_dim": self.dim // self.n_heads, "num_attention_heads": self.n_heads,
                "joint_attention_dim": self.text_dim, "pooled_projection_dim": self.pooled_dim,
                "guidance_embeds": self.guidance, "axes_dims_rope": list(self.rope_axes), "n_text": self.n_text}


SIZES = {
    "debug": Config(2, 4, 192, 6, (8, 12, 12), 12, 64, 32, 8),  # 5.2M parameters; pixels, no autoencoder
    "12b": Config(19, 38, 3072, 24, (16, 56, 56), 16, 4096, 768, 512),  # FLUX.1-dev
    "12b-schnell": Config(19, 38, 3072, 24, (16, 56, 56), 16, 4096, 768, 256, guidance=False),
}


class Linear(nn.Linear):
    """Casts its input to its weight's dtype: the batch and the embeddings of time come in fp32."""

    def forward(self, x):
        weight = self.weight
        return F.linear(x.to(weight.dtype), weight, self.bias)


def layer_norm(x, eps):
    """Without scale and shift: those are the modulation's."""
    h = x.float()
    return normalize(h - h.mean(-1, keepdim=True), eps).to(x.dtype)


class Modulation(nn.Module):
    """n vectors a sample out of the conditioning vector (AdaLN, arXiv:2212.09748): shifts, scales and gates."""

    def __init__(self, c, n):
        super().__init__()
        self.n = n
        self.linear = Linear(c.dim, n * c.dim)

    def forward(self, vec):  # (B, D) -> n of (B, 1, D)
        return self.linear(F.silu(vec))[:, None].chunk(self.n, dim=-1)


def sinusoid(x, dim=256, max_period=1e4):  # (B,) fp32 in 0..1000 -> (B, dim) fp32: cosines, then sines
    freq = torch.exp(-math.log(max_period) * torch.arange(dim // 2, device=x.device).float() / (dim // 2))
    angle = x[:, None] * freq
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


class Embedder(nn.Module):
    def __init__(self, in_dim, dim):
        super().__init__()
        self.linear_1 = Linear(in_dim, dim)
        self.linear_2 = Linear(dim, dim)

    def forward(self, x):
        return self.linear_2(F.silu(self.linear_1(x)))


class TimeTextEmbed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.timestep_embedder = Embedder(256, c.dim)
        self.guidance_embedder = Embedder(256, c.dim) if c.guidance else None
        self.text_embedder = Embedder(c.pooled_dim, c.dim)

    def forward(self, t, guidance, pooled):
        vec = self.timestep_embedder(sinusoid(1000 * t))
        if self.guidance_embedder is not None:
            vec = vec + self.guidance_embedder(sinusoid(1000 * guidance))
        return vec + self.text_embedder(pooled)  # (B, D)


def rope_table(rows, columns, axes, theta, device):
    """cos and sin of position × frequency, each (rows * columns, head_dim / 2) fp32, for image tokens row by row. A
    token's position is (0, row, column); text tokens are all at the origin, where nothing turns."""
    row = torch.arange(rows, device=device).float()[:, None].expand(rows, columns).flatten()
    column = torch.arange(columns, device=device).float().expand(rows, columns).flatten()
    angles = []
    for position, dim in zip((torch.zeros_like(row), row, column), axes):
        freq = theta ** -(torch.arange(0, dim, 2, device=device).float() / dim)
        angles.append(position[:, None] * freq)
    angle = torch.cat(angles, dim=-1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):  # x: (B, H, T, head_dim), neighbouring channels form a pair
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)


def patchify(x):
    """(B, C, H, W) -> (B, H/2 * W/2, 4C), each token channel by channel, as diffusers packs latents."""
    B, C, H, W = x.shape
    return x.view(B, C, H // 2, 2, W // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, H // 2 * (W // 2), 4 * C)


def unpatchify(x, H, W):
    B, _, C = x.shape
    return x.view(B, H // 2, W // 2, C // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(B, C // 4, H, W)


class Attention(nn.Module):
    """The projections of one block; with `double`, a second set for the text."""

    def __init__(self, c, double):
        super().__init__()
        self.n_heads = c.n_heads
        self.to_q, self.to_k, self.to_v = (Linear(c.dim, c.dim) for _ in range(3))
        self.norm_q, self.norm_k = (RMSNorm(c.dim // c.n_heads, c.norm_eps) for _ in range(2))
        if double:
            self.add_q_proj, self.add_k_proj, self.add_v_proj = (Linear(c.dim, c.dim) for _ in range(3))
            self.norm_added_q, self.norm_added_k = (RMSNorm(c.dim // c.n_heads, c.norm_eps) for _ in range(2))
            self.to_out = nn.ModuleList([Linear(c.dim, c.dim)])
            self.to_add_out = Linear(c.dim, c.dim)

    def qkv(self, x, cos, sin):
        q, k, v = (self.heads(proj(x)) for proj in (self.to_q, self.to_k, self.to_v))
        return rotate(self.norm_q(q), cos, sin), rotate(self.norm_k(k), cos, sin), v

    def text_qkv(self, x):
        q, k, v = (self.heads(proj(x)) for proj in (self.add_q_proj, self.add_k_proj, self.add_v_proj))
        return self.norm_added_q(q), self.norm_added_k(k), v

    def heads(self, x):
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, heads, T, head_dim)


def attend(q, k, v):  # (B, heads, T, head_dim) -> (B, T, D); every token sees every token
    return splash_attention(q, k, v, causal=False).transpose(1, 2).flatten(2)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        # diffusers' names; it has a dropout at 1
        self.net = nn.ModuleDict({"0": nn.ModuleDict({"proj": Linear(c.dim, c.mlp_ratio * c.dim)}),
                                  "2": Linear(c.mlp_ratio * c.dim, c.dim)})

    def forward(self, x):
        return self.net["2"](F.gelu(self.net["0"]["proj"](x), approximate="tanh"))


class DoubleBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.eps = c.norm_eps
        self.norm1, self.norm1_context = Modulation(c, 6), Modulation(c, 6)
        self.attn = Attention(c, double=True)
        self.ff, self.ff_context = MLP(c), MLP(c)

    def forward(self, x, vec, cos, sin):
        """x: (B, T, D), text tokens first; vec: (B, D); cos, sin: (image tokens, head_dim / 2)."""
        parts = [x.shape[1] - cos.shape[0], cos.shape[0]]
        text, image = x.split(parts, dim=1)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.norm1(vec)
        c_shift1, c_scale1, c_gate1, c_shift2, c_scale2, c_gate2 = self.norm1_context(vec)

        qkv = zip(self.attn.text_qkv(layer_norm(text, self.eps) * (1 + c_scale1) + c_shift1),
                  self.attn.qkv(layer_norm(image, self.eps) * (1 + scale1) + shift1, cos, sin))
        y_text, y_image = attend(*(torch.cat(pair, dim=2) for pair in qkv)).split(parts, dim=1)

        image = image + gate1 * self.attn.to_out[0](y_image)
        image = image + gate2 * self.ff(layer_norm(image, self.eps) * (1 + scale2) + shift2)
        text = text + c_gate1 * self.attn.to_add_out(y_text)
        text = text + c_gate2 * self.ff_context(layer_norm(text, self.eps) * (1 + c_scale2) + c_shift2)
        return torch.cat([text, image], dim=1)


class SingleBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.eps = c.norm_eps
        self.norm = Modulation(c, 3)
        self.attn = Attention(c, double=False)
        self.proj_mlp = Linear(c.dim, c.mlp_ratio * c.dim)
        self.proj_out = Linear((1 + c.mlp_ratio) * c.dim, c.dim)

    def forward(self, x, vec, cos, sin):  # cos, sin: (T, head_dim / 2)
        shift, scale, gate = self.norm(vec)
        h = layer_norm(x, self.eps) * (1 + scale) + shift
        y = attend(*self.attn.qkv(h, cos, sin))
        return x + gate * self.proj_out(torch.cat([y, F.gelu(self.proj_mlp(h), approximate="tanh")], dim=-1))


class Flux(nn.Module):
    sizes, Config = SIZES, Config
    defaults = {"batch": 32, "lr": 3e-3}  # train.py's
    keep_fp32 = ()
    hf_type = "FluxTransformer2DModel"  # _class_name of config.json
    hf_file = "diffusion_pytorch_model"  # what diffusers calls its safetensors
    hf_ignored = ()

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.time_text_embed = TimeTextEmbed(c)
        self.context_embedder = Linear(c.text_dim, c.dim)
        self.x_embedder = Linear(4 * c.channels, c.dim)
        self.transformer_blocks = Layers(DoubleBlock(c) for _ in range(c.n_layers))
        self.single_transformer_blocks = Layers(SingleBlock(c) for _ in range(c.n_single_layers))
        self.norm_out = Modulation(c, 2)
        self.proj_out = Linear(c.dim, 4 * c.channels)

    def init(self, name):
        """(mean, std) of a parameter's normal initialization. Modulations and the last layer start at zero, so
        every block starts as the identity (AdaLN-Zero, arXiv:2212.09748); the rest keep their input's scale."""
        owner, _, leaf = name.rpartition(".")
        if leaf == "bias" or owner.endswith(".linear") or owner == "proj_out":
            return 0.0, 0.0
        if "attn.norm" in name:
            return 1.0, 0.0
        return 0.0, self.get_submodule(owner)._parameters[leaf].shape[-1] ** -0.5

    @staticmethod
    def hf_name(name):
        """Parameter `name` in diffusers' files: (its name there, whether its matrix is stored transposed)."""
        return name, False

    def forward(self, latents, text, pooled, t, guidance):
        """The velocity at time t, of the latents' shape and in fp32.

        latents: (B, C, H, W), H and W even; text: (B, S, text_dim), T5's; pooled: (B, pooled_dim), CLIP's; t: (B,)
        from 0 (data) to 1 (noise); guidance: (B,). All floating point."""
        c = self.config
        H, W = latents.shape[2:]
        cos, sin = rope_table(H // 2, W // 2, c.rope_axes, c.rope_theta, latents.device)
        vec = self.time_text_embed(t, guidance, pooled)
        image = self.x_embedder(patchify(latents))
        n_image = image.shape[1]
        x = torch.cat([self.context_embedder(text), image], dim=1)  # (B, S + image tokens, D)
        x = self.transformer_blocks(x, vec, cos, sin)
        still = cos.new_zeros(text.shape[1], cos.shape[1])
        x = self.single_transformer_blocks(x, vec, torch.cat([still + 1, cos]), torch.cat([still, sin]))
        scale, shift = self.norm_out(vec)
        x = layer_norm(x[:, -n_image:], c.norm_eps) * (1 + scale) + shift
        return unpatchify(self.proj_out(x).float(), H, W)

    def batch_spec(self, rows, seq):
        """What loss reads, as meta tensors: rows of config.n_text text tokens and a square picture, together seq."""
        c, side = self.config, math.isqrt(max(seq - self.config.n_text, 0))
        if side == 0 or c.n_text + side * side != seq:
            raise ValueError(f"seq {seq} is not {c.n_text} tokens of text and a square number of image tokens")
        latents = (c.channels, 2 * side, 2 * side)
        shapes = {"guidance": (), "latents": latents, "noise": latents, "pooled": (c.pooled_dim,), "t": (),
                  "text": (c.n_text, c.text_dim)}
        return {name: torch.empty(rows, *shape, device="meta") for name, shape in shapes.items()}

    def loss(self, batch, psum=lambda x: x):
        """This device's share of the mean squared error of the velocity (rectified flow, arXiv:2209.03003).

        batch, fp32: latents and noise (B, C, H, W), t (B,), and text, pooled, guidance as in forward. psum sums a
        tensor over the devices that share the batch. Returns (loss, auxiliary loss), which add up over devices."""
        x0, noise, t = batch["latents"], batch["noise"], batch["t"][:, None, None, None]
        v = self((1 - t) * x0 + t * noise, batch["text"], batch["pooled"], batch["t"], batch["guidance"])
        rows = psum(torch.ones_like(batch["t"]).sum())
        loss = (v - (noise - x0)).square().mean((1, 2, 3)).sum() / rows
        return loss, torch.zeros_like(loss)

    def flops_per_token(self, T):
        """Forward and backward matmul FLOPs a token of a row, config.n_text of whose T tokens are text: 6 per weight and token
        that passes it, plus attention."""
        c, n_image, D = self.config, T - self.config.n_text, self.config.dim
        block = (4 + 2 * c.mlp_ratio) * D * D  # a token's weights in either kind of block
        tokens = (c.n_layers + c.n_single_layers) * (T * block + 2 * T * T * D)
        tokens += c.n_text * c.text_dim * D + 8 * n_image * c.channels * D
        embed = (256 + D) * D * (1 + c.guidance) + (c.pooled_dim + D) * D
        vector = embed + (12 * c.n_layers + 3 * c.n_single_layers + 2) * D * D  # once a row
        return 6 * (tokens + vector) / T


def shift_time(t, shift):
    """Moves times in 0..1 towards the noise: larger pictures need more to hide as much (arXiv:2403.03206, 5.3.2)."""
    return shift * t / (1 + (shift - 1) * t)


def shift_of(n_image):
    """FLUX.1's own shift for a number of image tokens: exp(0.5) at 256 to exp(1.15) at 4,096."""
    return math.exp(0.5 + (1.15 - 0.5) * (n_image - 256) / (4096 - 256))


def euler_step(model):
    """-> step(params, batch) -> latents one step nearer to the data, to capture.

    batch, fp32: latents (B, C, H, W), text (2B, S, text_dim) and pooled (2B, pooled_dim) of the captions and then of
    the empty one, t, t_next, guidance and cfg (B,): v = v_empty + cfg * (v_caption - v_empty) (arXiv:2207.12598)."""
    def step(params, batch):
        x, t = batch["latents"], batch["t"]
        with torch.no_grad(), _reparametrize_module(model, params):
            v = model(torch.cat([x, x]), batch["text"], batch["pooled"], torch.cat([t, t]),
                      torch.cat([batch["guidance"]] * 2))
        captioned, empty = v.chunk(2)
        v = empty + batch["cfg"][:, None, None, None] * (captioned - empty)
        return x + (batch["t_next"] - t)[:, None, None, None] * v

    return step
