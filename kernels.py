"""The three kernels that give a TPU step its memory and speed, as torch custom ops and as JAX functions.

    from kernels import splash_attention, linear_cross_entropy, grouped_matmul, paired_grouped_matmul

Notable features:
- plain PyTorch runs a reference, make_fx sees one node forward and one node backward, and lowering.py maps
  these nodes to JAX (`lowerings`)
- imports no sibling: copy it into any project
"""

import functools

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import lax

# -------------------------------------------------------------------------------------------- torch ops
# Each op's eager form is the reference: fp32 math, no cleverness.


def attention_mask(T, S, segment_ids, causal, window):
    """(1 or B, 1, T, S) bool: which query t may see which key s."""
    t, s = torch.arange(T)[:, None], torch.arange(S)[None]
    mask = torch.ones(1, 1, T, S, dtype=torch.bool)
    if causal:
        mask = mask & (s <= t)
    if window:
        mask = mask & (t - s < window)
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return mask


def _attention(q, k, v, segment_ids, causal, window, softcap, scale):
    T, S, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(groups, 1), v.float().repeat_interleave(groups, 1)
    s = q.float() @ k.mT * scale  # (B, H, T, S)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~attention_mask(T, S, segment_ids, causal, window).to(q.device), -torch.inf)
    lse = s.logsumexp(-1)  # (B, H, T); -inf where a query sees nothing
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0)[..., None])  # ... and p = 0
    return (p @ v).to(q.dtype), lse


@torch.library.custom_op("tpu::splash_attention", mutates_args=())
def splash_attention_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_ids: torch.Tensor | None,
                        causal: bool, window: int, softcap: float, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _attention(q, k, v, segment_ids, causal, window, softcap, scale)


