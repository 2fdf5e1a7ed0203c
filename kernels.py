"""The three kernels that give a TPU step its memory and speed, as torch custom ops and as JAX functions.

    from kernels import splash_attention, linear_cross_entropy, grouped_matmul, paired_grouped_matmul

Notable features:
- plain PyTorch runs a reference; make_fx sees one node forward and one backward; `lowerings` says what JAX runs for each
  node: the same reference, since it is written once for torch and jax.numpy, or Pallas kernels ("pallas", "interpret")
- what the mask empties is not computed: a kernel's grid walks a table of the blocks that hold something
- block sizes are tuned by chip (`python bench.py tune`), or cut down until they fit; given ones are taken or refused
- imports no sibling: copy it into any project
"""

import functools
import json
import math
import pathlib
import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from torch import Tensor


class KernelError(ValueError):
    """Shapes, dtypes or block sizes that a kernel does not take; the message is one line with the sizes and the limit."""


# --------------------------------------------------------------------------------- shared: ops and references


def define(name, inputs, outputs, like, reference):
    """An op tpu::name that runs the reference. inputs, outputs: of its schema; like(*inputs) -> the outputs' empty tensors."""
    schema = f"({', '.join(inputs)}) -> ({', '.join(outputs)})"
    op = torch.library.custom_op(f"tpu::{name}", reference, mutates_args=(), schema=schema)
    op.register_fake(like)
    return op


def torch_op(schema, n_saved, like, forward, backward):
    """Registers tpu::name and tpu::name_backward, which make_fx sees as one node each -> {op: (reference, Pallas)}.

    schema: "name(tensors, options) -> (outputs)". Only the first output is differentiable, in all tensors but the last one.
    name_backward(g, *tensors, *saved, *options) -> gradients; saved: the last n_saved outputs. like(*tensors, *options) -> the
    outputs' empty tensors. forward, backward: (reference, Pallas)."""
    name, inputs, outputs = re.fullmatch(r"(\w+)\((.*)\) -> \((.*)\)", schema).groups()
    n, inputs, outputs = inputs.count("Tensor"), inputs.split(", "), outputs.split(", ")
    first_saved = len(outputs) - n_saved
    op = define(name, inputs, outputs, like, forward[0])
    inputs = ["Tensor g", *inputs[:n], *outputs[first_saved:], *inputs[n:]]
    backward_op = define(name + "_backward", inputs, ["Tensor"] * (n - 1),
                         lambda g, *args: tuple(x.new_empty(x.shape) for x in args[:n - 1]), backward[0])

    def setup(ctx, inputs, output):
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)  # no zeros for the other outputs' gradients in the graph
        ctx.save_for_backward(*inputs[:n], *outputs[first_saved:])
        ctx.options = inputs[n:]

    def vjp(ctx, g, *_):
        return *backward_op(g, *ctx.saved_tensors, *ctx.options), None, *[None] * len(ctx.options)

    op.register_autograd(vjp, setup_context=setup)
    return {getattr(torch.ops.tpu, name).default: forward, getattr(torch.ops.tpu, name + "_backward").default: backward}


# References take torch tensors or JAX arrays. Where the two libraries spell something differently:


def lib(x):
    return torch if isinstance(x, Tensor) else jnp


def f32(x):
    return x.float() if isinstance(x, Tensor) else x.astype(jnp.float32)


def cast(y, x):
    """y in x's dtype, contiguous as an op's fake says."""
    return y.to(x.dtype).contiguous() if isinstance(x, Tensor) else y.astype(x.dtype)


def arange(start, stop, x):
    return torch.arange(start, stop, device=x.device) if isinstance(x, Tensor) else jnp.arange(start, stop)


def logsumexp(x):
    return (torch if isinstance(x, Tensor) else jax.nn).logsumexp(x, -1)


def logits(products, scale, softcap):
    """scale * products, softly capped: of attention and of the loss, in references and in the loss's kernels."""
    z = scale * products
    return softcap * lib(z).tanh(z / softcap) if softcap else z


# ------------------------------------------------------------------------------------ shared: Pallas

# Fast memory per core, less an eighth for the compiler.
VMEM_MIB = {"v5e": 112, "v5p": 56, "v6e": 112, "tpu7x": 56, "interpret": 56}
TABLE_FILE = pathlib.Path(__file__).with_name("tuned_blocks.json")  # bench.py tune writes it
TABLE = json.loads(TABLE_FILE.read_text()) if TABLE_FILE.exists() else {}


def tuned(op, chip, shapes):
    """The table's entry for an op with tensors of these shapes (without the incoming gradient), by what decides its speed: head
    dimension, width of the model or an expert's matrix. None, or {"blocks": [...], "forward", "backward": {"efficiency",
    "cycles", "flops", "bundles": {kernel: a block's}}}, by the compiler's schedule. efficiency: share of the MXU's peak, by
    the flops one has to do: attention 2 matmuls of what a causal mask leaves (backward 5), loss 1 (3), for each weight 1 (2)."""
    name = op.removesuffix("_backward")
    sizes = {"splash_attention": shapes[0][3:], "linear_cross_entropy": shapes[0][1:]}.get(name, shapes[1][1:])
    return TABLE.get(chip, {}).get(" ".join([name, *map("{}={}".format, "DF", sizes)]))


def cuts(length, unit, divide=True):
    """Sizes that an axis may be cut into, largest first: multiples of `unit`, or only those that divide it."""
    sizes = range(-(-length // unit) * unit, 0, -unit)
    return [size for size in sizes if length % size == 0] if divide else sizes


def fit_blocks(cls, given, op, chip, *tensors):
    """The given blocks, or the table's for an op with these tensors, or the defaults; the latter two cut down to fit.

    cls has allowed(unit, *tensors) -> the sizes that each field may have, largest first, and vmem(*tensors) -> {kernel: (bytes,
    the fields that may shrink)}."""
    unit = 1 if chip == "interpret" else 128  # TPUs: multiples of 128 lanes
    entry = tuned(op, chip, [x.shape for x in tensors])
    blocks = given or cls(*(entry["blocks"] if entry else ()))

    def sizes(field):  # that it may have, largest first; parts of a block depend on the block
        return dict(zip(vars(blocks), blocks.allowed(unit, *tensors)))[field]

    while True:
        for field, size in vars(blocks).items():
            fitting = next((s for s in sizes(field) if s <= size), min(sizes(field), default=0))
            if not fitting or given and fitting != min(size, sizes(field)[0]):
                fits = "one of " + ", ".join(map(str, sizes(field)[:6])) if sizes(field) else "a multiple itself (--seq)"
                raise KernelError(f"{cls.__name__}.{field}={size} does not fit: want a multiple of {unit} (rows: 32) that divides "
                                  f"its axis, {fits}")
            blocks = replace(blocks, **{field: fitting})
        kernel, (use, fields) = max(blocks.vmem(*tensors).items(), key=lambda item: item[1][0])
        if use <= VMEM_MIB[chip] * 2 ** 20:
            return blocks
        widest = max(fields, key=vars(blocks).get)
        smaller = [s for s in sizes(widest) if s <= vars(blocks)[widest] // 2]
        if given or not smaller:
            raise KernelError(f"{blocks}: {kernel} takes {use / 2**20:.1f} MiB of VMEM, {chip} has {VMEM_MIB[chip]} MiB for it")
        blocks = replace(blocks, **{widest: smaller[0]})


def call(kernel, name, grid, sequential, scalars, inputs, outputs, scratch, chip):
    """pl.pallas_call as all kernels here use it. The last `sequential` axes of the grid run in order. scalars: known before the
    blocks, whose index maps read them. inputs: (array, BlockSpec), outputs: (shape, dtype, BlockSpec), scratch: fp32 shapes.
    No checks of the blocks' addresses: index maps here stay within their arrays, and checks cost a step 60 bundles of 160."""
    return pl.pallas_call(
        kernel, name=name, interpret=chip == "interpret",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=grid, in_specs=[spec for _, spec in inputs],
            out_specs=[spec for *_, spec in outputs], scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch]),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid) - sequential) + ("arbitrary",) * sequential,
            vmem_limit_bytes=VMEM_MIB[chip] * 2 ** 20, disable_bounds_checks=True))(*scalars, *(array for array, _ in inputs))


