"""Muse Glimmer (its text model): sizes, module, FLOPs, Hugging Face names; what Llama 3 has, too, comes from llama3.py.

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

import llama3
from kernels import splash_attention
from llama3 import HF_FIELDS, MLP, Layers, next_token_loss, normalize, read_hf, rope_table, rotate

PERIOD = 4  # every fourth layer, counted back from the last, is global
FIELDS = {**HF_FIELDS, "window": "sliding_window", "output_multiplier": "output_multiplier", "query_scale": "qk_scale_factor",
          "softcap": "final_logit_softcapping", "post_norm_eps": "post_norm_eps"}  # Config's, as config.json calls them


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
        h = {key: value for key, value in h.get("text_config", h).items() if value is not None}
        n, theta = h["num_hidden_layers"], h["rope_parameters"]["rope_theta"]
        is_global = [(n - 1 - i) % PERIOD == 0 for i in range(n)]
        h = read_hf(h, "muse_glimmer.py", rope_type="default", hidden_activation="silu", attention_bias=False,
                    tie_word_embeddings=False, layer_rope_theta=[0 if g else theta for g in is_global],
                    layer_types=[("sliding_attention", "full_attention")[g] for g in is_global])
        return cls(**{field: h[key] for field, key in FIELDS.items()})

    def to_hf(self):
        """config.json of transformers' MuseGlimmerForConditionalGeneration, without the vision tower's half."""
        text = {key: getattr(self, field) for field, key in FIELDS.items()}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": text.pop("rope_theta")}
        text |= {"model_type": "muse_glimmer_text", "hidden_activation": "silu", "tie_word_embeddings": False}
        return {"architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer",
                "text_config": text, "tie_word_embeddings": False}


SIZES = {
    "debug": Config(8, 256, 4, 2, 64, 768, None, 64, output_multiplier=1.0),  # 7.0M parameters; the data's vocabulary
    "30b": Config(52, 6656, 32, 2, 128, 19968, 202048, 2048),
}


class RMSNorm(nn.Module):
    """Scale is weight + offset: the blocks' weights start at 0 and have offset 1, the final norm's has none."""

    def __init__(self, dim, eps, offset=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.offset = eps, offset

    def forward(self, x):
        return (normalize(x, self.eps) * (self.weight.float() + self.offset)).to(x.dtype)


class Attention(llama3.Attention):
    def __init__(self, c, local):
        super().__init__(c)
        self.local, self.eps = local, c.norm_eps
        self.window = c.window if local else 0
        self.scale = c.query_scale / math.sqrt(c.head_dim)
        self.gate_proj = nn.Linear(c.dim, c.n_heads * c.head_dim, bias=False)

    def forward(self, x, cos, sin, segment_ids):
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, heads, T, head_dim)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = normalize(q, self.eps).to(x.dtype), normalize(k, self.eps).to(x.dtype)
        if self.local:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = splash_attention(q, k, v, segment_ids, window=self.window, scale=self.scale)
        y = y.transpose(1, 2).reshape(B, T, -1)
        return self.o_proj(y * torch.sigmoid(self.gate_proj(x)))


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
        # Groups, over which `--scan` loops. A group's last layer is global.
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
        """tokens, segment_ids: (B, T) int; positions: (T,) int, 0 to T-1 if None -> normalized hidden states (B, T, dim)."""
        c = self.config
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        cos, sin = rope_table(positions, c.head_dim, c.rope_theta)
        x = self.embed_tokens(tokens)
        x = normalize(x, c.norm_eps).to(x.dtype)
        return self.norm(self.layers(x, cos, sin, segment_ids))

    def logits(self, x):
        """Hidden states (..., dim) -> logits (..., vocab) fp32, for sampling; the loss never makes them."""
        c = self.config
        z = c.output_multiplier * (x.float() @ self.lm_head.weight.float().T)
        return c.softcap * torch.tanh(z / c.softcap)

    def loss(self, batch, psum=lambda x: x):
        """batch: tokens, targets, segment_ids, each (B, T) int. -> as next_token_loss."""
        x = self(batch["tokens"], batch["segment_ids"])
        return next_token_loss(batch["targets"].flatten(), x.flatten(0, 1), self.lm_head.weight, psum,
                               self.config.output_multiplier, self.config.softcap)

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
