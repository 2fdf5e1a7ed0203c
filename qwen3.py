"""Qwen3 (dense): sizes, attention, module, Hugging Face names. What Llama 3 has just the same comes from llama3.py.

    python train.py --model qwen3 --size debug

Notable features:
- attention normalizes q and k per head (QK-norm), no bias; packed documents attend only to themselves
- the small sizes' output layer is their embedding: one parameter, read (and, sharded, gathered) twice
- parameter names are Hugging Face's own, so weights go in and out by name
- attention and the loss are single custom ops (kernels.py): Pallas on TPU, plain math elsewhere
"""

from dataclasses import dataclass

import torch
import torch.nn as nn

from kernels import splash_attention
from llama3 import HF_FIELDS, MLP, Block, Layers, RMSNorm, gpt2_init, next_token_loss, read_hf, rope_table, rotate


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
        h = read_hf({"head_dim": 128, **h}, "qwen3.py", rope_type="default", hidden_act="silu", attention_bias=False,
                    use_sliding_window=False)
        return cls(**{field: h[key] for field, key in HF_FIELDS.items()}, tied=h["tie_word_embeddings"])

    def to_hf(self):
        """config.json, as transformers 4 and 5 both read it."""
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
                **{key: getattr(self, field) for field, key in HF_FIELDS.items()},
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
        self.layers = Layers(Block(c, Attention(c), MLP(c)) for _ in range(c.n_layers))
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
        cos, sin = rope_table(positions, c.head_dim, c.rope_theta)
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
