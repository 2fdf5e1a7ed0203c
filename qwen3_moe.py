"""Qwen3 mixture-of-experts: sizes, router, experts, losses, FLOPs, Hugging Face names.

    python train.py --model qwen3_moe --scan

Notable features:
- 128 experts, 8 a token: no loop over experts, no capacity, no dropped token, static shapes. Tokens are
  sorted by expert, and one grouped matmul does all experts at once (kernels.py)
- router in fp32, top-k probabilities normalized, load-balancing loss over the whole batch of all devices
- attention is Qwen3's (qwen3.py): q and k normalized per head (QK-norm), no bias
- parameter names are Hugging Face's own, with each layer's experts stacked in one tensor
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import llama3
from kernels import grouped_matmul, linear_cross_entropy, paired_grouped_matmul
from llama3 import HF_FIELDS, Llama3, read_hf, rope_table
from qwen3 import Attention

FIELDS = {**HF_FIELDS, "ffn": "moe_intermediate_size", "n_experts": "num_experts", "top_k": "num_experts_per_tok",
          "aux_coef": "router_aux_loss_coef"}  # Config's, as config.json calls them


@dataclass(frozen=True)
class Config:
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int  # of one expert
    n_experts: int
    top_k: int
    vocab: int | None
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    aux_coef: float = 1e-3
    tied = False  # no field: no size's output layer is its embedding

    @classmethod
    def from_hf(cls, h):
        """The Config of a config.json. Raises ValueError for what this file does not compute."""
        h = {"norm_topk_prob": False, "router_aux_loss_coef": 1e-3, **h, "mlp_only_layers": h.get("mlp_only_layers") or []}
        h = read_hf(h, "qwen3_moe.py", rope_type="default", hidden_act="silu", attention_bias=False,
                    use_sliding_window=False, tie_word_embeddings=False, norm_topk_prob=True,
                    decoder_sparse_step=1, mlp_only_layers=[])
        h["head_dim"] = h.get("head_dim") or h["hidden_size"] // h["num_attention_heads"]
        h["num_experts"] = h.get("num_local_experts") or h["num_experts"]  # transformers 5's name and 4's
        return cls(**{field: h[key] for field, key in FIELDS.items()})

    def to_hf(self):
        """config.json, as transformers 4 and 5 both read it."""
        return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
                **{key: getattr(self, field) for field, key in FIELDS.items()}, "intermediate_size": self.ffn,
                "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
                "max_position_embeddings": 40960}


SIZES = {
    "debug": Config(6, 256, 4, 2, 64, 256, 8, 2, None),  # 10.8M parameters, 3.7M active; the data's vocabulary
    "30b-a3b": Config(48, 2048, 32, 4, 128, 768, 128, 8, 151936),
    "235b-a22b": Config(94, 4096, 64, 4, 128, 1536, 128, 8, 151936),
}


class Experts(nn.Module):
    """All experts' weights, (in, out) each: the grouped matmul reads them as x @ w. They lie one below the other, (E * in, out),
    so that FSDP can cut them into more shards than there are experts, or rows of one, and gather them without a copy."""

    def __init__(self, c):
        super().__init__()
        self.n_experts = c.n_experts
        self.gate_proj = nn.Parameter(torch.empty(c.n_experts * c.dim, c.ffn))
        self.up_proj = nn.Parameter(torch.empty(c.n_experts * c.dim, c.ffn))
        self.down_proj = nn.Parameter(torch.empty(c.n_experts * c.ffn, c.dim))

    def forward(self, x, group_sizes):  # x: (tokens sorted by expert, D); group_sizes: (E,)
        gate, up, down = (w.unflatten(0, (self.n_experts, -1)) for w in (self.gate_proj, self.up_proj, self.down_proj))
        return grouped_matmul(paired_grouped_matmul(x, gate, up, group_sizes), down, group_sizes)


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_experts, self.top_k = c.n_experts, c.top_k
        self.gate = nn.Linear(c.dim, c.n_experts, bias=False)
        self.experts = Experts(c)

    def forward(self, x, valid):
        """x: (B, T, D), valid: (B, T) bool -> y: (B, T, D) and the balance statistics of this device's
        valid tokens: the sum of router probabilities (E,) and the number of tokens sent (E,), both fp32."""
        B, T, D = x.shape
        x = x.view(B * T, D)
        probs = F.linear(x.float(), self.gate.weight.float()).softmax(-1)  # (B*T, E)
        weight, expert = probs.topk(self.top_k, dim=-1)  # (B*T, k)
        weight = weight / weight.sum(-1, keepdim=True)

        # Row r of the sorted order is copy order[r] of the (token, choice) pairs: token order[r] // k.
        order = expert.flatten().argsort(stable=True)  # (B*T*k,)
        chosen = F.one_hot(expert, self.n_experts)  # (B*T, k, E)
        group_sizes = chosen.sum((0, 1))  # (E,)
        y = self.experts(x[order // self.top_k], group_sizes.int())
        # A gather undoes the sort: cheaper on TPU than a scatter-add. Choices first: their sum then adds whole (B*T, D) matrices.
        back = order.argsort().view(B * T, self.top_k).T
        y = (y[back] * weight.T[..., None].to(y.dtype)).sum(0)  # y[back]: (k, B*T, D)

        valid = valid.reshape(B * T, 1).float()
        return y.view(B, T, D), (probs * valid).sum(0), (chosen.sum(1) * valid).sum(0)


class Block(llama3.Block):
    def forward(self, x, cos, sin, segment_ids, valid):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segment_ids)
        y, prob_sums, counts = self.mlp(self.post_attention_layernorm(x), valid)
        return x + y, prob_sums, counts


class Qwen3MoE(Llama3):
    sizes, Config, Block, Attention, MLP = SIZES, Config, Block, Attention, MoE
    keep_fp32 = ("mlp.gate.weight",)  # the router
    hf_type = "qwen3_moe"  # model_type of config.json
    hf_ignored = ()

    def forward(self, tokens, segment_ids=None, positions=None, valid=None):
        """tokens, segment_ids: (B, T) int; positions: (T,) int, 0 to T-1 if None; valid: (B, T) bool, which tokens
        the balance counts (None: all).

        Returns normalized hidden states (B, T, dim) and the balance statistics of MoE.forward, (L, E) each."""
        c = self.config
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        cos, sin = rope_table(positions, c.head_dim, c.rope_theta)
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        x, prob_sums, counts = self.layers(self.embed_tokens(tokens), cos, sin, segment_ids, valid)
        return self.norm(x), prob_sums, counts

    def loss(self, batch, psum=lambda x: x):
        """This device's share of the mean cross-entropy over the whole batch's valid targets.

        batch: tokens, targets (-100: ignored), segment_ids, each (B, T) int. psum sums a tensor over the
        devices that share the batch. Returns (loss, auxiliary loss), fp32 scalars that add up over devices.

        The auxiliary loss is Switch Transformer's (arXiv:2101.03961, eq. 4), averaged over layers and
        over the whole batch: E * sum_e (share of choices that went to e) * (mean probability of e). Only
        the counts, which carry no gradient, cross devices: the probabilities enter linearly."""
        c = self.config
        targets = batch["targets"]
        x, prob_sums, counts = self(batch["tokens"], batch["segment_ids"], valid=targets >= 0)
        nll = linear_cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())  # (B * T,) fp32
        valid = psum((targets >= 0).sum().float()).clamp(min=1)
        share = psum(counts) / (valid * c.top_k)  # (L, E), each row sums to 1
        balance = c.n_experts * (share * (prob_sums / valid)).sum() / c.n_layers  # 1.0 when uniform
        return nll.sum() / valid, c.aux_coef * balance

    def flops_per_token(self, T):
        """Forward and backward matmul FLOPs a token: 6 per active weight, plus causal attention's half square."""
        c = self.config
        layer = c.dim * c.head_dim * 2 * (c.n_heads + c.n_kv_heads) + 3 * c.dim * c.ffn * c.top_k + c.dim * c.n_experts
        return 6 * (c.n_layers * layer + c.dim * c.vocab) + 6 * c.n_layers * c.n_heads * c.head_dim * T

    @staticmethod
    def hf_name(name):
        """Parameter `name` in Hugging Face's files: (its name there, whether its matrix is stored transposed).
        A {} in the name counts config.n_experts equal parts of the parameter's rows: every expert is a tensor of its own."""
        if ".experts." in name:
            return f"model.{name}.weight".replace(".experts.", ".experts.{}."), True
        return name if name == "lm_head.weight" else f"model.{name}", False
