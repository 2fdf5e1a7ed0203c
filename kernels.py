# NOTE TO HELPERS (remove when merged): two of you were started on this file by mistake. Split:
# - the one whose prompt says "It is about 17:05 now": you own SPLASH ATTENTION and FUSED CROSS-ENTROPY (Pallas fwd+bwd,
#   their tests in tests/test_kernels.py). Build on the ops/references below; do not replace them wholesale.
# - the one whose prompt says "It is about 17:28 now": you own the CPU reference speed (grouped matmul first, attention),
#   GROUPED / PAIRED GROUPED MATMUL in Pallas (tests in tests/test_grouped_matmul.py), bench_kernels.py and tune.
# Edit only your own sections of this file, with small in-place edits (re-read before each), never a whole-file write.
"""The three kernels that give a TPU step its memory and speed, as torch custom ops and as JAX functions.

    from kernels import splash_attention, linear_cross_entropy, grouped_matmul, paired_grouped_matmul

Notable features:
- plain PyTorch runs a reference; make_fx sees one node forward and one backward; `lowerings` says what JAX
  runs for each node: the same mathematics in XLA ("reference") or Pallas kernels ("pallas", "interpret")
- what the mask empties is not computed: a kernel's grid walks a table of the blocks that hold something
- imports no sibling: copy it into any project
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import lax

Tensor = torch.Tensor


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
        raise ValueError(f"splash_attention: q {tuple(q.shape)} does not go with k {tuple(k.shape)} and v "
                         f"{tuple(v.shape)}: want (B, H, T, D) and (B, K, S, D), K dividing H")
    if segment_ids is not None and not tuple(segment_ids.shape) == (B, T) == (B, k.shape[2]):
        raise ValueError(f"splash_attention: segment_ids {tuple(segment_ids.shape)} with T={T}, S={k.shape[2]}: "
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
        raise ValueError(f"linear_cross_entropy: x {tuple(x.shape)}, weight {tuple(weight.shape)}, targets "
                         f"{tuple(targets.shape)}: want (N, D), (V, D), (N,)")
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
            raise ValueError(f"{name}: x {tuple(x.shape)}, weights {[tuple(w.shape) for w in weights]}, group_sizes "
                             f"{tuple(group_sizes.shape)}: want (N, D), (E, D, F), (E,)")


def groups_of(x, group_sizes):
    """x's rows of each group: a list of (n, D)."""
    return x[:int(group_sizes.sum())].split(group_sizes.tolist())


def grouped(xs, ws, n):
    """Rows of each group times its matrix, zeros behind them up to n rows."""
    y = torch.cat([x @ w for x, w in zip(xs, ws)])
    return F.pad(y, (0, 0, 0, n - y.shape[0]))


@torch.library.custom_op("tpu::grouped_matmul", mutates_args=())
def grouped_op(x: Tensor, w: Tensor, group_sizes: Tensor, blocks: Sequence[int]) -> Tensor:
    return grouped(groups_of(x, group_sizes), w, x.shape[0])


@grouped_op.register_fake
def _(x, w, group_sizes, blocks):
    return x.new_empty(x.shape[0], w.shape[2])


