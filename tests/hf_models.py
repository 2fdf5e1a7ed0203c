"""Small random models made by transformers, against which the tests hold ours."""

import torch
import transformers

from llama3 import Llama3
from muse_glimmer import MuseGlimmer
from qwen3 import Qwen3
from qwen3_moe import Qwen3MoE

transformers.utils.logging.disable_progress_bar()

SHAPE = dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, bos_token_id=None, eos_token_id=None, pad_token_id=None)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA_3_1 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64}


def llama(rope, **more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, rope_parameters=rope, **more))


def qwen3(tied):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        **SHAPE, rope_parameters=ROPE, tie_word_embeddings=tied))


def qwen3_moe(num_experts=8):
    experts = dict(moe_intermediate_size=48, num_experts=num_experts, num_experts_per_tok=3, norm_topk_prob=True)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHAPE, rope_parameters=ROPE, **experts))


def muse_glimmer():
    """Two groups of layers, window 12, and the smallest vision tower (which no text touches)."""
    text = {**SHAPE, "num_hidden_layers": 8, "sliding_window": 12, "rope_parameters": ROPE, "output_multiplier": 0.5}
    vision = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, patch_size=2,
                  pos_emb_height=2, pos_emb_width=2)
    return transformers.MuseGlimmerForConditionalGeneration(transformers.MuseGlimmerConfig(
        text_config=text, vision_config=vision, out_hidden_size=128, projector_hidden_size=32, image_token_id=318,
        video_token_id=319))


CASES = {
    "llama": (Llama3, lambda: llama(ROPE)),
    "llama-3.1": (Llama3, lambda: llama(LLAMA_3_1)),
    "llama-tied": (Llama3, lambda: llama(LLAMA_3_1, tie_word_embeddings=True)),
    "qwen3": (Qwen3, lambda: qwen3(False)),
    "qwen3-tied": (Qwen3, lambda: qwen3(True)),
    "qwen3_moe": (Qwen3MoE, qwen3_moe),
    "muse_glimmer": (MuseGlimmer, muse_glimmer),
}


def make(case):
    """-> our model class and a transformers model whose every weight is random, norms too."""
    model_class, build = CASES[case]
    torch.manual_seed(0)
    model = build().float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (0.3 if "norm" in name else 0.1))
    return model_class, model
