"""Llama 3 in one file: sizes, module, initialization, loss, FLOPs, Hugging Face names.

    python train.py --model llama3 --size debug

Notable features:
- grouped-query attention with rotary embeddings (3.1's long-context scaling included); packed documents attend
  only to themselves
- parameter names are Hugging Face's own, so weights go in and out by name
- attention and the loss are single custom ops (kernels.py): Pallas on TPU, plain math elsewhere
- fp32 where it matters: norms, softmax, logits and loss; everything else in the compute dtype
- what the other models have just the same (norm, rotary table, MLP, loss) they import from here
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import linear_cross_entropy, rotate_half, splash_attention


# Config's fields as config.json calls them
HF_FIELDS = {"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads",
             "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn": "intermediate_size",
             "vocab": "vocab_size", "rope_theta": "rope_theta", "norm_eps": "rms_norm_eps"}
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
LLAMA_3_1 = (8.0, 1.0, 4.0, 8192)


def read_hf(h, file, **known):
    """config.json with the rotary keys beside the others: transformers 5 has them in rope_parameters, older versions in
    rope_scaling. known: what `file` computes, by key, a tuple where it has a choice (the first is the default). Raises
    ValueError for anything else."""
    rope = h.get("rope_parameters") or {"rope_theta": h.get("rope_theta", 1e4), **(h.get("rope_scaling") or {})}
    h = {"tie_word_embeddings": False, **h, "rope_type": rope.get("type", "default"), **rope}
    for key, values in known.items():
        values = values if isinstance(values, tuple) else (values,)
        if h.get(key, values[0]) not in values:
            raise ValueError(f"{key} is {h[key]!r}; {file} knows {' and '.join(map(repr, values))}")
    return h


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
        heads = h["num_attention_heads"]
        h = read_hf({"num_key_value_heads": heads, **h}, "llama3.py", rope_type=("default", "llama3"), hidden_act="silu",
                    attention_bias=False, mlp_bias=False)
        h["head_dim"] = h.get("head_dim") or h["hidden_size"] // heads
        scaling = tuple(h[key] for key in ROPE_SCALING) if h["rope_type"] == "llama3" else None
        return cls(**{field: h[key] for field, key in HF_FIELDS.items()}, rope_scaling=scaling, tied=h["tie_word_embeddings"])

    def to_hf(self):
        """config.json, as transformers 4 and 5 both read it."""
        scaling = self.rope_scaling and {"rope_type": "llama3", **dict(zip(ROPE_SCALING, self.rope_scaling))}
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
                **{key: getattr(self, field) for field, key in HF_FIELDS.items()}, "rope_scaling": scaling,
                "tie_word_embeddings": self.tied, "max_position_embeddings": 131072}


SIZES = {
    "debug": Config(6, 384, 6, 2, 64, 1024, None),  # 9.6M parameters; the data's vocabulary
    "8b": Config(32, 4096, 32, 8, 128, 14336, 128256),
    "70b": Config(80, 8192, 64, 8, 128, 28672, 128256),
    "405b": Config(126, 16384, 128, 8, 128, 53248, 128256, rope_scaling=LLAMA_3_1),
}


def normalize(x, eps):
    """x over its last dimension's root mean square (arXiv:1910.07467), in fp32."""
    h = x.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x):
        h = normalize(x, self.eps)
        return self.weight * h.to(x.dtype)


def rope_table(positions, head_dim, theta, scaling=None):
    """cos and sin of position × frequency, each (T, head_dim) fp32 (RoFormer, arXiv:2104.09864).

    positions: (T,) int. They run on across packed documents: rotary attention only sees differences.
    scaling: Llama 3.1's (factor, low, high, original): a frequency that turns less than `low` times within the
    original context is slowed by `factor`, one that turns more than `high` times stays, linear in between."""
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
    """A decoder layer: two residual branches, each normalized before."""

    def __init__(self, c, attention, mlp):
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.post_attention_layernorm = RMSNorm(c.dim, c.norm_eps)

    def forward(self, x, cos, sin, segment_ids):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segment_ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Layers(nn.ModuleList):
    """Layers in order: layer(x, *consts) -> x, or (x, *ys) with ys stacked over layers in the result. `--scan` puts one loop in
    this place (graph_trainer.ScanLayers)."""

    def forward(self, x, *consts):
        ys = []
        for layer in self:
            out = layer(x, *consts)
            x, *y = out if isinstance(out, tuple) else (out,)
            ys.append(y)
        return (x, *map(torch.stack, zip(*ys))) if ys[0] else x


