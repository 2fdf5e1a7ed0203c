"""aten -> JAX: a captured FX graph, interpreted with jax.numpy, is one XLA program.

    fn = lower(graph_module)             # flat list of jax arrays -> flat list of jax arrays
    jax.jit(fn)(*arrays)

Notable features:
- the table: one aten op, one or two lines of JAX. To add an op, add a line
- every result is held against the shape that PyTorch gave it, so a wrong line fails while lowering
- int64 becomes int32 and float64 becomes float32, knowingly: JAX's 64-bit mode would slow the whole
  program on TPU. A constant that does not fit raises
- collectives are lax collectives over the mesh axis that their process group stands for
- each op carries the model's source line into the HLO (profiles and compiler errors name it)
- imports no sibling: copy it into any project
"""

import functools
import glob
import os
import re
import zlib
from dataclasses import dataclass

# Before jax loads libtpu. On a machine without a TPU, libtpu would ask a metadata server for minutes; these
# make it a pure compiler. On a TPU host they would break its own detection.
ON_TPU_HOST = any(re.fullmatch(r"/dev/(accel|vfio/)\d+", path) for path in glob.glob("/dev/accel*") + glob.glob("/dev/vfio/*"))
if not ON_TPU_HOST:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.experimental import mesh_utils
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

DTYPES = {
    torch.float32: jnp.float32, torch.float64: jnp.float32, torch.bfloat16: jnp.bfloat16, torch.float16: jnp.float16,
    torch.int64: jnp.int32, torch.int32: jnp.int32, torch.int16: jnp.int16, torch.int8: jnp.int8,
    torch.uint8: jnp.uint8, torch.bool: jnp.bool_,
}


class LoweringError(Exception):
    """An op that has no lowering; the message names it, the model's line and what to add."""


class DoesNotFit(LoweringError):
    """The program needs more HBM than a device has: by how much, and the compiler's own words."""

    def __init__(self, excess, words=""):
        super().__init__(f"does not fit a device: {excess}. Levers: smaller --per-device-batch or --seq, --scan, Pallas attention "
                         f"and loss, --offload, more chips\n{words}")


# ---------------------------------------------------------------------------------------------- the table


def _axes(dim, ndim):
    dims = range(ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return tuple(d % ndim for d in dims) if ndim else ()


def _cast(x, dtype):
    return x if dtype is None else x.astype(DTYPES[dtype])


def _reduce(f):
    def reduce(x, dim=None, keepdim=False, dtype=None):
        return f(_cast(x, dtype), axis=_axes(dim, x.ndim), keepdims=keepdim)
    return reduce


def _sum(x, dim=None, keepdim=False, dtype=None):
    if x.ndim == 3 and _axes(dim, 3) == (0,) and 0 < len(x) <= 16 and jnp.issubdtype(x.dtype, jnp.floating):
        # A few matrices (what a token's experts gave): by the TPU compiler's count adds take a tenth of a reduction's cycles.
        total = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in x))
        return (total[None] if keepdim else total).astype(DTYPES[dtype] if dtype else x.dtype)
    return _reduce(jnp.sum)(x, dim, keepdim, dtype)


def _reshape(x, shape):
    if x.ndim == 3 and len(shape) == 4 and x.shape[:2] == tuple(shape[:2]):
        # (B, T, H * D) into heads. XLA would let the matmul before it write each head apart, and 128 columns at a time fill half
        # of a 256-wide matrix unit: llama3 405b's queries reach 45 % of its peak instead of 77.
        # Row-major: were tokens the minor dimension, which suits a norm over each head, it would cost a copy in fp32.
        return _row_major(lax.optimization_barrier(x).reshape(shape))
    return x.reshape(shape)


