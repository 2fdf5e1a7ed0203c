"""Qwen3 (dense): sizes, attention, Hugging Face's config. What Llama 3 has just the same is llama3.py's.

    python train.py --model qwen3 --size debug

Notable features:
- attention normalizes q and k per head (QK-norm), no bias
- the small sizes' output layer is their embedding: one parameter, read (and, sharded, gathered) twice
"""

from dataclasses import dataclass

import llama3
from kernels import splash_attention
from llama3 import HF_FIELDS, Llama3, RMSNorm, read_hf, rotate


@dataclass(frozen=True)
class Config(llama3.Config):
    rope_theta: float = 1e6
    norm_eps: float = 1e-6

    @classmethod
    def from_hf(cls, h):
        """The Config of a config.json. Raises ValueError for what this file does not compute."""
        h = read_hf({"head_dim": 128, **h}, "qwen3.py", rope_type="default", hidden_act="silu", attention_bias=False,
                    use_sliding_window=False)
        return cls(**{field: h[key] for field, key in HF_FIELDS.items()}, tied=h["tie_word_embeddings"])

    def to_hf(self):
        return super().to_hf() | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40960}


SIZES = {
    "debug": Config(6, 384, 6, 2, 64, 1024, None, tied=True),  # 9.5M parameters; the data's vocabulary
    "0.6b": Config(28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    "1.7b": Config(28, 2048, 16, 8, 128, 6144, 151936, tied=True),
    "4b": Config(36, 2560, 32, 8, 128, 9728, 151936, tied=True),
    "8b": Config(36, 4096, 32, 8, 128, 12288, 151936),
    "14b": Config(40, 5120, 40, 8, 128, 17408, 151936),
    "32b": Config(64, 5120, 64, 8, 128, 25600, 151936),
}


class Attention(llama3.Attention):
    def __init__(self, c):
        super().__init__(c)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x, cos, sin, segment_ids):
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, heads, T, head_dim)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = splash_attention(q, k, v, segment_ids)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Qwen3(Llama3):
    sizes, Config, Attention = SIZES, Config, Attention
    hf_type = "qwen3"  # model_type of config.json
