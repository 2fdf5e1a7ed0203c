"""Muse Glimmer (its text model) in one file: sizes, module, initialization, loss, FLOPs, Hugging Face names.

    python train.py --model muse_glimmer --scan

Notable features:
- layers repeat with period 4: three see a sliding window and rotate q and k, the fourth sees everything and
  has no positions at all. `layers` holds groups of these four, so the body of --scan's loop is one group
- every branch is normalized before and after, the embeddings too; q and k are normalized per head, without
  scale, so the softmax's temperature is one constant
- a sigmoid gate on attention's output; logits capped softly at 20
- attention and the loss are single custom ops (kernels.py): window, scale and cap are their arguments
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import linear_cross_entropy, rotate_half, splash_attention


PERIOD = 4  # every fourth layer, counted back from the last, is global


@dataclass(frozen=True)
class Config:
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int | None
    window: int  # keys that a local layer's query sees, itself among them
    output_multiplier: float = 0.19611613513818404  # 1 / sqrt(dim / 256) of the 30b
    query_scale: float = 43.7840518911 / 128**0.5  # of normalized queries, besides attention's own 1 / sqrt(head_dim)
    softcap: float = 20.0
    rope_theta: float = 5e5
    norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8

    def __post_init__(self):
        if self.n_layers % self.period:
            raise ValueError(f"Muse Glimmer's layers come in groups of {PERIOD}: {self.n_layers} is no multiple of it")

    @property
    def period(self):
        """Layers in a group."""
        return min(PERIOD, self.n_layers)

    @classmethod
    def from_hf(cls, h):
        """The Config of a config.json. Raises ValueError for what this file does not compute."""
        h = h.get("text_config", h)
        rope = h["rope_parameters"]
        theta = rope["rope_theta"]
        n, last = h["num_hidden_layers"], h["num_hidden_layers"] - 1
        is_global = [(last - i) % PERIOD == 0 for i in range(n)]
        for key, got, known in [
                ("rope_type", rope.get("rope_type", "default"), "default"),
                ("hidden_activation", h.get("hidden_activation", "silu"), "silu"),
                ("attention_bias", h.get("attention_bias", False), False),
                ("tie_word_embeddings", h.get("tie_word_embeddings", False), False),
                ("layer_types", h.get("layer_types"), [("sliding_attention", "full_attention")[g] for g in is_global]),
                ("layer_rope_theta", h.get("layer_rope_theta"), [0 if g else theta for g in is_global])]:
            if got is not None and got != known:
                raise ValueError(f"{key} is {got!r}; muse_glimmer.py knows {known!r}")
        return cls(n, h["hidden_size"], h["num_attention_heads"], h["num_key_value_heads"],
                   h["head_dim"], h["intermediate_size"], h["vocab_size"], h["sliding_window"],
                   h["output_multiplier"], h["qk_scale_factor"],
                   h["final_logit_softcapping"], theta, h["rms_norm_eps"], h["post_norm_eps"])

    def to_hf(self):
        """config.json of transformers' MuseGlimmerForConditionalGeneration, without the vision tower's half."""
        text = {"model_type": "muse_glimmer_text", "hidden_activation": "silu", "num_hidden_layers": self.n_layers,
                "hidden_size": self.dim, "num_attention_heads": self.n_heads, "num_key_value_heads": self.n_kv_heads,
                "head_dim": self.head_dim, "intermediate_size": self.ffn, "vocab_size": self.vocab,
                "sliding_window": self.window, "output_multiplier": self.output_multiplier,
                "qk_scale_factor": self.query_scale,
                "final_logit_softcapping": self.softcap, "rms_norm_eps": self.norm_eps,
                "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
                "post_norm_eps": self.post_norm_eps, "tie_word_embeddings": False}
        return {"architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer",
                "text_config": text, "tie_word_embeddings": False}


SIZES = {
    "debug": Config(8, 256, 4, 2, 64, 768, None, 64, output_multiplier=1.0),  # 7.0M parameters; the data's vocabulary
    "30b": Config(52, 6656, 32, 2, 128, 19968, 202048, 2048),
}


def normalize(x, eps):
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """Scale is weight + offset: the blocks' weights start at 0 and have offset 1, the final norm's has none."""

    def __init__(self, dim, eps, offset=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.offset = eps, offset

    def forward(self, x):
        return (normalize(x.float(), self.eps) * (self.weight.float() + self.offset)).to(x.dtype)


def rope_table(positions, head_dim, theta):
    """cos and sin of position × frequency, each (T, head_dim) fp32 (RoFormer, arXiv:2104.09864).

    positions: (T,) int. They run on across packed documents: rotary attention only sees differences."""
    freq = theta ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angle = positions.float()[:, None] * freq  # (T, head_dim / 2)
    angle = torch.cat([angle, angle], dim=-1)  # Hugging Face's halves, not interleaved pairs
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):  # x: (B, H, T, head_dim)
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c, local):
        super().__init__()
        self.local, self.head_dim, self.eps = local, c.head_dim, c.norm_eps
        self.window = c.window if local else 0
        self.scale = c.query_scale / math.sqrt(c.head_dim)
        self.q_proj = nn.Linear(c.dim, c.n_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.gate_proj = nn.Linear(c.dim, c.n_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=False)

    def forward(self, x, cos, sin, segment_ids):
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, heads, T, head_dim)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = normalize(q, self.eps), normalize(k, self.eps)
        if self.local:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = splash_attention(q, k, v, segment_ids, window=self.window, scale=self.scale)
        y = y.transpose(1, 2).reshape(B, T, -1)
        return self.o_proj(y * torch.sigmoid(self.gate_proj(x)))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c, local):
        super().__init__()
        self.self_attn = Attention(c, local)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.post_attention_layernorm = RMSNorm(c.dim, c.post_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.post_feedforward_layernorm = RMSNorm(c.dim, c.post_norm_eps)

    def forward(self, x, cos, sin, segment_ids):
        y = self.self_attn(self.input_layernorm(x), cos, sin, segment_ids)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Layers(nn.ModuleList):
    """Layers in order: of a group its blocks, of the model its groups. `--scan` puts one loop in the place of the
    latter (graph_trainer.ScanLayers)."""

    def forward(self, x, *consts):
        for layer in self:
            x = layer(x, *consts)
        return x


class MuseGlimmer(nn.Module):
    sizes, Config = SIZES, Config
    defaults = {"batch": 8, "lr": 1e-3}  # train.py's
    keep_fp32 = ()
    hf_type = "muse_glimmer"  # model_type of config.json
    hf_ignored = ("model.vision_",)

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab, c.dim)
        # A group's last layer is global.
        self.layers = Layers(Layers(Block(c, local=i < c.period - 1) for i in range(c.period))
                             for _ in range(c.n_layers // c.period))
        self.norm = RMSNorm(c.dim, c.norm_eps, offset=0.0)
        self.lm_head = nn.Linear(c.dim, c.vocab, bias=False)

    def init(self, name):
        """(mean, std) of a parameter's normal initialization. Depth needs no shrinking: branches end in a norm."""
        if "norm" in name:
            return float(name == "norm.weight"), 0.0
        return 0.0, 0.02

    def forward(self, tokens, segment_ids=None, positions=None):
        """tokens, segment_ids: (B, T) int; positions: (T,) int, 0 to T-1 if None
        -> normalized hidden states (B, T, dim)."""
        c = self.config
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        cos, sin = rope_table(positions, c.head_dim, c.rope_theta)
        x = self.layers(normalize(self.embed_tokens(tokens), c.norm_eps), cos, sin, segment_ids)
        return self.norm(x)

    def logits(self, x):
        """Hidden states (..., dim) -> logits (..., vocab) fp32, for sampling; the loss never makes them."""
        c = self.config
        z = c.output_multiplier * (x.float() @ self.lm_head.weight.float().T)
        return c.softcap * torch.tanh(z / c.softcap)

    def loss(self, batch, psum=lambda x: x):
        """This device's share of the mean cross-entropy over the whole batch's valid targets.

        batch: tokens, targets (-100: ignored), segment_ids, each (B, T) int. psum sums a tensor over the
        devices that share the batch. Returns (loss, auxiliary loss), fp32 scalars that add up over devices."""
        c = self.config
        x = self(batch["tokens"], batch["segment_ids"])
        targets = batch["targets"].flatten()
        nll = linear_cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets,  # (B * T,) fp32
                                   multiplier=c.output_multiplier, softcap=c.softcap)
        valid = psum((targets >= 0).sum().float()).clamp(min=1)
        loss = nll.sum() / valid
        return loss, torch.zeros_like(loss)

    def flops_per_token(self, T):
        """Forward and backward matmul FLOPs a token: 6 per weight, plus attention: the causal half square in global
        layers, the window's band of it in local ones."""
        c = self.config
        layer = c.dim * c.head_dim * (3 * c.n_heads + 2 * c.n_kv_heads) + 3 * c.dim * c.ffn
        window = min(c.window, T)
        band = window - window * window / (2 * T)
        keys = c.n_layers // c.period * (T / 2 + (c.period - 1) * band)  # seen by a mean query, summed over layers
        return 6 * (c.n_layers * layer + c.dim * c.vocab) + 12 * c.n_heads * c.head_dim * keys

    def hf_name(self, name):
        """Parameter `name` in Hugging Face's files: (its name there, whether its matrix is stored transposed)."""
        if name.startswith("layers."):
            _, group, layer, rest = name.split(".", 3)
            name = f"layers.{self.config.period * int(group) + int(layer)}.{rest}"
        return name if name == "lm_head.weight" else f"model.language_model.{name}", False