def _row_major(x):
    """Fixes the layout, the last dimension minor; XLA would choose one to suit what comes next."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _t(x):
    """What is transposed is row-major before. A weight's gradient reads its activation's so; the TPU compiler would make tokens the
    minor dimension there, and of all that the activation's gradient is computed from: a copy of each saved activation. The
    constraint hides from XLA that a matrix turned twice is itself: graph_trainer.turn_once removes these."""
    return jnp.transpose(_row_major(x))


def _fill(shape, value, dtype):
    dtype = dtype or {bool: torch.bool, int: torch.int64, float: torch.float32}[type(value)]
    if dtype == torch.int64 and not -2**31 <= value < 2**31:
        raise OverflowError(f"constant {value} does not fit int32, in which int64 is computed")
    return jnp.full(shape, value, DTYPES[dtype])


def _slice(x, dim=0, start=None, end=None, step=1):
    index = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return x[tuple(index)]


def _select(x, dim, index):
    return lax.index_in_dim(x, index, dim, keepdims=False)


def _split(x, sizes, dim=0):
    ends = np.arange(sizes, x.shape[dim], sizes) if isinstance(sizes, int) else np.cumsum(sizes)[:-1]
    return jnp.split(x, ends, axis=dim)


def _gradient(f, shape, grad):
    """Of the argument, of this shape, of a linear f."""
    return jax.linear_transpose(f, jax.ShapeDtypeStruct(shape, grad.dtype))(grad)[0]


def _index_put(x, indices, values, accumulate=False):
    at = x.at[tuple(slice(None) if i is None else i for i in indices)]
    return at.add(values) if accumulate else at.set(values)


def _along(index, dim):
    """PyTorch's gather and scatter as an index: [i][j][k] with `index` in the place of dim, within index's own shape."""
    grid = jnp.indices(index.shape, sparse=True)
    return tuple(index if d == dim % index.ndim else g for d, g in enumerate(grid))


def _scatter(x, dim, index, values, add=False):
    at = x.at[_along(index, dim)]
    values = values if jnp.ndim(values) == 0 else values[tuple(slice(n) for n in index.shape)]
    return at.add(values) if add else at.set(values)


def _embedding_backward(grad, ids, num_embeddings, padding_idx, scale_by_freq):
    ids, grad = ids.reshape(-1), grad.reshape(-1, grad.shape[-1])
    scale = (ids != padding_idx).astype(grad.dtype)  # the padding's row gets no gradient; -1 stands for no padding
    if scale_by_freq:
        scale = scale / jnp.bincount(ids, length=num_embeddings)[ids].astype(grad.dtype)
    return jnp.zeros((num_embeddings, grad.shape[-1]), grad.dtype).at[ids].add(grad * scale[:, None])


def _softmax(f):
    return lambda x, dim, half_to_float: f(x.astype(jnp.float32) if half_to_float else x, dim)


def _div_trunc(x, y):
    x, y = jnp.broadcast_arrays(x, y)
    return lax.div(x, y) if jnp.issubdtype(jnp.result_type(x, y), jnp.integer) else jnp.trunc(x / y)


def _cumsum(x, dim, dtype=None):
    widens = dtype is None and not jnp.issubdtype(x.dtype, jnp.floating)  # to int64
    return jnp.cumsum(x.astype(jnp.int32) if widens else _cast(x, dtype), dim)


def _arange(start, end, step=1, dtype=None, **layout):
    default = torch.float32 if any(isinstance(x, float) for x in (start, end, step)) else torch.int64
    return jnp.arange(start, end, step, dtype=DTYPES[dtype or default])


def _topk(x, k, dim=-1, largest=True, sorted=True):
    flip = (lambda x: x) if largest else jnp.negative if jnp.issubdtype(x.dtype, jnp.floating) else jnp.invert
    values, indices = lax.top_k(flip(x), k, axis=dim)
    return flip(values), indices


def _sort(x, dim=-1, descending=False, stable=True):
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order


def _call(body, args, late):
    """graph_trainer.call. A barrier's results are other values to XLA than its operands: nothing that is computed from
    them is merged with (CSE), or moved before, what the operands gave."""
    if late:
        args = [*lax.optimization_barrier(tuple(args[:late])), *(lax.optimization_barrier(x) for x in args[late:])]
    return body(*args)


def _loop(body, carry, xs, consts, reverse, prefetch, fetch=lambda x: x):
    """graph_trainer.loop: body(*carry, *x, *consts) -> (*carry, *y) for each x along dimension 0 of xs. fetch brings
    one of the first `prefetch` of them from host memory; an iteration carries the next one's."""
    n, hosted = len(xs[0]), xs[:prefetch]

    def ahead(i):
        return [fetch(lax.dynamic_index_in_dim(x, i, keepdims=False)) for x in hosted]

    def step(state, x):
        (carry, fetched), (i, *x) = state, x
        following = ahead(jnp.clip(i - 1 if reverse else i + 1, 0, n - 1))
        out = body(*carry, *fetched, *x, *consts)
        return (out[:len(carry)], following), out[len(carry):]

    start = list(carry), ahead(n - 1 if reverse else 0)
    (carry, _), ys = lax.scan(step, start, [jnp.arange(n), *xs[prefetch:]], reverse=reverse)
    return [*carry, *ys]


