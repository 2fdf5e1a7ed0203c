"""The three kernels that give a TPU step its memory and speed, as torch custom ops and as JAX functions.

    from kernels import splash_attention, linear_cross_entropy, grouped_matmul, paired_grouped_matmul

Notable features:
- plain PyTorch runs a reference; make_fx sees one node forward and one backward; `lowerings` says what JAX
  runs for each node: the same mathematics in XLA ("reference") or Pallas kernels ("pallas", "interpret")
- what the mask empties is not computed: a kernel's grid walks a table of the blocks that hold something
- imports no sibling: copy it into any project
"""

import functools
import json
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Tensor = torch.Tensor


class KernelError(ValueError):
    """Shapes, dtypes or block sizes that a kernel does not take; the message is one line with the sizes and the limit."""


# ------------------------------------------------------------------------------- splash attention: torch


def splash_attention(q, k, v, segment_ids=None, *, causal=True, window=0, softcap=0.0, scale=None, blocks=None):
    """softmax(scale * q @ k.mT, masked) @ v without a T×T matrix in memory (FlashAttention-2, arXiv:2307.08691).

    q: (B, H, T, D); k, v: (B, K, S, D) with K dividing H (grouped-query: head h reads k and v of h // (H / K)).
    segment_ids: (B, T) int32, a token sees only its own id (T == S then). causal: query t sees keys s <= t.
    window: 0, or the token sees itself and the window-1 before it. softcap: 0, or scores become
    softcap * tanh(scores / softcap). scale: 1/sqrt(D) if None. -> (B, H, T, D) in q's dtype, softmax in fp32;
    a query that sees nothing gives zeros.
    """
    B, H, T, D = q.shape
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != D or H % k.shape[1]:
        raise KernelError(f"splash_attention: q {tuple(q.shape)} does not go with k {tuple(k.shape)} and v "
                         f"{tuple(v.shape)}: want (B, H, T, D) and (B, K, S, D), K dividing H")
    if not q.is_floating_point() or {k.dtype, v.dtype} != {q.dtype}:
        raise KernelError(f"splash_attention: q {q.dtype}, k {k.dtype}, v {v.dtype}: want one floating dtype")
    if segment_ids is not None and segment_ids.is_floating_point():
        raise KernelError(f"splash_attention: segment_ids {segment_ids.dtype}: want integers")
    if segment_ids is not None and not tuple(segment_ids.shape) == (B, T) == (B, k.shape[2]):
        raise KernelError(f"splash_attention: segment_ids {tuple(segment_ids.shape)} with T={T}, S={k.shape[2]}: "
                         "want (B, T) and T == S")
    scale = D ** -0.5 if scale is None else scale
    return torch.ops.tpu.splash_attention(q, k, v, segment_ids, causal, window, softcap, scale, as_list(blocks))[0]


def as_list(blocks):
    """A blocks dataclass as the list of int that an op's schema can hold; [] means the defaults."""
    return [] if blocks is None else list(blocks.__dict__.values())


def masked_scores(q, k, segment_ids, causal, window, softcap, scale):
    """-> (B, H, T, S) fp32, -inf where query t may not see key s."""
    T, S = q.shape[2], k.shape[2]
    s = (q.float() @ k.float().mT) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    ahead = torch.arange(S, device=q.device) - torch.arange(T, device=q.device)[:, None]
    if causal:
        s = s.masked_fill(ahead > 0, -torch.inf)
    if window:
        s = s.masked_fill(ahead <= -window, -torch.inf)
    if segment_ids is not None:
        s = s.masked_fill((segment_ids[:, :, None] != segment_ids[:, None, :])[:, None], -torch.inf)
    return s


