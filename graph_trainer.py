"""The whole training step as one FX graph: forward, loss, backward, clipping, AdamW.

    graph = capture(train_step(model, AdamW(lr=3e-4)), state, batch)
    graph.gm.print_readable()

Notable features:
- make_fx on fake tensors: nothing is allocated, so 405B parameters trace on a laptop
- the optimizer is a function in the graph, the learning rate too: the step takes (state, batch) and gives
  (state, metrics), and XLA may update the state in place
- scan over layers: one loop node whose body is one layer. The backward body is cut out of the same traced graph as the
  forward's, so what is saved and what is recomputed (--remat) is a choice of nodes
- split: the same one graph cut into several programs, where one would be too large to compile
- under SimpleFSDP all of it is the program of one device, collectives included
"""

import functools
import math
import operator
import os
import sys
import traceback
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode, disable_proxy_modes_tracing, get_proxy_mode, make_fx, track_tensor_tree)
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import lowering
import simple_fsdp


class CaptureError(Exception):
    """The model cannot become one graph; the message names the line."""


# ------------------------------------------------------------------------------------------------ capture


@dataclass
class Graph:
    """gm takes and gives flat lists of tensors; the specs say how args and results nest (torch pytrees)."""

    gm: torch.fx.GraphModule
    in_spec: object
    out_spec: object


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
    return Graph(gm, in_spec, out_spec)


def values_of(gm):
    """A graph's results, as fake tensors."""
    return [node.meta["val"] for node in gm.graph.output_node().args[0]]