TABLE = {
    # elementwise
    "aten.add.Tensor": lambda x, y, alpha=1: x + y if alpha == 1 else x + alpha * y,
    "aten.sub.Tensor": lambda x, y, alpha=1: x - y if alpha == 1 else x - alpha * y,
    "aten.rsub.Scalar": lambda x, y, alpha=1: y - x * alpha,
    "aten.mul.Tensor": lambda x, y: x * y,
    "aten.div.Tensor": lambda x, y: x / y,
    "aten.fill.Scalar": lambda x, value: jnp.full_like(x, value),
    "aten.div.Tensor_mode": lambda x, y, rounding_mode: {
        None: jnp.divide, "floor": jnp.floor_divide, "trunc": _div_trunc}[rounding_mode](x, y),
    "aten.remainder.Scalar": jnp.remainder,
    "aten.neg.default": jnp.negative,
    "aten.sgn.default": lambda x: jnp.sign(jnp.nan_to_num(x)),  # PyTorch: NaN has no sign
    "aten.sign.default": lambda x: jnp.sign(jnp.nan_to_num(x)),
    "aten.rsqrt.default": lax.rsqrt,
    "aten.sigmoid.default": jax.nn.sigmoid,
    "aten.silu.default": jax.nn.silu,
    "aten.pow.Tensor_Scalar": lambda x, y: lax.integer_pow(x, int(y)) if y % 1 == 0 else x ** y,
    "aten.pow.Tensor_Tensor": jnp.power,
    "aten.pow.Scalar": jnp.power,
    "aten.clamp.default": jnp.clip,
    "aten.clamp_min.default": jnp.maximum,
    "aten.clamp_max.default": jnp.minimum,
    "aten.lerp.Scalar": lambda x, y, w: x + w * (y - x),
    "aten.where.self": jnp.where,
    "aten.masked_fill.Scalar": lambda x, mask, value: jnp.where(mask, value, x),
    "aten.bitwise_and.Tensor": lambda x, y: x & y,
    "aten.bitwise_or.Tensor": lambda x, y: x | y,
    "aten.bitwise_not.default": lambda x: ~x,
    # shapes
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.t.default": _t,
    "aten.transpose.int": jnp.swapaxes,
    "aten.permute.default": jnp.transpose,
    "aten.expand.default": lambda x, shape: jnp.broadcast_to(
        x, [n if n != -1 else x.shape[i - len(shape) + x.ndim] for i, n in enumerate(shape)]),
    "aten.unsqueeze.default": jnp.expand_dims,
    "aten.squeeze.dim": lambda x, dim: jnp.squeeze(x, dim) if x.shape[dim] == 1 else x,
    "aten.squeeze.dims": lambda x, dims: jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1)),
    "aten.cat.default": lambda xs, dim=0: jnp.concatenate(xs, dim),
    "aten.stack.default": lambda xs, dim=0: jnp.stack(xs, dim),
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.unbind.int": lambda x, dim=0: [jnp.squeeze(s, dim) for s in jnp.split(x, x.shape[dim], dim)],
    "aten.slice.Tensor": _slice,
    "aten.slice_backward.default": lambda grad, shape, *at: _gradient(lambda x: _slice(x, *at), shape, grad),
    "aten.select.int": _select,
    "aten.select_backward.default": lambda grad, shape, *at: _gradient(lambda x: _select(x, *at), shape, grad),
    "aten.clone.default": lambda x, memory_format=None: x,
    "aten.detach.default": lambda x: x,
    "aten.alias.default": lambda x: x,
    "aten.lift_fresh_copy.default": lambda x: x,
    "aten._to_copy.default": lambda x, dtype=None, **layout: _cast(x, dtype),
    # creation: layout, device and pin_memory mean nothing here
    "aten.full.default": lambda shape, value, dtype=None, **layout: _fill(shape, value, dtype),
    "aten.full_like.default": lambda x, value, dtype=None, **layout: jnp.full_like(x, value, dtype and DTYPES[dtype]),
    "aten.empty_like.default": lambda x, dtype=None, **layout: jnp.empty_like(x, dtype and DTYPES[dtype]),
    "aten.zeros.default": lambda shape, dtype=None, **layout: _fill(shape, 0, dtype or torch.float32),
    "aten.ones.default": lambda shape, dtype=None, **layout: _fill(shape, 1, dtype or torch.float32),
    "aten.zeros_like.default": lambda x, dtype=None, **layout: jnp.zeros_like(x, dtype and DTYPES[dtype]),
    "aten.ones_like.default": lambda x, dtype=None, **layout: jnp.ones_like(x, dtype and DTYPES[dtype]),
    "aten.new_zeros.default": lambda x, shape, dtype=None, **layout: jnp.zeros(shape, DTYPES.get(dtype, x.dtype)),
    "aten.scalar_tensor.default": lambda value, dtype=None, **layout: _fill((), value, dtype),
    "aten.arange.default": lambda end, dtype=None, **layout: _arange(0, end, 1, dtype),
    "aten.arange.start": lambda start, end, dtype=None, **layout: _arange(start, end, 1, dtype),
    "aten.arange.start_step": _arange,
    # matmuls
    "aten.mm.default": jnp.matmul,
    "aten.bmm.default": jnp.matmul,
    "aten.addmm.default": lambda b, x, y, beta=1, alpha=1: beta * b + alpha * (x @ y),
    # reductions
    "aten.sum.default": lambda x, dtype=None: _cast(x, dtype).sum(),
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": lambda x, dtype=None: _cast(x, dtype).mean(),
    "aten.mean.dim": _reduce(jnp.mean),
    "aten.amax.default": _reduce(jnp.max),
    "aten.argmax.default": lambda x, dim=None, keepdim=False: jnp.argmax(x, dim, keepdims=keepdim),
    "aten.cumsum.default": _cumsum,
    # indexing
    "aten.embedding.default": lambda w, ids, *rest: jnp.take(w, ids, axis=0),
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.index.Tensor": lambda x, indices: x[tuple(slice(None) if i is None else i for i in indices)],
    "aten.index_put.default": _index_put,
    "aten.gather.default": lambda x, dim, index, sparse_grad=False: x[_along(index, dim)],
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter,
    "aten.scatter_add.default": lambda x, dim, index, values: _scatter(x, dim, index, values, add=True),
    "aten.topk.default": _topk,
    "aten.sort.default": _sort,
    "aten.sort.stable": lambda x, stable=True, dim=-1, descending=False: _sort(x, dim, descending),
    # nn
    "aten._softmax.default": _softmax(jax.nn.softmax),
    "aten._softmax_backward_data.default": lambda grad, y, dim, dtype:
        y * (grad - (grad * y).sum(dim, keepdims=True)),
    "aten._log_softmax.default": _softmax(jax.nn.log_softmax),
    "aten._log_softmax_backward_data.default": lambda grad, y, dim, dtype:
        grad - jnp.exp(y) * grad.sum(dim, keepdims=True),
    "aten.gelu.default": lambda x, approximate="none": jax.nn.gelu(x, approximate == "tanh"),
    "aten.gelu_backward.default": lambda grad, x, approximate="none":
        jax.vjp(lambda x: jax.nn.gelu(x, approximate == "tanh"), x)[1](grad)[0],
    "aten.sigmoid_backward.default": lambda grad, y: grad * y * (1 - y),
    "aten.tanh_backward.default": lambda grad, y: grad * (1 - y * y),
    # graph_trainer's: control flow, and marks; where the host's memory is the device's, nothing moves
    "loop": _loop,
    "call": _call,
    "tpu.boundary.default": lambda x: x,
    "tpu.to_host.default": lambda x: x,
    "tpu.to_device.default": lambda x: x,
    "<built-in function getitem>": lambda xs, i: xs[i],
}
for op, f in {"eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater,
              "ge": jnp.greater_equal}.items():
    TABLE[f"aten.{op}.Scalar"] = TABLE[f"aten.{op}.Tensor"] = f