@torch.library.custom_op("tpu::grouped_matmul_backward", mutates_args=())
def grouped_backward_op(g: Tensor, x: Tensor, w: Tensor, group_sizes: Tensor,
                        blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    xs, gs = groups_of(x, group_sizes), groups_of(g, group_sizes)
    return grouped(gs, w.mT, x.shape[0]), torch.stack([x.T @ g for x, g in zip(xs, gs)])


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
    xs = groups_of(x, group_sizes)
    a, b = (grouped(xs, w, x.shape[0]) for w in (gate, up))
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
    xs, das, dbs = (groups_of(t, group_sizes) for t in (x, da, db))
    dx = grouped(das, gate.mT, x.shape[0]) + grouped(dbs, up.mT, x.shape[0])
    return dx, *(torch.stack([x.T @ d for x, d in zip(xs, ds)]) for ds in (das, dbs))


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
    dqs, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for rows, keys in spans(T, S, causal, window, max(64, T // 8)):
        s = scores_jax(q, k, rows, keys, segment_ids, causal, window, softcap, scale)
        p = jnp.exp(s - lse[:, :, :, rows, None])
        dp = jnp.einsum("bkgtd,bksd->bkgts", g[:, :, :, rows], v[:, :, keys], preferred_element_type=jnp.float32)
        ds = p * (dp - delta[:, :, :, rows]) * scale
        if softcap:
            ds = ds * (1 - (jnp.where(s == -jnp.inf, 0, s) / softcap) ** 2)
        p, ds = p.astype(q.dtype), ds.astype(q.dtype)
        dqs.append(jnp.einsum("bkgts,bksd->bkgtd", ds, k[:, :, keys]))
        dk = dk.at[:, :, keys].add(jnp.einsum("bkgts,bkgtd->bksd", ds, q[:, :, :, rows]))
        dv = dv.at[:, :, keys].add(jnp.einsum("bkgts,bkgtd->bksd", p, g[:, :, :, rows]))
    return jnp.concatenate(dqs, 3).reshape(B, H, T, D), dk.astype(k.dtype), dv.astype(v.dtype)


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
# in a loop took 2.4 ms against its 42 (N=4096, D=F=256, E=8, 2 cores).
ROWS = 128


def row_tiles(group_sizes, n):
    """Rows 0..n in tiles of ROWS that belong to one expert each: how many, each one's expert and first row.
    A group's last tile runs over into the next group."""
    count = -(-group_sizes // ROWS)
    last = jnp.cumsum(count)
    tile = jnp.arange(n // ROWS + len(group_sizes))
    expert = jnp.minimum(jnp.searchsorted(last, tile, side="right"), len(group_sizes) - 1)
    first = (jnp.cumsum(group_sizes) - group_sizes)[expert] + (tile - (last - count)[expert]) * ROWS
    return last[-1], expert, first


def grouped_reference(x, w, group_sizes, blocks):
    n, expert, first = row_tiles(group_sizes, x.shape[0])
    x = jnp.pad(x, ((0, ROWS), (0, 0)))

    def tile(i, y):  # tiles come in order, so the next group writes over what ran into it
        y_tile = lax.dynamic_slice_in_dim(x, first[i], ROWS) @ w[expert[i]]
        return lax.dynamic_update_slice_in_dim(y, y_tile, first[i], 0)

    y = lax.fori_loop(0, n, tile, jnp.zeros((x.shape[0], w.shape[2]), x.dtype))
    return jnp.where(jnp.arange(x.shape[0])[:, None] < group_sizes.sum(), y, 0)[:-ROWS]


def grouped_weights_reference(x, g, group_sizes):
    """x[rows of e].T @ g[rows of e] -> (E, D, F) fp32."""
    n, expert, first = row_tiles(group_sizes, x.shape[0])
    x, g = (jnp.pad(t, ((0, ROWS), (0, 0))) for t in (x, g))
    end = jnp.cumsum(group_sizes)

    def tile(i, dw):
        x_tile, g_tile = (lax.dynamic_slice_in_dim(t, first[i], ROWS) for t in (x, g))
        own = (first[i] + jnp.arange(ROWS) < end[expert[i]])[:, None]
        return dw.at[expert[i]].add(jnp.matmul(jnp.where(own, x_tile, 0).T, g_tile, preferred_element_type=jnp.float32))

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


# ---------------------------------------------------------------------------------------- lowerings


def lowerings(kind):
    """{torch op: JAX function of the op's arguments, in order}. kind: "reference" (XLA), "pallas" (TPU) or
    "interpret" (the Pallas kernels interpreted, on any machine)."""
    if kind not in ("reference", "interpret", "pallas"):
        raise ValueError(f'kernels must be "reference", "interpret" or "pallas" (got {kind!r})')
    ops = torch.ops.tpu
    return {
        ops.splash_attention.default: splash_reference,
        ops.splash_attention_backward.default: splash_backward_reference,
        ops.linear_cross_entropy.default: cross_entropy_reference,
        ops.linear_cross_entropy_backward.default: cross_entropy_backward_reference,
        ops.grouped_matmul.default: grouped_reference,
        ops.grouped_matmul_backward.default: grouped_backward_reference,
        ops.paired_grouped_matmul.default: paired_reference,
        ops.paired_grouped_matmul_backward.default: paired_backward_reference,
    }