def gpt2_init(name, n_layers):
    """(mean, std) of a parameter's normal initialization: 0.02, residual outputs shrunk by depth (GPT-2)."""
    if "norm" in name:
        return 1.0, 0.0
    residual = name.removesuffix(".weight").endswith(("o_proj", "down_proj"))
    return 0.0, 0.02 / math.sqrt(2 * n_layers) if residual else 0.02


def next_token_loss(targets, x, weight, psum, multiplier=1.0, softcap=0.0):
    """This device's share of the mean cross-entropy over the whole batch's valid targets.

    targets: (N,) int, -100: ignored; x: (N, dim); weight: (vocab, dim), the output layer's; multiplier, softcap: of the logits
    (kernels.linear_cross_entropy). psum sums a tensor over the devices that share the batch.
    Returns (loss, auxiliary loss), fp32 scalars that add up over devices."""
    nll = linear_cross_entropy(x, weight, targets, multiplier=multiplier, softcap=softcap)  # (N,) fp32
    valid = psum((targets >= 0).sum().float()).clamp(min=1)
    loss = nll.sum() / valid
    return loss, torch.zeros_like(loss)


class Llama3(nn.Module):
    """Qwen3 and Qwen3-MoE are this with parts of their own."""

    sizes, Config, Block, Attention, MLP = SIZES, Config, Block, Attention, MLP
    defaults = {"batch": 8, "lr": 1e-3}  # train.py's
    keep_fp32 = ()
    hf_type = "llama"  # model_type of config.json
    hf_ignored = ("lm_head.weight",)  # a tied model's files may repeat its embedding

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab, c.dim)
        self.layers = Layers(self.Block(c, self.Attention(c), self.MLP(c)) for _ in range(c.n_layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.lm_head = None if c.tied else nn.Linear(c.dim, c.vocab, bias=False)

    def init(self, name):
        return gpt2_init(name, self.config.n_layers)

    @property
    def output_weight(self):
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens, segment_ids=None, positions=None):
        """tokens, segment_ids: (B, T) int; positions: (T,) int, 0 to T-1 if None -> normalized hidden states (B, T, dim)."""
        c = self.config
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        cos, sin = rope_table(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        x = self.layers(self.embed_tokens(tokens), cos, sin, segment_ids)
        return self.norm(x)

    def logits(self, x):
        """Hidden states (..., dim) -> logits (..., vocab) fp32, for sampling; the loss never makes them."""
        return x.float() @ self.output_weight.float().T

    def loss(self, batch, psum=lambda x: x):
        """batch: tokens, targets, segment_ids, each (B, T) int. -> as next_token_loss."""
        x = self(batch["tokens"], batch["segment_ids"])
        return next_token_loss(batch["targets"].flatten(), x.flatten(0, 1), self.output_weight, psum)

    def flops_per_token(self, T):
        """Forward and backward matmul FLOPs a token: 6 a weight, plus causal attention's half square (PaLM, app. B)."""
        c = self.config
        layer = c.dim * c.head_dim * 2 * (c.n_heads + c.n_kv_heads) + 3 * c.dim * c.ffn
        return 6 * (c.n_layers * layer + c.dim * c.vocab) + 6 * c.n_layers * c.n_heads * c.head_dim * T

    @staticmethod
    def hf_name(name):
        """Parameter `name` in Hugging Face's files: (its name there, whether its matrix is stored transposed)."""
        return name if name == "lm_head.weight" else f"model.{name}", False