def trace(fn, fakes):
    def named(*fakes):
        record_lines(get_proxy_mode().tracer)
        return fn(*fakes)

    try:
        gm = make_fx(named, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        frames = [f for f in traceback.extract_tb(e.__traceback__) if "/torch/" not in f.filename
                  and f.filename != __file__]
        line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(e)
        raise CaptureError(f"the model's Python looks at a tensor's value, which one graph cannot: {line} "
                           "(use torch.where or a mask instead)") from e
    functionalize(gm)
    turn_once(gm)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def record_lines(tracer):
    """Gives every node that `tracer` makes the model's lines as its stack_trace; a node of the backward pass those of the
    forward op whose gradient it is (torch's record_stack_traces leaves these, the loss and the optimizer without)."""
    create, lines = tracer.create_node, {}

    def create_node(*args, **kwargs):
        node = create(*args, **kwargs)
        running = torch._C._current_autograd_node()  # autograd numbers its nodes as the forward makes them
        node.stack_trace = running and lines.get(running._sequence_nr()) or model_lines()
        lines.setdefault(torch.autograd._get_sequence_nr() - 1, node.stack_trace)
        return node

    tracer.create_node = create_node


def model_lines():
    """The stack of the model's functions, or this file's own line where none runs."""
    lines = []
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname.split(".<locals>")[0]
        if path == __file__ and lines:
            break
        if f"{os.sep}torch{os.sep}" not in path and os.path.basename(path) not in ("kernels.py", "simple_fsdp.py"):
            lines.append(traceback.FrameSummary(path, line, name))
        if path == __file__:
            break
    return "".join(traceback.StackSummary.from_list(reversed(lines)).format())


def functionalize(gm):
    """Turns each in-place op on a tensor that nothing aliases into its functional form, in place; PyTorch's own
    backward formulas make a few. Refuses the rest: what a view of changed memory reads would be a guess."""
    done = set()
    for node in gm.graph.nodes:
        done.add(node)
        if not getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            continue
        base = node.args[0]
        if base.op != "call_function" or is_view(base) or any(is_view(user) for user in base.users):
            raise CaptureError(f"in-place op {node.target} on an input, a constant or a view, which one graph cannot hold: "
                               f"write y = f(x) instead of changing x\n{node.meta.get('stack_trace', '')}")
        packet, overload = node.target.overloadpacket.__name__.rstrip("_"), node.target._overloadname
        node.target = getattr(getattr(torch.ops.aten, packet), overload)
        base.replace_all_uses_with(node, delete_user_cb=lambda user: user not in done)


def turn_once(gm):
    """A matrix transposed twice is itself: autograd does so with each weight and its gradient, SimpleFSDP (movedim) with those
    whose second dimension is cut. XLA cannot see it, because lowering._t fixes layouts."""
    def turns(node):
        return op_name(node) == "aten.t.default" or op_name(node) == "aten.permute.default" and list(node.args[1]) == [1, 0]

    for node in gm.graph.nodes:
        if turns(node) and turns(node.args[0]):
            node.replace_all_uses_with(node.args[0].args[0])


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


def train_step(model, opt, psum=lambda x, dims=None: x, micro_batches=1):
    """-> step(state, batch) -> (state, metrics), to capture.

    state: {"params", "m", "v": {name: this device's shard}, "step": int32 scalar, steps done}.
    psum: sums a tensor over the devices (simple_fsdp.all_sum), over the named mesh dimensions or all.
    micro_batches: how many the batch's rows are taken as, one after the other (see accumulate).
    metrics: loss, aux_loss, grad_norm (before clipping, of the whole model), lr: fp32 scalars.
    """
    shards = {name: tuple(axis for axis in lowering.partition_spec(p) if axis) for name, p in model.named_parameters()}
    # Decay matrices, not norms and biases: by the layer's own shape, without scan's leading dimension.
    decay = {name: p.ndim - (".stack." in name) >= 2 for name, p in model.named_parameters()}

    def step(state, batch):
        params = {name: p.requires_grad_() for name, p in state["params"].items()}
        if micro_batches > 1:
            loss, aux_loss, grads = accumulate(model, params, batch, psum, micro_batches)
        else:
            with _reparametrize_module(model, params):
                loss, aux_loss = model.loss(batch, psum)
            grads = torch.autograd.grad(loss + aux_loss, list(params.values()))
        grads = dict(zip(params, grads))

        with torch.no_grad():
            # Shards of one parameter lie on different devices of an axis; copies of it count once. Summed in the order of
            # the backward pass, so that split's programs each hand on one sum.
            square = {}
            for name, g in reversed(grads.items()):
                square[shards[name]] = square.get(shards[name], 0) + g.float().square().sum()
            grad_norm = sum(psum(s, axes) if axes else s for axes, s in square.items()).sqrt()
            scale = boundary((opt.clip / (grad_norm + 1e-6)).clamp(max=1.0)) if opt.clip else 1.0

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


def accumulate(model, params, batch, psum, n):
    """-> loss, aux_loss and gradients of the whole batch, its rows taken as n micro-batches in one loop.

    Each weight is gathered once, before the loop, and its gradient, accumulated whole in fp32, is reduced once, after it:
    the network carries one step's bytes, and each device holds one whole model and its gradients.
    A micro-batch weighs as much as it has valid targets. The MoE's balance is that of each micro-batch.
    """
    reads = simple_fsdp.reads(model)
    whole = [reads[name].gather(p).detach() for name, p in params.items()]

    def body(sums, rows, weight, whole):
        whole = [w.requires_grad_() for w in whole]
        with _reparametrize_module(model, dict(zip(params, whole))), simple_fsdp.gathered():
            loss, aux_loss = model.loss(rows, psum)
        losses = [loss * weight, aux_loss / n]
        grads = torch.autograd.grad(sum(losses), whole)
        return [s + g.float() for s, g in zip(sums, [*losses, *grads])]

    sums = [torch.zeros(()), torch.zeros(()), *(torch.zeros_like(w, dtype=torch.float32) for w in whole)]
    loss, aux_loss, *sums = over_micro_batches(body, sums, batch, whole, psum, n)
    return loss, aux_loss, [reads[name].reduce(g) for name, g in zip(params, sums)]


def over_micro_batches(body, sums, batch, consts, psum, n):
    """sums = body(sums, rows, weight, consts) for each of n parts of the batch's rows, in one loop -> sums."""
    micro = {key: x.unflatten(0, (n, -1)) for key, x in batch.items()}
    weight = torch.full((n,), 1 / n)
    if "targets" in batch:
        valid = psum((micro["targets"] >= 0).sum((1, 2)).float())
        weight = valid / valid.sum().clamp(min=1)
    with disable_proxy_modes_tracing(), torch.enable_grad():
        example = tree_map(torch.empty_like, (sums, {key: x[0] for key, x in micro.items()}, weight[0], consts))
        graph = capture(body, *example)
    return loop(graph.gm, sums, [*micro.values(), weight], consts, False, 0)


def eval_step(model, psum=lambda x, dims=None: x, micro_batches=1):
    """-> step(params, batch) -> mean cross-entropy over the batch's valid targets, to capture. micro_batches: as train_step's."""

    def step(params, batch):
        def body(sums, rows, weight, values):
            with torch.no_grad(), _reparametrize_module(model, dict(zip(params, values))):
                return [sums[0] + model.loss(rows, psum)[0] * weight]

        with torch.no_grad():
            if micro_batches > 1:
                return psum(over_micro_batches(body, [torch.zeros(())], batch, list(params.values()), psum, micro_batches)[0])
            with _reparametrize_module(model, params):
                return psum(model.loss(batch, psum)[0])

    return step


def state_spec(model):
    """The training state of a (sharded, scanned, meta) model as this device's meta tensors."""
    shapes = {name: (p.to_local() if isinstance(p, DTensor) else p).shape for name, p in model.named_parameters()}
    m, params, v = ({name: torch.empty(s, dtype=torch.float32, device="meta") for name, s in shapes.items()} for _ in range(3))
    return {"m": m, "params": params, "step": torch.empty((), dtype=torch.int32, device="meta"), "v": v}


# ------------------------------------------------------------ ops that hold a graph, ops that mark a place


class BodyOp(HigherOrderOperator):
    """op(body, *args): one node of the graph that holds a GraphModule. results: what it gives, of the body's results."""

    def __init__(self, name, run, results):
        super().__init__(name)
        self.fallthrough(torch._C.DispatchKey.AutogradCPU)  # LayerFunction below is their autograd
        self.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(run)
        self.py_impl(FakeTensorMode)(functools.partial(self.fake, results))
        self.py_impl(ProxyTorchDispatchMode)(self.record)

    def __call__(self, body, *args):
        return super().__call__(body, *args)

    def fake(self, results, mode, body, *args):
        with mode:
            return [torch.empty(shape, dtype=y.dtype) for shape, y in results(values_of(body), *args)]

    def record(self, mode, body, *args):
        with disable_proxy_modes_tracing():
            out = self(body, *args)
        root = mode.tracer.root
        name = next(name for i in range(10**6) if getattr(root, name := f"{self.name()}_body_{i}", body) is body)
        root.register_module(name, body)
        proxies = tree_map(mode.tracer.unwrap_proxy, (body, *args))
        node = mode.tracer.create_proxy("call_function", self, proxies, {})
        return track_tensor_tree(out, node, constant=None, tracer=mode.tracer)


def run_loop(body, carry, xs, consts, reverse, prefetch):
    ys = []
    for i in reversed(range(len(xs[0]))) if reverse else range(len(xs[0])):
        out = body(*carry, *(x[i] for x in xs), *consts)
        carry, y = out[:len(carry)], out[len(carry):]
        ys.append(y)
    return [*carry, *(torch.stack(y) for y in zip(*(reversed(ys) if reverse else ys)))]


# loop(body, carry, xs, consts, reverse, prefetch): body(*carry, *x, *consts) -> (*carry, *y), once for each slice x of xs
# along dimension 0, from the last one if reverse. Returns [*carry, *stacked ys]. The first `prefetch` of xs lie in host
# memory: each slice is fetched an iteration ahead. lax.scan in the lowering; torch's own scan has no reverse, short of
# flipping the stacked weights, which copies each of them whole.
loop = BodyOp("loop", run_loop, lambda out, carry, xs, *_: [
    (y.shape if i < len(carry) else (len(xs[0]), *y.shape), y) for i, y in enumerate(out)])

# call(body, args, late): body(*args). late > 0 marks a recomputation: XLA must not merge it with what it repeats, nor begin
# it before the last of its first `late` arguments is there. The other arguments (weights to gather) it may use ahead.
call = BodyOp("call", lambda body, args, late: list(body(*args)), lambda out, *_: [(y.shape, y) for y in out])


def mark(name):
    """An identity that stays in the graph as one node, torch.ops.tpu.<name>."""
    def clone(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    op = torch.library.custom_op(f"tpu::{name}", clone, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: op(grad))
    return op


to_host = mark("to_host")  # its result lies in the host's memory
to_device = mark("to_device")
boundary = mark("boundary")  # one program ends here, in forward and in backward, if the graph is split

# ------------------------------------------------------------------------- layers as one loop, or as one node each

# --remat: the ops, by the beginnings of their names, whose results a layer's forward saves for its backward,
# which recomputes the rest. Full remat saves the layer's input alone.
ATTENTION = ("tpu.splash_attention",)
DOTS = (*ATTENTION, "aten.mm.", "aten.bmm.", "aten.addmm.", "tpu.grouped_matmul", "tpu.paired_grouped_matmul")
REMAT = {"full": (), "attention": ATTENTION, "dots": DOTS, "none": ("",)}


class ScanLayers(nn.Module):
    """Takes the place of a model's `layers`: one layer whose parameters are stacked, (L, ...) each.

    layer(x, *consts) -> x, or (x, *ys) with ys stacked over layers in the result. A const that requires a gradient
    gets the sum over layers, accumulated in fp32. remat: a key of REMAT. offload: what is saved goes to host memory.
    """

    def __init__(self, layers, remat="full", offload=False):
        super().__init__()
        check_alike(layers)
        self.n_layers, self.remat, self.offload = len(layers), remat, offload
        self.stack = layers[0]
        for sub in self.stack.modules():
            for name, p in sub._parameters.items():
                sub._parameters[name] = p if p is None else nn.Parameter(torch.stack([p.data] * self.n_layers))

    def forward(self, x, *consts):
        params = [p for _, p in self.stack.named_parameters()]
        bodies = trace_bodies(self.stack, x, [p[0] for p in params], consts, self.remat, self.offload)
        if not torch.is_grad_enabled():
            x, *ys = loop(bodies.inference, [x], params, list(consts), False, 0)
        else:
            x, *ys = LayerFunction.apply(bodies, True, self.offload, len(params), x, *params, *consts)
        return (x, *ys) if ys else x


class UnrolledLayers(nn.ModuleList):
    """Takes the place of a model's `layers`: the same layers, each one a node in forward and a node in backward, traced once.

    remat: as in ScanLayers. groups: boundaries cut them into so many programs, between which what is saved lies in host
    memory (0: no cut).
    """

    def __init__(self, layers, remat="full", groups=0):
        super().__init__(layers)
        check_alike(layers)
        self.remat, self.groups = remat, groups

    def forward(self, x, *consts):
        bodies, ys = None, []
        for i, layer in enumerate(self):
            if self.groups and i % (len(self) // self.groups) == 0:
                x = boundary(x)
            params = [p for _, p in layer.named_parameters()]
            bodies = bodies or trace_bodies(layer, x, params, consts, self.remat)
            if not torch.is_grad_enabled():
                x, *y = call(bodies.inference, [x, *params, *consts], 0)
            else:
                x, *y = LayerFunction.apply(bodies, False, self.groups > 0, len(params), x, *params, *consts)
            ys.append(y)
        x = boundary(x) if self.groups else x
        return (x, *map(torch.stack, zip(*ys))) if ys[0] else x


def check_alike(layers):
    """Raises CaptureError for layers that are not the first one with other weights: its graph stands for all."""
    def facts(layer):
        return {f"{prefix}.{name}".lstrip("."): (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x
                for prefix, sub in layer.named_modules()
                for name, x in ({"class": type(sub)} | vars(sub) | sub._parameters | sub._buffers).items()
                if x is None or isinstance(x, (bool, int, float, str, tuple, type, torch.Tensor))}

    first = facts(layers[0])
    for i, layer in enumerate(layers):
        own = facts(layer)
        if name := next((name for name in first | own if own.get(name) != first.get(name)), None):
            raise CaptureError(f"layer {i}'s {name} is {own.get(name)}, layer 0's {first.get(name)}: --scan, --remat and --split "
                               "take layers that differ in their weights only (muse_glimmer.py makes groups of layers alike)")


@dataclass
class Bodies:
    inference: torch.fx.GraphModule  # (x, *params, *consts) -> (x, *ys)
    forward: torch.fx.GraphModule  # (x, *params, *consts) -> (x, *ys, *saved)
    # (grad_x, *grad_consts, *saved, *params, *grad_ys, *consts) -> (grad_x, *grad_consts, *grad_params)
    backward: torch.fx.GraphModule
    n_outs: int  # of (x, *ys)
    differentiable: list  # which of them have a gradient
    learned: list  # which consts need one


def trace_bodies(module, x, params, consts, remat, offload=False):
    """Traces one layer and its gradient as one graph and cuts that in two. What the forward saves and what the backward
    recomputes is a choice of nodes: those of REMAT[remat], as far as they depend on x (gathered weights are not
    worth their memory) and the backward needs them. Views and casts are recomputed from what they read."""
    names = [name for name, _ in module.named_parameters()]

    def layer(x, params, consts):
        with _reparametrize_module(module, dict(zip(names, params))):
            out = module(x, *consts)
        return out if isinstance(out, tuple) else (out,)

    def joint(x, params, consts, grads, sums):
        wanted = [c for c, needed in zip(consts, learned) if needed]
        inputs = [t.requires_grad_() for t in (x, *wanted, *params)]
        outs = layer(x, params, consts)
        ends = [o for o, d in zip(outs, differentiable) if d]
        grad_x, *grads = torch.autograd.grad(ends, inputs, grads, materialize_grads=True)
        sums = [s + g for s, g in zip(sums, grads)]
        return outs, [grad_x, *sums, *grads[len(sums):]]

    with disable_proxy_modes_tracing(), torch.enable_grad():
        learned = [c.requires_grad for c in consts]
        x, params, consts = tree_map(torch.empty_like, (x, params, list(consts)))
        for t in (x, *params):
            t.requires_grad_()
        outs = layer(x, params, consts)
        differentiable = [o.requires_grad for o in outs]
        graph = capture(joint, x, params, consts, [torch.empty_like(o) for o, d in zip(outs, differentiable) if d],
                        [torch.empty_like(c, dtype=torch.float32) for c, needed in zip(consts, learned) if needed])
    gm, inputs = graph.gm, graph.gm.graph.find_nodes(op="placeholder")
    x, params, consts, (grad_x, *grad_ys), sums = tree_unflatten(inputs, graph.in_spec)
    outs, grads = tree_unflatten(gm.graph.output_node().args[0], graph.out_spec)
    keep = {n for n in depend_on([x], gm) - depend_on([grad_x, *grad_ys], gm)
            if op_name(n).startswith(REMAT[remat]) and isinstance(n.meta["val"], torch.Tensor)
            and not is_view(n) and not op_name(n).startswith("aten._to_copy")}
    keep = (keep | {x}) & ancestors(grads, keep)
    saved = [n for n in gm.graph.nodes if n in keep]
    forward = subgraph(gm, [x, *params, *consts], [*outs, *saved], hosted=len(saved) if offload else 0)
    backward = subgraph(gm, [grad_x, *sums, *saved, *params, *grad_ys, *consts], grads)
    return Bodies(subgraph(gm, [x, *params, *consts], outs), forward, backward, len(outs), differentiable, learned)


def op_name(node):
    return op_name(node.args[0]) if node.target is operator.getitem else str(node.target)


def depend_on(nodes, gm):
    """The nodes of gm's graph that the given ones lead to, without them."""
    found = set(nodes)
    for node in gm.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found - set(nodes)


def ancestors(nodes, stop):
    """The given nodes and all that lead to them, back to those in `stop`."""
    found, pending = set(), list(nodes)
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending += () if node in stop else node.all_input_nodes
    return found


def subgraph(gm, inputs, outputs, hosted=0):
    """The part of gm's graph that computes `outputs` from `inputs` (nodes of it), as a GraphModule. The last `hosted` outputs go
    to host memory."""
    needed = ancestors(outputs, set(inputs))
    graph = torch.fx.Graph()
    env = {node: graph.placeholder(node.name) for node in inputs}
    for node in inputs:
        env[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in needed and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    results = [env[node] for node in outputs]
    for i in range(len(results) - hosted, len(results)):
        results[i] = graph.call_function(torch.ops.tpu.to_host.default, (results[i],))
        results[i].meta = dict(outputs[i].meta)
    graph.output(results)
    return torch.fx.GraphModule(gm, graph)


class LayerFunction(torch.autograd.Function):
    """Runs Bodies: forward of one layer, or of all in a loop (scan: params stacked)."""

    @staticmethod
    def forward(ctx, bodies, scan, offload, n_params, x, *rest):
        params, consts = rest[:n_params], rest[n_params:]
        if scan:
            outs = loop(bodies.forward, [x], list(params), list(consts), False, 0)
        else:
            outs = call(bodies.forward, [x, *params, *consts], 0)
        outs, saved = outs[:bodies.n_outs], outs[bodies.n_outs:]
        if offload and not scan:
            saved = [to_host(s) for s in saved]
        ctx.bodies, ctx.scan, ctx.offload, ctx.n_params, ctx.n_saved = bodies, scan, offload, n_params, len(saved)
        ctx.save_for_backward(*saved, *params, *consts)
        ctx.mark_non_differentiable(*(o for o, d in zip(outs, bodies.differentiable) if not d))
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        n = ctx.n_saved + ctx.n_params
        saved, params, consts = ctx.saved_tensors[:ctx.n_saved], ctx.saved_tensors[ctx.n_saved:n], ctx.saved_tensors[n:]
        grad_x, *grad_ys = [g for g, d in zip(grads, ctx.bodies.differentiable) if d]
        learned = [c for c, needed in zip(consts, ctx.bodies.learned) if needed]
        sums = [torch.zeros_like(c, dtype=torch.float32) for c in learned]
        if ctx.scan:
            grad_x, *grads = loop(ctx.bodies.backward, [grad_x, *sums], [*saved, *params, *grad_ys], list(consts), True,
                                  len(saved) if ctx.offload else 0)
        else:
            saved = [to_device(s) for s in saved] if ctx.offload else saved
            late = [grad_x, *sums, *saved]
            grad_x, *grads = call(ctx.bodies.backward, [*late, *params, *grad_ys, *consts], len(late))
        sums = iter([s.to(c.dtype) for s, c in zip(grads, learned)])
        grad_consts = [next(sums) if needed else None for needed in ctx.bodies.learned]
        return None, None, None, None, grad_x, *grads[len(learned):], *grad_consts


# ------------------------------------------------------------------------------- graph split


def split(graph, n_data):
    """Cuts a captured graph at its boundary nodes -> [lowering.Stage, ...], to be run in order.

    n_data: how many of the graph's flat inputs, the last ones, are the batch. What depends on no data (gathered weights,
    rotary tables, the learning rate) is computed anew in each stage that needs it; all else runs in the earliest
    stage that has its inputs. With clipping no update can come before the last gradient (the clip is a boundary): the
    updates are then cut by the stage that their gradient comes from. Without, they are part of that stage.
    """
    gm = graph.gm
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    inputs, outputs = gm.graph.find_nodes(op="placeholder"), gm.graph.output_node().args[0]
    data = set(inputs[-n_data:])
    data |= depend_on(data, gm) - {gm.graph.output_node()}
    stage, clip = {}, math.inf
    for node in position:
        if node in data and op_name(node) != TO_DEVICE:
            stage[node] = max((stage[i] + (op_name(i) == BOUNDARY) for i in node.all_input_nodes if i in stage), default=0)
            if op_name(node) == BOUNDARY and node.meta["val"].ndim == 0:
                clip = stage[node]
    for node in data - set(stage):  # fetched where it is used, not where it was saved
        stage[node] = min(stage[user] for user in node.users)
    final = max(stage.values()) if clip == math.inf else clip

    earlier = {n for n in stage if stage[n] <= clip}
    wanted = {}  # (stage, where an update's gradient comes from) -> nodes that later stages or the caller need
    for node in stage:
        if node.op != "placeholder" and any(stage.get(user, -1) > stage[node] for user in node.users):
            wanted.setdefault((stage[node], 0), {})[node] = None
    for node in outputs:
        at, born = stage.get(node, final), 0
        if at > clip:
            born = max((stage[n] for n in ancestors([node], earlier) & earlier if stage[n] < clip), default=0)
        wanted.setdefault((at, born), {})[node] = None
    stages = []
    for at, born in sorted(wanted):
        results = sorted(wanted[at, born], key=position.get)
        known = {n for n in stage if stage[n] < at} | set(inputs)
        taken = sorted(ancestors(results, known) & known, key=position.get)
        stages.append(lowering.Stage(subgraph(gm, taken, results), taken, results))
    return stages


BOUNDARY, TO_DEVICE, TO_HOST = (f"tpu.{name}.default" for name in ("boundary", "to_device", "to_host"))


def host_bytes(gm, layers=1):
    """What one device's to_host nodes hold in its host's memory at a time: a layer loop's of all layers, those of loops
    within a loop (micro-batches) one after the other."""
    total = 0
    for node in gm.graph.nodes:
        if op_name(node) == TO_HOST:
            total += node.meta["val"].nbytes * layers
        if node.target is loop:
            total += host_bytes(getattr(gm, node.args[0].target), len(node.args[2][0].meta["val"]))
    return total
