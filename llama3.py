"""Llama 3 in one file: sizes, module, initialization, loss, FLOPs, Hugging Face names.

    python train.py --model llama3 --size debug

Notable features:
- grouped-query attention with rotary embeddings (3.1's long-context scaling included); packed documents attend
  only to themselves
- parameter names are Hugging Face's own, so weights go in and out by name
- attention and the loss are single custom ops (kernels.py): Pallas on TPU, plain math elsewhere
- fp32 where it matters: norms, softmax, logits and loss; everything else in the compute dtype
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import linear_cross_entropy, rotate_half, splash_attention


@dataclass(frozen=True)
class Config:
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int | None
    rope_theta: float = 5e5
    norm_eps: float = 1e-5
    rope_scaling: tuple | None = None  # Llama 3.1: (factor, low, high, original context), see rope_table
    tied: bool = False  # the output layer is the embedding (3.2's 1b and 3b)

    @classmethod
    def from_hf(cls, h):
        """The Config of a config.json. Raises ValueError for what this file does not compute."""
        # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling
        rope = h.get("rope_parameters") or {"rope_theta": h.get("rope_theta", 1e4), **(h.get("rope_scaling") or {})}
        kind = rope.get("rope_type", rope.get("type", "default"))
        for key, got, known in [("rope_type", kind, ("default", "llama3")),
                                ("hidden_act", h.get("hidden_act", "silu"), ("silu",)),
                                ("attention_bias", h.get("attention_bias", False), (False,)),
                                ("mlp_bias", h.get("mlp_bias", False), (False,))]:
            if got not in known:
                raise ValueError(f"{key} is {got!r}; llama3.py knows {known}")
        scaling = tuple(rope[k] for k in ROPE_SCALING) if kind == "llama3" else None
        heads = h["num_attention_heads"]
        return cls(h["num_hidden_layers"], h["hidden_size"], heads, h.get("num_key_value_heads", heads),
                   h.get("head_dim") or h["hidden_size"] // heads, h["intermediate_size"], h["vocab_size"],
                   rope["rope_theta"], h["rms_norm_eps"], scaling, h.get("tie_word_embeddings", False))

    def to_hf(self):
        """config.json, as transformers 4 and 5 both read it."""
        scaling = self.rope_scaling and {"rope_type": "llama3", **dict(zip(ROPE_SCALING, self.rope_scaling))}
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
                "num_hidden_layers": self.n_layers, "hidden_size": self.dim, "num_attention_heads": self.n_heads,
                "num_key_value_heads": self.n_kv_heads, "head_dim": self.head_dim, "intermediate_size": self.ffn,
                "vocab_size": self.vocab, "rope_theta": self.rope_theta, "rope_scaling": scaling,
                "rms_norm_eps": self.norm_eps, "tie_word_embeddings": self.tied, "max_position_embeddings": 131072}


ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
LLAMA_3_1 = (8.0, 1.0, 4.0, 8192)


SIZES = {
    "debug": Config(6, 384, 6, 2, 64, 1024, None),  # 9.6M parameters; the data's vocabulary
    "8b": Config(32, 4096, 32, 8, 128, 14336, 128256),
    "70b": Config(80, 8192, 64, 8, 128, 28672, 128256),
    "405b": Config(126, 16384, 128, 8, 128, 53248, 128256, rope_scaling=LLAMA_3_1),
}


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def rope_table(positions, head_dim, theta, scaling=None):
    """cos and sin of position × frequency, each (T, head_dim) fp32 (RoFormer, arXiv:2104.09864).

    positions: (T,) int. They run on across packed documents: rotary attention only sees differences.
    scaling: Llama 3.1's (factor, low, high, original): a frequency that turns less than `low` times within the
    original context is slowed by `factor`, one that turns more than `high` times stays, linear in between.
    """
    freq = theta ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    if scaling:
        factor, low, high, original = scaling
        turns = original * freq / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = freq * keep + freq / factor * (1 - keep)
    angle = positions.float()[:, None] * freq  # (T, head_dim / 2)
    angle = torch.cat([angle, angle], dim=-1)  # Hugging Face's halves, not interleaved pairs
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):  # x: (B, H, T, head_dim)
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.dim, c.n_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=False)

    def forward(self, x, cos, sin, segment_ids):
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, heads, T, head_dim)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        y = splash_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, segment_ids)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.post_attention_layernorm = RMSNorm(c.dim, c.norm_eps)

    def forward(self, x, cos, sin, segment_ids):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segment_ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Layers(nn.ModuleList):
    """The decoder layers in order. `--scan` puts one loop in this place (graph_trainer.ScanLayers)."""

    def forward(self, x, *consts):
        for layer in self:
            x = layer(x, *consts)
        return x


class Llama3(nn.Module):
    sizes, Config = SIZES, Config
    defaults = {"batch": 8, "lr": 1e-3}  # train.py's
    keep_fp32 = ()
    hf_type = "llama"  # model_type of config.json
    hf_ignored = ("lm_head.weight",)  # a tied model's files may repeat its embedding

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab, c.dim)
        self.layers = Layers(Block(c) for _ in range(c.n_layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.lm_head = None if c.tied else nn.Linear(c.dim, c.vocab, bias=False)

    def init(self, name):
        """(mean, std) of a parameter's normal initialization: 0.02, residual outputs shrunk by depth (GPT-2)."""
        if "norm" in name:
            return 1.0, 0.0
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return 0.0, 0.02 / math.sqrt(2 * self.config.n_layers) if residual else 0.02

    @property
    def output_weight(self):
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens, segment_ids=None, positions=None):
        """tokens, segment_ids: (B, T) int; positions: (T,) int, 0 to T-1 if None
        -> normalized hidden states (B, T, dim)."""
        c = self.config
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        cos, sin = rope_table(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        x = self.layers(self.embed_tokens(tokens), cos, sin, segment_ids)
        return self.norm(x)

    def logits(self, x):
        """Hidden states (..., dim) -> logits (..., vocab) fp32, for sampling; the loss never makes them."""
        return x.float() @ self.output_weight.float().T

    def loss(self, batch, psum=lambda x: x):
        """This device's share of the mean cross-entropy over the whole batch's valid targets.

        batch: tokens, targets (-100: ignored), segment_ids, each (B, T) int. psum sums a tensor over the
        devices that share the batch. Returns (loss, auxiliary loss), fp32 scalars that add up over devices.
        """
        x = self(batch["tokens"], batch["segment_ids"])
        targets = batch["targets"].flatten()
        nll = linear_cross_entropy(x.flatten(0, 1), self.output_weight, targets)  # (B * T,) fp32
        valid = psum((targets >= 0).sum().float()).clamp(min=1)
        loss = nll.sum() / valid
        return loss, torch.zeros_like(loss)

    def flops_per_token(self, T):
        """Forward and backward matmul FLOPs a token: 6 a weight, plus causal attention's half square (PaLM, app. B)."""
        c = self.config
        layer = c.dim * c.head_dim * 2 * (c.n_heads + c.n_kv_heads) + 3 * c.dim * c.ffn
        return 6 * (c.n_layers * layer + c.dim * c.vocab) + 6 * c.n_layers * c.n_heads * c.head_dim * T

    @staticmethod
    def hf_name(name):
        """Parameter `name` in Hugging Face's files: (its name there, whether its matrix is stored transposed)."""
        return name if name == "lm_head.weight" else f"model.{name}", False