NN, NT, TN = (1, 0), (1, 1), (0, 0)  # the dimensions that x @ y, x @ y.T, x.T @ y sum over


def dot(x, y, contract=NN):
    return lax.dot_general(x, y, ((contract[:1], contract[1:]), ((), ())), preferred_element_type=jnp.float32)


def zero(*refs):
    for ref in refs:
        ref[...] = jnp.zeros_like(ref)


def store(ref, value):
    ref[...] = value.astype(ref.dtype)


MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # not -inf: MASKED - MASKED is 0, not NaN
LOG2_E = math.log2(math.e)


# ------------------------------------------------------------------------------------------- rotary embedding


def rotate_half(x):
    """[-b, a] for the halves [a, b] of x's last dimension: rotary embeddings (RoFormer, arXiv:2104.09864) as Hugging Face has it.

    On a TPU it is a product with a signed permutation: exact for finite x, and done by the matrix unit within the arithmetic
    around it. Slices of 128 lanes are passes over x of their own: (4, 64, 4096, 128) bf16 rotated takes 0.41 ms instead of 1.41
    by the compiler's count, its gradient 0.49 instead of 1.86."""
    return torch.ops.tpu.rotate_half(x)


def rotate_half_reference(x):
    half = x.shape[-1] // 2
    return lib(x).concatenate([-x[..., half:], x[..., :half]], -1)


