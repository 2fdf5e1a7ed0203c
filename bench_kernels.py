"""Our Pallas kernels against JAX's own, and their block sizes, by the TPU compiler's count. No TPU needed.

    python bench.py kernels --topology tpu7x:2x2x1 [--json FILE]
    python bench.py tune --topology tpu7x:2x2x1 --model llama3 --size 8b      # writes tuned_blocks.json

Notable features:
- the compiler dumps a kernel's machine code: bundles, one a cycle, and which slots each of them fills
- a whole problem's cycles are the bundles of each part of the kernel times how often the grid runs that part, so
  skipped blocks, masks and group borders count. Waiting for memory does not
- a part takes at least what the matrix units need for its flops: bundles that issue faster wait. XLA's own matmul of 8192^3 is
  1.5M bundles on tpu7x, and the compiler's cost model gives it 2.3M cycles
- a size that the table holds is not tuned again: delete its line first
"""

import argparse
import dataclasses
import glob
import importlib
import json
import os
import re
import sys
import tempfile

import lowering  # noqa: F401, first: it sets libtpu's environment before jax loads

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import kernels
from kernels import CrossEntropyBlocks, GroupedBlocks, SplashBlocks

SLOTS = "mxu xlu valu vpop eup vload fill vstore spill salu".split()
MXU_FLOPS = {"v5e": 131072, "v5p": 262144, "v6e": 524288, "tpu7x": 524288}  # a cycle of one device: peak / clock
MXU_WIDTH = {"v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 256}  # a narrower matmul leaves the rest of it empty

# ------------------------------------------------------------------------- reading the compiler's dump


@dataclasses.dataclass
class Code:
    """One kernel: (bundles, slots filled) of the conditional parts of the grid's loop, in order, and of the rest,
    which every grid step runs. capacity: slots a bundle has."""

    parts: list
    rest: tuple
    capacity: dict


def read_dump(folder, kernel):
    """The Code of the one kernel of this name."""
    listing, = [f for f in glob.glob(f"{folder}/*-{kernel}.*-final_bundles.txt") if "schedule-analysis" not in f]
    stem = re.match(r"(.*/\d+-.*?)-\d+-final_bundles", listing).group(1)
    table, = glob.glob(f"{glob.escape(stem)}-*-final_hlo-static-per-bundle-utilization.txt")
    rows = [line.split() for line in open(table)]
    capacity, *used = [[int(c) for c in r] for r in rows if len(r) == len(SLOTS) and all(c.isdigit() for c in r)]
    used = np.array(used)

    branches, labels = [], {}
    for line in open(listing):
        if not (m := re.match(r"\s*(0x[0-9a-f]+|0)\s*\w*\s*:", line)):
            continue
        at = int(m.group(1), 16)
        branches += [(at, int(target)) for target in re.findall(r"sbr\.rel \(.*?\) target = \$region(\d+)", line)]
        for region in re.findall(r"(?:Start region|Start/End empty region) (\d+)", line):
            labels.setdefault(int(region), at)
    spans = {(a, labels[t]) for a, t in branches if labels.get(t, 0) >= a + 64}  # shorter ones count as always run
    spans -= {s for s in spans if any(o != s and o[1] == s[1] and o[0] <= s[0] < o[0] + 64 for o in spans)}
    start, end = max(spans, key=lambda s: s[1] - s[0])  # the body of the grid's loop
    regions = sorted((s for s in spans if start <= s[0] and s[1] <= end), key=lambda s: (s[0], -s[1]))
    parts = []
    for a, b in regions:  # without what lies in a region within it
        own = np.zeros(len(used), bool)
        own[a:b] = True
        for c, d in regions:
            if (c, d) != (a, b) and a <= c and d <= b:
                own[c:d] = False
        parts.append((int(own.sum()), dict(zip(SLOTS, used[own].sum(0).tolist()))))
    return Code(parts[1:], parts[0], dict(zip(SLOTS, capacity)))


# ------------------------------------------------------------------------------------- what is compiled

ATTENTION = {"T": 8192, "H": 8, "D": 128}  # causal, one key head: a device's share of a llama3 or qwen3 layer
EXPERTS = {"N": 65536, "D": 2048, "F": 768, "E": 128}  # qwen3_moe 30b-a3b, 8,192 tokens a device

# op: its kernels forward and backward, each with the fields of the blocks dataclass that are its own
OURS = {
    "splash_attention": (SplashBlocks, {"splash_attention": slice(4)}, {"splash_attention_backward": slice(4, 9)}),
    "linear_cross_entropy": (CrossEntropyBlocks, {"linear_cross_entropy": slice(2)},
                             {"linear_cross_entropy_dx": slice(2, 4), "linear_cross_entropy_dw": slice(4, 6)}),
    "grouped_matmul": (GroupedBlocks, {"grouped_matmul": slice(2)},
                       {"grouped_matmul_dx": slice(2, 4), "grouped_matmul_dw": slice(4, 7)}),
    "paired_grouped_matmul": (GroupedBlocks, {"paired_grouped_matmul": slice(2)},
                              {"paired_grouped_matmul_dx": slice(2, 4), "paired_grouped_matmul_dw": slice(4, 7)})}


def our_program(op, backward, s, blocks, chip):
    """-> function and arguments of one of our ops at the sizes s."""
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    f32, i32 = {"dtype": jnp.float32}, {"dtype": jnp.int32}
    if op == "splash_attention":
        q, k = shape(1, s["H"], s["T"], s["D"]), shape(1, 1, s["T"], s["D"])
        g, tensors, saved, options = q, [q, k, k], [q, shape(1, s["H"], s["T"], **f32)], [True, 0, 0.0, s["D"] ** -0.5]
    elif op == "linear_cross_entropy":
        g, options = shape(s["N"], **f32), [-100, 0.0, 1.0, 0.0]
        tensors, saved = [shape(s["N"], s["D"]), shape(s["V"], s["D"]), shape(s["N"], **i32)], [g]
    else:
        pair, w, g = op.startswith("paired"), shape(s["E"], s["D"], s["F"]), shape(s["N"], s["F"])
        tensors, saved, options = [shape(s["N"], s["D"]), *[w] * (1 + pair), shape(s["E"], **i32)], [g, g] * pair, []
    fn = kernels.lowerings("pallas", chip=chip)[getattr(torch.ops.tpu, op + "_backward" * backward).default]
    ids = [None] * (op == "splash_attention")  # no documents
    n = backward + 3
    return (lambda *args: fn(*args[:n], *ids, *args[n:], *options, blocks)), [*[g] * backward, *tensors, *saved * backward]


def jax_program(kernel, s, blocks):
    """-> function, arguments and kernel's name of JAX's own. blocks: (q, kv, kv_compute) or (rows, contraction, columns)."""
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    if kernel.startswith("splash"):
        (T, H, D), (q, kv, part) = s.values(), blocks
        sizes = splash_attention_kernel.BlockSizes(block_q=q, block_kv=kv, block_kv_compute=part, block_q_dkv=q, block_kv_dkv=kv,
                                                   block_kv_dkv_compute=part, use_fused_bwd_kernel=True)
        mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))] * H)
        backward = kernel.endswith("backward")
        attend = splash_attention_kernel.make_splash_mqa_single_device(mask, block_sizes=sizes, save_residuals=not backward)
        args = [shape(H, T, D), shape(T, D), shape(T, D)]
        if not backward:
            return attend, args, "splash_mqa_fwd"
        return lambda g, *qkv: jax.vjp(attend, *qkv)[1](g), args[:1] + args, "splash_mqa_dkv"
    x, w, g, n = (shape(s["N"], s["D"]), shape(s["E"], s["D"], s["F"]), shape(s["N"], s["F"]), shape(s["E"], dtype=jnp.int32))
    if kernel == "grouped_matmul":
        return lambda x, w, n: gmm(x, w, n, jnp.bfloat16, tuple(blocks)), [x, w, n], "gmm"
    if kernel == "grouped_matmul_dx":
        return lambda g, w, n: gmm(g, w, n, jnp.bfloat16, tuple(blocks), transpose_rhs=True), [g, w, n], "gmm"
    return lambda g, x, n: tgmm(x.T, g, n, jnp.bfloat16, tuple(blocks)), [g, x, n], "tgmm"


