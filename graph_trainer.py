"""The whole training step as one FX graph: forward, loss, backward, clipping, AdamW.

    graph = capture(train_step(model, AdamW(lr=3e-4)), state, batch)
    print(graph.readable())

Notable features:
- make_fx on fake tensors: nothing is allocated, so 405B parameters trace on a laptop
- the optimizer is a function in the graph, the learning rate too: the step takes (state, batch) and gives
  (state, metrics), and XLA may update the state in place
- scan over layers: one loop node whose body is one layer. The backward body is cut out of the same traced
  graph as the forward's, so what is saved and what is recomputed is a choice of nodes
- under SimpleFSDP all of it is the program of one device, collectives included
"""

import functools
import math
import operator
import traceback
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode, disable_proxy_modes_tracing, make_fx, track_tensor_tree)
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


class CaptureError(Exception):
    """The model cannot become one graph; the message names the line."""


# ------------------------------------------------------------------------------------------------ capture


@dataclass
class Graph:
    """gm takes and gives flat lists of tensors; the specs say how args and results nest (torch pytrees)."""

    gm: torch.fx.GraphModule
    in_spec: object
    out_spec: object
    outputs: list  # fake tensors

    def readable(self):
        return self.gm.print_readable(print_output=False)


def capture(fn, *args):
    """Traces fn(*args) into a Graph without running it.

    args: pytrees of tensors; only shape and dtype are used (device "meta" is enough). No two leaves may
    be the same tensor object: the tracer would give both one placeholder.
    Raises CaptureError where Python looks at a tensor's value.
    """
    flat, in_spec = tree_flatten(args)
    assert len({id(x) for x in flat}) == len(flat), "one tensor object passed twice would become one input"
    out_spec = None

    def flat_fn(*flat):
        nonlocal out_spec
        out, out_spec = tree_flatten(fn(*tree_unflatten(flat, in_spec)))
        return out

    with detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True):  # a scan body is captured while the step is
        fakes = [torch.empty(x.shape, dtype=x.dtype) for x in flat]
    gm = trace(flat_fn, fakes)
    outputs = [n.meta["val"] for n in gm.graph.output_node().args[0]]
    return Graph(gm, in_spec, out_spec, outputs)


def trace(fn, fakes):
    try:
        gm = make_fx(fn, tracing_mode="fake", record_stack_traces=True, _allow_non_fake_inputs=True)(*fakes)
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        frames = [f for f in traceback.extract_tb(e.__traceback__) if "/torch/" not in f.filename
                  and f.filename != __file__]
        line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(e)
        raise CaptureError(f"the model's Python looks at a tensor's value, which one graph cannot: {line} "
                           "(use torch.where or a mask instead)") from e
    functionalize(gm)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def functionalize(gm):
    """Turns each in-place op on a tensor that nothing aliases into its functional form, in place; PyTorch's own
    backward formulas make a few. Refuses the rest: what a view of changed memory reads would be a guess."""
    done = set()
    for node in gm.graph.nodes:
        done.add(node)
        if node.op != "call_function" or not mutates(node):
            continue
        base = node.args[0]
        if base.op != "call_function" or is_view(base) or any(is_view(user) for user in base.users):
            raise CaptureError(f"in-place op {node.target} on an input, a constant or a view, which one graph cannot hold: "
                               f"write y = f(x) instead of changing x\n{node.meta.get('stack_trace', '')}")
        packet, overload = node.target.overloadpacket.__name__.rstrip("_"), node.target._overloadname
        node.target = getattr(getattr(torch.ops.aten, packet), overload)
        base.replace_all_uses_with(node, delete_user_cb=lambda user: user not in done)