for op in ("floor_divide", "abs", "sqrt", "reciprocal", "exp", "log", "sin", "cos", "tanh", "minimum", "maximum",
           "logical_and", "logical_not", "squeeze", "flip", "dot", "any"):  # jax.numpy has them by the same name
    TABLE[f"aten.{op}.default"] = getattr(jnp, op)
for op in ("add", "sub", "mul", "div"):
    TABLE[f"aten.{op}.Scalar"] = TABLE[f"aten.{op}.Tensor"]


def collectives(axis_of_group):
    """Lowerings of functional collectives. axis_of_group: {process group's name: mesh axis name}."""
    reductions = {"sum": lax.psum, "avg": lax.pmean, "max": lax.pmax}

    def reduce_scatter(x, op, size, group):
        # Shards row by row from the start: the TPU compiler would turn a gradient around in fp32, a second buffer of its size.
        y = lax.psum_scatter(_row_major(x), axis_of_group[group], tiled=True)
        return {"sum": y, "avg": y / size}[op]

    return {
        "_c10d_functional.all_gather_into_tensor.default":
            lambda x, size, group: lax.all_gather(x, axis_of_group[group], tiled=True),
        "_c10d_functional.reduce_scatter_tensor.default": reduce_scatter,
        "_c10d_functional.all_reduce.default": lambda x, op, group: reductions[op](x, axis_of_group[group]),
        "_c10d_functional.wait_tensor.default": lambda x: x,  # XLA decides when to wait
    }