def rotate_half_product(x, blocks, chip):
    distance = jnp.arange(x.shape[-1])[:, None] - jnp.arange(x.shape[-1])  # of a channel from where it goes
    swap = (distance == -(x.shape[-1] // 2)).astype(x.dtype) - (distance == x.shape[-1] // 2).astype(x.dtype)
    return lax.dot_general(x, swap, (((x.ndim - 1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)


rotate_half_op = define("rotate_half", ["Tensor x"], ["Tensor"], lambda x: x.new_empty(x.shape), rotate_half_reference)
rotate_half_op.register_autograd(lambda ctx, g: -rotate_half_op(g))
ROTARY = {torch.ops.tpu.rotate_half.default: (rotate_half_reference, rotate_half_product)}


# ---------------------------------------------------------------------------------------- splash attention


def splash_attention(q, k, v, segment_ids=None, *, causal=True, window=0, softcap=0.0, scale=None):
    """softmax(scale * q @ k.mT, masked) @ v without a T×T matrix in memory (FlashAttention-2, arXiv:2307.08691).

    q: (B, H, T, D); k, v: (B, K, S, D) with K dividing H (grouped-query: head h reads k and v of h // (H / K)).
    segment_ids: (B, T) int32, a token sees only its own id (T == S then). causal: query t sees keys s <= t.
    window: 0, or the token sees itself and the window-1 before it. softcap: 0, or scores become softcap * tanh(scores / softcap).
    scale: 1/sqrt(D) if None. -> (B, H, T, D) in q's dtype, softmax in fp32; a query that sees nothing gives zeros."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or k.shape[::3] != q.shape[::3] or q.shape[1] % k.shape[1]:  # ::3: B, D
        raise KernelError(f"splash_attention: q {tuple(q.shape)} does not go with k {tuple(k.shape)} and v "
                          f"{tuple(v.shape)}: want (B, H, T, D) and (B, K, S, D), K dividing H")
    if not q.is_floating_point() or {k.dtype, v.dtype} != {q.dtype}:
        raise KernelError(f"splash_attention: q {q.dtype}, k {k.dtype}, v {v.dtype}: want one floating dtype")
    (B, _, T, D), S = q.shape, k.shape[2]
    if segment_ids is not None and (segment_ids.is_floating_point() or not segment_ids.shape == (B, T) == (B, S)):
        raise KernelError(f"splash_attention: segment_ids {tuple(segment_ids.shape)} {segment_ids.dtype} with T={T}, S={S}: "
                          "want integers (B, T), and T == S")
    scale = D ** -0.5 if scale is None else scale
    return torch.ops.tpu.splash_attention(q, k, v, segment_ids, causal, window, softcap, scale)[0]


def reference_scores(q, k, segment_ids, causal, window, softcap, scale):
    """q: (B, K, G, T, D), k: (B, K, S, D) -> for blocks of queries: slices of queries and of the keys that they can see, and
    scores (B, K, G, rows, keys) fp32, -inf where a query may not see a key."""
    xp, T, S = lib(q), q.shape[3], k.shape[2]
    block = max(64, T // 8)
    for start in range(0, T, block):
        end = min(start + block, S) if causal else S
        rows = slice(start, min(start + block, T))
        keys = slice(min(max(start - window + 1, 0), end - 1) if window else 0, end)
        s = logits(xp.einsum("bkgtd,bksd->bkgts", f32(q[:, :, :, rows]), f32(k[:, :, keys])), scale, softcap)
        distance = arange(keys.start, keys.stop, q) - arange(rows.start, rows.stop, q)[:, None]
        s = xp.where(distance > 0, -math.inf, s) if causal else s
        s = xp.where(distance <= -window, -math.inf, s) if window else s
        if segment_ids is not None:
            same = segment_ids[:, rows, None] == segment_ids[:, None, keys]
            s = xp.where(same[:, None, None], s, -math.inf)
        yield rows, keys, s


def splash_reference(q, k, v, segment_ids, causal, window, softcap, scale):
    """-> out, and the scores' log-sum-exp (B, H, T) fp32, which is +inf where a query sees nothing: exp(s - lse) is
    then the probability, also of such rows."""
    xp, (B, H, T, D), K = lib(q), q.shape, k.shape[1]
    queries = q.reshape(B, K, H // K, T, D)
    outs, lses = [], []
    for rows, keys, s in reference_scores(queries, k, segment_ids, causal, window, softcap, scale):
        lse = logsumexp(s)
        lses.append(xp.where(lse == -math.inf, math.inf, lse))
        outs.append(xp.einsum("bkgts,bksd->bkgtd", xp.exp(s - lses[-1][..., None]), f32(v[:, :, keys])))
    return cast(xp.concatenate(outs, 3).reshape(B, H, T, D), q), xp.concatenate(lses, 3).reshape(B, H, T)


def splash_backward_reference(g, q, k, v, segment_ids, out, lse, causal, window, softcap, scale):
    xp, (B, H, T, D), (K, S) = lib(q), q.shape, k.shape[1:3]
    queries, g, out, lse = (f32(x).reshape(B, K, H // K, *x.shape[2:]) for x in (q, g, out, lse))
    delta = (g * out).sum(-1)[..., None]  # sum over keys of p * dp, by the definition of out

    def over_queries(x, y, keys):
        """x: (B, K, G, rows, keys), y: (B, K, G, rows, D) -> (B, K, D, S). This way round, and padded rather than
        added into a slice, XLA:CPU takes half the time."""
        x, y = (t.reshape(B, K, -1, t.shape[-1]) for t in (x, y))
        z, (before, after) = xp.einsum("bkts,bktd->bkds", x, y), (keys.start, S - keys.stop)
        return F.pad(z, (before, after)) if xp is torch else jnp.pad(z, ((0, 0),) * 3 + ((before, after),))

    dqs, dk, dv = [], 0, 0
    for rows, keys, s in reference_scores(queries, k, segment_ids, causal, window, softcap, scale):
        p = xp.exp(s - lse[:, :, :, rows, None])
        dp = xp.einsum("bkgtd,bksd->bkgts", g[:, :, :, rows], f32(v[:, :, keys]))
        ds = p * (dp - delta[:, :, :, rows]) * scale
        if softcap:
            ds = ds * (1 - (xp.where(s == -math.inf, 0, s) / softcap) ** 2)
        dqs.append(xp.einsum("bkgts,bksd->bkgtd", ds, f32(k[:, :, keys])))
        dk = dk + over_queries(ds, queries[:, :, :, rows], keys)
        dv = dv + over_queries(p, g[:, :, :, rows], keys)
    return cast(xp.concatenate(dqs, 3).reshape(B, H, T, D), q), cast(dk.mT, k), cast(dv.mT, v)


# Splash attention in Pallas.
#
# Scores are kept transposed, keys down the sublanes and queries along the lanes: a query's maximum, sum and
# log-sum-exp are then one row (1, queries) that spreads over sublanes at no cost, and reductions over keys
# are adds of whole registers instead of shuffles across lanes.
#
# Where the cycles go (tpu7x, a block of 1024 × 1024 at head dimension 128, which fills half of the 256 × 256 matrix units):
# forward 2,245 bundles for 2,048 cycles of the MXU, 1,560 of vector operations and 1,030 of exp; backward 4,078 bundles under
# 5,120 cycles of the MXU, which bounds it. A masked block takes 2,802 and 5,120. JAX's own: 3,346 and 5,318 bundles.


@dataclass(frozen=True)
class SplashBlocks:
    """One grid step holds q queries and kv keys. Inside it, parts of *_compute are worked on one behind the other, the matmuls
    of the next ones under the softmax of this one. The backward kernel keeps the gradients of up to kv_resident keys in VMEM;
    longer sequences take one call for each such stretch."""
    q: int = 1024
    kv: int = 1024
    q_compute: int = 512
    kv_compute: int = 256
    q_backward: int = 1024
    kv_backward: int = 1024
    q_compute_backward: int = 512
    kv_compute_backward: int = 512
    kv_resident: int = 8192

    def allowed(self, unit, q, k):
        T, S = q.shape[2], k.shape[2]
        lengths = T, S, self.q, self.kv, T, S, self.q_backward, self.kv_backward
        return [*(cuts(n, unit) for n in lengths), cuts(S, 1, divide=False)]

    def vmem(self, q, k):  # inputs and outputs twice, one of them being moved; then fp32 accumulators and a few parts of scores
        D, size = q.shape[3], q.dtype.itemsize
        forward = 4 * size * D * (self.q + self.kv) + 4 * (D + 16) * self.q + 16 * self.q_compute * self.kv_compute
        backward = (size * D * (6 * self.q_backward + 4 * self.kv_backward) + 4 * D * self.q_backward
                    + 2 * self.kv_resident * D * (2 * size + 4) + 24 * self.q_compute_backward * self.kv_compute_backward)
        return {"forward": (forward, ("q", "kv")), "backward": (backward, ("kv_resident", "q_backward", "kv_backward"))}


FIRST, LAST, PARTIAL, FULL = 1, 2, 4, 8  # flags of a grid step: of its query block; its scores are masked or not


def splash_steps(B, T, causal, window, block_q, block_kv, keys, segment_ids):
    """The grid's steps, query blocks in order and in each the blocks of `keys` (a range) that it sees.

    -> q_of (steps,), kv_of (B * steps,), flags (B * steps,) int32: which blocks a step works on, and how. A step whose
    documents do not meet has neither PARTIAL nor FULL. It names the next working step's keys: those are fetched anyway, so it
    costs no fetch."""
    q_of, kv_of = np.mgrid[:T // block_q, keys.start // block_kv:keys.stop // block_kv].astype(np.int32)
    # Keys minus queries, over a block: from the last query's view of the first key to the reverse.
    low, high = kv_of * block_kv - (q_of + 1) * block_q + 1, (kv_of + 1) * block_kv - 1 - q_of * block_q

    def seen(first, last):
        return ((first <= 0) | (not causal)) & ((last > -window) | (not window))

    some, every = seen(low, high), seen(high, low)
    flags = np.where(some, np.where(every, FULL, PARTIAL), 0).astype(np.int32)
    some[~some.any(1), 0] = True  # a query block that sees nothing has zeros to write
    q_of, kv_of, flags = q_of[some], kv_of[some], flags[some]
    flags |= np.where(np.diff(q_of, prepend=-1), FIRST, 0) | np.where(np.diff(q_of, append=-1), LAST, 0)
    if segment_ids is None:
        return q_of, np.tile(kv_of, B), np.tile(flags, B)

    def ranges(block, of):
        ids = segment_ids.reshape(B, -1, block)
        return ids.min(-1)[:, of], ids.max(-1)[:, of]  # (B, steps) each

    (q_low, q_high), (kv_low, kv_high) = ranges(block_q, q_of), ranges(block_kv, kv_of)
    meet = (q_low <= kv_high) & (kv_low <= q_high) & (flags & (PARTIAL | FULL) > 0)
    one = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low) & (flags & FULL > 0)
    flags = jnp.where(meet, jnp.where(one, FULL, PARTIAL), 0) | flags & (FIRST | LAST)
    following = lax.cummin(jnp.where(meet, jnp.arange(len(q_of)), len(q_of) - 1), axis=1, reverse=True)
    return q_of, jnp.asarray(kv_of)[following].reshape(-1), flags.reshape(-1)


def splash_call(kernel, name, q, k, v, others, outputs, scratch, segment_ids, causal, window, softcap, scale, blocks, keys, chip):
    """A kernel over the grid (batch, key head, query head of it, steps); blocks: (q, kv, q_compute, kv_compute). others: more
    inputs (kind, array), outputs: (kind, dtype), of kind "q" (B, H, T, D), "row" (B, H, 1, T), a number for each query, or
    "resident" (B, K, len(keys), D), which stays while the grid walks over queries."""
    (B, H, T, D), (K, S), (block_q, block_kv, q_compute, kv_compute) = q.shape, k.shape[1:3], blocks
    G = H // K
    q_of, kv_of, flags = splash_steps(B, T, causal, window, block_q, block_kv, keys, segment_ids)
    n = len(q_of)
    specs = {
        "q": pl.BlockSpec((None, None, block_q, D), lambda b, k, g, i, q_of, *_: (b, k * G + g, q_of[i], 0)),
        "kv": pl.BlockSpec((None, None, block_kv, D), lambda b, k, g, i, q_of, kv_of, _: (b, k, kv_of[b * n + i], 0)),
        "row": pl.BlockSpec((None, None, 1, block_q), lambda b, k, g, i, q_of, *_: (b, k * G + g, 0, q_of[i])),
        "resident": pl.BlockSpec((None, None, len(keys), D), lambda b, k, *_: (b, k, 0, 0)),
        "q_ids": pl.BlockSpec((None, 1, block_q), lambda b, k, g, i, q_of, *_: (b, 0, q_of[i])),
        "kv_ids": pl.BlockSpec((None, 1, block_kv), lambda b, k, g, i, q_of, kv_of, _: (b, 0, kv_of[b * n + i]))}
    shapes = {"q": (B, H, T, D), "row": (B, H, 1, T), "resident": (B, K, len(keys), D)}
    # What multiplies every score is put on the queries. exp(x) is exp2(x * log2 e), which saves a multiplication.
    queries = (f32(q) * (scale / softcap if softcap else scale * LOG2_E)).astype(q.dtype)
    ids = [jnp.zeros((B, 1, length), jnp.int32) if segment_ids is None else segment_ids[:, None] for length in (T, S)]
    parts = [(pl.ds(s, kv_compute), pl.ds(t, q_compute))  # of a block of scores: slices of keys and of queries
             for s in range(0, block_kv, kv_compute) for t in range(0, block_q, q_compute)]
    step = functools.partial(splash_step, causal=causal, window=window, segmented=segment_ids is not None)
    inputs = [("q", queries), ("kv", k), ("kv", v), *others, ("q_ids", ids[0]), ("kv_ids", ids[1])]
    return call(functools.partial(kernel, parts=parts, step=step, softcap=softcap), name, (B, K, G, n), 2, (q_of, kv_of, flags),
                [(x, specs[kind]) for kind, x in inputs], [(shapes[kind], dtype, specs[kind]) for kind, dtype in outputs],
                scratch, chip)


def splash_step(q_of, kv_of, flags, q_ref, k_ref, q_ids, kv_ids, causal, window, segmented):
    """-> the grid step's flags, the number of its first key, and mask(scores (keys, queries), keys, queries) of a part."""
    i, step = pl.program_id(3), pl.program_id(0) * pl.num_programs(3) + pl.program_id(3)
    flag, first_key, first_query = flags[step], kv_of[step] * k_ref.shape[0], q_of[i] * q_ref.shape[0]

    def mask(s, keys, queries):
        distance = lax.broadcasted_iota(jnp.int32, s.shape, 0) - lax.broadcasted_iota(jnp.int32, s.shape, 1)
        offset = first_key + keys.start - first_query - queries.start  # scalar: distance + offset is key - query
        keep = distance <= -offset if causal else True
        keep &= distance > -window - offset if window else True
        keep &= kv_ids[:, keys].T == q_ids[:, queries] if segmented else True
        return jnp.where(keep, s, MASKED)

    return flag, first_key, mask


def ahead(fn, items, depth):
    """Yields (item, fn(item)), with fn called `depth` items early: the scheduler keeps to the program's order
    roughly, so this puts the next parts' matmuls beside this part's vector work."""
    results = [fn(item) for item in items[:depth]]
    for i, item in enumerate(items):
        results += [fn(later) for later in items[i + depth:i + depth + 1]]
        yield item, results.pop(0)


def splash_kernel(q_of, kv_of, flags, q_ref, k_ref, v_ref, q_ids, kv_ids, out_ref, lse_ref, m_ref, l_ref, acc_ref, *,
                  parts, step, softcap):
    """q_ref: (q, D); k_ref, v_ref: (kv, D); out_ref: (q, D); lse_ref, m_ref, l_ref: (1, q); acc_ref: (D, q)."""
    flag, _, mask = step(q_of, kv_of, flags, q_ref, k_ref, q_ids, kv_ids)

    @pl.when(flag & FIRST > 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, MASKED)
        zero(l_ref, acc_ref)

    def attend(masked):
        def scores(part):
            keys, queries = part
            s = dot(k_ref[keys, :], q_ref[queries, :], NT)  # (kv_compute, q_compute), in units of log 2
            s = softcap * LOG2_E * jnp.tanh(s) if softcap else s
            return mask(s, keys, queries) if masked else s

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
        store(out_ref, (acc_ref[...] * jnp.where(nothing, 0, 1 / l)).T)
        lse_ref[...] = jnp.where(nothing, jnp.inf, m / LOG2_E + jnp.log(l))


def splash_pallas(q, k, v, segment_ids, causal, window, softcap, scale, blocks, chip):
    b, (B, H, T, D) = fit_blocks(SplashBlocks, blocks, "splash_attention", chip, q, k), q.shape
    out, lse = splash_call(
        splash_kernel, "splash_attention", q, k, v, [], [("q", q.dtype), ("row", jnp.float32)], [(1, b.q), (1, b.q), (D, b.q)],
        segment_ids, causal, window, softcap, scale, (b.q, b.kv, b.q_compute, b.kv_compute), range(k.shape[2]), chip)
    return out, lse.reshape(B, H, T)


def splash_backward_kernel(q_of, kv_of, flags, q_ref, k_ref, v_ref, g_ref, lse_ref, delta_ref, q_ids, kv_ids,
                           dq_ref, dk_ref, dv_ref, dq_acc, dk_acc, dv_acc, *, parts, step, softcap, first_resident, scale):
    """q_ref, g_ref, dq_ref: (q, D); k_ref, v_ref: (kv, D); lse_ref (in units of log 2), delta_ref: (1, q);
    dk_ref, dv_ref, dk_acc, dv_acc: (resident keys, D); dq_acc: (D, q)."""
    group, groups, i, steps = pl.program_id(2), pl.num_programs(2), pl.program_id(3), pl.num_programs(3)
    flag, first_key, mask = step(q_of, kv_of, flags, q_ref, k_ref, q_ids, kv_ids)
    pl.when((group == 0) & (i == 0))(lambda: zero(dk_acc, dv_acc))
    pl.when(flag & FIRST > 0)(lambda: zero(dq_acc))

    def attend(masked):
        def matmuls(part):
            keys, queries = part
            return dot(k_ref[keys, :], q_ref[queries, :], NT), dot(v_ref[keys, :], g_ref[queries, :], NT)

        for (keys, queries), (s, dp) in ahead(matmuls, parts, 1):
            if softcap:
                s = jnp.tanh(s)
                dp_slope = 1 - s * s
                s = softcap * LOG2_E * s
            s = mask(s, keys, queries) if masked else s
            p = jnp.exp2(s - lse_ref[:, queries])
            ds = p * (dp - delta_ref[:, queries])
            ds = (ds * dp_slope if softcap else ds).astype(q_ref.dtype)
            rows = pl.ds(pl.multiple_of(first_key - first_resident + keys.start, keys.size), keys.size)
            dv_acc[rows, :] += dot(p.astype(q_ref.dtype), g_ref[queries, :], NN)
            dk_acc[rows, :] += dot(ds, q_ref[queries, :], NN)
            dq_acc[:, queries] += dot(k_ref[keys, :], ds, TN)

    pl.when(flag & FULL > 0)(lambda: attend(masked=False))
    pl.when(flag & PARTIAL > 0)(lambda: attend(masked=True))
    pl.when(flag & LAST > 0)(lambda: store(dq_ref, (dq_acc[...] * scale).T))

    @pl.when((group == groups - 1) & (i == steps - 1))
    def _():
        store(dk_ref, dk_acc[...] * (softcap or 1 / LOG2_E))  # the queries it sums hold the scale already
        store(dv_ref, dv_acc[...])


def splash_backward_pallas(g, q, k, v, segment_ids, out, lse, causal, window, softcap, scale, blocks, chip):
    b, (B, H, T, D), S = fit_blocks(SplashBlocks, blocks, "splash_attention", chip, q, k), q.shape, k.shape[2]
    lse, delta = (row.reshape(B, H, 1, T) for row in (lse * LOG2_E, (f32(g) * out).sum(-1)))
    stretch = max(b.kv_resident // b.kv_backward, 1) * b.kv_backward
    stretches = [range(S)[start:start + stretch] for start in range(0, S, stretch)]
    dqs, dks, dvs = zip(*(splash_call(
        functools.partial(splash_backward_kernel, first_resident=keys.start, scale=scale), "splash_attention_backward",
        q, k, v, [("q", g), ("row", lse), ("row", delta)],
        [("q", q.dtype if len(stretches) == 1 else jnp.float32), ("resident", k.dtype), ("resident", v.dtype)],
        [(D, b.q_backward), (len(keys), D), (len(keys), D)], segment_ids, causal, window, softcap, scale,
        (b.q_backward, b.kv_backward, b.q_compute_backward, b.kv_compute_backward), keys, chip) for keys in stretches))
    return sum(dqs).astype(q.dtype), jnp.concatenate(dks, 2), jnp.concatenate(dvs, 2)


SPLASH = torch_op(
    "splash_attention(Tensor q, Tensor k, Tensor v, Tensor? segment_ids, bool causal, int window, float softcap, float scale)"
    " -> (Tensor out, Tensor lse)", n_saved=2,
    like=lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)),
    forward=(splash_reference, splash_pallas), backward=(splash_backward_reference, splash_backward_pallas))


# ------------------------------------------------------------------------------- fused linear cross-entropy


def linear_cross_entropy(x, weight, targets, *, ignore_index=-100, z_loss=0.0, multiplier=1.0, softcap=0.0):
    """Cross-entropy of x @ weight.T without the logits in memory: one vocabulary tile at a time.

    x: (N, D); weight: (V, D); targets: (N,) int. -> (N,) fp32 losses, 0 where the target is ignore_index.
    logits: multiplier * x @ weight.T, in fp32; with a softcap, softcap * tanh(logits / softcap).
    z_loss: adds z_loss * logsumexp(logits)^2 (PaLM, arXiv:2204.02311, section 5)."""
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or targets.shape != x.shape[:1]:
        raise KernelError(f"linear_cross_entropy: x {tuple(x.shape)}, weight {tuple(weight.shape)}, targets "
                          f"{tuple(targets.shape)}: want (N, D), (V, D), (N,)")
    if not x.is_floating_point() or weight.dtype != x.dtype or targets.is_floating_point():
        raise KernelError(f"linear_cross_entropy: x {x.dtype}, weight {weight.dtype}, targets {targets.dtype}: want one "
                          "floating dtype, and integers")
    return torch.ops.tpu.linear_cross_entropy(x, weight, targets, ignore_index, z_loss, multiplier, softcap)[0]


def reference_logits(x, weight, targets, multiplier, softcap):
    """-> logits (N, V) fp32 and which of them is the target's; none is where the target is no word."""
    return logits(f32(x) @ f32(weight).T, multiplier, softcap), targets[:, None] == arange(0, len(weight), x)


def cross_entropy_reference(x, weight, targets, ignore_index, z_loss, multiplier, softcap):
    """-> losses and the logits' log-sum-exp, both (N,) fp32."""
    z, hit = reference_logits(x, weight, targets, multiplier, softcap)
    lse = logsumexp(z)
    picked = lib(x).where(hit, z, 0).sum(-1)
    return lib(x).where(targets != ignore_index, lse - picked + z_loss * lse ** 2, 0), lse


def cross_entropy_backward_reference(g, x, weight, targets, lse, ignore_index, z_loss, multiplier, softcap):
    z, hit = reference_logits(x, weight, targets, multiplier, softcap)
    dz = lib(x).exp(z - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None] - f32(hit)
    dz = dz * (g * (targets != ignore_index) * multiplier)[:, None]
    dz = dz * (1 - (z / softcap) ** 2) if softcap else dz
    return cast(dz @ f32(weight), x), cast(dz.T @ f32(x), weight)


# Fused linear cross-entropy in Pallas.
#
# As in attention, logits are kept transposed, vocabulary down the sublanes: what belongs to a token is a row (1, tokens). Only
# dw, which is dx with words and tokens exchanged, has them upright: a product's sum then runs down the sublanes of both its
# sides, 1.4 times as fast. The backward pass computes the logits twice, once for each gradient: one kernel for both would have
# to keep the sum of one of them in HBM.
#
# Where the cycles go (tpu7x, 512 tokens × 512 words at D = 4096): forward 3,655 bundles, with the softmax, under 4,096 cycles of
# the MXU, which bounds it; dx 7,001 and dw 6,700 under 8,192, of which 6,144 are for matmuls that one has to do. Small blocks
# wait for the fp32 sums: 256 × 128 reaches 25 % of the peak. At D = 16,384, 256 × 512 in 4 pieces 71 %, whole ones at most 38 %.


@dataclass(frozen=True)
class CrossEntropyBlocks:
    """A grid step holds the logits of `vocab` words for `tokens` tokens. All weights are read once for each block of tokens (dw:
    all tokens for each block of words), so small ones wait for memory. A gradient keeps the whole width of one side and its
    sum in VMEM; what it walks over comes in pieces of *_width and is read twice, unless that is all of the width."""
    tokens: int = 1024
    vocab: int = 512
    dx_tokens: int = 1024
    dx_vocab: int = 512
    dx_width: int = 8192
    dw_tokens: int = 512
    dw_vocab: int = 1024
    dw_width: int = 8192

    def allowed(self, unit, x, weight):
        (N, D), V = x.shape, weight.shape[0]
        tokens, words, widths = *(cuts(n, unit, divide=False) for n in (N, V)), [D, *cuts(D, unit)]
        return tokens, words, tokens, words, widths, tokens, words, widths

    def vmem(self, x, weight):
        D, size = x.shape[1], x.dtype.itemsize

        def gradient(outer, inner, width):  # one outer and two inner blocks (one arriving), the output twice, its accumulator;
            # then what the compiler was seen to take for tiles of logits and a part of the masked inner block
            return D * outer * (3 * size + 4) + width * inner * (2 * size + size / 4) + 28 * outer * inner

        return {"forward": (D * size * (self.tokens + 2 * self.vocab) + 16 * self.tokens * self.vocab, ("tokens", "vocab")),
                "dx": (gradient(self.dx_tokens, self.dx_vocab, self.dx_width), ("dx_tokens", "dx_vocab")),
                "dw": (gradient(self.dw_vocab, self.dw_tokens, self.dw_width), ("dw_tokens", "dw_vocab"))}


def cross_entropy_kernel(x_ref, w_ref, target_ref, lse_ref, picked_ref, m_ref, l_ref, *, vocab, multiplier, softcap):
    """x_ref: (tokens, D); w_ref: (words, D); the others (1, tokens): lse, the target's logit, online softmax."""
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, MASKED)
        zero(l_ref, picked_ref)

    z, word = logits(dot(w_ref[...], x_ref[...], NT), multiplier, softcap), numbers(w_ref.shape[0], 0, tile)
    z = jnp.where(word < vocab, z, MASKED)
    m = jnp.maximum(m_ref[...], z.max(0, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - m) + jnp.exp(z - m).sum(0, keepdims=True)
    m_ref[...] = m
    picked_ref[...] += jnp.where(word == target_ref[...], z, 0).sum(0, keepdims=True)
    pl.when(tile == pl.num_programs(1) - 1)(lambda: store(lse_ref, m_ref[...] + jnp.log(l_ref[...])))


def numbers(words, axis, tile):
    """A tile's words along an axis. The last tile may reach behind the vocabulary's end, into memory that holds anything: it is
    masked, and products with it too since 0 * NaN is NaN."""
    return tile * words + lax.broadcasted_iota(jnp.int32, (words, 1) if axis == 0 else (1, words), axis)


def cross_entropy_gradient_kernel(outer_ref, inner_ref, target_ref, lse_ref, p_ref, hit_ref, out_ref, acc_ref, z_ref=None, *,
                                  of_words, vocab, multiplier, softcap):
    """dx: outer blocks of tokens, inner ones of words. dw (of_words): the other way round. acc_ref (outer rows, D) sums over the
    inner blocks' rows, which run down the sublanes of the logits. p_ref and hit_ref (1, tokens): what the loss's gradient
    multiplies the probabilities and the target's 1 with. An inner block in pieces comes forth to sum the logits in z_ref, then
    back, its last piece being there already, for the product with their gradient."""
    tile, step, steps, width = pl.program_id(1), pl.program_id(2), pl.num_programs(2), inner_ref.shape[1]
    pieces = acc_ref.shape[1] // width
    start = 0 if pieces == 1 else pl.multiple_of(jnp.minimum(step, 2 * pieces - 1 - step) * width, width)
    columns = pl.ds(start, width)
    word = numbers(outer_ref.shape[0], 1, pl.program_id(0)) if of_words else numbers(inner_ref.shape[0], 0, tile)
    pl.when((tile == 0) & (step == 0))(lambda: zero(acc_ref))

    def product():
        return dot(inner_ref[...], outer_ref[:, columns], NT)

    def gradient(z):
        z = logits(z, multiplier, softcap)
        target, lse, p, hit = (ref[...].T if of_words else ref[...] for ref in (target_ref, lse_ref, p_ref, hit_ref))
        dz = multiplier * (jnp.exp(z - lse) * p - jnp.where(word == target, hit, 0))
        dz = dz * (1 - (z / softcap) ** 2) if softcap else dz
        return dz if of_words else jnp.where(word < vocab, dz, 0)

    def add(dz):
        inner = inner_ref[...] if of_words else jnp.where(word < vocab, inner_ref[...], 0)
        acc_ref[:, columns] += dot(dz.astype(inner.dtype), inner, TN)

    def first_sum():
        store(z_ref, gradient(z_ref[...]))
        add(z_ref[...])

    if pieces == 1:
        add(gradient(product()))
    else:
        pl.when(step == 0)(lambda: store(z_ref, product()))
        pl.when((step > 0) & (step < pieces))(lambda: store(z_ref, z_ref[...] + product()))
        pl.when(step == pieces)(first_sum)
        pl.when(step > pieces)(lambda: add(z_ref[...]))
    pl.when((tile == pl.num_programs(1) - 1) & (step == steps - 1))(lambda: store(out_ref, acc_ref[...]))


def cross_entropy_call(kernel, name, x, weight, rows, outputs, scratch, blocks, multiplier, softcap, chip, of_words=False):
    """A kernel over the grid (outer blocks, inner blocks, their pieces forth and back). blocks: (outer, inner, width); the outer
    ones are of tokens, or of words. rows: arrays of a number a token, (N,). outputs: "row" (1, N) fp32 or "outer". Tokens are
    padded to whole blocks."""
    (outer_size, inner_size, width), D = blocks, x.shape[1]
    tokens, steps = inner_size if of_words else outer_size, 1 if width == D else 2 * D // width
    n = pl.cdiv(len(x), tokens) * tokens
    x, *rows = (jnp.pad(a, [(0, n - len(a))] + [(0, 0)] * (a.ndim - 1)) for a in (x, *rows))
    outer, inner = (weight, x) if of_words else (x, weight)
    row = pl.BlockSpec((1, tokens), lambda i, j, s: (0, j if of_words else i))
    inputs = [(outer, pl.BlockSpec((outer_size, D), lambda i, j, s: (i, 0), pipeline_mode=pl.Buffered(1))),  # stays: one buffer
              (inner, pl.BlockSpec((inner_size, width), lambda i, j, s: (j, jnp.minimum(s, steps - 1 - s)))),
              *((r[None], row) for r in rows)]
    kinds = {"row": ((1, n), jnp.float32, row),
             "outer": (outer.shape, outer.dtype, pl.BlockSpec((outer_size, D), lambda i, j, s: (i, 0)))}
    return call(functools.partial(kernel, vocab=len(weight), multiplier=multiplier, softcap=softcap), name,
                (pl.cdiv(len(outer), outer_size), pl.cdiv(len(inner), inner_size), steps), 2, (), inputs,
                [kinds[kind] for kind in outputs], scratch, chip)


def cross_entropy_pallas(x, weight, targets, ignore_index, z_loss, multiplier, softcap, blocks, chip):
    b = fit_blocks(CrossEntropyBlocks, blocks, "linear_cross_entropy", chip, x, weight)
    N, valid = len(x), targets != ignore_index
    lse, picked = cross_entropy_call(
        cross_entropy_kernel, "linear_cross_entropy", x, weight, [jnp.where(valid, targets, -1)], ["row", "row"],
        [(1, b.tokens)] * 2, (b.tokens, b.vocab, x.shape[1]), multiplier, softcap, chip)
    lse, picked = lse[0, :N], picked[0, :N]
    return jnp.where(valid, lse - picked + z_loss * lse ** 2, 0), lse


def cross_entropy_backward_pallas(g, x, weight, targets, lse, ignore_index, z_loss, multiplier, softcap, blocks, chip):
    b, (N, D) = fit_blocks(CrossEntropyBlocks, blocks, "linear_cross_entropy", chip, x, weight), x.shape
    hit = jnp.where(targets != ignore_index, g, 0)

    def gradient(name, of_words, outer, inner, width):
        return cross_entropy_call(
            functools.partial(cross_entropy_gradient_kernel, of_words=of_words), name, x, weight,
            [targets, lse, hit * (1 + 2 * z_loss * lse), hit], ["outer"], [(outer, D)] + [(inner, outer)] * (width < D),
            (outer, inner, width), multiplier, softcap, chip, of_words)[0]

    dx = gradient("linear_cross_entropy_dx", False, b.dx_tokens, b.dx_vocab, b.dx_width)
    return dx[:N], gradient("linear_cross_entropy_dw", True, b.dw_vocab, b.dw_tokens, b.dw_width)


LOSS = torch_op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, int ignore_index, float z_loss, float multiplier, "
    "float softcap) -> (Tensor loss, Tensor lse)", n_saved=1,
    like=lambda x, *_: tuple(x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(2)),
    forward=(cross_entropy_reference, cross_entropy_pallas),
    backward=(cross_entropy_backward_reference, cross_entropy_backward_pallas))


# --------------------------------------------------------------------------------- grouped matmuls of experts


def grouped_matmul(x, w, group_sizes):
    """x[rows of group e] @ w[e] for every expert e.

    x: (N, D), sorted by expert; w: (E, D, F); group_sizes: (E,) int32, data: empty groups and any sizes whose sum is at most N.
    -> (N, F) in x's dtype; rows behind the last group give zeros."""
    check_grouped("grouped_matmul", x, (w,), group_sizes)
    return torch.ops.tpu.grouped_matmul(x, w, group_sizes)


def paired_grouped_matmul(x, gate, up, group_sizes):
    """silu(x @ gate[e]) * (x @ up[e]) for every expert e: a gated MLP's first half, reading x once.

    x: (N, D), sorted by expert; gate, up: (E, D, F); group_sizes as in grouped_matmul. -> (N, F) in x's dtype."""
    check_grouped("paired_grouped_matmul", x, (gate, up), group_sizes)
    return torch.ops.tpu.paired_grouped_matmul(x, gate, up, group_sizes)[0]


def check_grouped(name, x, weights, group_sizes):
    if x.ndim != 2 or any(w.ndim != 3 or w.shape != weights[0].shape or w.shape[:2] != (*group_sizes.shape, x.shape[1])
                          for w in weights):
        raise KernelError(f"{name}: x {tuple(x.shape)}, weights {[tuple(w.shape) for w in weights]}, group_sizes "
                          f"{tuple(group_sizes.shape)}: want (N, D), (E, D, F), (E,)")


def group_tiles(group_sizes, n):
    """The references' tiles of up to 128 rows, each of one group -> how many, and each one's group, first row and its group's
    end. There are as many as any sizes may need, since XLA compiles for shapes: the last ones have no rows."""
    rows, ends = min(128, n), group_sizes.cumsum(0)
    count = -(-group_sizes // rows)
    last, tile = count.cumsum(0), arange(0, n // rows + len(group_sizes), group_sizes)
    group = (tile[:, None] >= last).sum(1).clip(max=len(group_sizes) - 1)
    return last[-1], group, (ends - group_sizes)[group] + (tile - (last - count)[group]) * rows, ends[group]


def gather_tiles(group_sizes, *arrays):
    """torch: -> the tiles' groups, their rows' numbers (tiles, rows), N for none, and those rows of each array, 0 for none."""
    N = len(arrays[0])
    _, group, first, end = group_tiles(group_sizes, N)
    index = first[:, None] + arange(0, min(128, N), first)
    index = torch.where(index < end[:, None], index, N)
    return group, index, *(F.pad(x, (0, 0, 0, 1))[index] for x in arrays)


def over_tiles(body, arrays, group_sizes, init):
    """JAX: total = body(total, group, first row, is the row the group's, tile of each array). A loop: XLA:CPU computes
    lax.ragged_dot as one masked full-size matmul per expert, E times the flops."""
    N, rows, (n_tiles, group, first, end) = len(arrays[0]), min(128, len(arrays[0])), group_tiles(group_sizes, len(arrays[0]))

    def tile(i, total):
        start = jnp.minimum(first[i], N - rows)
        row = start + jnp.arange(rows)[:, None]
        tiles = [lax.dynamic_slice_in_dim(x, start, rows) for x in arrays]
        return body(total, group[i], start, (first[i] <= row) & (row < end[i]), *tiles)

    return lax.fori_loop(0, n_tiles, tile, init)


def grouped_reference(x, w, group_sizes):
    if lib(x) is torch:
        group, index, tiles = gather_tiles(group_sizes, x)
        return x.new_zeros(len(x) + 1, w.shape[2]).index_put((index,), tiles @ w[group])[:-1]

    def write(y, group, start, own, x):
        old = lax.dynamic_slice_in_dim(y, start, len(x))
        return lax.dynamic_update_slice_in_dim(y, jnp.where(own, x @ w[group], old), start, 0)

    return over_tiles(write, [x], group_sizes, jnp.zeros((len(x), w.shape[2]), x.dtype))


def grouped_weights_reference(x, g, group_sizes):
    """x[rows of e].T @ g[rows of e] -> (E, D, F) in x's dtype."""
    if lib(x) is torch:
        group, _, x, g = gather_tiles(group_sizes, x, g)
        y = x.float().mT @ g.float()
        return y.new_zeros(len(group_sizes), *y.shape[1:]).index_add(0, group, y).to(g.dtype)

    def add(dw, group, start, own, x, g):
        return dw.at[group].add(dot(jnp.where(own, x, 0), jnp.where(own, g, 0), TN))

    return over_tiles(add, [x, g], group_sizes, jnp.zeros((len(group_sizes), x.shape[1], g.shape[1]))).astype(x.dtype)


def grouped_gradients_reference(x, gs, ws, group_sizes):
    """-> dx, and dw for each of the weights. gs: gradients with respect to x @ w for each of them."""
    dx = sum(grouped_reference(g, w.mT, group_sizes) for g, w in zip(gs, ws))
    return dx, *(grouped_weights_reference(x, g, group_sizes) for g in gs)


def paired_reference(x, gate, up, group_sizes):
    """-> silu(a) * b, a = x @ gate[e], b = x @ up[e]. Keeping a and b for the backward pass is cheaper than
    computing them again: writing 2 numbers a row and column against 2 * D multiply-adds each."""
    a, b = (grouped_reference(x, w, group_sizes) for w in (gate, up))
    half = 0.5 * f32(a)  # silu by one tanh; a sigmoid is an exp and a division
    return cast((half * lib(x).tanh(half) + half) * f32(b), x), a, b


def silu_backward(g, a, b):
    """Gradients of silu(a) * b."""
    g, a_, b_ = (f32(t) for t in (g, a, b))
    s = 0.5 * lib(a).tanh(0.5 * a_) + 0.5
    return cast(g * b_ * s * (1 + a_ * (1 - s)), a), cast(g * a_ * s, b)


# Grouped matmuls in Pallas.
#
# Rows are cut into tiles at fixed places. A group's rows lie in some of them, and a tile on a border holds rows of several
# groups: the grid makes one visit for each group and each tile that it lies in. XLA computes which, as that is data, and they are
# prefetched as scalars, from which the block specs pick what to fetch. A group's visits follow each other, so its weights are
# fetched once and stay. The contraction (D forward, F for dx) is never cut: no accumulator is read, added to and written
# between blocks, and the matrix unit's own accumulation runs on. Hence also one visit writes one block.
#
# Where the cycles go (tpu7x, 256 rows, D = 2048, F = 768; JAX's megablox in brackets): forward 1,193 bundles (1,317), dx 1,284
# (1,325), both under 1,536 cycles of the MXU, which bounds them; half a tile 855 and 983 over 768, as its rows are few for the
# weights that must be loaded. dw 1,623 (1,987), and at a group's end 1,470 to transpose the sums where F < D. The grid adds 104
# to a visit (116). Pair: 2,530 under 3,072; silu's arithmetic shows as 140.


@dataclass(frozen=True)
class GroupedBlocks:
    """Forward: x (rows, D) @ w (D, columns). dx: g (dx_rows, F) @ w.T (F, dx_columns). dw: (dw_d, dw_f) of a
    group's gradient from dw_rows rows at a time. More rows use the matrix unit better, but a border's tile is
    computed once for each group in it: n / rows + experts - 1 visits."""
    rows: int = 256
    columns: int = 2 ** 16
    dx_rows: int = 256
    dx_columns: int = 2 ** 16
    dw_rows: int = 256
    dw_d: int = 2 ** 16
    dw_f: int = 2 ** 16

    def allowed(self, unit, x, w, *_):
        (n, D), F = x.shape, w.shape[2]
        rows, d, f = cuts(n, 32, divide=False), *(sorted({n, *cuts(n, unit)}, reverse=True) for n in (D, F))
        return rows, f, rows, d, rows, d, f

    def vmem(self, x, *ws):  # each block twice, so that the next one's copy runs under this one's arithmetic; results in fp32
        D, F, size, pair = *ws[0].shape[1:], x.dtype.itemsize, len(ws)
        forward = 2 * size * (self.rows * D + pair * D * self.columns + (2 * pair - 1) * self.rows * self.columns)
        dx = 2 * size * (pair * self.dx_rows * F + pair * F * self.dx_columns + self.dx_rows * self.dx_columns)
        dw = 2 * size * (self.dw_rows * self.dw_d + pair * self.dw_rows * self.dw_f + pair * self.dw_d * self.dw_f)
        return {"forward": (forward + 4 * pair * self.rows * self.columns, ("columns",)),
                "dx": (dx + 4 * self.dx_rows * self.dx_columns, ("dx_columns",)),
                "dw": (dw + 4 * (pair + 1) * self.dw_d * self.dw_f, ("dw_d", "dw_f"))}  # a result, before it is added to its sum


def grouped_blocks(given, x, ws, chip):
    if {x.dtype, *(w.dtype for w in ws)} not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float32)}):
        raise KernelError(f"grouped_matmul: x is {x.dtype} and the weights {ws[0].dtype}: want both bfloat16 or float32")
    return fit_blocks(GroupedBlocks, given, "paired_" * (len(ws) == 2) + "grouped_matmul", chip, x, *ws)


WHOLE, LOWER, UPPER, NOTHING = range(4)  # what a visit multiplies of its tile


def visits(group_sizes, n, rows, every_group):
    """-> how many, and for each visit its group, tile, where in the tile the group begins and ends, and in which half it lies.

    The rows behind the last group count as one more group, len(group_sizes), of which there is NOTHING to multiply.
    every_group: that one is left out, and empty groups are visited once too."""
    sizes = group_sizes if every_group else jnp.append(group_sizes, n - group_sizes.sum())
    groups, tiles = jnp.arange(len(sizes)), pl.cdiv(n, rows)

    def cumsum(x):  # Sums over masks, here and below: XLA makes jnp.cumsum, searchsorted and x[group] some 70 programs one
        # after the other, of 2,300 cycles each by its own estimate. These are 9.
        return jnp.where(groups <= groups[:, None], x, 0).sum(1)

    ends = cumsum(sizes)
    starts = ends - sizes
    first = jnp.minimum(starts // rows, tiles - 1)
    count = jnp.where(sizes > 0, pl.cdiv(ends, rows) - first, int(every_group))
    last = cumsum(count)
    visit = jnp.arange(tiles + len(group_sizes))[:, None]  # a border adds one visit; some of these remain unused
    own = (last - count <= visit) & (visit < last)
    group, tile, start, end = (jnp.where(own, x, 0).sum(1) for x in (groups, first + visit - (last - count), starts, ends))
    begin, end = start - tile * rows, end - tile * rows
    part = jnp.where(end <= rows // 2, LOWER, jnp.where(begin >= rows // 2, UPPER, WHOLE))
    part = jnp.where(group < len(group_sizes), part, NOTHING)
    return last[-1], [x.astype(jnp.int32) for x in (group, tile, begin, end, part)]


def grouped_kernel(expert, tile, begin, part, *refs, transposed, n_x, n_w):
    """One visit writes x @ w of the tile, or of the half that holds all of the group's rows. A pair: silu(x @ gate) * (x @ up)
    and both products. transposed: the sum of x @ w.T. Rows behind the group's end are written too, before the next visit."""
    xs, ws, outs = refs[:n_x], refs[n_x:n_x + n_w], refs[n_x + n_w:]
    visit, half = pl.program_id(1), xs[0].shape[0] // 2
    whole, own_half = pl.ds(0, 2 * half), pl.ds(pl.multiple_of(jnp.where(part[visit] == UPPER, half, 0), half), half)

    def multiply(rows):
        if transposed:
            return [sum(dot(x[rows, :], w[...], NT) for x, w in zip(xs, ws))]
        ys = [dot(xs[0][rows, :], w[...]) for w in ws]
        z = 0.5 * ys[0]
        return ys if n_w == 1 else [(z * jnp.tanh(z) + z) * ys[1], *ys]

    def write(rows, results):
        own = rows.start + lax.broadcasted_iota(jnp.int32, (rows.size, outs[0].shape[1]), 0) >= begin[visit]
        for out, y in zip(outs, results):  # select in fp32: bf16 masks are packed, slower to make
            out[rows, :] = jnp.where(own, y, out[rows, :].astype(jnp.float32)).astype(out.dtype)

    pl.when(part[visit] == WHOLE)(lambda: write(whole, multiply(whole)))
    pl.when((part[visit] == LOWER) | (part[visit] == UPPER))(lambda: write(own_half, multiply(own_half)))
    pl.when(part[visit] == NOTHING)(lambda: write(whole, [0.0] * len(outs)))


def grouped_call(xs, ws, group_sizes, rows, columns, chip, transposed=False):
    """grouped_kernel for every visit and block of columns. Transposed weights are read as they lie, (columns, K)."""
    (n, K), width, n_outs = xs[0].shape, ws[0].shape[1 if transposed else 2], 1 if transposed else 2 * len(ws) - 1
    name = "paired_" * (len(ws) == 2) + "grouped_matmul" + "_dx" * transposed
    n_visits, (group, tile, begin, _, part) = visits(group_sizes, n, rows, every_group=False)
    expert = jnp.minimum(group, len(group_sizes) - 1)  # whose weights to hold, behind the last group too
    x_rows = pl.BlockSpec((rows, K), lambda c, v, expert, tile, *_: (tile[v], 0))
    weights = (pl.BlockSpec((None, columns, K), lambda c, v, expert, *_: (expert[v], c, 0)) if transposed else
               pl.BlockSpec((None, K, columns), lambda c, v, expert, *_: (expert[v], 0, c)))
    out = pl.BlockSpec((rows, columns), lambda c, v, expert, tile, *_: (tile[v], c))
    return call(functools.partial(grouped_kernel, transposed=transposed, n_x=len(xs), n_w=len(ws)), name,
                (width // columns, n_visits), 1, (expert, tile, begin, part),
                [*((x, x_rows) for x in xs), *((w, weights) for w in ws)], [((n, width), xs[0].dtype, out)] * n_outs, [], chip)


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
        return jnp.where(mine, f32(ref[...]), 0).astype(ref.dtype)

    def add(first):
        for total, g in zip(sums, gs):
            left, right = (g, x) if flipped else (x, g)
            product = dot(own(left), own(right), TN)
            total[...] = product if first else total[...] + product

    pl.when(first_of_group)(lambda: add(first=True))  # of an empty group too: its gradient is zero
    pl.when(~first_of_group)(lambda: add(first=False))

    @pl.when(last_of_group)
    def _():
        for out, total in zip(outs, sums):
            store(out, total[...].T if flipped else total[...])


def grouped_pallas(x, ws, group_sizes, blocks, chip):
    b = grouped_blocks(blocks, x, ws, chip)
    return grouped_call([x], ws, group_sizes, b.rows, b.columns, chip)


def grouped_gradients_pallas(x, gs, ws, group_sizes, blocks, chip):
    """-> dx, and dw for each of the weights. gs: gradients with respect to x @ w for each of them."""
    b, (E, D, F_) = grouped_blocks(blocks, x, ws, chip), ws[0].shape
    dx = grouped_call(gs, ws, group_sizes, b.dx_rows, b.dx_columns, chip, transposed=True)
    n_visits, (*scalars, _) = visits(group_sizes, len(x), b.dw_rows, every_group=True)
    x_rows = pl.BlockSpec((b.dw_rows, b.dw_d), lambda i, j, v, group, tile, *_: (tile[v], i))
    g_rows = pl.BlockSpec((b.dw_rows, b.dw_f), lambda i, j, v, group, tile, *_: (tile[v], j))
    dw = pl.BlockSpec((None, b.dw_d, b.dw_f), lambda i, j, v, group, *_: (group[v], i, j))
    total = (b.dw_f, b.dw_d) if b.dw_f < b.dw_d else (b.dw_d, b.dw_f)
    name, grid = "paired_" * (len(ws) == 2) + "grouped_matmul_dw", (D // b.dw_d, F_ // b.dw_f, n_visits)
    dws = call(weights_kernel, name, grid, 1, scalars, [(x, x_rows), *((g, g_rows) for g in gs)],
               [((E, D, F_), x.dtype, dw)] * len(gs), [total] * len(gs), chip)
    return *dx, *dws


EXPERTS = torch_op(
    "grouped_matmul(Tensor x, Tensor w, Tensor group_sizes) -> (Tensor y)", n_saved=0,
    like=lambda x, w, _: x.new_empty(x.shape[0], w.shape[2]),
    forward=(grouped_reference, lambda x, w, sizes, blocks, chip: grouped_pallas(x, [w], sizes, blocks, chip)[0]),
    backward=(lambda g, x, w, sizes: grouped_gradients_reference(x, [g], [w], sizes),
              lambda g, x, w, sizes, blocks, chip: grouped_gradients_pallas(x, [g], [w], sizes, blocks, chip)))
EXPERTS |= torch_op(
    "paired_grouped_matmul(Tensor x, Tensor gate, Tensor up, Tensor group_sizes) -> (Tensor y, Tensor a, Tensor b)", n_saved=2,
    like=lambda x, gate, *_: tuple(x.new_empty(x.shape[0], gate.shape[2]) for _ in range(3)),
    forward=(paired_reference, lambda x, gate, up, sizes, blocks, chip: grouped_pallas(x, [gate, up], sizes, blocks, chip)),
    backward=(lambda g, x, gate, up, sizes, a, b: grouped_gradients_reference(x, silu_backward(g, a, b), [gate, up], sizes),
              lambda g, x, gate, up, sizes, a, b, blocks, chip: grouped_gradients_pallas(
                  x, silu_backward(g, a, b), [gate, up], sizes, blocks, chip)))


# ---------------------------------------------------------------------------------------- lowerings


def lowerings(kind="reference", *, splash=None, fused_ce=None, paired_gmm=None, chip="tpu7x", splash_blocks=None,
              ce_blocks=None, grouped_blocks=None):
    """{torch op: JAX function of the op's arguments, in order}. kind: "reference" (XLA), "pallas" (TPU) or
    "interpret" (the Pallas kernels interpreted, on any machine); splash, fused_ce, paired_gmm: that of attention,
    the loss and the grouped matmuls, if another. chip: the generation that "pallas" is compiled for, which decides
    block sizes; *_blocks: instead of the tuned ones."""
    if chip not in VMEM_MIB:
        raise KernelError(f"chip must be one of {', '.join(VMEM_MIB)} (got {chip!r})")
    table = {}
    for ops, own, blocks in ((ROTARY, kind, None), (SPLASH, splash or kind, splash_blocks), (LOSS, fused_ce or kind, ce_blocks),
                             (EXPERTS, paired_gmm or kind, grouped_blocks)):
        if own not in ("reference", "interpret", "pallas"):
            raise KernelError(f'kernels must be "reference", "interpret" or "pallas" (got {own!r})')
        for op, (reference, pallas) in ops.items():
            table[op] = reference if own == "reference" else functools.partial(
                pallas, blocks=blocks, chip="interpret" if own == "interpret" else chip)
    return table
