"""SimpleFSDP: reading a parameter is an all-gather, its gradient's way back a reduce-scatter.

    fully_shard(model, init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",)))
    model(x).sum().backward()                            # that is all; works eagerly, compiled and captured

Notable features:
- a descriptor per parameter (a DTensor redistribute), no hooks, no flat buffers (arXiv:2411.00284): the
  collectives are ordinary nodes of the captured graph, and the compiler schedules them
- state_dict holds the shards: only reading `module.weight` gathers
- mixed precision on the way: gather in param_dtype, reduce in reduce_dtype, shards stay as they are
- imports nothing but torch: copy it into any project and run it under torchrun
"""

import contextlib

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def shard_dim(shape, n):
    """The dimension to cut: the first with shards of whole tiles (8 rows), or else the first that n divides, or None: replicated.

    Only even shards, because every device must run the same program. Whole tiles, because of others the TPU compiler makes an
    all-reduce of the whole gradient instead of a reduce-scatter. The first, because collectives put shards below each other.
    """
    return next((d for multiple in (8 * n, n) for d, size in enumerate(shape) if size % multiple == 0), None)


def fully_shard(module, mesh, *, param_dtype=None, reduce_dtype=torch.float32, reduce_op="avg", keep_fp32=()):
    """Makes each parameter of `module` a DTensor and each read of it a gathered, cast, plain tensor.

    mesh: a DeviceMesh; one of two dimensions (replicas, shards) is hybrid sharding, which replicates over the first (slices)
    and shards over the second; None: a single device, where a read only casts. param_dtype: dtype that is gathered and
    computed in (None: the parameter's own); reduce_dtype: dtype of the gradient's reduction; reduce_op: "avg" for a loss that
    is a mean on each device, "sum" for one that is already divided by the whole batch. keep_fp32: endings of names of
    parameters that are read uncast."""
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(f"fully_shard: the mesh has {mesh.ndim} dimensions: want (shards) or (replicas, shards)")
    classes = {}  # modules that read alike share one: torch.compile then takes all layers for the same code
    sharded = {}  # by the id of a parameter, itself (nothing else takes its id then) and its shards: what was tied stays tied
    for prefix, sub in module.named_modules():
        read, key = {}, [type(sub)]
        for name, p in [(name, p) for name, p in sub._parameters.items() if p is not None]:
            dtype = p.dtype if f"{prefix}.{name}".endswith(tuple(keep_fp32)) else param_dtype or p.dtype
            place = None
            if mesh is not None:
                dim = shard_dim(p.shape, mesh.shape[-1])
                place = Replicate() if dim is None else Shard(dim)
                if id(p) not in sharded:
                    shards = distribute_tensor(p.data, mesh, [Replicate()] * (mesh.ndim - 1) + [place])
                    sharded[id(p)] = p, nn.Parameter(shards, p.requires_grad)
                sub._parameters[name] = sharded[id(p)][1]
            read[name] = Read(name, p.ndim, mesh, place, dtype, reduce_dtype, reduce_op)
            key.append((name, p.ndim, str(place), dtype))
        if read:
            sub.__class__ = classes.setdefault(tuple(key), type(type(sub).__name__, (type(sub),), read))


class Read:
    """Stands in a module's class in the place of one parameter (a Python descriptor): what `module.weight` gives."""

    whole = False  # parameters are already whole, see gathered()

    def __init__(self, name, ndim, mesh, placement, dtype, reduce_dtype, reduce_op):
        self.name, self.ndim, self.mesh, self.placement = name, ndim, mesh, placement
        self.dtype, self.reduce_dtype, self.op = dtype, reduce_dtype, reduce_op
        if mesh is not None:
            self.replicas = mesh.get_group(0) if mesh.ndim == 2 else None
            self.shards = mesh[mesh.mesh_dim_names[-1]]

    def __get__(self, module, owner=None):
        if module is None:
            return self
        p = module._parameters[self.name]
        return p if Read.whole else self.gather(p)

    def gather(self, p):
        """This device's shard -> the whole parameter, cast. A backward through it reduces the gradient."""
        if self.mesh is None:
            return p.to(self.dtype)
        p = p.to_local() if isinstance(p, DTensor) else p  # under capture the state is plain shards already
        if self.replicas:
            p = SumGradient.apply(p, self.replicas, self.op)
        p, dim, place = self.first(p)
        p = DTensor.from_local(p, self.shards, place, run_check=False)
        p = p.redistribute(placements=[Replicate()], forward_dtype=self.dtype, backward_dtype=self.reduce_dtype)
        return p.to_local(grad_placements=[Partial(self.op)]).movedim(0, dim)

    def reduce(self, grad):
        """A whole parameter's gradient on each device -> the shard of its sum (or mean)."""
        if self.mesh is None:
            return grad
        grad, dim, place = self.first(grad.to(self.reduce_dtype))
        grad = DTensor.from_local(grad, self.shards, [Partial(self.op)], run_check=False)
        grad = grad.redistribute(placements=place).to_local().movedim(0, dim)
        return funcol.all_reduce(grad, self.op, self.replicas) if self.replicas else grad

    def first(self, p):
        """-> p with its sharded dimension in the first place, that dimension, placements of the result. DTensor would gather
        into the first one all the same, then cut 2,048 pieces apart and lay them side by side, over which the TPU compiler
        takes minutes. With scan, p may be all layers', stacked."""
        if not isinstance(self.placement, Shard):
            return p, 0, [self.placement]
        dim = self.placement.dim + p.ndim - self.ndim
        return p.movedim(dim, 0), dim, [Shard(0)]


def reads(module):
    """{parameter name: its Read}."""
    return {f"{prefix}.{name}".lstrip("."): getattr(type(sub), name)
            for prefix, sub in module.named_modules() for name, p in sub._parameters.items() if p is not None}


@contextlib.contextmanager
def gathered():
    """Within it, parameters are taken as they are: whole and cast already, by Read.gather."""
    Read.whole = True
    try:
        yield
    finally:
        Read.whole = False


class SumGradient(torch.autograd.Function):
    """A shard on its way to being gathered. Its gradient comes back reduce-scattered within the replica and is then reduced
    across: DTensor on the 2-D mesh would all-reduce first, the whole gradient instead of a shard over the slow network."""

    @staticmethod
    def forward(ctx, shard, group, op):
        ctx.group, ctx.op = group, op
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx, grad):
        return funcol.all_reduce(grad, ctx.op, ctx.group), None, None


def all_sum(x, mesh, dims=None):
    """Sums a plain tensor over all of the mesh or over the named dimensions. Not differentiable."""
    for dim in dims or mesh.mesh_dim_names:
        x = funcol.all_reduce(x, "sum", mesh.get_group(dim))
    return x


def capture_mesh(shards, replicas=1):
    """A DeviceMesh of devices that are not there, for tracing what one of them does: its process group is
    torch's fake one, which sends nothing. Dimensions "replicas" (if more than one) and "fsdp"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shards * replicas)
    sizes = {"fsdp": shards} if replicas == 1 else {"replicas": replicas, "fsdp": shards}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
