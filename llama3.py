"""Llama 3 in one file: sizes, module, initialization, loss, FLOPs.

    python train.py --model llama3 --size debug

Notable features:
- grouped-query attention with rotary embeddings; packed documents attend only to themselves
- parameter names are Hugging Face's own, so weights go in and out by name
- attention and the loss are single custom ops (kernels.py): Pallas on TPU, plain math elsewhere
- fp32 where it matters: norms, softmax, logits and loss; everything else in the compute dtype
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import linear_cross_entropy, splash_attention


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


SIZES = {
    "debug": Config(6, 384, 6, 2, 64, 1024, None),  # 9.6M parameters; the data's vocabulary
    "8b": Config(32, 4096, 32, 8, 128, 14336, 128256),
    "70b": Config(80, 8192, 64, 8, 128, 28672, 128256),
    "405b": Config(126, 16384, 128, 8, 128, 53248, 128256),
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


def rope_table(T, head_dim, theta, device):
    """cos and sin of position × frequency, each (T, head_dim) fp32 (RoFormer, arXiv:2104.09864).

    Positions run on across packed documents: rotary attention only sees differences.
    """
    freq = theta ** -(torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angle = torch.arange(T, device=device).float()[:, None] * freq  # (T, head_dim / 2)
    angle = torch.cat([angle, angle], dim=-1)  # Hugging Face's halves, not interleaved pairs
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):  # x: (B, H, T, head_dim)
    a, b = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


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
    sizes = SIZES
    keep_fp32 = ()

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab, c.dim)
        self.layers = Layers(Block(c) for _ in range(c.n_layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.lm_head = nn.Linear(c.dim, c.vocab, bias=False)

    def init(self, name):
        """(mean, std) of a parameter's normal initialization: 0.02, residual outputs shrunk by depth (GPT-2)."""
        if "norm" in name:
            return 1.0, 0.0
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return 0.0, 0.02 / math.sqrt(2 * self.config.n_layers) if residual else 0.02

    def forward(self, tokens, segment_ids=None):
        """tokens, segment_ids: (B, T) int -> normalized hidden states (B, T, dim)."""
        c = self.config
        cos, sin = rope_table(tokens.shape[1], c.head_dim, c.rope_theta, tokens.device)
        x = self.layers(self.embed_tokens(tokens), cos, sin, segment_ids)
        return self.norm(x)

    def loss(self, batch, psum=lambda x: x):
        """This device's share of the mean cross-entropy over the whole batch's valid targets.

        batch: tokens, targets (-100: ignored), segment_ids, each (B, T) int. psum sums a tensor over the
        devices that share the batch. Returns (loss, auxiliary loss), fp32 scalars that add up over devices.
        """
        x = self(batch["tokens"], batch["segment_ids"])
        targets = batch["targets"].flatten()
        nll = linear_cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets)  # (B * T,) fp32
        valid = psum((targets >= 0).sum()).clamp(min=1)
        loss = nll.sum() / valid
        return loss, torch.zeros_like(loss)

    def flops_per_token(self, T):
        """Forward and backward matmul FLOPs a token: 6 per weight, plus causal attention's half square (PaLM, app. B)."""
        c = self.config
        layer = c.dim * c.head_dim * 2 * (c.n_heads + c.n_kv_heads) + 3 * c.dim * c.ffn
        return 6 * (c.n_layers * layer + c.dim * c.vocab) + 6 * c.n_layers * c.n_heads * c.head_dim * T