def mutates(node):
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def is_view(node):
    if node.target is operator.getitem:  # a piece of a split is a view because the split is
        return is_view(node.args[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info and not r.alias_info.is_write for r in schema.returns)


# -------------------------------------------------------------------------------------------- the step


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled decay (arXiv:1711.05101), warmup, cosine decay to min_lr, global-norm clipping."""

    lr: float = 3e-4
    min_lr: float = 3e-5
    warmup: int = 20
    steps: int = 200
    betas: tuple = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0

    def lr_at(self, t):
        """t: the step's number from 1, a float tensor -> learning rate, a float tensor."""
        warm = t / max(self.warmup, 1)
        done = ((t - self.warmup) / max(self.steps - self.warmup, 1)).clamp(0, 1)
        cosine = self.min_lr + 0.5 * (self.lr - self.min_lr) * (1 + torch.cos(math.pi * done))
        return torch.where(t < self.warmup, self.lr * warm, cosine)

    def update(self, t, lr):
        """-> update(p, g, m, v, decay) -> (p, m, v) of one parameter at step t, all fp32."""
        b1, b2 = self.betas
        keep, rate, root = 1 - lr * self.weight_decay, lr / (1 - b1 ** t), (1 - b2 ** t).sqrt()

        def update(p, g, m, v, decay):
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            p = p * keep if decay else p
            return p - rate * m / (v.sqrt() / root + self.eps), m, v

        return update


def train_step(model, opt, psum=lambda x, dims=None: x):
    """-> step(state, batch) -> (state, metrics), to capture.

    state: {"params", "m", "v": {name: this device's shard}, "step": int32 scalar, steps done}.
    psum: sums a tensor over the devices (simple_fsdp.all_sum), over the named mesh dimensions or all.
    metrics: loss, aux_loss, grad_norm (before clipping, of the whole model), lr: fp32 scalars.
    """
    shards = {name: shard_axes(p) for name, p in model.named_parameters()}
    # Decay matrices, not norms and biases: by the layer's own shape, without scan's leading dimension.
    decay = {name: p.ndim - is_stacked(name) >= 2 for name, p in model.named_parameters()}

    def step(state, batch):
        params = {name: p.requires_grad_() for name, p in state["params"].items()}
        with _reparametrize_module(model, params):
            loss, aux_loss = model.loss(batch, psum)
        grads = dict(zip(params, torch.autograd.grad(loss + aux_loss, list(params.values()))))

        with torch.no_grad():
            # Shards of one parameter lie on different devices of an axis; copies of it count once.
            square = {}
            for name, g in grads.items():
                square.setdefault(shards[name], []).append(g.float().square().sum())
            total = sum(psum(torch.stack(s).sum(), axes) if axes else torch.stack(s).sum()
                        for axes, s in square.items())
            grad_norm = total.sqrt()
            scale = (opt.clip / (grad_norm + 1e-6)).clamp(max=1.0)

            step_number = state["step"] + 1
            t = step_number.float()
            lr = opt.lr_at(t)
            update = opt.update(t, lr)
            new = {"m": {}, "params": {}, "step": step_number, "v": {}}
            for name, p in params.items():
                new["params"][name], new["m"][name], new["v"][name] = update(
                    p, grads[name].float() * scale, state["m"][name], state["v"][name], decay[name])
            metrics = {"loss": psum(loss), "aux_loss": psum(aux_loss), "grad_norm": grad_norm, "lr": lr}
            return new, metrics

    return step


def eval_step(model, psum=lambda x, dims=None: x):
    """-> step(params, batch) -> mean cross-entropy over the batch's valid targets, to capture."""

    def step(params, batch):
        with torch.no_grad(), _reparametrize_module(model, params):
            return psum(model.loss(batch, psum)[0])

    return step


def state_spec(model):
    """The training state of a (sharded, scanned, meta) model as this device's meta tensors."""
    def local(p):
        p = p.to_local() if isinstance(p, DTensor) else p
        return torch.empty(p.shape, dtype=torch.float32, device="meta")

    def tree():
        return {name: local(p) for name, p in model.named_parameters()}

    return {"m": tree(), "params": tree(), "step": torch.empty((), dtype=torch.int32, device="meta"), "v": tree()}


def is_stacked(name):
    """Whether ScanLayers stacked this parameter."""
    return ".stack." in name


def shard_axes(p):
    """Names of the mesh dimensions over which a parameter is sharded."""
    if not isinstance(p, DTensor):
        return ()
    return tuple(axis for axis, place in zip(p.device_mesh.mesh_dim_names, p.placements) if isinstance(place, Shard))


# ----------------------------------------------------------------------------------- scan over layers


class Loop(HigherOrderOperator):
    """loop(body, carry, xs, consts, reverse): body(*carry, *x, *consts) -> (*carry, *y), once for each slice x
    of xs along dimension 0, from the last one if reverse. Returns [*carry, *stacked ys].

    One node in the graph, lax.scan in the lowering. torch's own scan has no reverse, short of flipping
    the stacked weights, which copies each of them whole.
    """

    def __init__(self):
        super().__init__("loop")

    def __call__(self, body, carry, xs, consts, reverse):
        return super().__call__(body, list(carry), list(xs), list(consts), reverse)


loop = Loop()
loop.fallthrough(torch._C.DispatchKey.AutogradCPU)  # _Scan below is its autograd


@loop.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
def loop_eager(body, carry, xs, consts, reverse):
    ys = []
    for i in reversed(range(len(xs[0]))) if reverse else range(len(xs[0])):
        out = body(*carry, *(x[i] for x in xs), *consts)
        carry, y = out[:len(carry)], out[len(carry):]
        ys.append(y)
    return [*carry, *(torch.stack(y) for y in zip(*(reversed(ys) if reverse else ys)))]


@loop.py_impl(FakeTensorMode)
def loop_fake(mode, body, carry, xs, consts, reverse):
    out = [n.meta["val"] for n in body.graph.output_node().args[0]]
    with mode:
        stacked = [torch.empty((len(xs[0]), *y.shape), dtype=y.dtype) for y in out[len(carry):]]
        return [torch.empty_like(c) for c in carry] + stacked


@loop.py_impl(ProxyTorchDispatchMode)
def loop_proxy(mode, body, *args):
    with disable_proxy_modes_tracing():
        out = loop(body, *args)
    name = next(name for i in range(10**6) if not hasattr(mode.tracer.root, name := f"loop_body_{i}"))
    mode.tracer.root.register_module(name, body)
    proxies = tree_map(mode.tracer.unwrap_proxy, (body, *args))
    node = mode.tracer.create_proxy("call_function", loop, proxies, {})
    return track_tensor_tree(out, node, constant=None, tracer=mode.tracer)


class ScanLayers(nn.Module):
    """Takes the place of a model's `layers`: one layer whose parameters are stacked, (L, ...) each.

    layer(x, *consts) -> x, or (x, *ys) with ys stacked over layers in the result. A const that requires a gradient
    gets the sum over layers, accumulated in fp32.
    """

    def __init__(self, layers):
        super().__init__()
        self.n_layers = len(layers)
        self.stack = layers[0]
        for sub in self.stack.modules():
            for name, p in sub._parameters.items():
                sub._parameters[name] = p if p is None else stack_meta(p, self.n_layers)

    def forward(self, x, *consts):
        names, params = zip(*self.stack.named_parameters())
        with disable_proxy_modes_tracing(), torch.enable_grad():
            bodies = trace_bodies(functools.partial(self.run_layer, names), x, params, consts)
        x, *ys = Scan.apply(bodies, len(params), x, *params, *consts)
        return (x, *ys) if ys else x

    def run_layer(self, names, x, params, consts):
        with _reparametrize_module(self.stack, dict(zip(names, params))):
            out = self.stack(x, *consts)
        return out if isinstance(out, tuple) else (out,)


def stack_meta(p, n):
    """A meta parameter with a leading layer dimension, sharded as before behind it."""
    if not isinstance(p, DTensor):
        return nn.Parameter(torch.empty((n, *p.shape), dtype=p.dtype, device="meta"))
    local = torch.empty((n, *p.to_local().shape), dtype=p.dtype, device="meta")
    placements = [Shard(place.dim + 1) if isinstance(place, Shard) else place for place in p.placements]
    return nn.Parameter(DTensor.from_local(local, p.device_mesh, placements, run_check=False))


@dataclass
class Bodies:
    forward: torch.fx.GraphModule  # (x, *params, *consts) -> (x, *ys, *saved)
    # (grad_x, *grad_consts, *params, *saved, *grad_ys, *consts) -> (grad_x, *grad_consts, *grad_params)
    backward: torch.fx.GraphModule
    differentiable: list  # which of (x, *ys) have a gradient
    learned: list  # which consts need one


def trace_bodies(layer, x, params, consts):
    """Traces one layer and its gradient as one graph and cuts that in two: the forward saves the layer's
    input only, the backward recomputes the rest."""
    learned = [c.requires_grad for c in consts]
    x, params, consts = tree_map(torch.empty_like, (x, [p[0] for p in params], list(consts)))
    inputs = [t.requires_grad_() for t in (x, *params)]
    outs = layer(x, params, consts)
    differentiable = [o.requires_grad for o in outs]

    def joint(x, params, consts, grads, sums):
        wanted = [c for c, needed in zip(consts, learned) if needed]
        inputs = [t.requires_grad_() for t in (x, *wanted, *params)]
        outs = layer(x, params, consts)
        ends = [o for o, d in zip(outs, differentiable) if d]
        grad_x, *grads = torch.autograd.grad(ends, inputs, grads, materialize_grads=True)
        sums = [s + g for s, g in zip(sums, grads)]
        return outs, [grad_x, *sums, *grads[len(sums):]]

    graph = capture(joint, x, params, consts, [torch.empty_like(o) for o, d in zip(outs, differentiable) if d],
                    [torch.empty_like(c, dtype=torch.float32) for c, needed in zip(consts, learned) if needed])
    inputs = graph.gm.graph.find_nodes(op="placeholder")
    x, params, consts, (grad_x, *grad_ys), sums = tree_unflatten(inputs, graph.in_spec)
    outs, grads = tree_unflatten(graph.gm.graph.output_node().args[0], graph.out_spec)
    saved = [x]
    return Bodies(subgraph(graph.gm, [x, *params, *consts], [*outs, *saved]),
                  subgraph(graph.gm, [grad_x, *sums, *params, *saved, *grad_ys, *consts], grads),
                  differentiable, learned)


def subgraph(gm, inputs, outputs):
    """The part of gm's graph that computes `outputs` from `inputs` (nodes of it), as a GraphModule."""
    needed, pending = set(inputs), list(outputs)
    while pending:
        if (node := pending.pop()) not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    graph = torch.fx.Graph()
    env = {node: graph.placeholder(node.name) for node in inputs}
    for node in inputs:
        env[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in needed and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output([env[node] for node in outputs])
    return torch.fx.GraphModule(gm, graph)


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, bodies, n_params, x, *rest):
        params, consts = rest[:n_params], rest[n_params:]
        outs = loop(bodies.forward, [x], params, consts, False)
        outs, saved = outs[:len(bodies.differentiable)], outs[len(bodies.differentiable):]
        ctx.bodies, ctx.n_params, ctx.n_saved = bodies, n_params, len(saved)
        ctx.save_for_backward(*params, *saved, *consts)
        ctx.mark_non_differentiable(*(o for o, d in zip(outs, bodies.differentiable) if not d))
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        n = ctx.n_params + ctx.n_saved
        xs, consts = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        grad_x, *grad_ys = [g for g, d in zip(grads, ctx.bodies.differentiable) if d]
        learned = [c for c, needed in zip(consts, ctx.bodies.learned) if needed]
        sums = [torch.zeros_like(c, dtype=torch.float32) for c in learned]
        grad_x, *grads = loop(ctx.bodies.backward, [grad_x, *sums], [*xs, *grad_ys], consts, True)
        sums = iter([s.to(c.dtype) for s, c in zip(grads, learned)])
        grad_consts = [next(sums) if needed else None for needed in ctx.bodies.learned]
        return None, None, grad_x, *grads[len(learned):], *grad_consts
