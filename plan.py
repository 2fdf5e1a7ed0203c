"""Plan a run on chips you do not have: compile the training step for them, read what the compiler says.

    python plan.py --recipe llama3_8b
    python plan.py --topology v6e:4x4 --model llama3 --size 8b --scan --seq 8192 --per-device-batch 1 --report r.json
    python plan.py batch --recipe llama3_8b | scaling --recipe llama3_8b | flags --recipe llama3_8b --libtpu-init-flags="..."

Notable features:
- the real TPU compiler (libtpu, ahead of time): its memory, its errors, its schedule. Nothing is executed or allocated
- time is a replay of the compiled schedule: the compiler's own cycles of every op times the trip counts of the loops
  around it; collectives and copies run beside it at the bandwidths in CHIPS and cost what the schedule fails to hide
- what the compiler does not say (links, clock, a kernel's or a gather's cost) is an assumption, and is printed as one
"""

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass, field

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # only compiles: may share the machine with another libtpu
import lowering  # before jax: it sets libtpu's environment

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import data
import graph_trainer
import kernels
import recipes
import simple_fsdp
import train
from train import UsageError

# ----------------------------------------------------------------------------------------------- the chips


@dataclass(frozen=True)
class Chip:
    """Figures of one chip; a tpu7x chip is two JAX devices. Sources: the specification tables on
    docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}."""

    peak: float  # bf16 FLOP/s of a device
    mxu: int  # matmul flops a device's MXUs can do in a cycle; the clock is peak / mxu
    hbm: float  # bytes of a device that the compiler lets a program have (it names them when they do not suffice)
    hbm_bandwidth: float  # bytes/s of a device
    links: int  # ICI links a chip (2 an axis of the torus)
    ici: float  # bytes/s of one link, one way: the table's bidirectional figure / links / 2
    dcn: float  # bytes/s of a chip
    devices: int = 1  # a chip
    calibration: str = ""  # smallest topology, to calibrate on


GiB = 2**30
CHIPS = {  # by device_kind
    "TPU v5 lite": Chip(197e12, 131072, 15.75 * GiB, 819e9, 4, 50e9, 25e9 / 8, calibration="v5e:2x2"),
    "TPU v5": Chip(459e12, 262144, 95.74 * GiB, 2765e9, 6, 100e9, 50e9 / 8, calibration="v5p:2x2x1"),
    "TPU v6 lite": Chip(918e12, 524288, 31.25 * GiB, 1638e9, 4, 100e9, 100e9 / 8, calibration="v6e:2x2"),
    "TPU7x": Chip(1153.5e12, 524288, 94.75 * GiB, 3690e9, 6, 100e9, 100e9 / 8, devices=2, calibration="tpu7x:2x2x1"),
}
LINK_EFFICIENCY = 0.9  # of a link's figure that large transfers reach (jax-ml.github.io/scaling-book: 45 and 90 GB/s)
HOST_BANDWIDTH = 32e9  # bytes/s a device to host memory: PCIe Gen 5 x16 shared by two devices
# Of the MXU peak that a Pallas kernel is taken to reach: the compiler gives kernels no cycles. Attention: JAX's own splash
# forward is scheduled as 4,103 bundles a 1024 x 1024 block of head dim 128 on tpu7x, where its matmuls need 1,024.
KERNEL_EFFICIENCY = {"splash": 0.25, "cross_entropy": 0.7, "grouped": 0.7}
KNOWN = ["v5e:2x2", "v5e:4x4", "v5e:16x16", "v5p:2x2x1", "v5p:4x4x4", "v5p:8x8x16", "v6e:2x2", "v6e:4x4", "v6e:16x16",
         "tpu7x:2x2x1", "tpu7x:4x4x4", "tpu7x:4x4x8", "tpu7x:4x8x8", "tpu7x:8x8x8", "tpu7x:8x8x16", "tpu7x:16x16x16"]


def link_bandwidth(topology, chip):
    """Bytes/s into a chip, one way, on all axes of its torus at once: two links an axis that wraps around, one
    (an end's) on one that does not. v5e and v6e wrap at 16, v5p and tpu7x in whole cubes of 4."""
    sizes = [int(s) for s in topology.split(":")[1].split("x")]
    wraps = (lambda s: s >= 16) if chip.links == 4 else (lambda s: all(t % 4 == 0 for t in sizes))
    return sum((2 if wraps(s) else 1) for s in sizes if s > 1) * chip.ici * LINK_EFFICIENCY or chip.ici


# ------------------------------------------------------------------------------------- the compiler's text

DTYPE_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s4": .5, "u4": .5}
OP_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
SCHEDULED_NOWHERE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id",
                     "replica-id", "iota", "recv", "opt-barrier", "domain"}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass
class Op:
    name: str
    shape: str
    opcode: str
    operands: list
    attrs: str  # the rest of the line
    root: bool

    def attr(self, pattern):
        found = re.search(pattern, self.attrs)
        return found and found.group(1)

    @property
    def calls(self):
        return self.attr(r"(?:calls|to_apply|called_computations=\{)=?%?([\w.\-]+)")

    @property
    def scope(self):
        return self.attr(r'op_name="([^"]*)"') or ""