@torch.library.custom_op("tpu::splash_attention", mutates_args=())
def splash_op(q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor | None, causal: bool, window: int,
              softcap: float, scale: float, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """-> out and the scores' log-sum-exp (B, H, T) fp32, which is +inf where a query sees nothing: exp(s - lse)
    is then the probability, also of such rows."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = masked_scores(q, k, segment_ids, causal, window, softcap, scale)
    lse = s.logsumexp(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return (torch.exp(s - lse[..., None]) @ v).to(q.dtype), lse


@splash_op.register_fake
def _(q, k, v, segment_ids, causal, window, softcap, scale, blocks):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tpu::splash_attention_backward", mutates_args=())
def splash_backward_op(g: Tensor, q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor | None, out: Tensor,
                       lse: Tensor, causal: bool, window: int, softcap: float, scale: float,
                       blocks: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    B, K, S, D = k.shape
    groups = q.shape[1] // K
    k_, v_ = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    s = masked_scores(q, k_, segment_ids, causal, window, softcap, scale)
    p = torch.exp(s - lse[..., None])
    dp = g.float() @ v_.mT
    ds = p * (dp - (g.float() * out.float()).sum(-1, keepdim=True)) * scale
    if softcap:
        ds = ds * (1 - (s.masked_fill(s == -torch.inf, 0) / softcap) ** 2)
    dk, dv = (x.view(B, K, groups, S, D).sum(2) for x in (ds.mT @ q.float(), p.mT @ g.float()))
    return (ds @ k_).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@splash_backward_op.register_fake
def _(g, q, k, v, segment_ids, out, lse, causal, window, softcap, scale, blocks):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def splash_setup(ctx, inputs, output):
    *tensors, ctx.causal, ctx.window, ctx.softcap, ctx.scale, ctx.blocks = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for lse's gradient in the graph
    ctx.save_for_backward(*tensors, *output)


def splash_vjp(ctx, g, _):
    grads = torch.ops.tpu.splash_attention_backward(
        g, *ctx.saved_tensors, ctx.causal, ctx.window, ctx.softcap, ctx.scale, ctx.blocks)
    return *grads, None, None, None, None, None, None


splash_op.register_autograd(splash_vjp, setup_context=splash_setup)


# ------------------------------------------------------------------ fused linear cross-entropy: torch


def linear_cross_entropy(x, weight, targets, *, ignore_index=-100, z_loss=0.0, multiplier=1.0, softcap=0.0,
                         blocks=None):
    """Cross-entropy of x @ weight.T without the logits in memory: one vocabulary tile at a time.

    x: (N, D); weight: (V, D); targets: (N,) int. -> (N,) fp32 losses, 0 where the target is ignore_index.
    logits: multiplier * x @ weight.T, in fp32; with a softcap, softcap * tanh(logits / softcap).
    z_loss: adds z_loss * logsumexp(logits)^2 (PaLM, arXiv:2204.02311, section 5).
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or targets.shape != x.shape[:1]:
        raise KernelError(f"linear_cross_entropy: x {tuple(x.shape)}, weight {tuple(weight.shape)}, targets "
                         f"{tuple(targets.shape)}: want (N, D), (V, D), (N,)")
    if not x.is_floating_point() or weight.dtype != x.dtype or targets.is_floating_point():
        raise KernelError(f"linear_cross_entropy: x {x.dtype}, weight {weight.dtype}, targets {targets.dtype}: want one "
                         "floating dtype, and integers")
    return torch.ops.tpu.linear_cross_entropy(x, weight, targets, ignore_index, z_loss, multiplier, softcap,
                                              as_list(blocks))[0]


def logits_of(x, weight, multiplier, softcap):
    z = multiplier * (x.float() @ weight.float().T)
    return softcap * torch.tanh(z / softcap) if softcap else z


@torch.library.custom_op("tpu::linear_cross_entropy", mutates_args=())
def cross_entropy_op(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float,
                     multiplier: float, softcap: float, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """-> losses and the logits' log-sum-exp, both (N,) fp32."""
    z = logits_of(x, weight, multiplier, softcap)
    lse = z.logsumexp(-1)
    valid = targets != ignore_index
    picked = z.gather(1, torch.where(valid, targets, 0).long()[:, None])[:, 0]
    return torch.where(valid, lse - picked + z_loss * lse ** 2, 0), lse


@cross_entropy_op.register_fake
def _(x, weight, targets, ignore_index, z_loss, multiplier, softcap, blocks):
    return tuple(x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(2))


@torch.library.custom_op("tpu::linear_cross_entropy_backward", mutates_args=())
def cross_entropy_backward_op(g: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor,
                              ignore_index: int, z_loss: float, multiplier: float, softcap: float,
                              blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    z = logits_of(x, weight, multiplier, softcap)
    valid = targets != ignore_index
    dz = torch.exp(z - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None]
    dz -= F.one_hot(torch.where(valid, targets, 0).long(), weight.shape[0])
    dz *= (g * valid * multiplier)[:, None]
    if softcap:
        dz *= 1 - (z / softcap) ** 2
    return (dz @ weight.float()).to(x.dtype), (dz.T @ x.float()).to(weight.dtype)


@cross_entropy_backward_op.register_fake
def _(g, x, weight, targets, lse, ignore_index, z_loss, multiplier, softcap, blocks):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def cross_entropy_setup(ctx, inputs, output):
    *tensors, ctx.ignore_index, ctx.z_loss, ctx.multiplier, ctx.softcap, ctx.blocks = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def cross_entropy_vjp(ctx, g, _):
    grads = torch.ops.tpu.linear_cross_entropy_backward(
        g, *ctx.saved_tensors, ctx.ignore_index, ctx.z_loss, ctx.multiplier, ctx.softcap, ctx.blocks)
    return *grads, None, None, None, None, None, None


cross_entropy_op.register_autograd(cross_entropy_vjp, setup_context=cross_entropy_setup)


# ----------------------------------------------------------------------------- grouped matmul: torch


def grouped_matmul(x, w, group_sizes, *, blocks=None):
    """x[rows of group e] @ w[e] for every expert e.

    x: (N, D), sorted by expert; w: (E, D, F); group_sizes: (E,) int32, data: empty groups and any sizes whose
    sum is at most N. -> (N, F) in x's dtype; rows behind the last group give zeros.
    """
    check_grouped("grouped_matmul", x, (w,), group_sizes)
    return torch.ops.tpu.grouped_matmul(x, w, group_sizes, as_list(blocks))


def paired_grouped_matmul(x, gate, up, group_sizes, *, blocks=None):
    """silu(x @ gate[e]) * (x @ up[e]) for every expert e: a gated MLP's first half, reading x once.

    x: (N, D), sorted by expert; gate, up: (E, D, F); group_sizes as in grouped_matmul. -> (N, F) in x's dtype.
    """
    check_grouped("paired_grouped_matmul", x, (gate, up), group_sizes)
    return torch.ops.tpu.paired_grouped_matmul(x, gate, up, group_sizes, as_list(blocks))[0]


def check_grouped(name, x, weights, group_sizes):
    for w in weights:
        if x.ndim != 2 or w.shape != weights[0].shape or w.shape[:2] != (*group_sizes.shape, x.shape[1]):
            raise KernelError(f"{name}: x {tuple(x.shape)}, weights {[tuple(w.shape) for w in weights]}, group_sizes "
                             f"{tuple(group_sizes.shape)}: want (N, D), (E, D, F), (E,)")


def group_tiles(x, group_sizes):
    """Rows of x in tiles that belong to one expert each, as many as any sizes may need: XLA (torch_xla too) compiles for shapes.

    -> each tile's expert (tiles,), its rows' numbers (tiles, rows), N for none, and the rows (tiles, rows, D), 0 for none.
    """
    N, E, rows = x.shape[0], len(group_sizes), min(ROWS, x.shape[0])
    count, end = -(-group_sizes // rows), group_sizes.cumsum(0)
    last = count.cumsum(0)
    tile = torch.arange(N // rows + E, device=x.device)
    expert = (tile[:, None] >= last).sum(1).clamp(max=E - 1)
    first = (end - group_sizes)[expert] + (tile - (last - count)[expert]) * rows
    index = first[:, None] + torch.arange(rows, device=x.device)
    index = torch.where(index < end[expert][:, None], index, N)
    return expert, index, F.pad(x, (0, 0, 0, 1))[index]


def grouped(x, w, group_sizes):
    """Rows of each group times its matrix, zeros behind them."""
    expert, index, tiles = group_tiles(x, group_sizes)
    return x.new_zeros(x.shape[0] + 1, w.shape[2]).index_put((index,), tiles @ w[expert])[:-1]


def grouped_weights(x, g, group_sizes):
    """x[rows of e].T @ g[rows of e] -> (E, D, F) fp32."""
    (expert, _, x), (_, _, g) = group_tiles(x, group_sizes), group_tiles(g, group_sizes)
    y = x.float().mT @ g.float()
    return y.new_zeros(len(group_sizes), *y.shape[1:]).index_add(0, expert, y)


@torch.library.custom_op("tpu::grouped_matmul", mutates_args=())
def grouped_op(x: Tensor, w: Tensor, group_sizes: Tensor, blocks: Sequence[int]) -> Tensor:
    return grouped(x, w, group_sizes)


@grouped_op.register_fake
def _(x, w, group_sizes, blocks):
    return x.new_empty(x.shape[0], w.shape[2])


@torch.library.custom_op("tpu::grouped_matmul_backward", mutates_args=())
def grouped_backward_op(g: Tensor, x: Tensor, w: Tensor, group_sizes: Tensor,
                        blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    return grouped(g, w.mT, group_sizes), grouped_weights(x, g, group_sizes).to(w.dtype)


@grouped_backward_op.register_fake
def _(g, x, w, group_sizes, blocks):
    return x.new_empty(x.shape), w.new_empty(w.shape)


def grouped_setup(ctx, inputs, output):
    *tensors, ctx.blocks = inputs
    ctx.save_for_backward(*tensors)


def grouped_vjp(ctx, g):
    return *torch.ops.tpu.grouped_matmul_backward(g, *ctx.saved_tensors, ctx.blocks), None, None


grouped_op.register_autograd(grouped_vjp, setup_context=grouped_setup)


@torch.library.custom_op("tpu::paired_grouped_matmul", mutates_args=())
def paired_op(x: Tensor, gate: Tensor, up: Tensor, group_sizes: Tensor,
              blocks: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """-> silu(a) * b, a = x @ gate[e], b = x @ up[e]. Keeping a and b for the backward pass is cheaper than
    computing them again: writing 2 numbers a row and column against 2 * D multiply-adds each."""
    a, b = (grouped(x, w, group_sizes) for w in (gate, up))
    return F.silu(a) * b, a, b


@paired_op.register_fake
def _(x, gate, up, group_sizes, blocks):
    return tuple(x.new_empty(x.shape[0], gate.shape[2]) for _ in range(3))


@torch.library.custom_op("tpu::paired_grouped_matmul_backward", mutates_args=())
def paired_backward_op(g: Tensor, x: Tensor, gate: Tensor, up: Tensor, group_sizes: Tensor, a: Tensor, b: Tensor,
                       blocks: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    s = torch.sigmoid(a.float())
    da = (g * b * s * (1 + a * (1 - s))).to(x.dtype)
    db = (g * a * s).to(x.dtype)
    dx = grouped(da, gate.mT, group_sizes) + grouped(db, up.mT, group_sizes)
    return dx, *(grouped_weights(x, d, group_sizes).to(gate.dtype) for d in (da, db))


@paired_backward_op.register_fake
def _(g, x, gate, up, group_sizes, a, b, blocks):
    return x.new_empty(x.shape), gate.new_empty(gate.shape), up.new_empty(up.shape)


def paired_setup(ctx, inputs, output):
    *tensors, ctx.blocks = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def paired_vjp(ctx, g, *_):
    grads = torch.ops.tpu.paired_grouped_matmul_backward(g, *ctx.saved_tensors, ctx.blocks)
    return *grads, None, None


paired_op.register_autograd(paired_vjp, setup_context=paired_setup)


# ------------------------------------------------------------------------------------ JAX references


def spans(T, S, causal, window, block):
    """The rows of attention in blocks of queries: (lo, hi, first key, end of keys) that a block can see."""
    for lo in range(0, T, block):
        hi = min(lo + block, T)
        end = min(hi, S) if causal else S
        first = min(max(lo - window + 1, 0), end - 1) if window else 0
        yield slice(lo, hi), slice(first, end)


def scores_jax(q, k, rows, keys, segment_ids, causal, window, softcap, scale):
    """-> (B, K, G, rows, keys) fp32, -inf where masked."""
    s = jnp.einsum("bkgtd,bksd->bkgts", q[:, :, :, rows], k[:, :, keys], preferred_element_type=jnp.float32) * scale
    if softcap:
        s = softcap * jnp.tanh(s / softcap)
    ahead = jnp.arange(keys.start, keys.stop) - jnp.arange(rows.start, rows.stop)[:, None]
    if causal:
        s = jnp.where(ahead > 0, -jnp.inf, s)
    if window:
        s = jnp.where(ahead <= -window, -jnp.inf, s)
    if segment_ids is not None:
        same = segment_ids[:, rows, None] == segment_ids[:, None, keys]
        s = jnp.where(same[:, None, None], s, -jnp.inf)
    return s


def splash_reference(q, k, v, segment_ids, causal, window, softcap, scale, blocks):
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    q = q.reshape(B, K, H // K, T, D)
    outs, lses = [], []
    for rows, keys in spans(T, S, causal, window, max(64, T // 8)):
        s = scores_jax(q, k, rows, keys, segment_ids, causal, window, softcap, scale)
        lse = jax.nn.logsumexp(s, axis=-1)
        lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
        p = jnp.exp(s - lse[..., None]).astype(v.dtype)
        outs.append(jnp.einsum("bkgts,bksd->bkgtd", p, v[:, :, keys]))
        lses.append(lse)
    return jnp.concatenate(outs, 3).reshape(B, H, T, D), jnp.concatenate(lses, 3).reshape(B, H, T)


def splash_backward_reference(g, q, k, v, segment_ids, out, lse, causal, window, softcap, scale, blocks):
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    q, g, out, lse = (x.reshape(B, K, H // K, *x.shape[2:]) for x in (q, g, out, lse))
    delta = (g.astype(jnp.float32) * out).sum(-1, keepdims=True)

    def over_queries(x, y, keys):
        """x: (B, K, G, rows, keys), y: (B, K, G, rows, D) -> (B, K, D, S) fp32. This way round, and padded rather
        than added into a slice, XLA:CPU takes half the time."""
        x, y = (t.reshape(B, K, -1, t.shape[-1]) for t in (x, y))
        z = jnp.einsum("bkts,bktd->bkds", x, y, preferred_element_type=jnp.float32)
        return jnp.pad(z, ((0, 0),) * 3 + ((keys.start, S - keys.stop),))

    dqs, dk, dv = [], 0, 0
    for rows, keys in spans(T, S, causal, window, max(64, T // 8)):
        s = scores_jax(q, k, rows, keys, segment_ids, causal, window, softcap, scale)
        p = jnp.exp(s - lse[:, :, :, rows, None])
        dp = jnp.einsum("bkgtd,bksd->bkgts", g[:, :, :, rows], v[:, :, keys], preferred_element_type=jnp.float32)
        ds = p * (dp - delta[:, :, :, rows]) * scale
        if softcap:
            ds = ds * (1 - (jnp.where(s == -jnp.inf, 0, s) / softcap) ** 2)
        p, ds = p.astype(q.dtype), ds.astype(q.dtype)
        dqs.append(jnp.einsum("bkgts,bksd->bkgtd", ds, k[:, :, keys]))
        dk += over_queries(ds, q[:, :, :, rows], keys)
        dv += over_queries(p, g[:, :, :, rows], keys)
    return jnp.concatenate(dqs, 3).reshape(B, H, T, D), dk.mT.astype(k.dtype), dv.mT.astype(v.dtype)


def logits_jax(x, weight, multiplier, softcap):
    z = multiplier * lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return softcap * jnp.tanh(z / softcap) if softcap else z


def cross_entropy_reference(x, weight, targets, ignore_index, z_loss, multiplier, softcap, blocks):
    z = logits_jax(x, weight, multiplier, softcap)
    lse = jax.nn.logsumexp(z, axis=-1)
    valid = targets != ignore_index
    picked = jnp.take_along_axis(z, jnp.where(valid, targets, 0)[:, None], axis=1)[:, 0]
    return jnp.where(valid, lse - picked + z_loss * lse ** 2, 0), lse


def cross_entropy_backward_reference(g, x, weight, targets, lse, ignore_index, z_loss, multiplier, softcap, blocks):
    z = logits_jax(x, weight, multiplier, softcap)
    hot = targets[:, None] == jnp.arange(weight.shape[0])
    dz = jnp.exp(z - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None] - hot
    dz = dz * (g * (targets != ignore_index) * multiplier)[:, None]
    if softcap:
        dz = dz * (1 - (z / softcap) ** 2)
    dz = dz.astype(x.dtype)
    return dz @ weight, dz.T @ x


# XLA:CPU computes lax.ragged_dot as one masked full-size matmul per expert, E times the flops. Tiles of rows
# in a loop take 2.1 ms against its 19 and 3.1 of a loop over experts in PyTorch (N=4096, D=F=256, E=8, 2 cores).
ROWS = 256


def row_tiles(group_sizes, n, rows):
    """Rows 0..n in tiles of `rows` that belong to one expert each: how many, each one's expert and first row.
    A group's last tile runs over into the next group."""
    count = -(-group_sizes // rows)
    last = jnp.cumsum(count)
    tile = jnp.arange(n // rows + len(group_sizes))
    expert = jnp.minimum(jnp.searchsorted(last, tile, side="right"), len(group_sizes) - 1)
    first = (jnp.cumsum(group_sizes) - group_sizes)[expert] + (tile - (last - count)[expert]) * rows
    return last[-1], expert, first


def grouped_reference(x, w, group_sizes, blocks):
    rows = min(ROWS, x.shape[0])
    n, expert, first = row_tiles(group_sizes, x.shape[0], rows)
    x = jnp.pad(x, ((0, rows), (0, 0)))

    def tile(i, y):  # tiles come in order, so the next group writes over what ran into it
        y_tile = lax.dynamic_slice_in_dim(x, first[i], rows) @ w[expert[i]]
        return lax.dynamic_update_slice_in_dim(y, y_tile, first[i], 0)

    y = lax.fori_loop(0, n, tile, jnp.zeros((x.shape[0], w.shape[2]), x.dtype))
    return jnp.where(jnp.arange(x.shape[0])[:, None] < group_sizes.sum(), y, 0)[:-rows]


def grouped_weights_reference(x, g, group_sizes):
    """x[rows of e].T @ g[rows of e] -> (E, D, F) fp32."""
    rows = min(ROWS, x.shape[0])
    n, expert, first = row_tiles(group_sizes, x.shape[0], rows)
    x, g = (jnp.pad(t, ((0, rows), (0, 0))) for t in (x, g))
    end = jnp.cumsum(group_sizes)

    def tile(i, dw):
        own = (first[i] + jnp.arange(rows) < end[expert[i]])[:, None]
        x_tile, g_tile = (jnp.where(own, lax.dynamic_slice_in_dim(t, first[i], rows), 0) for t in (x, g))
        return dw.at[expert[i]].add(jnp.matmul(x_tile.T, g_tile, preferred_element_type=jnp.float32))

    return lax.fori_loop(0, n, tile, jnp.zeros((len(group_sizes), x.shape[1], g.shape[1]), jnp.float32))


def grouped_backward_reference(g, x, w, group_sizes, blocks):
    dx = grouped_reference(g, w.mT, group_sizes, blocks)
    return dx, grouped_weights_reference(x, g, group_sizes).astype(w.dtype)


def paired_reference(x, gate, up, group_sizes, blocks):
    a, b = (grouped_reference(x, w, group_sizes, blocks) for w in (gate, up))
    return jax.nn.silu(a) * b, a, b


def silu_mul_backward(g, a, b):
    """Gradients of silu(a) * b, in fp32."""
    g, a_, b_ = (t.astype(jnp.float32) for t in (g, a, b))
    s = jax.nn.sigmoid(a_)
    return (g * b_ * s * (1 + a_ * (1 - s))).astype(a.dtype), (g * a_ * s).astype(b.dtype)


def paired_backward_reference(g, x, gate, up, group_sizes, a, b, blocks):
    da, db = silu_mul_backward(g, a, b)
    dx = grouped_reference(da, gate.mT, group_sizes, blocks) + grouped_reference(db, up.mT, group_sizes, blocks)
    return dx, *(grouped_weights_reference(x, d, group_sizes).astype(gate.dtype) for d in (da, db))


# ------------------------------------------------------------------- Pallas: what the kernels share

# bench.py tune writes it: {chip: {"kernel sizes": the blocks' fields in order}}
TUNED_FILE = pathlib.Path(__file__).with_name("tuned_blocks.json")
TUNED = json.loads(TUNED_FILE.read_text()) if TUNED_FILE.exists() else {}
VMEM_MIB = {"v5e": 128, "v5p": 64, "v6e": 128, "tpu7x": 64}  # fast memory per core


def vmem_limit(chip):
    if chip not in VMEM_MIB:
        raise KernelError(f"chip must be one of {', '.join(VMEM_MIB)} (got {chip!r})")
    return VMEM_MIB[chip] * 2 ** 20 * 7 // 8  # the rest is the compiler's


def resolve(cls, given, tuned, chip, sizes, interpret):
    """An op's list of block sizes as a blocks dataclass. sizes: {field: (length, strict)}.

    [] stands for the tuned ones under this name or the defaults, cut down to divide the lengths. So is a field that
    is not strict, if given; of the others, one that does not divide its length raises. TPUs want multiples of 128.
    """
    unit = 1 if interpret else 128
    blocks = cls(*(given or TUNED.get(chip, {}).get(tuned, ())))
    for field, (length, strict) in sizes.items():
        length = getattr(blocks, length) if isinstance(length, str) else length
        block = min(getattr(blocks, field), length)
        if not given or not strict:
            block = max((b for b in range(unit, block + 1, unit) if length % b == 0), default=0)
        if block < 1 or length % block or block % unit:
            raise KernelError(f"{cls.__name__}.{field}={getattr(blocks, field)} does not fit a length of {length}: want "
                             f"a multiple of {unit} that divides it")
        blocks = replace(blocks, **{field: block})
    return blocks


def check_vmem(blocks, chip, **uses):
    """uses: the bytes that a kernel keeps in VMEM, by what they hold (inputs and outputs twice: one being moved)."""
    if sum(uses.values()) > vmem_limit(chip):
        parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in uses.items())
        raise KernelError(f"{blocks} takes {sum(uses.values()) / 2**20:.1f} MiB of VMEM ({parts}), {chip} has "
                         f"{vmem_limit(chip) / 2**20:.0f} MiB for it")


NN, NT, TN = (1, 0), (1, 1), (0, 0)  # the dimensions that x @ y, x @ y.T, x.T @ y sum over


def dot(x, y, contract=NN):
    return lax.dot_general(x, y, ((contract[:1], contract[1:]), ((), ())), preferred_element_type=jnp.float32)


# --------------------------------------------------------------------------- splash attention: Pallas
#
# Scores are kept transposed, keys down the sublanes and queries along the lanes: a query's maximum, sum and
# log-sum-exp are then one row (1, queries) that spreads over sublanes at no cost, and reductions over keys
# are adds of whole registers instead of shuffles across lanes.
#
# Where the cycles go (tpu7x, a block of 1024 × 1024 at head dimension 128, bundles of 2 MXU and 4 vector slots):
# forward 2,247 bundles, of them 1,030 at least for exp, 1,560 for 6,230 vector operations, 1,400 for the MXU;
# backward 4,078, of them 3,880 for the MXU. A masked block takes 2,802 and 4,374. JAX's own: 3,346 and 5,315.


@dataclass(frozen=True)
class SplashBlocks:
    """One grid step holds q queries and kv keys. Inside it, parts of *_compute are worked on one behind the
    other, the matmuls of the next ones under the softmax of this one. The backward kernel keeps the gradients
    of up to kv_resident keys in VMEM; longer sequences take one call for each such stretch."""

    q: int = 1024
    kv: int = 1024
    q_compute: int = 512
    kv_compute: int = 256
    q_backward: int = 1024
    kv_backward: int = 1024
    q_compute_backward: int = 512
    kv_compute_backward: int = 512
    kv_resident: int = 8192


FIRST, LAST, PARTIAL, FULL = 1, 2, 4, 8  # flags of a grid step: of its query block; its scores are masked or not
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # not -inf: MASKED - MASKED is 0, not NaN
LOG2_E = math.log2(math.e)


def splash_steps(B, T, causal, window, block_q, block_kv, keys, segment_ids):
    """The grid's steps, query blocks in order and in each the blocks of `keys` (a range) that it sees.

    -> q_of (steps,), kv_of (B * steps,), flags (B * steps,) int32: which blocks a step works on, and how. A step
    whose documents do not meet has neither PARTIAL nor FULL. It names the next working step's keys: those are
    fetched anyway, so it costs no fetch.
    """
    q_of, kv_of, flags = [], [], []
    for i in range(T // block_q):
        row = []
        for j in range(keys.start // block_kv, keys.stop // block_kv):
            # Keys minus queries, over the block: from the last query's view of the first key to the reverse.
            low, high = j * block_kv - (i + 1) * block_q + 1, (j + 1) * block_kv - 1 - i * block_q
            if not (causal and low > 0 or window and high <= -window):
                full = not (causal and high > 0 or window and low <= -window)
                row.append([i, j, FULL if full else PARTIAL])
        row = row or [[i, keys.start // block_kv, 0]]  # sees nothing, but has zeros to write
        row[0][2] |= FIRST
        row[-1][2] |= LAST
        for step in row:
            for column, value in zip((q_of, kv_of, flags), step):
                column.append(value)
    q_of, kv_of, flags = (np.array(column, np.int32) for column in (q_of, kv_of, flags))
    if segment_ids is None:
        return q_of, np.tile(kv_of, B), np.tile(flags, B)

    def ranges(block, of):
        ids = segment_ids.reshape(B, -1, block)
        return ids.min(-1)[:, of], ids.max(-1)[:, of]  # (B, steps) each

    (q_low, q_high), (kv_low, kv_high) = ranges(block_q, q_of), ranges(block_kv, kv_of)
    meet = (q_low <= kv_high) & (kv_low <= q_high) & (flags & (PARTIAL | FULL) > 0)
    one = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low) & (flags & FULL > 0)
    edges = flags & (FIRST | LAST)
    flags = jnp.where(meet, jnp.where(one, FULL, PARTIAL), 0) | edges
    steps = len(q_of)
    following = lax.cummin(jnp.where(meet, jnp.arange(steps), steps - 1), axis=1, reverse=True)
    return q_of, jnp.asarray(kv_of)[following].reshape(-1), flags.reshape(-1)


def split_block(block_kv, block_q, kv, q):
    """A block of scores in parts of kv × q: slices of keys and of queries."""
    return [(pl.ds(s, kv), pl.ds(t, q)) for s in range(0, block_kv, kv) for t in range(0, block_q, q)]


def ahead(fn, items, depth):
    """Yields (item, fn(item)), with fn called `depth` items early: the scheduler keeps to the program's order
    roughly, so this puts the next parts' matmuls beside this part's vector work."""
    results = [fn(item) for item in items[:depth]]
    for i, item in enumerate(items):
        results += [fn(later) for later in items[i + depth:i + depth + 1]]
        yield item, results.pop(0)


def mask_scores(s, part, first_key, first_query, q_ids, kv_ids, causal, window, segmented):
    """s: (keys, queries) of one part -> MASKED where the query may not see the key."""
    keys, queries = part
    iota = functools.partial(lax.broadcasted_iota, jnp.int32, s.shape)
    distance = iota(0) - iota(1)
    offset = first_key + keys.start - first_query - queries.start  # scalar: distance + offset is key - query
    keep = []
    if causal:
        keep.append(distance <= -offset)
    if window:
        keep.append(distance > -window - offset)
    if segmented:
        keep.append(kv_ids[:, keys].T == q_ids[:, queries])
    return jnp.where(functools.reduce(jnp.logical_and, keep, True), s, MASKED)


def splash_kernel(q_of, kv_of, flags, q_ref, k_ref, v_ref, q_ids, kv_ids, out_ref, lse_ref, m_ref, l_ref, acc_ref, *,
                  parts, softcap, mask):
    """q_ref: (q, D); k_ref, v_ref: (kv, D); out_ref: (q, D); lse_ref, m_ref, l_ref: (1, q); acc_ref: (D, q)."""
    i = pl.program_id(2)
    step = pl.program_id(0) * pl.num_programs(2) + i
    flag, first_key, first_query = flags[step], kv_of[step] * k_ref.shape[0], q_of[i] * q_ref.shape[0]

    @pl.when(flag & FIRST > 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, MASKED)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def attend(masked):
        def scores(part):
            keys, queries = part
            s = dot(k_ref[keys, :], q_ref[queries, :], NT)  # (kv_compute, q_compute), in units of log 2
            s = softcap * LOG2_E * jnp.tanh(s) if softcap else s
            return mask(s, part, first_key, first_query, q_ids, kv_ids) if masked else s

        for (keys, queries), s in ahead(scores, parts, 2):
            m = jnp.maximum(m_ref[:, queries], s.max(0, keepdims=True))
            p = jnp.exp2(s - m)
            shrink = jnp.exp2(m_ref[:, queries] - m)
            m_ref[:, queries] = m
            l_ref[:, queries] = shrink * l_ref[:, queries] + p.sum(0, keepdims=True)
            acc_ref[:, queries] = shrink * acc_ref[:, queries] + dot(v_ref[keys, :], p.astype(v_ref.dtype), TN)

    pl.when(flag & FULL > 0)(lambda: attend(masked=False))
    pl.when(flag & PARTIAL > 0)(lambda: attend(masked=True))

    @pl.when(flag & LAST > 0)
    def _():
        m, l = m_ref[...], l_ref[...]
        nothing = m == MASKED
        out_ref[...] = (acc_ref[...] * jnp.where(nothing, 0, 1 / l)).T.astype(out_ref.dtype)
        lse_ref[...] = jnp.where(nothing, jnp.inf, m / LOG2_E + jnp.log(l))


def splash_pallas(q, k, v, segment_ids, causal, window, softcap, scale, blocks, *, chip, interpret):
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    blocks = splash_blocks(blocks, q, k, chip, interpret)
    block_q, block_kv = blocks.q, blocks.kv
    q_of, kv_of, flags = splash_steps(B, T, causal, window, block_q, block_kv, range(S), segment_ids)
    n = len(q_of)
    ids_q, ids_kv = segment_rows(segment_ids, B, T, S)
    kernel = functools.partial(
        splash_kernel, parts=split_block(block_kv, block_q, blocks.kv_compute, blocks.q_compute), softcap=softcap,
        mask=functools.partial(mask_scores, causal=causal, window=window, segmented=segment_ids is not None))
    queries = pl.BlockSpec((None, None, block_q, D), lambda b, h, i, q_of, kv_of, flags: (b, h, q_of[i], 0))
    keys = pl.BlockSpec((None, None, block_kv, D),
                        lambda b, h, i, q_of, kv_of, flags: (b, lax.div(h, H // K), kv_of[b * n + i], 0))
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, H, n),
            in_specs=[
                queries, keys, keys,
                pl.BlockSpec((None, 1, block_q), lambda b, h, i, q_of, kv_of, flags: (b, 0, q_of[i])),
                pl.BlockSpec((None, 1, block_kv), lambda b, h, i, q_of, kv_of, flags: (b, 0, kv_of[b * n + i])),
            ],
            out_specs=[
                queries,
                pl.BlockSpec((None, None, 1, block_q), lambda b, h, i, q_of, kv_of, flags: (b, h, 0, q_of[i])),
            ],
            scratch_shapes=[pltpu.VMEM((1, block_q), jnp.float32), pltpu.VMEM((1, block_q), jnp.float32),
                            pltpu.VMEM((D, block_q), jnp.float32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, H, 1, T), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"),
                                             vmem_limit_bytes=vmem_limit(chip)),
        interpret=interpret,
        name="splash_attention",
    )(q_of, kv_of, flags, scale_queries(q, scale, softcap), k, v, ids_q, ids_kv)
    return out, lse.reshape(B, H, T)


def splash_backward_kernel(q_of, kv_of, flags, q_ref, k_ref, v_ref, g_ref, lse_ref, delta_ref, q_ids, kv_ids,
                           dq_ref, dk_ref, dv_ref, dq_acc, dk_acc, dv_acc, *, parts, softcap, mask, first_resident,
                           dq_scale, dk_scale):
    """q_ref, g_ref, dq_ref: (q, D); k_ref, v_ref: (kv, D); lse_ref (in units of log 2), delta_ref: (1, q);
    dk_ref, dv_ref, dk_acc, dv_acc: (resident keys, D); dq_acc: (D, q)."""
    group, groups, i, steps = pl.program_id(2), pl.num_programs(2), pl.program_id(3), pl.num_programs(3)
    step = pl.program_id(0) * steps + i
    flag, first_key, first_query = flags[step], kv_of[step] * k_ref.shape[0], q_of[i] * q_ref.shape[0]

    @pl.when((group == 0) & (i == 0))
    def _():
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    @pl.when(flag & FIRST > 0)
    def _():
        dq_acc[...] = jnp.zeros_like(dq_acc)

    def attend(masked):
        def matmuls(part):
            keys, queries = part
            return dot(k_ref[keys, :], q_ref[queries, :], NT), dot(v_ref[keys, :], g_ref[queries, :], NT)

        for (keys, queries), (s, dp) in ahead(matmuls, parts, 1):
            if softcap:
                s = jnp.tanh(s)
                dp_slope = 1 - s * s
                s = softcap * LOG2_E * s
            if masked:
                s = mask(s, (keys, queries), first_key, first_query, q_ids, kv_ids)
            p = jnp.exp2(s - lse_ref[:, queries])
            ds = p * (dp - delta_ref[:, queries])
            ds = (ds * dp_slope if softcap else ds).astype(q_ref.dtype)
            rows = pl.ds(pl.multiple_of(first_key - first_resident + keys.start, keys.size), keys.size)
            dv_acc[rows, :] += dot(p.astype(q_ref.dtype), g_ref[queries, :], NN)
            dk_acc[rows, :] += dot(ds, q_ref[queries, :], NN)
            dq_acc[:, queries] += dot(k_ref[keys, :], ds, TN)

    pl.when(flag & FULL > 0)(lambda: attend(masked=False))
    pl.when(flag & PARTIAL > 0)(lambda: attend(masked=True))

    @pl.when(flag & LAST > 0)
    def _():
        dq_ref[...] = (dq_acc[...] * dq_scale).T.astype(dq_ref.dtype)

    @pl.when((group == groups - 1) & (i == steps - 1))
    def _():
        dk_ref[...] = (dk_acc[...] * dk_scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)


def splash_backward_pallas(g, q, k, v, segment_ids, out, lse, causal, window, softcap, scale, blocks, *,
                           chip, interpret):
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    G = H // K
    blocks = splash_blocks(blocks, q, k, chip, interpret)
    block_q, block_kv = blocks.q_backward, blocks.kv_backward
    resident = max(blocks.kv_resident // block_kv, 1) * block_kv
    delta = (g.astype(jnp.float32) * out).sum(-1)  # sum over keys of p * dp, by the definition of out
    lse, delta = (lse * LOG2_E).reshape(B, H, 1, T), delta.reshape(B, H, 1, T)
    ids_q, ids_kv = segment_rows(segment_ids, B, T, S)
    dqs, dks, dvs = [], [], []
    for start in range(0, S, resident):
        keys = range(start, min(start + resident, S))
        q_of, kv_of, flags = splash_steps(B, T, causal, window, block_q, block_kv, keys, segment_ids)
        n = len(q_of)
        kernel = functools.partial(
            splash_backward_kernel, softcap=softcap, first_resident=start, dq_scale=scale,
            dk_scale=softcap or 1 / LOG2_E,  # the kernel's queries hold the scale already, see scale_queries
            parts=split_block(block_kv, block_q, blocks.kv_compute_backward, blocks.q_compute_backward),
            mask=functools.partial(mask_scores, causal=causal, window=window, segmented=segment_ids is not None))
        query_rows = pl.BlockSpec((None, None, block_q, D), lambda b, k, group, i, q_of, kv_of, flags:
                                  (b, k * G + group, q_of[i], 0))
        query_stats = pl.BlockSpec((None, None, 1, block_q), lambda b, k, group, i, q_of, kv_of, flags:
                                   (b, k * G + group, 0, q_of[i]))
        key_rows = pl.BlockSpec((None, None, block_kv, D), lambda b, k, group, i, q_of, kv_of, flags:
                                (b, k, kv_of[b * n + i], 0))
        key_grads = pl.BlockSpec((None, None, len(keys), D), lambda b, k, group, i, q_of, kv_of, flags: (b, k, 0, 0))
        dq, dk, dv = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(B, K, G, n),
                in_specs=[
                    query_rows, key_rows, key_rows, query_rows, query_stats, query_stats,
                    pl.BlockSpec((None, 1, block_q), lambda b, k, group, i, q_of, kv_of, flags: (b, 0, q_of[i])),
                    pl.BlockSpec((None, 1, block_kv), lambda b, k, group, i, q_of, kv_of, flags:
                                 (b, 0, kv_of[b * n + i])),
                ],
                out_specs=[query_rows, key_grads, key_grads],
                scratch_shapes=[pltpu.VMEM((D, block_q), jnp.float32), pltpu.VMEM((len(keys), D), jnp.float32),
                                pltpu.VMEM((len(keys), D), jnp.float32)],
            ),
            out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype if len(keys) == S else jnp.float32),
                       jax.ShapeDtypeStruct((B, K, len(keys), D), k.dtype),
                       jax.ShapeDtypeStruct((B, K, len(keys), D), v.dtype)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit(chip)),
            interpret=interpret,
            name="splash_attention_backward",
        )(q_of, kv_of, flags, scale_queries(q, scale, softcap), k, v, g, lse, delta, ids_q, ids_kv)
        for grads, grad in zip((dqs, dks, dvs), (dq, dk, dv)):
            grads.append(grad)
    return sum(dqs).astype(q.dtype), jnp.concatenate(dks, 2), jnp.concatenate(dvs, 2)


def scale_queries(q, scale, softcap):
    """What multiplies every score, put on the queries: exp(x) is exp2(x * log2 e), which saves a multiplication."""
    return (q.astype(jnp.float32) * (scale / softcap if softcap else scale * LOG2_E)).astype(q.dtype)


def segment_rows(segment_ids, B, T, S):
    """Rows of segment ids, (B, 1, T) and (B, 1, S)."""
    if segment_ids is None:
        return jnp.zeros((B, 1, T), jnp.int32), jnp.zeros((B, 1, S), jnp.int32)
    return segment_ids[:, None], segment_ids[:, None]


def splash_blocks(blocks, q, k, chip, interpret):
    T, S, D = q.shape[2], k.shape[2], q.shape[3]
    blocks = resolve(SplashBlocks, blocks, f"splash_attention D={D}", chip, {
        "q": (T, True), "kv": (S, True), "q_compute": ("q", False), "kv_compute": ("kv", False),
        "q_backward": (T, True), "kv_backward": (S, True), "q_compute_backward": ("q_backward", False),
        "kv_compute_backward": ("kv_backward", False)}, interpret)
    size = q.dtype.itemsize * D
    part = 4 * 4 * blocks.q_compute * blocks.kv_compute
    check_vmem(blocks, chip, q_and_out=4 * blocks.q * size, k_and_v=4 * blocks.kv * size, accumulator=4 * blocks.q * (D + 16),
               scores=part)
    resident = min(blocks.kv_resident, S)
    part = 6 * 4 * blocks.q_compute_backward * blocks.kv_compute_backward
    check_vmem(blocks, chip, q_g_dq=6 * blocks.q_backward * size, k_and_v=4 * blocks.kv_backward * size,
               dk_and_dv=2 * resident * (2 * size + 4 * D), accumulator=4 * blocks.q_backward * D, scores=part)
    return blocks


# ---------------------------------------------------------------- fused linear cross-entropy: Pallas
#
# As in attention, logits are kept transposed, vocabulary down the sublanes: what belongs to a token is a row
# (1, tokens). The backward pass computes the logits twice, once for each gradient: one kernel for both would
# have to keep the sum of one of them in HBM.
#
# Where the cycles go (tpu7x, 512 tokens × 512 words at D = 4096, bundles of 2 MXU slots): forward 3,656 bundles, 76 % of
# their MXU slots filled, the softmax under the matmul; dx 7,132, 89 %, and dw 6,433, 91 %, two matmuls each.


@dataclass(frozen=True)
class CrossEntropyBlocks:
    """A grid step holds the logits of `vocab` words for `tokens` tokens, over the whole width of the model."""

    tokens: int = 1024
    vocab: int = 512


def logit_tile(x_ref, w_ref, first_word, multiplier, softcap):
    """-> logits (words, tokens) fp32 and the words' numbers (words, 1). The last tile may reach behind the
    vocabulary's end, into memory that holds anything: callers mask it, products with it too since 0 * NaN is NaN."""
    z = multiplier * dot(w_ref[...], x_ref[...], NT)
    word = first_word + lax.broadcasted_iota(jnp.int32, (w_ref.shape[0], 1), 0)
    return softcap * jnp.tanh(z / softcap) if softcap else z, word


def cross_entropy_kernel(x_ref, w_ref, target_ref, lse_ref, picked_ref, m_ref, l_ref, *, vocab, multiplier, softcap):
    """x_ref: (tokens, D); w_ref: (words, D); the others (1, tokens): lse, the target's logit, online softmax."""
    tile, tiles = pl.program_id(1), pl.num_programs(1)

    @pl.when(tile == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, MASKED)
        l_ref[...] = jnp.zeros_like(l_ref)
        picked_ref[...] = jnp.zeros_like(picked_ref)

    z, word = logit_tile(x_ref, w_ref, tile * w_ref.shape[0], multiplier, softcap)
    z = jnp.where(word < vocab, z, MASKED)
    m = jnp.maximum(m_ref[...], z.max(0, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - m) + jnp.exp(z - m).sum(0, keepdims=True)
    m_ref[...] = m
    picked_ref[...] += jnp.where(word == target_ref[...], z, 0).sum(0, keepdims=True)

    @pl.when(tile == tiles - 1)
    def _():
        lse_ref[...] = m_ref[...] + jnp.log(l_ref[...])


def logit_gradients(x_ref, w_ref, target_ref, lse_ref, p_ref, hit_ref, first_word, vocab, multiplier, softcap):
    """-> gradients with respect to x @ w.T, (words, tokens). p_ref and hit_ref (1, tokens): what the loss's
    gradient multiplies the probabilities and the target's 1 with."""
    z, word = logit_tile(x_ref, w_ref, first_word, multiplier, softcap)
    dz = jnp.exp(z - lse_ref[...]) * p_ref[...] - jnp.where(word == target_ref[...], hit_ref[...], 0)
    dz = dz * (1 - (z / softcap) ** 2) if softcap else dz
    return jnp.where(word < vocab, dz * multiplier, 0).astype(x_ref.dtype), word


def cross_entropy_dx_kernel(x_ref, w_ref, target_ref, lse_ref, p_ref, hit_ref, dx_ref, acc_ref, *, vocab, **options):
    """Grid (tokens, vocabulary): acc_ref (tokens, D) sums over the vocabulary."""
    tile, tiles = pl.program_id(1), pl.num_programs(1)

    @pl.when(tile == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    dz, word = logit_gradients(x_ref, w_ref, target_ref, lse_ref, p_ref, hit_ref, tile * w_ref.shape[0],
                               vocab, **options)
    acc_ref[...] += dot(dz, jnp.where(word < vocab, w_ref[...], 0), TN)

    @pl.when(tile == tiles - 1)
    def _():
        dx_ref[...] = acc_ref[...].astype(dx_ref.dtype)


def cross_entropy_dw_kernel(x_ref, w_ref, target_ref, lse_ref, p_ref, hit_ref, dw_ref, acc_ref, *, vocab, **options):
    """Grid (vocabulary, tokens): acc_ref (words, D) sums over the tokens."""
    word_tile, tile, tiles = pl.program_id(0), pl.program_id(1), pl.num_programs(1)

    @pl.when(tile == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    dz, _ = logit_gradients(x_ref, w_ref, target_ref, lse_ref, p_ref, hit_ref, word_tile * w_ref.shape[0],
                               vocab, **options)
    acc_ref[...] += dot(dz, x_ref[...], NN)

    @pl.when(tile == tiles - 1)
    def _():
        dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


def cross_entropy_call(kernel, name, x, weight, rows, blocks, words_outer, out_shapes, scratch, chip,
                       interpret):
    """One of the three kernels over its grid. rows: arrays of one number a token, (1, N). out_shapes: (1, N) for
    rows, (N, D) or (V, D). scratch: shapes of fp32 scratch."""
    (N, D), V = x.shape, weight.shape[0]
    tokens, vocab = blocks.tokens, blocks.vocab
    grid = (N // tokens, pl.cdiv(V, vocab))

    def spec(shape, index):  # index: of the block, from (token block, word block)
        return pl.BlockSpec(shape, (lambda v, n: index(n, v)) if words_outer else index)

    row, x_rows, w_rows = (spec((1, tokens), lambda n, v: (0, n)), spec((tokens, D), lambda n, v: (n, 0)),
                           spec((vocab, D), lambda n, v: (v, 0)))
    out_specs = {(1, N): row, (N, D): x_rows, (V, D): w_rows}
    return pl.pallas_call(
        kernel,
        grid=grid[::-1] if words_outer else grid,
        in_specs=[x_rows, w_rows] + [row] * len(rows),
        out_specs=[out_specs[s.shape] for s in out_shapes],
        out_shape=out_shapes,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"),
                                             vmem_limit_bytes=vmem_limit(chip)),
        interpret=interpret,
        name=name,
    )(x, weight, *rows)


def pad_tokens(n, *arrays):
    """Arrays of N tokens with zeros behind them, up to n."""
    return [jnp.pad(a, [(0, n - a.shape[0])] + [(0, 0)] * (a.ndim - 1)) for a in arrays]


def cross_entropy_pallas(x, weight, targets, ignore_index, z_loss, multiplier, softcap, blocks, *, chip,
                         interpret):
    N = x.shape[0]
    blocks = cross_entropy_blocks(blocks, x, weight, chip, interpret)
    valid = targets != ignore_index
    padded, target_row = pad_tokens(-(-N // blocks.tokens) * blocks.tokens, x, jnp.where(valid, targets, -1))
    row = jax.ShapeDtypeStruct((1, len(padded)), jnp.float32)
    lse, picked = cross_entropy_call(
        functools.partial(cross_entropy_kernel, vocab=weight.shape[0], multiplier=multiplier, softcap=softcap),
        "linear_cross_entropy", padded, weight, [target_row[None]], blocks, False, [row, row],
        [(1, blocks.tokens)] * 2, chip, interpret)
    lse, picked = lse[0, :N], picked[0, :N]
    return jnp.where(valid, lse - picked + z_loss * lse ** 2, 0), lse


def cross_entropy_backward_pallas(g, x, weight, targets, lse, ignore_index, z_loss, multiplier, softcap, blocks, *,
                                  chip, interpret):
    N = x.shape[0]
    blocks = cross_entropy_blocks(blocks, x, weight, chip, interpret)
    hit = jnp.where(targets != ignore_index, g, 0)
    padded, *rows = pad_tokens(-(-N // blocks.tokens) * blocks.tokens, x, targets, lse,
                               hit * (1 + 2 * z_loss * lse), hit)
    rows = [row[None] for row in rows]
    options = dict(vocab=weight.shape[0], multiplier=multiplier, softcap=softcap)
    dx, = cross_entropy_call(
        functools.partial(cross_entropy_dx_kernel, **options), "linear_cross_entropy_dx", padded, weight,
        rows, blocks, False, [jax.ShapeDtypeStruct(padded.shape, x.dtype)], [(blocks.tokens, x.shape[1])],
        chip, interpret)
    dw, = cross_entropy_call(
        functools.partial(cross_entropy_dw_kernel, **options), "linear_cross_entropy_dw", padded, weight,
        rows, blocks, True, [jax.ShapeDtypeStruct(weight.shape, weight.dtype)], [(blocks.vocab, x.shape[1])],
        chip, interpret)
    return dx[:N], dw


def cross_entropy_blocks(blocks, x, weight, chip, interpret):
    """Block sizes for N tokens, padded to a multiple. The defaults halve until they fit the model's width."""
    (N, D), size, unit = x.shape, x.dtype.itemsize, 1 if interpret else 128
    given = CrossEntropyBlocks(*(blocks or TUNED.get(chip, {}).get(f"linear_cross_entropy D={D}", ())))
    if given.tokens % unit or given.vocab % unit:
        raise KernelError(f"{given}: want multiples of {unit}")
    b = CrossEntropyBlocks(*(min(block, -(-n // unit) * unit) for block, n in (
        (given.tokens, N), (given.vocab, weight.shape[0]))))

    def uses(b):
        return {"x_and_dx": 4 * b.tokens * D * size, "w_and_dw": 4 * b.vocab * D * size,
                "accumulator": 4 * max(b.tokens, b.vocab) * D, "logits": 4 * 4 * b.tokens * b.vocab}

    while not blocks and sum(uses(b).values()) > vmem_limit(chip) and max(b.tokens, b.vocab) >= 256:
        b = replace(b, **{"tokens": b.tokens // 256 * 128} if b.tokens > b.vocab else {"vocab": b.vocab // 256 * 128})
    check_vmem(b, chip, **uses(b))
    return b


# ---------------------------------------------------------------------------- grouped matmul: Pallas
#
# x's rows are cut into tiles at fixed places. A group's rows lie in some tiles, and a tile on a border holds
# rows of several groups; the grid makes one visit for each group and each tile that it lies in. Which ones is data:
# the visits are computed by XLA and prefetched as scalars, from which the block specs pick what to fetch. A
# group's visits follow each other, so its weights are fetched once and stay.
#
# The contraction (D forward, F for dx) is never cut: no accumulator is read, added to and written between
# blocks, and the matrix unit's own accumulation runs on. Hence also one visit writes one block.
#
# Where the cycles go (tpu7x, 256 rows, D = 2048, F = 768, bundles of 2 MXU and 4 vector slots; JAX's megablox in
# brackets): forward 1,193 (1,317), 85 % of the MXU slots filled, dx 1,284 (1,325), dw 1,623 (1,987), and 150 a visit for the
# grid. dw's groups end with 1,470 to transpose the sums where F < D. Pair 2,530: silu's arithmetic shows as 140.


@dataclass(frozen=True)
class GroupedBlocks:
    """Forward: x (rows, D) @ w (D, columns). dx: g (dx_rows, F) @ w.T (F, dx_columns). dw: (dw_d, dw_f) of a
    group's gradient from dw_rows rows at a time. More rows use the matrix unit better, but a border's tile is
    computed once for each group in it: n / rows + experts - 1 visits."""
    rows: int
    columns: int
    dx_rows: int
    dx_columns: int
    dw_rows: int
    dw_d: int
    dw_f: int


def grouped_vmem(blocks, D, F, pair, itemsize):
    """Bytes of fast memory of the forward, dx and dw kernels: each block twice, so that the next one's copy runs
    under the current one's arithmetic, and what stays between (fp32)."""
    b, n = blocks, 2 if pair else 1
    forward = 2 * itemsize * (b.rows * D + n * D * b.columns + (2 * n - 1) * b.rows * b.columns) + 4 * n * b.rows * b.columns
    dx = 2 * itemsize * (n * b.dx_rows * F + n * F * b.dx_columns + b.dx_rows * b.dx_columns) + 4 * b.dx_rows * b.dx_columns
    dw = (2 * itemsize * (b.dw_rows * b.dw_d + n * b.dw_rows * b.dw_f + n * b.dw_d * b.dw_f)
          + 4 * (n + 1) * b.dw_d * b.dw_f)  # one result before it is added to its accumulator
    return {"forward": forward, "dx": dx, "dw": dw}


def cuts(size):
    """What a dimension may be cut into: itself and its divisors that are whole lanes, largest first."""
    return [size] + [c for c in range(size - 1, 127, -1) if size % c == 0 and c % 128 == 0]


def grouped_blocks(given, x, w, pair, chip):
    """The given blocks, or the tuned ones (bench.py tune), or the widest that fit."""
    D, F = w.shape[1:]
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise KernelError(f"grouped_matmul: x is {x.dtype} and the weights {w.dtype}: want both bfloat16 or float32")
    given = given or TUNED.get(chip, {}).get(f"{'paired_' * pair}grouped_matmul D={D} F={F}")
    blocks = GroupedBlocks(*given or (256, F, 256, D, 256, D, F))
    fields = {"columns": F, "dx_columns": D, "dw_d": D, "dw_f": F}
    for name, size in fields.items():
        if getattr(blocks, name) not in cuts(size):
            raise KernelError(f"grouped_matmul: {name}={getattr(blocks, name)} must be {size} or a multiple of 128 that "
                              "divides it")
    if rows := [r for r in (blocks.rows, blocks.dx_rows, blocks.dw_rows) if r < 16 or r % 16]:
        raise KernelError(f"grouped_matmul: rows={rows[0]} must be a multiple of 16")
    for kernel, names in (("forward", ["columns"]), ("dx", ["dx_columns"]), ("dw", ["dw_d", "dw_f"])):
        while (vmem := grouped_vmem(blocks, D, F, pair, x.dtype.itemsize)[kernel]) > vmem_limit(chip):
            widest = max(names, key=lambda name: getattr(blocks, name))
            narrower = [c for c in cuts(fields[widest]) if c < getattr(blocks, widest)]
            if given or not narrower:
                raise KernelError(f"grouped_matmul: {kernel} needs {vmem / 2**20:.1f} MiB of VMEM, {chip} has "
                                  f"{vmem_limit(chip) / 2**20:.0f} MiB for it: D={D}, F={F}, {blocks}")
            blocks = replace(blocks, **{widest: narrower[0]})
    return blocks


def visits(group_sizes, n, rows, every_group):
    """-> how many, and for each visit its group, tile of rows, and where in the tile the group begins and ends.

    The rows behind the last group count as one more group, len(group_sizes). every_group: that one is left
    out, and empty groups are visited once too.
    """
    sizes = group_sizes if every_group else jnp.append(group_sizes, n - group_sizes.sum())
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    tiles = pl.cdiv(n, rows)
    first = jnp.minimum(starts // rows, tiles - 1)
    count = jnp.where(sizes > 0, pl.cdiv(ends, rows) - first, int(every_group))
    last = jnp.cumsum(count)
    visit = jnp.arange(tiles + len(group_sizes))  # a border adds one visit; some of these remain unused
    group = jnp.minimum(jnp.searchsorted(last, visit, side="right"), len(sizes) - 1)
    tile = jnp.minimum(first[group] + visit - (last - count)[group], tiles - 1)
    begin, end = (x[group] - tile * rows for x in (starts, ends))
    return last[-1], [x.astype(jnp.int32) for x in (group, tile, begin, end)]


def multiply(xs, ws):
    return [dot(xs[0], ws[0])]


def gated(xs, ws):
    a, b = (dot(xs[0], w) for w in ws)
    half = 0.5 * a  # silu by one tanh; a sigmoid is an exp and a division
    return [(half * jnp.tanh(half) + half) * b, a, b]


def multiply_transposed(xs, ws):
    return [sum(dot(x, w, NT) for x, w in zip(xs, ws))]


def grouped_kernel(group, expert, tile, begin, *refs, compute, n_x, n_w, n_groups):
    """One visit: compute(x's rows, the group's weights) -> the results' rows. Those behind the group's end are
    written too: the next group's visit writes over them."""
    xs, ws, outs = refs[:n_x], refs[n_x:n_x + n_w], refs[n_x + n_w:]
    visit = pl.program_id(1)

    def write(results):
        own = lax.broadcasted_iota(jnp.int32, outs[0].shape, 0) >= begin[visit]
        for out, y in zip(outs, results):  # select in fp32: bf16 masks are packed, slower to make
            out[...] = jnp.where(own, y, out[...].astype(jnp.float32)).astype(out.dtype)

    def multiply_rows():
        write(compute([x[...] for x in xs], [w[...] for w in ws]))

    def clear_rows():  # behind the last group
        write([0.0] * len(outs))

    lax.cond(group[visit] < n_groups, multiply_rows, clear_rows)


def grouped_call(compute, xs, ws, group_sizes, n_outs, rows, columns, transposed, chip, interpret):
    n, K = xs[0].shape
    E, F = ws[0].shape[0], ws[0].shape[1 if transposed else 2]
    n_visits, (group, tile, begin, _) = visits(group_sizes, n, rows, every_group=False)

    expert = jnp.minimum(group, E - 1)  # whose weights to hold, behind the last group too

    def weights_at(column, visit, group, expert, tile, begin):
        return (expert[visit], column, 0) if transposed else (expert[visit], 0, column)

    return pl.pallas_call(
        functools.partial(grouped_kernel, compute=compute, n_x=len(xs), n_w=len(ws), n_groups=E),
        name=compute.__name__ + "_grouped",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(F // columns, n_visits),
            in_specs=[pl.BlockSpec((rows, K), lambda c, v, group, expert, tile, begin: (tile[v], 0))] * len(xs)
            + [pl.BlockSpec((None, columns, K) if transposed else (None, K, columns), weights_at)] * len(ws),
            out_specs=[pl.BlockSpec((rows, columns), lambda c, v, group, expert, tile, begin: (tile[v], c))] * n_outs),
        out_shape=[jax.ShapeDtypeStruct((n, F), xs[0].dtype)] * n_outs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"),
                                             vmem_limit_bytes=vmem_limit(chip)),
        interpret=interpret)(group, expert, tile, begin, *xs, *ws)


def weights_kernel(group, tile, begin, end, x, *refs):
    """One visit adds x[rows of the group].T @ g[rows of the group] to the sums; a group's last visit writes them. The
    matrix unit takes the narrower of x and g transposed in 0.6 of the steps that the wider one takes, so where g
    is narrower the sums are kept transposed, (f, d)."""
    gs, outs, sums = (refs[i * len(refs) // 3:(i + 1) * len(refs) // 3] for i in range(3))
    visit, last = pl.program_id(2), pl.num_programs(2) - 1
    first_of_group = (visit == 0) | (group[jnp.maximum(visit - 1, 0)] != group[visit])
    last_of_group = (visit == last) | (group[jnp.minimum(visit + 1, last)] != group[visit])
    flipped = gs[0].shape[1] < x.shape[1]

    def own(ref):
        row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        mine = (row >= begin[visit]) & (row < end[visit])
        return jnp.where(mine, ref[...].astype(jnp.float32), 0).astype(ref.dtype)

    def product(g):
        return dot(own(g), own(x), TN) if flipped else dot(own(x), own(g), TN)

    @pl.when(first_of_group)  # of an empty group too: its gradient is zero
    def _():
        for total, g in zip(sums, gs):
            total[...] = product(g)

    @pl.when(~first_of_group)
    def _():
        for total, g in zip(sums, gs):
            total[...] += product(g)

    @pl.when(last_of_group)
    def _():
        for out, total in zip(outs, sums):
            out[...] = (total[...].T if flipped else total[...]).astype(out.dtype)


def weights_call(x, gs, group_sizes, dtype, rows, d, f, chip, interpret):
    """x[rows of e].T @ g[rows of e] for each g -> [(E, D, F)]"""
    (n, D), F, E = x.shape, gs[0].shape[1], len(group_sizes)
    n_visits, scalars = visits(group_sizes, n, rows, every_group=True)
    return pl.pallas_call(
        weights_kernel,
        name="weights_grouped",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(D // d, F // f, n_visits),
            in_specs=[pl.BlockSpec((rows, d), lambda i, j, v, group, tile, *_: (tile[v], i))]
            + [pl.BlockSpec((rows, f), lambda i, j, v, group, tile, *_: (tile[v], j))] * len(gs),
            out_specs=[pl.BlockSpec((None, d, f), lambda i, j, v, group, *_: (group[v], i, j))] * len(gs),
            scratch_shapes=[pltpu.VMEM((f, d) if f < d else (d, f), jnp.float32)] * len(gs)),
        out_shape=[jax.ShapeDtypeStruct((E, D, F), dtype)] * len(gs),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"),
                                             vmem_limit_bytes=vmem_limit(chip)),
        interpret=interpret)(*scalars, x, *gs)


def grouped_pallas(x, w, group_sizes, blocks, *, chip, interpret):
    b = grouped_blocks(blocks, x, w, False, chip)
    return grouped_call(multiply, [x], [w], group_sizes, 1, b.rows, b.columns, False, chip, interpret)[0]


def grouped_backward_pallas(g, x, w, group_sizes, blocks, *, chip, interpret):
    b = grouped_blocks(blocks, x, w, False, chip)
    dx, = grouped_call(multiply_transposed, [g], [w], group_sizes, 1, b.dx_rows, b.dx_columns, True, chip, interpret)
    dw, = weights_call(x, [g], group_sizes, w.dtype, b.dw_rows, b.dw_d, b.dw_f, chip, interpret)
    return dx, dw


def paired_pallas(x, gate, up, group_sizes, blocks, *, chip, interpret):
    b = grouped_blocks(blocks, x, gate, True, chip)
    return grouped_call(gated, [x], [gate, up], group_sizes, 3, b.rows, b.columns, False, chip, interpret)


def paired_backward_pallas(g, x, gate, up, group_sizes, a, b, blocks, *, chip, interpret):
    blocks = grouped_blocks(blocks, x, gate, True, chip)
    gs = silu_mul_backward(g, a, b)
    dx, = grouped_call(multiply_transposed, gs, [gate, up], group_sizes, 1, blocks.dx_rows, blocks.dx_columns, True,
                       chip, interpret)
    return dx, *weights_call(x, gs, group_sizes, gate.dtype, blocks.dw_rows, blocks.dw_d, blocks.dw_f, chip, interpret)


# ---------------------------------------------------------------------------------------- lowerings


def lowerings(kind="reference", *, splash=None, fused_ce=None, paired_gmm=None, chip="tpu7x", splash_blocks=None,
              ce_blocks=None, grouped_blocks=None):
    """{torch op: JAX function of the op's arguments, in order}. kind: "reference" (XLA), "pallas" (TPU) or
    "interpret" (the Pallas kernels interpreted, on any machine); splash, fused_ce, paired_gmm: that of attention,
    the loss and the grouped matmuls, if another. chip: the generation that "pallas" is compiled for, which decides
    block sizes; *_blocks: those of ops that name none themselves."""
    def choose(kind, blocks, reference, pallas):
        if kind not in ("reference", "interpret", "pallas"):
            raise KernelError(f'kernels must be "reference", "interpret" or "pallas" (got {kind!r})')
        if kind == "reference":
            return reference
        return lambda *args: pallas(*args[:-1], args[-1] or as_list(blocks), chip=chip,
                                    interpret=kind == "interpret")

    attention = functools.partial(choose, splash or kind, splash_blocks)
    loss = functools.partial(choose, fused_ce or kind, ce_blocks)
    experts = functools.partial(choose, paired_gmm or kind, grouped_blocks)
    ops = torch.ops.tpu
    return {
        ops.splash_attention.default: attention(splash_reference, splash_pallas),
        ops.splash_attention_backward.default: attention(splash_backward_reference, splash_backward_pallas),
        ops.linear_cross_entropy.default: loss(cross_entropy_reference, cross_entropy_pallas),
        ops.linear_cross_entropy_backward.default: loss(cross_entropy_backward_reference, cross_entropy_backward_pallas),
        ops.grouped_matmul.default: experts(grouped_reference, grouped_pallas),
        ops.grouped_matmul_backward.default: experts(grouped_backward_reference, grouped_backward_pallas),
        ops.paired_grouped_matmul.default: experts(paired_reference, paired_pallas),
        ops.paired_grouped_matmul_backward.default: experts(paired_backward_reference, paired_backward_pallas),
    }
