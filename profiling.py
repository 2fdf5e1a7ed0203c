"""Where a step's time goes: a jax.profiler trace, and its answer as text, by kind of work and by the model's lines.

    python train.py --model llama3 --profile            # steps 5 to 7, into profile/

Notable features:
- the trace opens in xprof and TensorBoard (the folder) and in Perfetto (its trace.json.gz)
- lowering.py writes "file.py:line function/torch op" into every HLO op's metadata; the trace has a duration for each op
  of the compiled program; joined by the op's name they give each line's time, forward and backward
- a fusion counts for the line of its root; loops and calls do not count, what runs inside them does
"""

import collections
import glob
import os
import re
import time

import jax

import hlo

CONTAINERS = ("while", "call", "conditional")
COPIES = ("copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "reshape", "bitcast")
LINE = re.compile(r'([^/";]+\.py:\d+ [^/"]+)/([^/"]+)')


class Profile:
    """Traces steps first to last into a folder. Call after(number, state) when step `number`'s metrics are read; after those
    of `edges` no other step may have been started."""

    def __init__(self, folder, first, last):
        self.folder, self.first, self.last, self.edges = folder, first, last, (first - 1, last)

    def after(self, number, state, program):
        """-> the report's text once the last step is traced, None otherwise."""
        if number == self.first - 1:
            jax.block_until_ready(state)
            self.start = time.perf_counter()
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # the ops are wanted, not this loop's Python
            jax.profiler.start_trace(self.folder, profiler_options=options)
        if number == self.last:
            jax.block_until_ready(state)
            seconds = time.perf_counter() - self.start
            jax.profiler.stop_trace()
            path = max(glob.glob(os.path.join(self.folder, "plugins/profile/*/*.xplane.pb")), key=os.path.getmtime)
            text = report(durations(path), program.pieces[0].executable.as_text(), self.last - self.first + 1, seconds)
            with open(os.path.join(os.path.dirname(path), "report.txt"), "w") as f:
                f.write(text + "\n")
            return f"{text}\n\nthis and the trace: {os.path.dirname(path)}"


def durations(path):
    """A trace -> {HLO op: nanoseconds}, over all steps and devices."""
    total = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")  # the CPU's; on a TPU the line holds nothing but ops
                if name or plane.name.startswith("/device:") and line.name == "XLA Ops":
                    total[re.match(r"%?([\w.-]+)", name or event.name)[1]] += event.duration_ns
    return total


def describe(text):
    """Optimized HLO text -> {op: (kind, model's line)}; None for ops that only hold others."""
    ops, matmuls = {}, set()
    for computation, body in hlo.parse(text).items():
        for op in body.values():
            # computations come before their callers
            matmul = op.opcode in ("dot", "convolution") or op.attr(r"calls=%([\w.-]+)") in matmuls
            if matmul:
                matmuls.add(computation)
            # of several lines the innermost is the last: a layer's within its loop's
            line, torch_op = (LINE.findall(op.scope) or [("(made by the compiler)", "")])[-1]
            ops[op.name] = None if op.opcode in CONTAINERS else (kind_of(op, matmul, line, torch_op), line)
    return ops


def kind_of(op, matmul, line, torch_op):
    if op.opcode.startswith(hlo.COLLECTIVES):
        return "collectives"
    if kind := next((kind for word, kind in hlo.KINDS.items() if word in torch_op), "matmul" if matmul else None):
        return kind
    if "AdamW" in line:
        return "optimizer"
    if op.opcode.startswith(COPIES) or re.match(r"(?:(?:copy|transpose|bitcast|slice)_?)+_fusion", op.name):
        return "copies"
    return "elementwise and reductions"


def report(total, text, steps, seconds):
    """{HLO op: nanoseconds} of so many steps -> text. Shares are of the ops' time, all devices together."""
    ops, other = describe(text), ("other programs", "(not in the step)")
    rows = [(ns / 1e6 / steps, *ops.get(name, other), name) for name, ns in total.items() if ops.get(name, other)]
    whole = sum(row[0] for row in rows)

    def table(title, label, top):
        by = collections.Counter()
        for row in rows:
            by[label(row)] += row[0]
        shown = by.most_common(top)
        shown += [("the rest", whole - sum(ms for _, ms in shown))] * (len(by) > top)
        return ["", f"{title:62} share  ms a step", *(f"{label:62} {ms / whole:5.1%} {ms:10.3f}" for label, ms in shown)]

    return "\n".join([f"{steps} steps traced: {seconds / steps * 1e3:.1f} ms a step, {whole:.1f} ms of ops",
                      *table("by kind", lambda row: row[1], 20), *table("by line, forward and backward", lambda row: row[2], 25),
                      *table("by op", lambda row: f"{row[3][:28]:29}{row[2]}"[:62], 15)])