def parse_hlo(text):
    """compiled.as_text() -> ({computation: {op name: Op, in schedule order}}, name of the entry)."""
    computations, entry, ops = {}, None, None
    for line in text.splitlines():
        if line[:1] in "%E" and line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.\-]+) ", line)):
            ops = computations[head.group(2)] = {}
            entry = head.group(2) if head.group(1) else entry
        elif ops is not None and (start := OP_LINE.match(line)):
            rest = line[start.end():]
            shape, rest = split_shape(rest)
            opcode, _, rest = rest.partition("(")
            inside, attrs = split_parenthesis(rest)
            ops[start.group(2)] = Op(start.group(2), shape, opcode, re.findall(r"%([\w.\-]+)", inside) or [inside],
                                     attrs, bool(start.group(1)))
            last = ops[start.group(2)]
        elif ops and (line.startswith("}}") or line[:1] not in "}% "):
            last.attrs += line  # a Pallas kernel's metadata has line breaks
    return computations, entry


def split_parenthesis(text):
    """"a, (b)), c" -> ("a, (b)", ", c"): up to the parenthesis that closes what is already open."""
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found.group() == "(" else -1
        if not depth:
            return text[:found.start()], text[found.end():]
    return text, ""


def split_shape(text):
    if text.startswith("("):
        inside, rest = split_parenthesis(text[1:])
        return inside, rest.lstrip()
    shape, _, rest = text.partition(" ")
    return shape, rest


