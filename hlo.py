"""How long a compiled TPU program takes: its optimized HLO, replayed op by op in the compiler's own schedule.

    phases = Replay(executable.as_text(), 1 / 2.2e9, 1.15e15, bandwidth, slices=1, kernel_seconds=...).run()

Notable features:
- compute costs the compiler's own estimate of each op's cycles, times the trips of the loops around it; a matmul at least its
  flops at the matrix units' peak (one of llama3 405b's is estimated at 1.3 times that)
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
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
               "collective-broadcast")
COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice", "async")
KINDS = {"splash": "attention", "cross_entropy": "loss", "grouped": "experts"}  # what kernels.py computes, by its ops' names
FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id", "iota",
        "recv", "send-done", "opt-barrier", "domain")


@dataclass
class Op:
    name: str
    shape: str
    opcode: str
    operands: list
    attrs: str  # the rest of the line

    def attr(self, pattern):
        found = re.search(pattern, self.attrs)
        return found and found.group(1)

    @property
    def verb(self):
        return re.sub("-(start|update|done)$", "", self.opcode)  # without its asynchronous halves' endings

    @property
    def scope(self):
        return self.attr('op_name="([^"]*)"') or ""

    @property
    def kernel(self):
        """Of a Pallas kernel: its scope up to the torch op that it works for, e.g. "... tpu.splash_attention"."""
        return self.opcode == "custom-call" and "tpu_custom_call" in self.attrs and re.sub(r"(tpu\.\w+).*", r"\1", self.scope)


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
            last.attrs += line  # a kernel's metadata has line breaks
    return computations


def sizes(shape, space=None):
    """Bytes of each array of a shape, or of those in a memory space (0: HBM, 1: VMEM, 5: host)."""
    return [math.prod(int(d) for d in dims.split(",") if d) * int(re.sub(r"\D*(\d*).*", r"\1", dtype) or 8) / 8
            for dtype, dims, where in ARRAY.findall(shape) if space in (None, int(where or 0))]


@dataclass
class Replay:
    """run() -> [(label, Counter)], one for each stretch and each loop of the entry. The Counter's keys: ("s", kind): seconds of
    the step; ("busy", kind): seconds of a transfer, hidden or not; ("bytes", engine); ("guessed", "ops"): seconds that nobody
    gave cycles for; ("kernel", torch op): seconds of its kernels."""

    text: str
    seconds_per_cycle: float
    peak: float  # matmul flops a second
    bandwidth: dict  # engine (ici, dcn, host, hbm, sparsecore) -> bytes/s; ici_N: of groups of N devices, if theirs differs
    slices: int
    kernel_seconds: object  # (kernel's scope, how many share it, bytes it reads and writes) -> seconds
    unknown_loops: list = field(default_factory=list)

    def run(self):
        self.computations = parse(self.text)
        # Kernels of different names (dx, dw) share an op's work; those of one name, what remat or a peeled loop repeats, do not.
        kernels = {(op.kernel, op.scope) for ops in self.computations.values() for op in ops.values() if op.kernel}
        self.sharing = Counter(kernel for kernel, _ in kernels)
        return self.walk(self.computations["ENTRY"])

    def walk(self, ops):
        """One pass through a computation. What it starts and does not wait for, it waits for at its end."""
        now, queues, pending, carried, phases = 0.0, defaultdict(list), {}, {}, [("", Counter())]

        def spend(kind, s):
            nonlocal now
            now += s
            phases[-1][1]["s", kind] += s

        def wait(key):
            engine, until = pending.pop(key, (None, 0))
            for kind, begin, end in queues[engine]:  # what went before it is waited for as well
                spend(kind, max(min(end, until) - max(begin, now), 0))

        for op in ops.values():
            inside = list(self.inside(op))
            calls = {i.attr(r'custom_call_target="(\w+)"') for i in inside}
            # Whose buffers the op hands on: a done finds its start through tuples and the fusions that carry it on.
            carried[op.name] = key = next((carried[o] for o in op.operands if carried.get(o)), None)
            if op.opcode == "while":
                trips, body = self.loop(op)
                phases += [(f"loop of {trips}", total(self.walk(body), trips)), ("", Counter())]
                now += sum(s for (what, _), s in phases[-2][1].items() if what == "s")
            elif op.opcode == "recv-done":
                wait(rendezvous(ops[op.operands[0]]))
            elif op.opcode in FREE or op.opcode.endswith("-update"):
                pass
            elif op.opcode.endswith("-done") or "AsyncCollectiveDone" in calls:
                wait(key)
            elif transfer := self.transfer(op, ops, inside):
                engine, kind, size, *group = transfer
                carried[op.name] = key = rendezvous(op) or op.name
                rate = self.bandwidth.get("_".join([engine, *group]), self.bandwidth[engine])
                takes, begin = size / rate, max([now] + [end for _, _, end in queues[engine][-1:]])
                queues[engine].append((kind, begin, begin + takes))
                pending[key] = engine, begin + takes
                phases[-1][1].update({("busy", kind): takes, ("bytes", engine): size})
                if not (op.opcode.endswith("-start") or op.opcode == "send" or "AsyncCollectiveStart" in calls):
                    wait(key)
            elif op.opcode != "custom-call" or op.kernel:  # others only mark and allocate
                spend(*self.compute(op, ops, inside, phases[-1][1]))
        for key in list(pending):
            wait(key)
        return phases

    def inside(self, op):
        """The op and every op of the computations that it is a name for."""
        yield op
        for other in self.computations.get(op.attr(r"(?:calls|to_apply)=%?([\w.\-]+)"), {}).values():
            yield from self.inside(other)

    def loop(self, op):
        """-> (trips, body) of a while. Every loop that JAX writes counts from 0 to a constant, its condition's only integer."""
        condition, body = (self.computations[op.attr(rf"{part}=%?([\w.\-]+)")] for part in ("condition", "body"))
        limits = {int(i.operands[0]) for o in condition.values() for i in self.inside(o)
                  if i.opcode == "constant" and i.shape.startswith("s32[]")}
        if len(limits) != 1:
            self.unknown_loops.append(op.name)
        return limits.pop() if len(limits) == 1 else 1, body

    def transfer(self, op, ops, inside):
        """-> (engine, kind, bytes) of a collective or a copy that runs beside compute, on ICI also its group's size; or None."""
        if op.opcode == "send":  # a collective between slices: a send to the hosts' network now, its recv-done later
            kind = (op.attr(r'_xla_megascale_transfer_type="(\w+)"') or "send").lower().replace("_", "-")
            return "dcn", f"dcn {kind}", max(sizes(op.shape)) * (2 - 2 / self.slices if kind == "all-reduce" else 1)
        body = next((i for i in inside if i.verb in COLLECTIVES), None)
        if body and not has_matmul(inside):  # with one, the fusion only carries on what another has started
            shapes = {i.name: i.shape for i in [*ops.values(), *inside]}
            inputs = sum(sum(sizes(shapes[o])) for o in body.operands if o in shapes)
            output = max(sizes(body.shape)) if body.opcode.endswith("-start") else sum(sizes(body.shape))
            scattered = body.verb == "all-reduce" and any(i.opcode == "dynamic-slice" for i in inside)  # the compiler's spelling
            kind = "reduce-scatter" if scattered else body.verb
            groups = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", body.attrs)  # the first one, or [groups, size]
            n = (int(groups[2]) if groups[2] else groups[1].count(",") + 1) if groups else math.inf
            return "ici", kind, {"all-gather": output, "all-reduce": 2 * inputs}.get(kind, inputs) * (1 - 1 / n), str(n)
        host = sizes(op.shape, 5) or any(sizes(ops[o].shape, 5) for o in op.operands if o in ops)
        if op.verb in COPIES and (op.opcode.endswith("-start") or host):
            size = min((size for size in sizes(op.shape) if size > 16), default=0)
            return ("host", "copies to host", size) if host else ("hbm", "copies", size)
        if op.opcode == "call-start":  # a gather or a change of layout; the shape names operands and results
            return "sparsecore", "sparse cores", sum(sizes(op.shape, 0))

    def compute(self, op, ops, inside, counts):
        """-> (kind, seconds) of an op that the TensorCore is busy with."""
        scope = next((i.scope for i in inside if i.scope), "")
        traffic = sum(sum(sizes(shape, 0)) for shape in [op.shape] + [ops[o].shape for o in op.operands if o in ops])
        cycles = next((int(c) for c in re.findall(r'estimated_cycles":"(\d+)"', op.attrs)), 2**62)
        if op.kernel:
            s = self.kernel_seconds(op.kernel, self.sharing[op.kernel], traffic)
            counts["kernel", op.kernel.split("tpu.")[-1]] += s
        elif cycles < 2**62:  # larger: the compiler does not know
            s = cycles * self.seconds_per_cycle
        else:
            s = traffic / self.bandwidth["hbm"]
            counts["guessed", "ops"] += s
        s = max(s, matmul_flops(inside, ops) / self.peak)
        return next((k for word, k in KINDS.items() if word in scope), "matmul" if has_matmul(inside) else "elementwise"), s


def has_matmul(inside):
    return any(i.opcode in ("convolution", "dot") for i in inside)  # the TPU compiler writes matmuls as convolutions


def matmul_flops(inside, ops):
    """Of an op's matmuls, which the TPU compiler writes as convolutions. (M, K) by (K, N) has 2 M K N, and M K N is the root of its
    three sizes' product; B of them at once, with a window dilated by B, have B^3 (M K N)^2 as that product."""
    flops = 0
    for op in inside:
        if op.opcode in ("convolution", "dot"):
            shapes = [op.shape, *(next(o.shape for o in [*inside, *ops.values()] if o.name == name) for name in op.operands)]
            elements = math.prod(int(d) for shape in shapes for d in ARRAY.search(shape).group(2).split(",") if d)
            flops += 2 * math.sqrt(elements / math.prod(map(int, (op.attr(r"lhs_dilate=([\dx]+)") or "1").split("x"))))
    return flops


def rendezvous(op):
    return op.attr(r'_xla_host_transfer_rendezvous="([^"]*)"')


def total(phases, times=1):
    """The sum of phases' Counters, `times` times over."""
    out = Counter()
    for _, part in phases:
        out.update({key: value * times for key, value in part.items()})
    return out