def host_memory():
    """Lowerings of what moves between a TPU's HBM and its host's memory. What goes to the host, and what a loop fetches, has a
    buffer in HBM of its own: one that shares the loop's carried x must be gone before x is overwritten, or come after its last
    use, and nothing hides it. How far start and done then lie apart is the scheduler's choice (recipes.IRONWOOD)."""
    def own(x):  # a copy (subnormals may become 0) that the compiler cannot see through: nothing merges it with x
        return lax.optimization_barrier(x * lax.optimization_barrier(jnp.ones((), x.dtype)))

    to_device = functools.partial(jax.device_put, device=jax.memory.Space.Device)
    return {"tpu.to_host.default": lambda x: jax.device_put(own(x), jax.memory.Space.Host), "tpu.to_device.default": to_device,
            "loop": functools.partial(_loop, fetch=lambda x: own(to_device(x)))}


# ------------------------------------------------------------------------------------------ the interpreter


def lower(gm, extra=()):
    """An FX GraphModule of aten ops -> a function of its flat inputs to its flat outputs, for jax.jit.

    extra: more table entries, {op or its name: JAX function}. Raises LoweringError at once for ops that
    nobody can lower.
    """
    table = TABLE | {str(op): f for op, f in dict(extra).items()}
    check(gm, table)
    return lambda *args: interpret(gm, table, args)


def check(gm, table):
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(value := getattr(gm, node.target), torch.fx.GraphModule):
            check(value, table)
        if node.op != "call_function":
            continue
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            raise LoweringError(f"in-place op {node.target} at {source(node)}: graph_trainer.functionalize first")
        if str(node.target) not in table:
            raise LoweringError(f"no lowering for {node.target} at {source(node)}: add a line "
                                f"\"{node.target}\": lambda ...: to TABLE in lowering.py")