def arrays(shape, space=None):
    """[(dtype, dims, bytes, memory space)] of a shape; space 0: HBM, 1: VMEM, 5: host."""
    found = []
    for dtype, dims, layout in re.findall(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", shape):
        dims = [int(d) for d in dims.split(",") if d]
        where = re.search(r"S\((\d+)\)", layout or "")
        where = int(where.group(1)) if where else 0
        size = DTYPE_BYTES.get(dtype) or int((re.findall(r"\d+", dtype) or [8])[0]) / 8
        if space is None or where == space:
            found.append((dtype, dims, math.prod(dims) * size, where))
    return found


def nbytes(shape, space=None):
    return sum(a[2] for a in arrays(shape, space))


def trip_count(computations, caller, loop):
    """Trips of a while op: its condition compares a counter from a constant with a constant. None: data decides."""
    if known := loop.attr(r'known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    ops = computations[loop.attr(r"condition=%?([\w.\-]+)")]

    def constant(scope, name, start=None):
        """An op's integer value; the condition's own parameter is what the loop starts with."""
        op = scope.get(name)
        while op and op.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            op = scope.get(op.operands[0])
        if op is None:
            return None
        if op.opcode == "constant":
            return int(op.operands[0]) if re.fullmatch(r"-?\d+", op.operands[0]) else None
        if op.opcode == "get-tuple-element" and scope is ops:
            start = caller.get(loop.operands[0])
            index = int(op.attr(r"index=(\d+)"))
            return constant(caller, start.operands[index]) if start and start.opcode == "tuple" else None
        return None

    root = next(op for op in ops.values() if op.root)
    sides, compare = root.operands, root
    if root.opcode == "fusion":
        inner = computations[root.calls]
        compare = next((op for op in inner.values() if op.opcode == "compare"), root)
        index = [inner[s].operands[0] for s in compare.operands]
        sides = [root.operands[int(i)] if inner[s].opcode == "parameter" else s
                 for i, s in zip(index, compare.operands)]
    if compare.opcode != "compare":
        return None
    first, last = (constant(ops, s) for s in sides)
    if first is None or last is None:
        return None
    return last - first if "LT" in compare.attrs else last - first + 1 if "LE" in compare.attrs else None


def matmul_flops(op, scope):
    """Flops of a convolution, as which the TPU compiler writes every matmul: 2 x outputs x what each one sums over."""
    lhs_labels, rhs_labels, out_labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attrs).groups()
    (_, lhs, *_), (_, rhs, *_), (_, out, *_) = (arrays(s)[0] for s in (
        scope[op.operands[0]].shape, scope[op.operands[1]].shape, op.shape))
    flops = 2 * out[out_labels.index("b")] * out[out_labels.index("f")] * rhs[rhs_labels.index("i")]
    window = re.search(r"window=\{([^}]*)\}", op.attrs)
    dilate = re.search(r"lhs_dilate=([\dx]+)", window.group(1)) if window else None
    dilate = [int(d) for d in dilate.group(1).split("x")] if dilate else [1] * 9
    for axis in (c for c in lhs_labels if c.isdigit()):  # batch dimensions, and second contracting ones
        taps, inputs, outputs = rhs[rhs_labels.index(axis)], lhs[lhs_labels.index(axis)], out[out_labels.index(axis)]
        flops *= min(outputs * taps, inputs * taps) if dilate[int(axis)] == 1 else max(inputs, outputs)
    return flops


# --------------------------------------------------------------------------------------- replaying the schedule


@dataclass
class Transfer:
    """Something that runs beside the compute: a collective or a copy."""

    engine: str  # ici, dcn, host, hbm
    kind: str
    left: float  # seconds
    channel: str | None = None  # moves only inside the fusions that carry this channel


@dataclass
class Replay:
    """Seconds and bytes of one step on one device."""

    computations: dict
    chip: Chip
    bandwidth: dict  # engine -> bytes/s
    slice_size: int  # devices of a slice
    slices: int = 1
    seconds: dict = field(default_factory=dict)  # kind -> busy or waiting seconds that add up to the step
    hidden: dict = field(default_factory=dict)  # kind of transfer -> seconds hidden behind compute
    moved: dict = field(default_factory=dict)  # engine -> bytes
    phases: list = field(default_factory=list)  # (name, {kind: seconds}) of the entry
    flops: float = 0
    cycles: float = 0
    guessed: float = 0  # seconds of compute for which the compiler gave no cycles
    kernels: dict = field(default_factory=dict)  # kernel -> (calls, seconds, efficiency)
    sharing: dict = field(default_factory=dict)  # scope of a torch op -> Pallas calls in it
    unknown_loops: list = field(default_factory=list)

    def run(self, entry):
        self.walk(entry, 1, top=True)
        self.end_phase("after the loops" if self.phases else "step")
        return self

    def end_phase(self, name):
        done = {}
        for _, part in self.phases:
            for kind, s in part.items():
                done[kind] = done.get(kind, 0) + s
        self.phases.append((name, {k: s - done.get(k, 0) for k, s in self.seconds.items() if s > done.get(k, 0) + 1e-9}))

    def spend(self, kind, seconds, times, pending, channels=()):
        """Compute goes on for some seconds, and with it the transfers that may move meanwhile, first come first served."""
        self.seconds[kind] = self.seconds.get(kind, 0) + seconds * times
        budget = {}
        for t in pending.values():
            if t.channel is None or t.channel in channels:
                used = min(t.left, budget.get(t.engine, seconds))
                budget[t.engine] = budget.get(t.engine, seconds) - used
                t.left -= used
                self.hidden[t.kind] = self.hidden.get(t.kind, 0) + used * times

    def wait(self, name, times, pending):
        """The schedule needs a transfer's result: whatever is left of it, and of those before it, is exposed."""
        mine = pending.get(name)
        if mine is None:
            return
        for key in list(pending):
            t = pending[key]
            if t.engine == mine.engine:
                self.seconds[t.kind] = self.seconds.get(t.kind, 0) + t.left * times
                t.left = 0
            if key == name:
                break
        del pending[name]

    def walk(self, name, times, top=False):
        """One computation, `times` times over. What it starts and does not wait for, it waits for at its end."""
        pending = {}  # op name -> Transfer, in the order of their starts
        scope = self.computations[name]
        for op in scope.values():
            code = op.opcode
            inner = self.computations.get(op.calls, {}) if op.calls else {}
            if code in SCHEDULED_NOWHERE:
                continue
            if code == "while":
                trips = trip_count(self.computations, scope, op)
                if trips is None:
                    self.unknown_loops.append(op.name)
                if top:
                    self.end_phase(f"before loop {len(self.phases) // 2 + 1}")
                self.walk(op.attr(r"body=%?([\w.\-]+)"), times * (1 if trips is None else trips))
                if top:
                    self.end_phase(f"loop {len(self.phases) // 2 + 1} ({trips} trips)")
            elif code == "conditional":
                branches = re.findall(r"%([\w.\-]+)", op.attr(r"branch_computations=\{([^}]*)\}") or " ".join(
                    re.findall(r"(?:true|false)_computation=(%[\w.\-]+)", op.attrs)))
                self.walk(max(branches, key=lambda b: len(self.computations[b])), times)
            elif code == "call":
                self.walk(op.calls, times)
            elif code == "send":
                pending[rendezvous(op)] = self.over_dcn(op, times)
            elif code == "recv-done":
                self.wait(rendezvous(scope[op.operands[0]]), times, pending)
            elif code.endswith("-done") or code.endswith("-update") or self.calls(inner, "AsyncCollectiveDone"):
                if not code.endswith("-update"):
                    self.wait(self.origin(scope, op, pending), times, pending)
            elif (transfer := self.transfer(op, scope, inner, times)) is not None:
                pending[op.name] = transfer
                if not (code.endswith("-start") or self.calls(inner, "AsyncCollectiveStart")):
                    self.wait(op.name, times, pending)
            else:
                self.compute(op, scope, inner, times, pending)
        for key in list(pending):
            self.wait(key, times, pending)

    def calls(self, inner, target):
        return any(op.opcode == "custom-call" and target in op.attrs for op in inner.values())

    def origin(self, scope, op, pending):
        """The start of a done: through tuple elements and the fusions that carried it on, back to what is pending."""
        seen, todo = set(), list(op.operands)
        while todo:
            name = todo.pop()
            if name in pending:
                return name
            if name in scope and name not in seen:
                seen.add(name)
                if scope[name].opcode in ("get-tuple-element", "bitcast", "fusion", "tuple", "async-update"):
                    todo += scope[name].operands
        return None

    def transfer(self, op, scope, inner, times):
        """-> the Transfer that an op starts (or is, when it is synchronous), or None."""
        code = op.opcode.removesuffix("-start")
        body = [op] if code in COLLECTIVES else [i for i in inner.values() if i.opcode.removesuffix("-start") in COLLECTIVES]
        carried = any(i.opcode == "convolution" for i in inner.values())
        if body and not carried:
            return self.collective(op, body[0], scope if body[0] is op else inner, inner, times)
        if code in ("copy", "slice", "dynamic-slice", "dynamic-update-slice", "async") and (
                op.opcode.endswith("-start") or nbytes(op.shape, 5)):
            sides = arrays(op.shape)
            size = min([a[2] for a in sides if a[2] > 16] or [0])
            host = any(a[3] == 5 for a in sides) or any(nbytes(scope[o].shape, 5) for o in op.operands if o in scope)
            return self.start("host" if host else "hbm", "copies to host" if host else "copies", size, times)
        return None

    def collective(self, op, body, scope, inner, times):
        code = body.opcode.removesuffix("-start")
        if code == "all-reduce" and any(i.opcode == "dynamic-slice" for i in inner.values()):
            code = "reduce-scatter"  # the compiler's spelling of one
        group = replica_group(body.attrs)
        n = len(group) or 1
        inputs = sum(nbytes(scope[o].shape) for o in body.operands if o in scope)
        output = max([a[2] for a in arrays(body.shape)] or [0]) if body.opcode.endswith("-start") else nbytes(body.shape)
        size = {"all-gather": output, "all-reduce": 2 * inputs, "collective-permute": output * n / max(n - 1, 1)}.get(code, inputs)
        engine = "dcn" if len({d // self.slice_size for d in group}) > 1 else "ici"
        carried = self.calls(inner, "AsyncCollectiveStart")
        return self.start(engine, code, size * (n - 1) / n if n > 1 else 0, times,
                          body.attr(r"channel_id=(\d+)") if carried else None)

    def over_dcn(self, op, times):
        """A collective between slices: a send to the hosts' network now, its recv-done later."""
        kind = (op.attr(r'_xla_megascale_transfer_type="(\w+)"') or "send").lower().replace("_", "-")
        size = max(a[2] for a in arrays(op.shape))
        return self.start("dcn", f"dcn {kind}", size * (2 * (self.slices - 1) / self.slices if kind == "all-reduce" else 1), times)

    def start(self, engine, kind, size, times, channel=None):
        self.moved[engine] = self.moved.get(engine, 0) + size * times
        if engine in ("ici", "dcn"):
            self.moved[kind] = self.moved.get(kind, 0) + size * times
        return Transfer(engine, kind, size / self.bandwidth[engine], channel)

    def compute(self, op, scope, inner, times, pending):
        """An op that the TensorCore is busy with."""
        cycles = [int(c) for c in re.findall(r'estimated_cycles":"(\d+)"', op.attrs)]
        cycles = cycles[0] if cycles and cycles[0] < 2**62 else None
        every = list(self.reach(op, scope))
        flops = sum(matmul_flops(i, s) for i, s in every if i.opcode == "convolution")
        scopes = op.scope or next((i.scope for i, _ in every if i.scope), "")
        is_kernel = op.opcode == "custom-call" and "tpu_custom_call" in op.attrs
        traffic = nbytes(op.shape, 0) + sum(nbytes(scope[o].shape, 0) for o in op.operands if o in scope)
        if op.opcode == "custom-call" and not is_kernel:
            return  # AllocateBuffer, ConcatBitcast, ...: no work
        if is_kernel:
            name = re.sub(r"\.\d+$", "", op.name)
            scopes += "/" + name
            flops = self.kernel_flops(op)
            efficiency = next((e for word, e in KERNEL_EFFICIENCY.items() if word in scopes), 0.5)
            seconds = max(flops / (self.chip.peak * efficiency), traffic / self.bandwidth["hbm"])
            calls, total, _ = self.kernels.get(name, (0, 0, 0))
            self.kernels[name] = calls + times, total + seconds * times, efficiency
        elif cycles is None:
            seconds = traffic / self.bandwidth["hbm"]
            self.guessed += seconds * times
        else:
            seconds = cycles * self.chip.mxu / self.chip.peak
        self.flops += flops * times
        self.cycles += seconds * self.chip.peak / self.chip.mxu * times
        channels = {i.attr(r"channel_id=(\d+)") for i in inner.values() if i.opcode in COLLECTIVES}
        self.spend(kind_of(scopes, flops), seconds, times, pending, channels)

    def kernel_flops(self, op):
        """What name_kernels wrote into the scope of a torch op, shared by the Pallas calls that compute it."""
        found = re.search(r"[^/]* flops=(\d+)", op.scope)
        if not found:
            return 0
        if not self.sharing:
            for ops in self.computations.values():
                for other in ops.values():
                    if other.opcode == "custom-call" and "tpu_custom_call" in other.attrs and " flops=" in other.scope:
                        key = re.search(r"[^/]* flops=\d+", other.scope).group()
                        self.sharing[key] = self.sharing.get(key, 0) + 1
        return int(found.group(1)) // self.sharing[found.group()]

    def reach(self, op, scope):
        yield op, scope
        for i in self.computations.get(op.calls, {}).values() if op.opcode == "fusion" else ():
            yield from self.reach(i, self.computations[op.calls])


def kind_of(scope, flops):
    for word, kind in (("splash", "attention"), ("cross_entropy", "loss"), ("grouped_matmul", "experts")):
        if word in scope:
            return kind
    return "matmul" if flops else "elementwise"


def rendezvous(op):
    return op.attr(r'_xla_host_transfer_rendezvous="([^"]*)"')


def replica_group(attrs):
    """The devices of the first group: of {{0,1},{2,3}}, or of the iota [groups,size]<=[dims]T(order)."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attrs):
        return [int(d) for d in listed.group(1).split(",")]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attrs):
        shape, dims, order = ([int(d) for d in g.split(",")] if g else None for g in iota.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        return list((ids.transpose(order) if order else ids).reshape(shape)[0])
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attrs):
        return [int(d) for d in pairs.groups()]
    return []


# ------------------------------------------------------------------------------------------------ compiling


class CompileError(Exception):
    """The TPU compiler refused; the message is one line of ours and its own words."""


def topology_devices(name, slices=1):
    """-> the devices of a TPU topology nobody here has, as (slices, devices a slice) arrays in torus order."""
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices
    except Exception as e:
        raise UsageError(f"--topology {name} --slices {slices}: the compiler does not know it. Some that it knows: "
                         f"{', '.join(KNOWN)}. It says: {first_line(e)}") from e
    by_slice = {}
    for d in devices:
        by_slice.setdefault(getattr(d, "slice_index", 0), []).append(d)
    return np.stack([mesh_utils.create_device_mesh((len(ds),), ds, allow_split_physical_axes=True)
                     for _, ds in sorted(by_slice.items())])


def first_line(e):
    return str(e).strip().split("\n")[0][:300]


def compile_with(lowered, options):
    """lowered.compile with the compiler's words kept: CompileError, with what to do about it."""
    try:
        return lowered.compile(compiler_options=options or None)
    except Exception as e:
        text = str(e)
        if option := re.search(r"No such compile option: '(\w+)'", text):
            raise UsageError(f"--libtpu-init-flags: this libtpu has no flag {option.group(1)}") from e
        if used := re.search(r"Used ([\d.]+[KMGT]) of ([\d.]+[KMGT]) hbm|temporaries \(([\d.]+[KMGT])\) exceeds available HBM \(([\d.]+[KMGT])", text):
            need, have = (float(x[:-1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[x[-1]] for x in used.groups() if x)
            error = CompileError(
                f"does not fit: needs {need / 1e9:.1f} GB of HBM a device, the compiler allows {have / 1e9:.1f}: "
                f"{(need - have) / 1e9:.1f} GB too much. Levers: smaller --per-device-batch or --seq, --scan, Pallas "
                f"attention and loss, offload, more chips\n{text}")
            error.need = need
            raise error from e
        raise CompileError(f"the TPU compiler refused the program\n{text}") from e


def calibrate(chip):
    """The compiler's flops a cycle on one large bf16 matmul, 16384 cubed."""
    mesh = Mesh(topology_devices(chip.calibration).ravel()[:1], ("x",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((16384, 16384), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    text = jax.jit(jnp.matmul).lower(x, x).compile().as_text()
    return 2 * 16384**3 / sum(int(c) for c in re.findall(r'estimated_cycles":"(\d+)"', text) if int(c) < 2**62)


def report(args):
    """Compiles the step of train.py's flags for args.topology -> (flat dict of figures, assumptions, phases).

    Nothing is executed, no parameter allocated. The dict: bytes a device, seconds, flops of the whole step over all
    devices; keys s_<kind> add up to predicted_step_s, hidden_<kind> ran behind compute, bytes_<kind> are memory.
    """
    devices = topology_devices(args.topology, args.slices)
    kind, n = devices.flat[0].device_kind, devices.size
    if kind not in CHIPS:
        raise UsageError(f"--topology {args.topology}: no figures for {kind}, only for {', '.join(CHIPS)}")
    chip = CHIPS[kind]
    args.dtype = args.dtype or "bfloat16"
    args.batch = args.per_device_batch * n
    mesh = Mesh(devices, ("replicas", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    config = train.choose_size(args)
    if getattr(config, "vocab", 0) is None:  # FLUX has none
        config = dataclasses.replace(config, vocab=512)  # debug sizes take the data's: bytes, rounded up
    device_mesh = simple_fsdp.capture_mesh(devices.shape[1], args.slices) if n > 1 else None

    clock = time.perf_counter()
    def lap():
        nonlocal clock
        clock, last = time.perf_counter(), clock
        return clock - last

    with train.phase("tracing"):
        model = train.build_model(args, config, device_mesh)
        opt = graph_trainer.AdamW()
        step, _ = train.build_programs(args, model, opt, device_mesh, mesh)
        name_kernels(step.graph.gm)
    trace_s = lap()
    with train.phase("lowering"):
        step.lower()
    lower_s = lap()
    with train.phase(f"compiling for {n} {kind}"):
        executable = compile_with(step.pieces[0].lowered, recipes.compiler_options(args.libtpu_init_flags))
    compile_s = lap()

    memory = executable.memory_analysis()
    text = executable.as_text()
    if args.hlo:
        open(args.hlo, "w").write(text)
    bandwidth = {"ici": link_bandwidth(args.topology, chip), "dcn": chip.dcn * LINK_EFFICIENCY / chip.devices,
                 "host": HOST_BANDWIDTH, "hbm": chip.hbm_bandwidth}
    computations, entry = parse_hlo(text)
    replay = Replay(computations, chip, bandwidth, devices.shape[1], args.slices).run(entry)
    rate = calibrate(chip)

    step_s = sum(replay.seconds.values())
    tokens = args.batch * args.seq
    model_flops = model.flops_per_token(args.seq) * tokens
    state = memory.argument_size_in_bytes
    saved = saved_bytes(step.graph.gm)
    peak = memory.peak_memory_in_bytes
    r = {
        "model": args.model, "size": args.size, "layers": config.n_layers, "topology": args.topology, "slices": args.slices,
        "params": sum(p.numel() for p in model.parameters()), "devices": n, "chips": n // chip.devices,
        "per_device_batch": args.per_device_batch, "seq": args.seq, "flags": args.libtpu_init_flags or "", "kernels": args.kernels or "pallas",
        "hbm_bytes": peak, "hbm_limit_bytes": chip.hbm, "hbm_arguments_and_temporaries_bytes": state + memory.temp_size_in_bytes,
        "bytes_state": state, "bytes_saved_activations": saved, "bytes_temporaries": max(peak - state - saved, 0),
        "bytes_code": memory.generated_code_size_in_bytes,
        "host_bytes": memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes,
        "model_flops": model_flops, "hardware_flops": replay.flops * n, "cycles": replay.cycles,
        "predicted_step_s": step_s, "tokens_per_s_per_chip": tokens / step_s / (n // chip.devices),
        "predicted_mfu": model_flops / step_s / chip.peak / n, "matmul_bound_mfu": rate / chip.mxu,
        "collective_bytes_ici": replay.moved.get("ici", 0), "collective_bytes_dcn": replay.moved.get("dcn", 0),
        "host_copy_bytes": replay.moved.get("host", 0), "guessed_s": replay.guessed,
        "trace_s": trace_s, "lower_s": lower_s, "compile_s": compile_s,
    }
    r |= {f"s_{k.replace(' ', '_').replace('-', '_')}": s for k, s in sorted(replay.seconds.items())}
    r |= {f"hidden_{k.replace(' ', '_').replace('-', '_')}": s for k, s in sorted(replay.hidden.items())}
    assumptions = [
        f"peak {chip.peak / 1e12:,.1f} TFLOP/s a device; clock {chip.peak / chip.mxu / 1e9:.2f} GHz = peak / {chip.mxu:,} MXU flops a cycle",
        f"calibration: the compiler gives a 16384-cubed matmul {rate:,.0f} flops a cycle: no step can exceed {rate / chip.mxu:.0%} MFU",
        f"ICI {bandwidth['ici'] / 1e9:.0f} GB/s into a chip ({chip.ici / 1e9:.0f} GB/s a link one way x {LINK_EFFICIENCY}), "
        f"DCN {bandwidth['dcn'] / 1e9:.1f} GB/s a device, host {HOST_BANDWIDTH / 1e9:.0f} GB/s, HBM {chip.hbm_bandwidth / 1e9:,.0f} GB/s a device",
    ]
    if chip.devices == 2:
        assumptions.append("a chip's two devices share its links: what both need comes in once")
    if replay.guessed:
        assumptions.append(f"{replay.guessed * 1e3:.1f} ms are ops without compiler cycles (gathers, scatters, sorts), taken at HBM bandwidth")
    if replay.kernels:
        names = ", ".join(f"{k} x {calls}: {s * 1e3:.1f} ms at {e:.0%}" for k, (calls, s, e) in sorted(replay.kernels.items()))
        assumptions.append(f"Pallas kernels at a share of the MXU peak, at least at HBM speed: {names}")
    for loop in replay.unknown_loops:
        assumptions.append(f"loop {loop} has as many trips as the data says: counted once")
    return r, assumptions, replay.phases


def name_kernels(gm):
    """Puts a custom op's name and flops into its node's source line: the HLO of its lowering then says whose it is."""
    for node in gm.graph.nodes:
        if node.op == "get_attr" and hasattr(body := getattr(gm, node.target), "graph"):
            name_kernels(body)
        if str(node.target).startswith("tpu."):
            where = lowering.source(node).split(":")[0].split(".")[0]
            node.meta["stack_trace"] = f'File "{where} flops={custom_op_flops(node):.0f} ", line 0, in {node.target}'


def custom_op_flops(node):
    """Matmul flops of a kernels.py op, masked blocks left out, the backward's recomputation counted."""
    name = str(node.target).split(".")[1]
    shapes = [a.meta["val"].shape for a in node.args if isinstance(a, torch.fx.Node)]
    shapes = shapes[name.endswith("_backward"):]  # a backward's first argument is the incoming gradient
    if name.startswith("splash"):
        (B, H, T, D), S = shapes[0], shapes[1][2]
        causal, window = [a for a in node.args if isinstance(a, bool)][0], [a for a in node.args if type(a) is int][0]
        seen = T * S / 2 if causal else T * S
        seen = min(seen, T * window - window**2 / 2) if window else seen
        return 2 * B * H * D * seen * (5 if name.endswith("_backward") else 2)
    if name.startswith("linear_cross_entropy"):
        return 2 * math.prod(shapes[0]) * shapes[1][0] * (3 if name.endswith("_backward") else 1)
    flops = 2 * math.prod(shapes[0]) * shapes[1][2]  # grouped
    return flops * (2 if name.startswith("paired") else 1) * (2 if name.endswith("_backward") else 1)


def saved_bytes(gm):
    """What the layer loop saves for its backward pass, stacked over layers (0 without --scan)."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is graph_trainer.loop:
            carry = node.args[1]
            outs = node.meta["val"][len(carry):] if isinstance(node.meta.get("val"), (list, tuple)) else []
            return sum(t.numel() * t.element_size() for t in outs)
    return 0


# --------------------------------------------------------------------------------------------------- showing


def show(r, assumptions, phases, published=None):
    GB = 1e9
    total = r["predicted_step_s"]
    print(f"\n{r['model']} {r['size']} ({r['layers']} layers), {r['params'] / 1e9:.2f}B parameters, on {r['chips']} chips "
          f"({r['devices']} devices) of {r['topology']}" + (f" x {r['slices']} slices" if r["slices"] > 1 else "")
          + f", {r['per_device_batch']} x {r['seq']} tokens a device")
    print(f"\nHBM a device   {r['hbm_bytes'] / GB:8.2f} GB of {r['hbm_limit_bytes'] / GB:.1f} "
          f"(arguments + temporaries {r['hbm_arguments_and_temporaries_bytes'] / GB:.2f})")
    for key in ("state", "saved_activations", "temporaries", "code"):
        print(f"  {key.replace('_', ' '):20} {r['bytes_' + key] / GB:8.2f} GB")
    if r["host_bytes"]:
        print(f"host a device  {r['host_bytes'] / GB:8.2f} GB")
    print(f"\nstep           {total * 1e3:8.1f} ms       {'ms':>9} {'share':>6} {'hidden ms':>10}")
    for key in sorted((k for k in r if k.startswith("s_")), key=lambda k: -r[k]):
        print(f"  {key[2:].replace('_', ' '):28} {r[key] * 1e3:9.1f} {r[key] / total:6.1%} {r.get('hidden_' + key[2:], 0) * 1e3:10.1f}")
    for key in (k for k in r if k.startswith("hidden_") and "s_" + k[7:] not in r):
        print(f"  {key[7:].replace('_', ' '):28} {0:9.1f} {0:6.1%} {r[key] * 1e3:10.1f}")
    for name, part in phases:
        print(f"  {name:28} {sum(part.values()) * 1e3:9.1f} {sum(part.values()) / total:6.1%}")
    print(f"moved a device: ICI {r['collective_bytes_ici'] / GB:.2f} GB, DCN {r['collective_bytes_dcn'] / GB:.2f} GB, "
          f"host {r['host_copy_bytes'] / GB:.2f} GB")
    print(f"flops: model {r['model_flops']:.3e}, hardware {r['hardware_flops']:.3e} "
          f"({r['hardware_flops'] / r['model_flops']:.2f}x: recomputation, masked attention)")
    print(f"predicted: {r['predicted_step_s']:.3f} s a step, {r['tokens_per_s_per_chip']:,.0f} tokens/s a chip, MFU {r['predicted_mfu']:.1%}"
          + (f"; published {published[0]:.1%} on {published[1]}" if published else ""))
    print(f"trace {r['trace_s']:.1f} s, lower {r['lower_s']:.1f} s, compile {r['compile_s']:.1f} s")
    print("\nassumed:\n  " + "\n  ".join(assumptions))


def draw(r, phases, path):
    """The step's time by kind, in the order of its phases, and the memory by kind."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = sorted({k for _, part in phases for k in part}, key=lambda k: -sum(part.get(k, 0) for _, part in phases))
    colors = dict(zip(kinds, plt.get_cmap("tab10").colors * 2))
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 5), height_ratios=[2, 1], layout="constrained")
    start, labelled = 0, set()
    for name, part in phases:
        first = start
        for kind in kinds:
            if width := part.get(kind, 0) * 1e3:
                top.barh(0, width, left=start, color=colors[kind], label=None if kind in labelled else kind)
                labelled.add(kind)
                start += width
        top.text((first + start) / 2, 0.42, name, ha="left", fontsize=8, rotation=20)
        top.axvline(start, color="black", lw=0.5)
    top.set_ylim(-0.42, 0.42)
    top.set_title(pad=45, label=f"{r['model']} {r['size']} on {r['topology']}: step {r['predicted_step_s']:.3f} s, "
                  f"MFU {r['predicted_mfu']:.1%} (predicted)")
    top.set(yticks=[], xlabel="ms")
    top.legend(ncols=5, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    start = 0
    for key in ("state", "saved_activations", "temporaries"):
        bottom.barh(0, r["bytes_" + key] / 1e9, left=start, label=key.replace("_", " "))
        start += r["bytes_" + key] / 1e9
    bottom.axvline(r["hbm_limit_bytes"] / 1e9, color="red", label="HBM")
    bottom.set(yticks=[], xlabel="GB a device")
    bottom.legend(ncols=4, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# -------------------------------------------------------------------------------------------- subcommands


def plan(args):
    r, assumptions, phases = report(args)
    recipe = recipes.RECIPES.get(args.recipe)
    show(r, assumptions, phases, recipe.published if recipe else None)
    if args.report:
        with open(args.report, "w") as out:
            json.dump(r, out, indent=1)
        print("wrote", args.report)
    if args.picture:
        draw(r, phases, args.picture)
        print("wrote", args.picture)
    if r["hbm_bytes"] > r["hbm_limit_bytes"]:
        raise CompileError(f"does not fit by {(r['hbm_bytes'] - r['hbm_limit_bytes']) / 1e9:.1f} GB")
    return r


def batch(args):
    """The largest per-device batch that fits, by compiling: two give a line, its end is tried, then halves. Memory bends
    off the line near the limit, where the compiler computes things twice to fit, which also shows in the MFU."""
    fits, too_large, b = {}, math.inf, args.per_device_batch
    while True:
        args.per_device_batch = b
        try:
            r = fits[b] = report(args)[0]
            print(f"batch {b}: {r['hbm_bytes'] / 1e9:.2f} GB ({r['hbm_arguments_and_temporaries_bytes'] / 1e9:.2f} arguments + "
                  f"temporaries), MFU {r['predicted_mfu']:.1%}")
        except CompileError as e:
            if not hasattr(e, "need"):
                raise
            too_large = b
            print(f"batch {b}: {first_line(e)}")
        best = max(fits, default=0)
        if too_large - best <= max(1, best // 32):
            break
        if too_large < math.inf:
            b = (best + too_large) // 2
        elif len(fits) == 1:
            b = 2 * best
        else:
            (b0, r0), (b1, r1) = sorted(fits.items())[-2:]
            slope = max((r1["hbm_bytes"] - r0["hbm_bytes"]) / (b1 - b0), 1)
            b = max(int(b1 + (r1["hbm_limit_bytes"] - r1["hbm_bytes"]) / slope), b1 + max(1, b1 // 16))
    if not fits:
        raise UsageError("no batch fits, not even 1 row a device")
    fastest = max(fits, key=lambda b: fits[b]["predicted_mfu"])
    print(f"largest per-device batch that fits: {best}, MFU {fits[best]['predicted_mfu']:.1%}; best MFU: {fastest}, {fits[fastest]['predicted_mfu']:.1%}")
    return fits


SCALES = {  # chips -> (topology, slices)
    "tpu7x": {64: ("tpu7x:4x4x4", 1), 128: ("tpu7x:4x4x8", 1), 256: ("tpu7x:4x8x8", 1), 512: ("tpu7x:8x8x8", 1),
              1024: ("tpu7x:8x8x16", 1), 2048: ("tpu7x:8x16x16", 1), 4096: ("tpu7x:16x16x16", 1), 8192: ("tpu7x:8x8x16", 8)},
    "v5p": {64: ("v5p:4x4x4", 1), 128: ("v5p:4x4x8", 1), 256: ("v5p:4x8x8", 1), 512: ("v5p:8x8x8", 1), 1024: ("v5p:8x8x16", 1)},
    "v6e": {16: ("v6e:4x4", 1), 32: ("v6e:4x8", 1), 64: ("v6e:8x8", 1), 128: ("v6e:8x16", 1), 256: ("v6e:16x16", 1), 512: ("v6e:16x16", 2)},
}


def scaling(args):
    """Weak scaling: the same rows a device on more and more chips."""
    rows, scales = [], SCALES.get(args.topology.split(":")[0])
    if scales is None:
        raise UsageError(f"scaling knows {', '.join(SCALES)} (got --topology {args.topology})")
    for chips, (args.topology, args.slices) in scales.items():
        if args.chips and chips not in args.chips:
            continue
        try:
            rows.append(report(args)[0])
        except CompileError as e:
            print(f"{chips} chips: {first_line(e)}")
    print("| chips | slices | HBM GB | step s | tokens/s a chip | MFU | ICI GB | DCN GB | compile s |\n|" + "---|" * 9)
    for r in rows:
        print(f"| {r['chips']} | {r['slices']} | {r['hbm_bytes'] / 1e9:.1f} | {r['predicted_step_s']:.3f} | {r['tokens_per_s_per_chip']:,.0f} "
              f"| {r['predicted_mfu']:.1%} | {r['collective_bytes_ici'] / 1e9:.1f} | {r['collective_bytes_dcn'] / 1e9:.1f} | {r['compile_s']:.0f} |")
    return rows


def flags(args):
    """What compiler flags change against the recipe's own: on devices that are here also the first step's bits."""
    with_flags, args.libtpu_init_flags = args.libtpu_init_flags, recipes.flags_of(args.recipe) if args.recipe else ""
    both = f"{args.libtpu_init_flags} {with_flags or ''}".strip()
    if not args.topology or lowering.ON_TPU_HOST:
        mesh, device_mesh = train.choose_devices(args)
        before, after = (first_step(args, mesh, device_mesh, f) for f in (args.libtpu_init_flags, both))
        for key in ("loss", "grad_norm"):
            print(f"{key:12} {before[key].hex():24} {after[key].hex():24} {before[key]:.7f} {after[key]:.7f}")
        print("free: the same bits" if before == after else "changes rounding")
        return before, after
    before = report(args)[0]
    args.libtpu_init_flags = both
    after = report(args)[0]
    print(f"{'':24} {'before':>12} {'with flags':>12}")
    for key, unit in (("predicted_step_s", 1e-3), ("predicted_mfu", 1e-2), ("cycles", 1e6), ("hbm_bytes", 1e9), ("compile_s", 1)):
        print(f"{key:24} {before[key] / unit:12.2f} {after[key] / unit:12.2f}  x {unit:g}")
    print("whether it changes rounding: run the same flags without --topology, on such chips")
    return before, after


def first_step(args, mesh, device_mesh, options):
    """Loss and gradient norm of step 1 on the devices that are here, compiled with these options."""
    args.dtype = args.dtype or ("bfloat16" if mesh.devices.flat[0].platform == "tpu" else "float32")
    config = train.choose_size(args)
    dataset = data.load(args.data, args.tokenizer, args.seq, vocab_size=config.vocab, seed=args.seed)
    model = train.build_model(args, dataclasses.replace(config, vocab=dataset.vocab_size), device_mesh)
    step, _ = train.build_programs(args, model, graph_trainer.AdamW(), device_mesh, mesh)
    step.lower()
    step.pieces[0].executable = compile_with(step.pieces[0].lowered, recipes.compiler_options(options))
    first = dataset.batch(0, args.batch)
    rows_of = lambda rows: {k: x[rows] for k, x in first.items()}
    _, metrics = step(lowering.initial_state(model, mesh, args.seed), lowering.shard_batch(rows_of, (args.batch, args.seq), mesh))
    return {k: float(v) for k, v in metrics.items()}


# --------------------------------------------------------------------------------------------- command line


def parse(argv):
    """-> (subcommand, args): plan.py's flags, and the rest by train.py's own parser. A recipe's flags come first, so
    that later ones override them."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.error = lambda message: (_ for _ in ()).throw(UsageError(message))
    recipes.add_flags(p)
    p.add_argument("--chips", type=lambda s: [int(c) for c in s.split(",")], help="scaling: only these numbers of chips")
    p.add_argument("--hlo", metavar="FILE", help="write the compiler's optimized HLO")
    command, argv = (argv[0], argv[1:]) if argv[:1] and argv[0] in COMMANDS else ("plan", argv)
    mine, rest = p.parse_known_args(argv)
    if mine.recipe and mine.recipe not in recipes.RECIPES:
        raise UsageError(f"--recipe {mine.recipe} is not one of: {', '.join(recipes.RECIPES)}")
    if mine.recipe:
        mine, rest = p.parse_known_args(recipes.argv_of(mine.recipe) + recipes.chips_of(mine.recipe) + argv)
    if not mine.topology and command != "flags":
        raise UsageError(f"--topology NAME or --recipe NAME is needed. Topologies: {', '.join(KNOWN)}; recipes: {', '.join(recipes.RECIPES)}")
    mine.per_device_batch = mine.per_device_batch or 1
    args = train.parse_args(rest)
    for key, value in vars(mine).items():
        setattr(args, key, value)
    return command, args


COMMANDS = {"plan": plan, "batch": batch, "scaling": scaling, "flags": flags}


def main(argv=None):
    try:
        command, args = parse(sys.argv[1:] if argv is None else argv)
        COMMANDS[command](args)
    except (UsageError, CompileError, graph_trainer.CaptureError, lowering.LoweringError, kernels.KernelError) as e:
        print(f"plan.py: error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