@splash_attention_op.register_fake
def _(q, k, v, segment_ids, causal, window, softcap, scale):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tpu::splash_attention_backward", mutates_args=())
def splash_attention_backward_op(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_ids: torch.Tensor | None,
        out: torch.Tensor, lse: torch.Tensor, causal: bool, window: int, softcap: float, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _vjp(lambda q, k, v: _attention(q, k, v, segment_ids, causal, window, softcap, scale)[0], (q, k, v), grad)


@splash_attention_backward_op.register_fake
def _(grad, q, k, v, segment_ids, out, lse, causal, window, softcap, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_attention(ctx, inputs, output):
    q, k, v, segment_ids, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, segment_ids, *output)


def _attention_backward(ctx, grad, grad_lse):
    q, k, v, segment_ids, out, lse = ctx.saved_tensors
    return *splash_attention_backward_op(grad, q, k, v, segment_ids, out, lse, *ctx.options), *[None] * 5


splash_attention_op.register_autograd(_attention_backward, setup_context=_save_attention)


def splash_attention(q, k, v, segment_ids=None, *, causal=True, window=0, softcap=0.0, scale=None):
    """Attention without a T x T matrix in memory (on TPU). fp32 softmax; a query that sees nothing gives zeros.

    q: (B, H, T, D); k, v: (B, K, S, D), K divides H; segment_ids: (B, T) int, tokens see their own segment only;
    window: a token sees itself and the window - 1 before it (0: all); softcap: scores become
    softcap * tanh(scores / softcap); scale: of the scores, default D ** -0.5. Returns (B, H, T, D) in q's dtype.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return splash_attention_op(q, k, v, segment_ids, causal, window, softcap, scale)[0]


def _vjp(fn, inputs, grad):
    """Gradients of fn at inputs, by autograd: a reference backward needs no formulas."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        return tuple(g.contiguous() for g in torch.autograd.grad(fn(*inputs), inputs, grad))


def _linear_ce(x, weight, targets, ignore_index, z_loss, multiplier, softcap):
    logits = multiplier * (x.float() @ weight.float().T)  # (N, V)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    lse = logits.logsumexp(-1)
    valid = targets != ignore_index
    target = logits.gather(1, targets.long().masked_fill(~valid, 0)[:, None])[:, 0]
    return torch.where(valid, lse - target + z_loss * lse.square(), 0.0), lse


@torch.library.custom_op("tpu::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int,
                            z_loss: float, multiplier: float, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _linear_ce(x, weight, targets, ignore_index, z_loss, multiplier, softcap)


@linear_cross_entropy_op.register_fake
def _(x, weight, targets, ignore_index, z_loss, multiplier, softcap):
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty(len(x), dtype=torch.float32)


@torch.library.custom_op("tpu::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward_op(
        grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor,
        ignore_index: int, z_loss: float, multiplier: float, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _vjp(lambda x, w: _linear_ce(x, w, targets, ignore_index, z_loss, multiplier, softcap)[0], (x, weight), grad)


@linear_cross_entropy_backward_op.register_fake
def _(grad, x, weight, targets, lse, ignore_index, z_loss, multiplier, softcap):
    return torch.empty_like(x), torch.empty_like(weight)


def _save_linear_ce(ctx, inputs, output):
    x, weight, targets, *ctx.options = inputs
    ctx.save_for_backward(x, weight, targets, output[1])


def _linear_ce_backward(ctx, grad, grad_lse):
    return *linear_cross_entropy_backward_op(grad, *ctx.saved_tensors, *ctx.options), *[None] * 5


linear_cross_entropy_op.register_autograd(_linear_ce_backward, setup_context=_save_linear_ce)


def linear_cross_entropy(x, weight, targets, *, ignore_index=-100, z_loss=0.0, multiplier=1.0, softcap=0.0):
    """Cross-entropy of x @ weight.T without the logits in memory (on TPU). x: (N, D), weight: (V, D), targets: (N,) int.

    logits = multiplier * x @ weight.T, then softcap * tanh(logits / softcap) if softcap, in fp32.
    Returns the loss of each token, (N,) fp32: logsumexp - target's logit + z_loss * logsumexp ** 2; 0 where
    the target is ignore_index.
    """
    return linear_cross_entropy_op(x, weight, targets, ignore_index, z_loss, multiplier, softcap)[0]


def _gmm(x, w, group_sizes):
    ends = group_sizes.cumsum(0).tolist()
    y = [x[a:b] @ w[e] for e, (a, b) in enumerate(zip([0, *ends], ends))]
    return torch.cat([*y, x.new_zeros(len(x) - ends[-1], w.shape[2])])


def _paired_gmm(x, gate, up, group_sizes):
    return F.silu(_gmm(x, gate, group_sizes)) * _gmm(x, up, group_sizes)


@torch.library.custom_op("tpu::grouped_matmul", mutates_args=())
def grouped_matmul_op(x: torch.Tensor, w: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    return _gmm(x, w, group_sizes)


@grouped_matmul_op.register_fake
def _(x, w, group_sizes):
    return x.new_empty(len(x), w.shape[2])


@torch.library.custom_op("tpu::grouped_matmul_backward", mutates_args=())
def grouped_matmul_backward_op(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
                               group_sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _vjp(lambda x, w: _gmm(x, w, group_sizes), (x, w), grad)


@grouped_matmul_backward_op.register_fake
def _(grad, x, w, group_sizes):
    return torch.empty_like(x), torch.empty_like(w)


@torch.library.custom_op("tpu::paired_grouped_matmul", mutates_args=())
def paired_grouped_matmul_op(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
                             group_sizes: torch.Tensor) -> torch.Tensor:
    return _paired_gmm(x, gate, up, group_sizes)


@paired_grouped_matmul_op.register_fake
def _(x, gate, up, group_sizes):
    return x.new_empty(len(x), gate.shape[2])


@torch.library.custom_op("tpu::paired_grouped_matmul_backward", mutates_args=())
def paired_grouped_matmul_backward_op(
        grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
        group_sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _vjp(lambda x, gate, up: _paired_gmm(x, gate, up, group_sizes), (x, gate, up), grad)


@paired_grouped_matmul_backward_op.register_fake
def _(grad, x, gate, up, group_sizes):
    return torch.empty_like(x), torch.empty_like(gate), torch.empty_like(up)


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


grouped_matmul_op.register_autograd(
    lambda ctx, grad: (*grouped_matmul_backward_op(grad, *ctx.saved_tensors), None), setup_context=_save_inputs)
paired_grouped_matmul_op.register_autograd(
    lambda ctx, grad: (*paired_grouped_matmul_backward_op(grad, *ctx.saved_tensors), None), setup_context=_save_inputs)


def grouped_matmul(x, w, group_sizes):
    """x: (N, D) sorted by group, w: (E, D, F), group_sizes: (E,) int -> (N, F): each group's rows times its own matrix.

    Groups may be empty; rows after the last group give zeros.
    """
    return grouped_matmul_op(x, w, group_sizes)


def paired_grouped_matmul(x, gate, up, group_sizes):
    """silu(x @ gate[e]) * (x @ up[e]), x read once. x: (N, D) sorted by group, gate, up: (E, D, F) -> (N, F)."""
    return paired_grouped_matmul_op(x, gate, up, group_sizes)


# ------------------------------------------------------------------------------- JAX without Pallas (CPU)


def attention_reference(q, k, v, segment_ids, causal, window, softcap, scale):
    """As splash_attention, plain JAX -> (out, lse)."""
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    q_ = q.reshape(B, K, H // K, T, D).astype(jnp.float32)
    s = jnp.einsum("bkgtd,bksd->bkgts", q_, k.astype(jnp.float32)) * scale
    if softcap:
        s = softcap * jnp.tanh(s / softcap)
    t, u = jnp.arange(T)[:, None], jnp.arange(S)[None]
    mask = jnp.full((1, T, S), True)
    if causal:
        mask &= u <= t
    if window:
        mask &= t - u < window
    if segment_ids is not None:
        mask &= segment_ids[:, :, None] == segment_ids[:, None, :]
    s = jnp.where(mask[:, None, None], s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    out = jnp.einsum("bkgts,bksd->bkgtd", p, v.astype(jnp.float32))
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(B, H, T)


def linear_ce_reference(x, weight, targets, ignore_index, z_loss, multiplier, softcap):
    logits = multiplier * jnp.dot(x, weight.T, preferred_element_type=jnp.float32)
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    valid = targets != ignore_index
    target = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[:, None], axis=1)[:, 0]
    return jnp.where(valid, lse - target + z_loss * lse**2, 0.0), lse


def gmm_reference(x, w, group_sizes):
    return lax.ragged_dot(x, w, group_sizes)


def paired_gmm_reference(x, gate, up, group_sizes):
    return jax.nn.silu(gmm_reference(x, gate, group_sizes)) * gmm_reference(x, up, group_sizes)


def lowerings(kind):
    """{torch op: JAX function} for lowering.py. kind: "reference"."""
    def backward(fn, n, first):
        """The reference's gradient for its first n inputs, by JAX."""
        def vjp(grad, *args):
            args, rest = args[:n], args[n:]
            primal = lambda *xs: first(fn(*xs, *rest))
            return jax.vjp(primal, *args)[1](grad)
        return vjp

    first, only = (lambda y: y[0]), (lambda y: y)
    ops = torch.ops.tpu
    attention_vjp = backward(attention_reference, 3, first)
    ce_vjp = backward(linear_ce_reference, 2, first)
    return {
        ops.splash_attention.default: attention_reference,
        ops.splash_attention_backward.default:
            lambda grad, q, k, v, ids, out, lse, *options: attention_vjp(grad, q, k, v, ids, *options),
        ops.linear_cross_entropy.default: linear_ce_reference,
        ops.linear_cross_entropy_backward.default:
            lambda grad, x, w, targets, lse, *options: ce_vjp(grad, x, w, targets, *options),
        ops.grouped_matmul.default: gmm_reference,
        ops.grouped_matmul_backward.default: backward(gmm_reference, 2, only),
        ops.paired_grouped_matmul.default: paired_gmm_reference,
        ops.paired_grouped_matmul_backward.default: backward(paired_gmm_reference, 3, only),
    }