def interpret(gm, table, args):
    args, env = iter(args), {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(args)
        elif node.op == "get_attr":
            value = getattr(gm, node.target)
            env[node] = constant(value, node) if isinstance(value, torch.Tensor) else (
                lambda *xs, body=value: interpret(body, table, xs))
        elif node.op == "call_function":
            if str(node.target) == "loop":
                reduce_first(env, *node.args)
            args_, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            with jax.named_scope(f"{source(node)}/{node.target}"):  # profiling.py reads it back
                try:
                    env[node] = conform(node, table[str(node.target)](*args_, **kwargs))
                except (TypeError, ValueError, KeyError, IndexError, OverflowError) as e:
                    raise LoweringError(f"lowering of {node.target} at {source(node)}: {type(e).__name__}: {e}") from e
        else:
            return list(torch.fx.map_arg(node.args[0], env.__getitem__))


def reduce_first(env, body, carry, xs, consts, reverse, prefetch):
    """Has a backward loop begin when the gradients that are there already are reduced. While there is room the TPU compiler would
    keep them whole until the loop is over: 8.4 GB of llama3 405b's loss."""
    reduced = [node for node in env if reverse and str(node.target) == "_c10d_functional.wait_tensor.default"
               and "reduce_scatter" in str(node.args[0].target)]
    if reduced:
        env.update(zip([*carry, *reduced], lax.optimization_barrier([env[node] for node in (*carry, *reduced)])))


def conform(node, value):
    """Holds a result against PyTorch's own: the shape must be equal; the dtype is cast, because the two
    promote differently (a 0-d fp32 tensor does not widen bf16 in PyTorch, in JAX it does)."""
    fake = node.meta.get("val")
    if not isinstance(fake, torch.Tensor):
        return value
    if tuple(value.shape) != tuple(fake.shape):
        raise LoweringError(f"lowering of {node.target} at {source(node)} gave {tuple(value.shape)}, "
                            f"PyTorch gives {tuple(fake.shape)}")
    return value.astype(DTYPES[fake.dtype])


def constant(tensor, node):
    if tensor.dtype == torch.int64 and tensor.numel() and not -2**31 <= tensor.min() <= tensor.max() < 2**31:
        raise LoweringError(f"constant {node.target} at {source(node)} does not fit int32, in which int64 is computed")
    tensor = tensor.detach()
    return jnp.asarray((tensor.float() if tensor.is_floating_point() else tensor).numpy(), DTYPES[tensor.dtype])


def source(node):
    """The model's line that made this node, as "file.py:line function"."""
    frames = re.findall(r'File "(.*?)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    for path, line, function in reversed(frames):
        if f"{os.sep}torch{os.sep}" not in path:
            return f"{os.path.basename(path)}:{line} {function}"
    return node.name


# -------------------------------------------------------------------------------------- mesh, arrays, jit


def make_mesh(replicas=1, shards=1, devices=None):
    """A JAX mesh with the axes of SimpleFSDP's DeviceMesh, ("replicas", "fsdp"): slices one after the other, in each
    the order of its torus. Raises LoweringError for shards that would cross slices, or half a torus."""
    slices = {}
    for d in jax.devices()[:replicas * shards] if devices is None else devices:
        slices.setdefault(getattr(d, "slice_index", 0), []).append(d)
    try:
        if replicas % len(slices):
            raise ValueError(f"{len(slices)} slices cannot be {replicas} replicas")
        rows = [mesh_utils.create_device_mesh((len(ds),), ds, allow_split_physical_axes=True) for _, ds in sorted(slices.items())]
    except (AssertionError, NotImplementedError, ValueError) as e:
        raise LoweringError(f"{replicas} replicas of {shards} devices cannot be laid over these {replicas * shards}: "
                            f"{e or 'no whole torus'}") from e
    return Mesh(np.concatenate(rows).reshape(replicas, shards), ("replicas", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def partition_spec(p):
    """A parameter's DTensor placements as a PartitionSpec (of a plain tensor: replicated)."""
    if not isinstance(p, DTensor):
        return P()
    axes = [[] for _ in p.shape]
    for name, place in zip(p.device_mesh.mesh_dim_names, p.placements):
        if isinstance(place, Shard):
            axes[place.dim].append(name)
    return P(*(tuple(names) or None for names in axes))


@dataclass
class Stage:
    """A part of a graph that is an executable of its own. inputs, outputs: nodes of the whole graph, whose values gm's
    placeholders take and gm gives."""

    gm: torch.fx.GraphModule
    inputs: list
    outputs: list


class Program:
    """A captured graph as one XLA executable over a mesh, or as the several that graph_trainer.split cuts it into: the
    graph is each device's program.

    in_specs (a tuple), out_specs: PartitionSpecs, nested like the graph's arguments and results. donate: how many of
    the leading arguments give their memory to the results. stages: what split gives. Call lower(), compile(), then
    the program itself with (nested) global jax.Arrays.

    Values go from one stage to a later one as they lie on each device; those that a to_host node made go through
    host memory, and are fetched back while the stage before the one that needs them runs.
    """

    def __init__(self, graph, mesh, in_specs, out_specs, table=(), donate=0, stages=None):
        self.graph, self.mesh = graph, mesh
        inputs, outputs = graph.gm.graph.find_nodes(op="placeholder"), graph.gm.graph.output_node().args[0]
        stages = stages or [Stage(graph.gm, inputs, outputs)]
        self.inputs, self.outputs = inputs, outputs
        spec_of = dict(zip(inputs, tree_flatten(in_specs)[0])) | dict(zip(outputs, tree_flatten(out_specs)[0]))
        state = set(inputs[:len(tree_flatten(in_specs[:donate])[0])])
        last = {node: i for i, stage in enumerate(stages) for node in stage.inputs}
        self.stages, self.pieces, held = [], {}, set(inputs)  # equal stages share one Piece
        for i, stage in enumerate(stages):
            specs = [[spec_of.get(node, P(mesh.axis_names)) for node in nodes] for nodes in (stage.inputs, stage.outputs)]
            options = {"donated": [k for k, node in enumerate(stage.inputs)
                                   if node in state and last[node] == i and node.meta["val"].ndim],
                       "wide_in": {k for k, node in enumerate(stage.inputs) if node not in spec_of},
                       "wide_out": {k for k, node in enumerate(stage.outputs) if node not in spec_of},
                       "hosted": {k for k, node in enumerate(stage.outputs) if is_hosted(node)}}
            key = structure(stage.gm), str(specs), str(options)
            if key not in self.pieces:
                self.pieces[key] = Piece(stage.gm, mesh, *specs, table, **options)
            dropped = [node for node in stage.inputs if last[node] == i and node not in outputs]
            self.stages.append((self.pieces[key], stage.inputs, stage.outputs, dropped))
            # What lies in HBM meanwhile: values that this stage does not take, and those on their way for the next.
            ahead = [node for node in stages[i + 1].inputs if is_hosted(node)] if i + 1 < len(stages) else []
            beside = [node for node in held if node not in stage.inputs and not is_hosted(node)]
            beside = sum(node.meta["val"].nbytes for node in [*beside, *ahead])
            self.pieces[key].resident_bytes = max(self.pieces[key].resident_bytes, beside)
            held = (held | set(stage.outputs)) - set(dropped)
        self.pieces = list(self.pieces.values())
        # Virtual devices share threads: two programs at once, each with collectives, would wait for each other's forever.
        self.waits = len(stages) > 1 and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def lower(self):
        for piece in self.pieces:
            piece.lower()

    def compile(self, options=None):
        for piece in self.pieces:
            piece.compile(options)

    def parts(self):
        """-> [(name, Piece, how often a step runs it)]"""
        run = [piece for piece, *_ in self.stages]
        return [(f"program {i}", piece, run.count(piece)) for i, piece in enumerate(self.pieces)]

    def __call__(self, *args):
        values = dict(zip(self.inputs, tree_flatten(args)[0]))
        del args
        following, before = [stage[1] for stage in self.stages[1:]] + [[]], []
        for (piece, inputs, outputs, dropped), ahead in zip(self.stages, following):
            results = piece.executable(*(values[node] for node in inputs))
            values.update(zip(outputs, results))
            # What the next stage needs from the host is on its way while this one runs; not sooner, for it takes HBM.
            if ahead := [node for node in ahead if is_hosted(node)]:
                jax.block_until_ready(before)
                values.update((node, to_device(values[node])) for node in ahead)
            before = results[:1]
            if self.waits:
                jax.block_until_ready(results)
            for node in dropped:
                del values[node]
        return tree_unflatten([values[node] for node in self.outputs], self.graph.out_spec)


class Piece:
    """A GraphModule as one XLA executable. in_specs, out_specs: PartitionSpecs; donated: numbers of the inputs that give
    their memory to the results; wide_in, wide_out: numbers of inputs and results that stay what they are on each
    device, as slices of an array with a leading dimension of devices; hosted: numbers of results in host memory."""

    def __init__(self, gm, mesh, in_specs, out_specs, table=(), donated=(), wide_in=(), wide_out=(), hosted=()):
        on_tpu, self.gm = mesh.devices.flat[0].platform == "tpu", gm
        run = lower(gm, dict(table) | (host_memory() if on_tpu else {}))

        def fn(*args):
            out = run(*(x[0] if i in wide_in else x for i, x in enumerate(args)))
            return [x[None] if i in wide_out else x for i, x in enumerate(out)]

        self.resident_bytes = 0  # at most, of other stages' values beside it
        self.inputs = [global_shape(node.meta["val"], spec, mesh, i in wide_in)
                       for i, (node, spec) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), in_specs))]
        fn = jax.shard_map(fn, mesh=mesh, in_specs=tuple(in_specs), out_specs=list(out_specs), check_vma=False)
        kinds = {"out_shardings": [NamedSharding(mesh, spec, memory_kind="pinned_host" if i in hosted else None)
                                   for i, spec in enumerate(out_specs)]} if hosted and on_tpu else {}
        self.jitted = jax.jit(fn, donate_argnums=tuple(donated), **kinds)

    def lower(self):
        self.lowered = self.jitted.lower(*self.inputs)

    def compile(self, options=None):
        """options: XLA's and libtpu's own flags, {name: value}."""
        try:
            self.executable = self.lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as e:
            if unknown := re.search(r"No such compile option: '(\w+)'", str(e)):
                raise LoweringError(f"this compiler has no flag {unknown.group(1)} (--libtpu-init-flags)") from e
            excess = re.search(r"Used [\d.]+. of [\d.]+. hbm. Exceeded .*? by [\d.]+.|temporaries \(\S+\) exceeds .*? \(\S+?\)", str(e))
            if not excess:
                raise LoweringError(f"the compiler refused the program\n{e}") from e
            raise DoesNotFit(excess.group(), e) from e


def global_shape(x, spec, mesh, wide=False):
    """What all devices hold together of x, the fake tensor that one of them holds."""
    shape = [1, *x.shape] if wide else list(x.shape)
    for d, names in enumerate(spec):
        for name in [names] if isinstance(names, str) else names or ():
            shape[d] *= mesh.shape[name]
    return jax.ShapeDtypeStruct(shape, DTYPES[x.dtype], sharding=NamedSharding(mesh, spec))


def to_device(x):
    """An array in the hosts' memory -> in the devices'. Shard by shard: for several hosts device_put would be a program."""
    shards = [jax.device_put(s.data, SingleDeviceSharding(s.device)) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding.with_memory_kind(shards[0].sharding.memory_kind), shards)


def is_hosted(node):
    return str(node.target) == "tpu.to_host.default"


def structure(gm):
    """A graph without its nodes' names: equal for equal programs."""
    number = {node: i for i, node in enumerate(gm.graph.nodes)}
    return tuple((node.op, "" if node.op == "placeholder" else str(node.target),
                  repr(torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")),
                  repr(getattr(node.meta.get("val"), "shape", None)), repr(getattr(node.meta.get("val"), "dtype", None)))
                 for node in gm.graph.nodes)


def initial_state(model, mesh, seed):
    """The training state as jax.Arrays, each shard made on its own device: {"m", "params", "step", "v"}.

    model.init(name) gives the (mean, std) of a parameter. A weight depends on the seed, its name and its layer
    only: it is the same on every mesh, and under scan, where layers.0.w, layers.1.w, ... are layers.stack.w.
    """
    @functools.partial(jax.jit, static_argnames=("shape", "spec", "stacked"))
    def draw(keys, mean, std, shape, spec, stacked):
        x = jax.vmap(lambda key: mean + std * jax.random.normal(key, shape))(keys)
        return lax.with_sharding_constraint(x if stacked else x[0], NamedSharding(mesh, spec))

    params = {}
    for name, p in model.named_parameters():
        spec, shape = partition_spec(p), tuple(p.shape)
        head, layer, tail = re.fullmatch(r"(?:(.*?)\.(\d+|stack)\.)?(.*)", name).groups()
        stacked = layer == "stack"
        layers = range(shape[0]) if stacked else [int(layer or 0)]
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(f"{head}.{tail}".encode()))
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.array(layers))
        params[name] = draw(keys, *model.init(name), shape[stacked:], spec, stacked)
    m, v = ({name: jnp.zeros_like(p) for name, p in params.items()} for _ in range(2))  # each shard on its device
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, P()))
    return {"m": m, "params": params, "step": step, "v": v}


def shard_batch(rows_of, shape, mesh):
    """A global batch {name: jax.Array of shape[0] rows}, its rows split over all devices of the mesh.

    rows_of: slice of the rows -> {name: numpy array of those rows}, asked only for the rows of this process's devices.
    """
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    read = functools.cache(lambda start, stop: rows_of(slice(start, stop)))
    own = next(iter(sharding.addressable_devices_indices_map(shape).values()))[0]
    return {name: jax.make_array_from_callback((shape[0], *x.shape[1:]), sharding,
                                               lambda index, name=name: read(index[0].start, index[0].stop)[name])
            for name, x in sorted(read(own.start, own.stop).items())}