def useful_flops(kernel, s):
    """As kernels.efficiency counts: of an op's two backward kernels each has half, of the loss's 3 matmuls 1.5."""
    if kernel.startswith("splash"):
        return (10 if kernel.endswith("backward") else 4) * s["H"] * s["D"] * s["T"] * (s["T"] + 1) // 2
    if kernel.startswith("linear"):
        return (3 if kernel[-2:] in ("dx", "dw") else 2) * s["N"] * s["D"] * s["V"]
    return (4 if kernel.startswith("paired") else 2) * s["N"] * s["D"] * s["F"]


def mxu_cycles(kernel, s, blocks, chip):
    """What the matrix units need for one block."""
    width = lambda n: -(-n // MXU_WIDTH[chip]) * MXU_WIDTH[chip]  # noqa: E731
    a, b = blocks[:2]
    if kernel.startswith("splash"):
        flops = (10 if kernel.endswith("backward") else 4) * a * b * width(s["D"])
    elif kernel.startswith("linear"):
        flops = (4 if kernel[-2:] in ("dx", "dw") else 2) * a * b * s["D"]
    else:
        depth = {"dx": s["F"], "dw": blocks[-2]}.get(kernel[-2:], s["D"])
        flops = (4 if kernel.startswith("paired") else 2) * a * blocks[-1] * depth
    return flops // MXU_FLOPS[chip]


def cycles(kernel, s, blocks, code, ours, chip):
    """A whole problem's. blocks: the kernel's own. Parts with matmuls run once a working step, other parts at the ends of a
    row of blocks, what is too short to be a part in every step."""
    floor = mxu_cycles(kernel, s, blocks, chip)
    work = [max(bundles, floor) for bundles, slots in code.parts if slots["mxu"]]
    ends = sorted(bundles for bundles, slots in code.parts if not slots["mxu"] and bundles >= 64)
    every = code.rest[0] + sum(bundles for bundles, slots in code.parts if not slots["mxu"] and bundles < 64)
    if kernel.startswith("splash"):
        (T, H, _), (q, kv), backward = s.values(), blocks[:2], kernel.endswith("backward")
        flags = kernels.splash_steps(1, T, True, 0, q, kv, range(T), None)[2]
        full, partial = (int((flags & flag > 0).sum()) for flag in (kernels.FULL, kernels.PARTIAL))
        if not ours:  # empty blocks are steps too
            rows = T // kv if backward else H * (T // q)
            return H * ((T // q) * (T // kv) * every + (full + partial) * work[0]) + rows * sum(ends)
        once = sum(ends[-2:]) if backward else 0  # the gradients of a head's keys: cleared, written
        ends = ends[:-2] if backward else ends
        return once + H * (len(flags) * every + full * work[0] + partial * work[1] + T // q * sum(ends))
    if kernel.startswith("linear"):
        grid = s["N"] // blocks[0], -(-s["V"] // blocks[1])
        return grid[0] * grid[1] * max(every, floor) + grid[kernel.endswith("dw")] * sum(ends)
    sizes = group_sizes(s)
    last = np.cumsum(sizes)
    rows, a, b = blocks[0], blocks[1], blocks[-1]
    visits = int((-(-last // rows) - (last - sizes) // rows)[sizes > 0].sum())
    per_visit = visits * (every + work[-1])
    if kernel.endswith("dw"):
        first = work[0] - work[-1] if ours else 0  # our first visit of a group sets the sum, the others add to it
        return -(-s["D"] // a) * -(-s["F"] // b) * (per_visit + int((sizes > 0).sum()) * (first + sum(ends)))
    width, depth = (s["D"], s["F"]) if kernel.endswith("dx") else (s["F"], s["D"])
    return -(-width // b) * (1 if ours else -(-depth // a)) * per_visit


def group_sizes(s):
    """A router's: uneven, no multiples of anything."""
    rng = np.random.default_rng(0)
    return rng.multinomial(s["N"], rng.dirichlet(np.full(s["E"], 20.0)))


def measure(fn, args, names, sizes, topology, ours):
    """Compiles a function with kernels in it. names: {ours: (name in the dump, its own blocks)} -> {ours: measured}."""
    for f in glob.glob(f"{FOLDER.name}/*"):
        os.remove(f)
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1]
    sharding = NamedSharding(Mesh(np.array(device), ("x",)), P())
    jax.jit(fn).lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in args)).compile()
    results = {}
    for kernel, (name, blocks) in names.items():
        code, flops = read_dump(FOLDER.name, name), useful_flops(kernel, sizes)
        bundles, slots = next(((b, s) for b, s in code.parts if s["mxu"]), code.rest)  # the first: without a mask
        total = cycles(kernel, sizes, blocks, code, ours, topology.split(":")[0])
        results[kernel] = {
            "kernel": kernel, "who": "ours" if ours else "jax", "blocks": list(blocks), "cycles": total, "flops": flops,
            "bundles_per_block": bundles, "bundles_per_mflop": total / flops * 1e6,
            "mxu_slots": slots["mxu"] / (code.capacity["mxu"] * bundles), "spills": slots["spill"],
            "efficiency": flops / total / MXU_FLOPS[topology.split(":")[0]]}
    return results


def measure_ours(op, sizes, blocks, topology):
    """-> {kernel: measured} of an op forward and backward; blocks that do not fit are left out, with the compiler's words."""
    cls, *passes = OURS[op]
    results = {}
    for backward, parts in enumerate(passes):
        try:
            fn, args = our_program(op, backward, sizes, blocks, topology.split(":")[0])
            names = {kernel: (kernel, blocks[part]) for kernel, part in parts.items()}
            results |= measure(fn, args, names, sizes, topology, True)
        except (kernels.KernelError, jax.errors.JaxRuntimeError) as e:
            print(f"  {op}{' backward' * backward} {blocks}: {str(e).splitlines()[0][:150]}", flush=True)
    return results


# ----------------------------------------------------------------------------------------- the commands

# Each first one is what both have equal: q, kv, then parts; rows, contraction, columns.
JAX_BLOCKS = {
    "splash_attention": [(1024, 1024, 1024), (1024, 1024, 512), (512, 512, 512), (2048, 1024, 1024), (1024, 2048, 1024),
                         (2048, 2048, 1024)],
    "splash_attention_backward": [(1024, 1024, 1024), (1024, 1024, 512), (512, 512, 512)],
    "grouped_matmul": [(256, 2048, 768), (512, 2048, 768), (128, 2048, 768), (512, 1024, 768)],
    "grouped_matmul_dx": [(256, 768, 2048), (512, 768, 2048), (128, 768, 2048), (512, 768, 1024)],
    "grouped_matmul_dw": [(256, 1024, 768), (512, 2048, 768), (512, 1024, 768), (128, 1024, 768), (256, 2048, 768)]}


def candidates(op, D=None, F=None):
    """Blocks to try, each kernel's own fields side by side. Rows and outer blocks are not so small as to wait for memory."""
    if op == "splash_attention":
        forward = [(1024, 1024, 512, 256), (1024, 1024, 256, 256), (2048, 1024, 512, 256), (1024, 2048, 512, 256),
                   (2048, 2048, 512, 256), (1024, 1024, 1024, 256)]
        backward = [(1024, 1024, 512, 512), (512, 512, 512, 512), (1024, 1024, 512, 256), (2048, 1024, 512, 512),
                    (1024, 2048, 512, 512), (1024, 1024, 256, 512)]
        return [[*a, *b, 8192] for a, b in zip(forward, backward)]
    if op == "linear_cross_entropy":
        forward = [(512, 512), (1024, 512), (512, 256), (1024, 256)]
        dx = [(256, 128), (512, 256), (1024, 256), (512, 512)]  # dw: the other way round
        return [[*a, *b, *b[::-1]] for a, b in zip(forward, dx)]
    d, f = ([c for c in kernels.cuts(n, 128)[:2]] for n in (D, F))
    tries = [(256, 0, 0), (512, 0, 0), (512, 1, 0), (128, 0, 1)]
    return [[rows, f[j], rows, d[j], rows, d[i], f[j]] for rows, i, j in tries]


def kernels_command(args):
    """Ours and JAX's own at equal blocks and at each one's best, in the compiler's cycles for a whole problem."""
    print(f"{args.topology}: attention {ATTENTION} causal; experts {EXPERTS}. A bundle is a cycle; memory is not counted.")
    print(f"{'':25} {'':6} {'':5} {'blocks':24} {'bundles/block':>13} {'bundles/Mflop':>13} {'mxu':>4} {'spills':>6} {'cycles':>11}"
          " ours/jax")
    report = []
    for op, sizes in (("splash_attention", ATTENTION), ("grouped_matmul", EXPERTS)):
        tries = candidates(op, sizes["D"], sizes.get("F"))
        if op == "grouped_matmul":
            tries[0][5] = 1024  # dw's block as JAX's
        ours = [measure_ours(op, sizes, blocks, args.topology) for blocks in tries]
        for kernel in (k for k in JAX_BLOCKS if k.startswith(op)):
            results = {"ours": [r[kernel] for r in ours if kernel in r], "jax": []}
            for blocks in JAX_BLOCKS[kernel]:
                fn, arguments, name = jax_program(kernel, sizes, blocks)
                results["jax"] += measure(fn, arguments, {kernel: (name, blocks)}, sizes, args.topology, False).values()
            for label in ("equal", "best"):
                pair = {who: rs[0] if label == "equal" else min(rs, key=lambda r: r["cycles"]) for who, rs in results.items()}
                for who, r in pair.items():
                    ratio = f"{r['cycles'] / pair['jax']['cycles']:8.3f}" if who == "ours" else ""
                    print(f"{kernel:25} {label:6} {who:5} {str(r['blocks']):24} {r['bundles_per_block']:13,} "
                          f"{r['bundles_per_mflop']:13.3f} {r['mxu_slots']:4.0%} {r['spills']:6,} {r['cycles']:11,} {ratio}", flush=True)
            report += results["ours"] + results["jax"]
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"topology": args.topology, "results": report}, f, indent=1)


def tune(args):
    """Ranks block sizes that fit VMEM by cycles; each kernel's best go into tuned_blocks.json, which kernels.py reads."""
    chip = args.topology.split(":")[0]
    config = importlib.import_module(args.model).SIZES[args.size]
    wanted = [("splash_attention", {"T": 8192, "H": config.n_heads // getattr(config, "n_kv_heads", config.n_heads), "D": getattr(config, "head_dim", 0) or config.dim // config.n_heads})]
    if hasattr(config, "vocab"):
        wanted += [("linear_cross_entropy", {"N": 8192, "D": config.dim, "V": config.vocab})]
    if hasattr(config, "n_experts"):
        shapes = {"N": 8192 * config.top_k, "E": config.n_experts}
        wanted += [("paired_grouped_matmul", shapes | {"D": config.dim, "F": config.ffn}),  # gate and up
                   ("grouped_matmul", shapes | {"D": config.ffn, "F": config.dim})]  # down
    for op, sizes in wanted:
        name = " ".join([op, *(f"{key}={sizes[key]}" for key in "DF" if key in sizes)])
        if name in kernels.TABLE.get(chip, {}):
            print(f"{chip} {name}: in {kernels.TABLE_FILE.name} already")
            continue
        cls, *passes = OURS[op]
        tries = [measure_ours(op, sizes, blocks, args.topology) for blocks in candidates(op, sizes["D"], sizes.get("F"))]
        entry = {"blocks": []}
        for label, parts in zip(("forward", "backward"), passes):
            best = []
            for kernel in parts:
                ranked = sorted((r[kernel] for r in tries if kernel in r), key=lambda r: r["cycles"])
                for r in ranked:
                    print(f"{chip} {name} {kernel} {r['blocks']}: {r['cycles']:,} cycles, {r['efficiency']:.0%} of the MXU's peak")
                best.append(ranked[0])
                entry["blocks"] += ranked[0]["blocks"]
            total, flops = sum(r["cycles"] for r in best), sum(r["flops"] for r in best)
            entry[label] = {"efficiency": round(flops / total / MXU_FLOPS[chip], 3), "cycles": total, "flops": flops,
                            "bundles": {r["kernel"]: r["bundles_per_block"] for r in best}}
        kernels.TABLE.setdefault(chip, {})[name] = entry
        kernels.TABLE_FILE.write_text("{" + ",\n".join(
            f'\n"{chip}": {{\n' + ",\n".join(f"  {json.dumps(n)}: {json.dumps(e)}" for n, e in sorted(rows.items())) + "}"
            for chip, rows in sorted(kernels.TABLE.items())) + "\n}\n")


def main(argv=None):
    global FOLDER
    p = argparse.ArgumentParser(prog="bench.py", description=__doc__.split("\n")[0])
    p.add_argument("command", choices=["kernels", "tune"])
    p.add_argument("--topology", default="tpu7x:2x2x1")
    p.add_argument("--json", metavar="FILE", help="kernels: everything measured")
    p.add_argument("--model", default="llama3", help="tune")
    p.add_argument("--size", default="8b", help="tune")
    args = p.parse_args(argv)
    FOLDER = tempfile.TemporaryDirectory()
    # libtpu reads it once, when the first topology is made. Both sides get the same VMEM: JAX's kernels ask for none of their own.
    limit = kernels.vmem_bytes(args.topology.split(":")[0]) >> 10
    os.environ["LIBTPU_INIT_ARGS"] = (f"--xla_jf_dump_to={FOLDER.name} --xla_jf_dump_llo_pass_label_regex=final.* "
                                      f"--xla_tpu_scoped_vmem_limit_kib={limit}")
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    {"kernels": kernels_command, "tune": tune}[args.command](args)


if __name__ == "__main__":
    main(sys.argv[1:])
