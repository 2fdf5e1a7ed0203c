"""Qwen3 (dense) in one file: sizes, module, initialization, loss, FLOPs, Hugging Face names.

    python train.py --model qwen3 --size debug

Notable features:
- attention normalizes q and k per head (QK-norm), no bias; packed documents attend only to themselves
- the small sizes' output layer is their embedding: one parameter, read (and, sharded, gathered) twice
- parameter names are Hugging Face's own, so weights go in and out by name
- attention and the loss are single custom ops (kernels.py): Pallas on TPU, plain math elsewhere
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
    tied: bool = False  # the output layer is the embedding
    rope_theta: float = 1e6
    norm_eps: float = 1e-6

    @classmethod
    def from_hf(cls, h):
        """The Config of a config.json. Raises ValueError for what this file does not compute."""
        # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling
        rope = h.get("rope_parameters") or {"rope_theta": h.get("rope_theta", 1e4), **(h.get("rope_scaling") or {})}
        for key, got, known in [("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
                                ("hidden_act", h.get("hidden_act", "silu"), "silu"),
                                ("attention_bias", h.get("attention_bias", False), False),
                                ("use_sliding_window", h.get("use_sliding_window", False), False)]:
            if got != known:
                raise ValueError(f"{key} is {got!r}; qwen3.py knows {known!r}")
        return cls(h["num_hidden_layers"], h["hidden_size"], h["num_attention_heads"], h["num_key_value_heads"],
                   h.get("head_dim", 128), h["intermediate_size"], h["vocab_size"],
                   h.get("tie_word_embeddings", False), rope["rope_theta"], h["rms_norm_eps"])

    def to_hf(self):
        """config.json, as transformers 4 and 5 both read it."""
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
                "num_hidden_layers": self.n_layers, "hidden_size": self.dim, "num_attention_heads": self.n_heads,
                "num_key_value_heads": self.n_kv_heads, "head_dim": self.head_dim, "intermediate_size": self.ffn,
                "vocab_size": self.vocab, "rope_theta": self.rope_theta, "rms_norm_eps": self.norm_eps,
                "tie_word_embeddings": self.tied, "max_position_embeddings": 40960}


SIZES = {
    "debug": Config(6, 384, 6, 2, 64, 1024, None, tied=True),  # 9.5M parameters; the data's vocabulary
    "0.6b": Config(28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    "1.7b": Config(28, 2048, 16, 8, 128, 6144, 151936, tied=True),
    "4b": Config(36, 2560, 32, 8, 128, 9728, 151936, tied=True),
    "8b": Config(36, 4096, 32, 8, 128, 12288, 151936),
    "14b": Config(40, 5120, 40, 8, 128, 17408, 151936),
    "32b": Config(64, 5120, 64, 8, 128, 25600, 151936),
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


def rope_table(positions, head_dim, theta):
    """cos and sin of position × frequency, each (T, head_dim) fp32 (RoFormer, arXiv:2104.09864).

    positions: (T,) int. They run on across packed documents: rotary attention only sees differences.
    """
    freq = theta ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
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
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x, cos, sin, segment_ids):
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, heads, T, head_dim)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = splash_attention(q, k, v, segment_ids)
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


class Qwen3(nn.Module):
    sizes, Config = SIZES, Config
    defaults = {"batch": 8, "lr": 1e-3}  # train.py's
    keep_fp32 = ()
    hf_type = "qwen3"  # model_type of config.json
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
        cos, sin = rope_table(positions, c.head_dim, c.rope_theta)
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
