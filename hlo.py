"""How long a compiled TPU program takes: its optimized HLO, replayed op by op in the compiler's own schedule.

    phases = Replay(executable.as_text(), 1 / 2.2e9, bandwidth, slices=1, kernel_seconds=...).run()

Notable features:
- compute costs the compiler's own estimate of each op's cycles, times the trips of the loops around it
- a transfer (collective, copy, work on the SparseCores) takes bytes / bandwidth on its own engine, one behind the other;
  what lies between its start and its done hides it, and the step waits for the rest
- kernels, for which the compiler has no cycles, are asked for; ops without any are taken at HBM speed and counted
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

OP_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?=,|$)(.*)")
ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice", "async")
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id", "iota",
        "recv", "send-done", "opt-barrier", "domain"}


@dataclass
class Op:
    name: str
    shape: str
    opcode: str
    operands: list
    attrs: str  # the rest of the line

    def __post_init__(self):
        self.verb = re.sub(r"-(start|update|done)$", "", self.opcode)  # without its asynchronous halves' endings
        self.scope = self.attr(r'op_name="([^"]*)"') or ""
        self.is_kernel = self.opcode == "custom-call" and "tpu_custom_call" in self.attrs

    def attr(self, pattern):
        found = re.search(pattern, self.attrs)
        return found and found.group(1)


def parse(text):
    """compiled.as_text() -> {computation: {op name: Op, in schedule order}}; the entry is "ENTRY"."""
    computations, ops, last = {}, None, None
    for line in text.splitlines():
        if line[:1] in "%E" and line.endswith("{") and (head := re.match(r"(ENTRY|%[\w.\-]+) ", line)):
            ops = computations[head.group(1).lstrip("%")] = {}
        elif ops is not None and (found := OP_LINE.match(line)):
            name, shape, opcode, inside, attrs = found.groups()
            last = ops[name] = Op(name, shape, opcode, re.findall(r"%([\w.\-]+)", inside) or [inside], attrs)
        elif ops and line != "}":
            last.__init__(last.name, last.shape, last.opcode, last.operands, last.attrs + line)  # kernels' metadata has line breaks
    return computations


def sizes(shape, space=None):
    """Bytes of each array of a shape, or of those in a memory space (0: HBM, 1: VMEM, 5: host)."""
    return [math.prod(int(d) for d in dims.split(",") if d) * int(re.sub(r"\D*(\d*).*", r"\1", dtype) or 8) / 8
            for dtype, dims, where in ARRAY.findall(shape) if space in (None, int(where or 0))]


@dataclass
class Replay:
    """run() -> [(label, Counter)], one for each stretch and each loop of the entry. The Counter's keys: ("s", kind): seconds of
    the step; ("busy", kind): seconds of a transfer, hidden or not; ("bytes", engine); ("guessed", ""): seconds that nobody
    gave cycles for; ("kernel", name) and ("calls", name)."""

    text: str
    seconds_per_cycle: float
    bandwidth: dict  # engine (ici, dcn, host, hbm, sparsecore) -> bytes/s
    slices: int
    kernel_seconds: object  # (kernel's name, its scope, calls that share the scope, bytes it reads and writes) -> seconds
    unknown_loops: list = field(default_factory=list)

    def run(self):
        self.computations = parse(self.text)
        self.sharing = Counter((op.scope, kernel_name(op)) for ops in self.computations.values() for op in ops.values() if op.is_kernel)
        return self.walk(self.computations["ENTRY"])

    def walk(self, ops):
        """One pass through a computation. What it starts and does not wait for, it waits for at its end."""
        now, queues, pending, carried, phases = 0.0, defaultdict(list), {}, {}, [("", Counter())]

        def spend(kind, seconds):
            nonlocal now
            now += seconds
            phases[-1][1]["s", kind] += seconds

        def wait(key):
            engine, until = pending.pop(key, (None, 0))
            for kind, begin, end in queues[engine]:  # what went before it is waited for as well
                spend(kind, max(min(end, until) - max(begin, now), 0))

        for op in ops.values():
            inside = list(self.inside(op))
            calls = {i.attr(r'custom_call_target="(\w+)"') for i in inside}
            # Whose buffers the op hands on: a done finds its start through tuples and the fusions that carry it on.
            carried[op.name] = key = next((carried[o] for o in op.operands if carried.get(o)), None)
            if op.opcode in ("while", "conditional", "call"):
                trips, body = self.body(op)
                inner = total(self.walk(body), trips)
                phases += [(f"loop of {trips}" if op.opcode == "while" else "", inner), ("", Counter())]
                now += seconds(inner)
            elif op.opcode == "recv-done":
                wait(rendezvous(ops[op.operands[0]]))
            elif op.opcode in FREE or op.opcode.endswith("-update"):
                pass
            elif op.opcode.endswith("-done") or "AsyncCollectiveDone" in calls:
                wait(key)
            elif transfer := self.transfer(op, ops, inside):
                engine, kind, size = transfer
                carried[op.name] = key = rendezvous(op) or op.name
                takes, begin = size / self.bandwidth[engine], max([now] + [end for _, _, end in queues[engine][-1:]])
                queues[engine].append((kind, begin, begin + takes))
                pending[key] = engine, begin + takes
                phases[-1][1].update({("busy", kind): takes, ("bytes", engine): size})
                if not (op.opcode.endswith("-start") or op.opcode == "send" or "AsyncCollectiveStart" in calls):
                    wait(key)
            elif op.opcode != "custom-call" or op.is_kernel:  # others only mark and allocate
                spend(*self.compute(op, ops, inside, phases[-1][1]))
        for key in list(pending):
            wait(key)
        return phases

    def inside(self, op):
        """The op and every op of the computations that it is a name for."""
        yield op
        for other in self.computations.get(op.attr(r"(?:calls|to_apply)=%?([\w.\-]+)"), {}).values():
            yield from self.inside(other)

    def body(self, op):
        """-> (trips, computation) of a while; of a conditional its longest branch."""
        called = {key: [self.computations[n] for n in re.findall(r"%([\w.\-]+)", names)]
                  for key, names in re.findall(r"(\w+)=(\{%[^}]*\}|%[\w.\-]+)", op.attrs)}
        if op.opcode != "while":
            return 1, max((c for found in called.values() for c in found), key=len)
        # Every loop that JAX writes counts from 0 to a constant, the only integer one in its condition.
        limits = {int(i.operands[0]) for o in called["condition"][0].values() for i in self.inside(o)
                  if i.opcode == "constant" and i.shape.startswith("s32[]")}
        if len(limits) != 1:
            self.unknown_loops.append(op.name)
        return limits.pop() if len(limits) == 1 else 1, called["body"][0]

    def transfer(self, op, ops, inside):
        """-> (engine, kind, bytes) of a collective or a copy that runs beside compute, or None."""
        if op.opcode == "send":  # a collective between slices: a send to the hosts' network now, its recv-done later
            kind = (op.attr(r'_xla_megascale_transfer_type="(\w+)"') or "send").lower().replace("_", "-")
            return "dcn", f"dcn {kind}", max(sizes(op.shape)) * (2 * (self.slices - 1) / self.slices if kind == "all-reduce" else 1)
        body = next((i for i in inside if i.verb in COLLECTIVES), None)
        if body and not has_matmul(inside):  # with one, the fusion only carries on what another has started
            home = ops if body is op else next(c for c in self.computations.values() if c.get(body.name) is body)
            inputs = sum(sum(sizes(home[o].shape)) for o in body.operands if o in home)
            output = max(sizes(body.shape)) if body.opcode.endswith("-start") else sum(sizes(body.shape))
            scattered = body.verb == "all-reduce" and any(i.opcode == "dynamic-slice" for i in inside)  # the compiler's spelling
            kind = "reduce-scatter" if scattered else body.verb
            groups = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", body.attrs)  # the first one, or [groups, size]
            n = (int(groups[2]) if groups[2] else groups[1].count(",") + 1) if groups else math.inf
            return "ici", kind, {"all-gather": output, "all-reduce": 2 * inputs}.get(kind, inputs) * (1 - 1 / n)
        host = sizes(op.shape, 5) or any(sizes(ops[o].shape, 5) for o in op.operands if o in ops)
        if op.verb in COPIES and (op.opcode.endswith("-start") or host):
            size = min((size for size in sizes(op.shape) if size > 16), default=0)
            return ("host", "copies to host", size) if host else ("hbm", "copies", size)
        if op.opcode == "call-start":  # a gather or a change of layout; the shape names operands and results
            return "sparsecore", "sparse cores", sum(sizes(op.shape, 0))

    def compute(self, op, ops, inside, counts):
        """-> (kind, seconds) of an op that the TensorCore is busy with."""
        where = next((i.scope for i in inside if i.scope), "")
        traffic = sum(sum(sizes(shape, 0)) for shape in [op.shape] + [ops[o].shape for o in op.operands if o in ops])
        cycles = next((int(c) for c in re.findall(r'estimated_cycles":"(\d+)"', op.attrs)), 2**62)
        if op.is_kernel:
            name = kernel_name(op)
            seconds = self.kernel_seconds(name, where, self.sharing[op.scope, name], traffic)
            counts.update({("kernel", name): seconds, ("calls", name): 1})
            where += name
        elif cycles < 2**62:  # larger: the compiler does not know
            seconds = cycles * self.seconds_per_cycle
        else:
            seconds = traffic / self.bandwidth["hbm"]
            counts["guessed", ""] += seconds
        kinds = {"splash": "attention", "cross_entropy": "loss", "grouped": "experts"}
        return next((k for word, k in kinds.items() if word in where), "matmul" if has_matmul(inside) else "elementwise"), seconds


def has_matmul(inside):
    return any(i.opcode in ("convolution", "dot") for i in inside)  # the TPU compiler writes matmuls as convolutions


def kernel_name(op):
    return re.sub(r"[.\d]+$", "", op.name)


def rendezvous(op):
    return op.attr(r'_xla_host_transfer_rendezvous="([^"]*)"')


def total(phases, times=1):
    """The sum of phases' Counters, `times` times over."""
    out = Counter()
    for _, part in phases:
        out.update({key: value * times for key, value in part.items()})
    return out


def seconds(part):
    return sum(s for (what, _), s in part.items() if what == "s")
