"""Our Pallas kernels against JAX's own, by the TPU compiler's count. No TPU needed.

    python bench.py kernels --topology tpu7x:2x2x1 [--json FILE]
    python bench.py tune --topology tpu7x:2x2x1 --model llama3 --size 8b      # writes tuned_blocks.json

Notable features:
- the compiler dumps a kernel's machine code: bundles, one a cycle, and which slots each of them fills
- a whole problem's cycles are the bundles of each part of the kernel times how often the grid runs that part, so
  skipped blocks, masks and group borders count. Waiting for memory does not
- each compile is a process of its own: libtpu reads its flags once
"""

import argparse
import dataclasses
import glob
import importlib
import json
import os
import re
import subprocess
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
from kernels import GroupedBlocks

SLOTS = "mxu xlu valu vpop eup vload fill vstore spill salu".split()
BF16, F32 = jnp.bfloat16, jnp.float32


# ------------------------------------------------------------------------- reading the compiler's dump


@dataclasses.dataclass
class Code:
    """One kernel: (bundles, slots filled) of the conditional parts of the grid's loop, in order, and of the rest,
    which every grid step runs. capacity: slots a bundle has."""

    parts: list
    rest: tuple
    capacity: dict


def read_dump(folder, kernel):
    """The Code of the one kernel whose name begins with `kernel`."""
    listing, = [f for f in glob.glob(f"{folder}/*-{kernel}*-final_bundles.txt") if "schedule-analysis" not in f]
    stem = re.match(r"(.*/\d+-.*?)-\d+-final_bundles", listing).group(1)
    table, = [f for f in glob.glob(f"{glob.escape(stem)}-*-final_hlo-static-per-bundle-utilization.txt")]
    rows = [line.split() for line in open(table)]
    capacity, *used = [[int(c) for c in r] for r in rows if len(r) == len(SLOTS) and all(c.isdigit() for c in r)]
    used = np.array(used)

    branches, labels, loop_ends = [], {}, []
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


# -------------------------------------------------------------------------------------------- problems
#
# A case is plain data, so that another process can compile it: {"kernel", "who": "ours" or "jax", "blocks", shapes}.

ATTENTION = {"T": 8192, "H": 8, "D": 128}  # causal, one key head: a device's share of a llama3 or qwen3 layer
EXPERTS = {"N": 65536, "D": 2048, "F": 768, "E": 128}  # qwen3_moe 30b-a3b, 8,192 tokens a device


def group_sizes(case):
    """A router's: uneven, no multiples of anything."""
    rng = np.random.default_rng(0)
    return rng.multinomial(case["N"], rng.dirichlet(np.full(case["E"], 20.0)))


def jax_attention(case, backward):
    T, H = case["T"], case["H"]
    q, kv, kv_compute = case["blocks"]
    sizes = splash_attention_kernel.BlockSizes(
        block_q=q, block_kv=kv, block_kv_compute=kv_compute, block_q_dkv=q, block_kv_dkv=kv,
        block_kv_dkv_compute=kv_compute, use_fused_bwd_kernel=True)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))] * H)
    attend = splash_attention_kernel.make_splash_mqa_single_device(mask, block_sizes=sizes, save_residuals=not backward)
    if not backward:
        return lambda q, k, v: attend(q[0], k[0, 0], v[0, 0])
    return lambda g, q, k, v, out, lse: jax.vjp(attend, q[0], k[0, 0], v[0, 0])[1](g[0])


def program(case, chip):
    """-> function, argument shapes, name of the kernel in the dump."""
    c, kernel, blocks = case, case["kernel"], case["blocks"]
    shape = lambda *s, dtype=BF16: (s, dtype)  # noqa: E731
    table, ours = kernels.lowerings("pallas", chip=chip), c["who"] == "ours"
    op = lambda name: table[getattr(torch.ops.tpu, name).default]  # noqa: E731
    if kernel.startswith("splash"):
        query, key, backward = shape(1, c["H"], c["T"], c["D"]), shape(1, 1, c["T"], c["D"]), "backward" in kernel
        args = [query, key, key]
        if backward:
            args = [query, *args, query, shape(1, c["H"], c["T"], dtype=F32)]
        if not ours:
            return jax_attention(c, backward), args, "splash_mqa_dkv" if backward else "splash_mqa_fwd"
        mask = (True, 0, 0.0, c["D"] ** -0.5, blocks)
        if backward:
            return (lambda g, q, k, v, out, lse: op("splash_attention_backward")(g, q, k, v, None, out, lse, *mask),
                    args, "splash_attention_backward")
        return lambda q, k, v: op("splash_attention")(q, k, v, None, *mask), args, "splash_attention"
    if kernel.startswith("linear_cross_entropy"):
        rows = shape(c["N"], dtype=jnp.int32), shape(c["N"], dtype=F32)
        x, w, options = shape(c["N"], c["D"]), shape(c["V"], c["D"]), (-100, 0.0, 1.0, 0.0, blocks)
        if kernel == "linear_cross_entropy":
            return lambda x, w, t: op("linear_cross_entropy")(x, w, t, *options), [x, w, rows[0]], kernel
        return (lambda g, x, w, t, lse: op("linear_cross_entropy_backward")(g, x, w, t, lse, *options),
                [rows[1], x, w, *rows], kernel)
    x, w, g, sizes = (shape(c["N"], c["D"]), shape(c["E"], c["D"], c["F"]), shape(c["N"], c["F"]),
                      shape(c["E"], dtype=jnp.int32))
    if kernel.startswith("paired"):
        if not kernel.endswith(("dx", "dw")):
            return lambda x, w, u, n: op(kernel)(x, w, u, n, blocks), [x, w, w, sizes], "gated_grouped"
        part, name = ((slice(1), "multiply_transposed_grouped") if kernel.endswith("dx") else
                      (slice(1, 3), "weights_grouped"))
        return (lambda g, x, w, u, n, a, b: op("paired_grouped_matmul_backward")(g, x, w, u, n, a, b, blocks)[part],
                [g, x, w, w, sizes, g, g], name)
    if kernel == "grouped_matmul":
        if ours:
            return lambda x, w, n: op(kernel)(x, w, n, blocks), [x, w, sizes], "multiply_grouped"
        return lambda x, w, n: gmm(x, w, n, BF16, tuple(blocks)), [x, w, sizes], "gmm"
    if kernel == "grouped_matmul_dx":
        if ours:
            return (lambda g, x, w, n: op("grouped_matmul_backward")(g, x, w, n, blocks)[0], [g, x, w, sizes],
                    "multiply_transposed_grouped")
        return lambda g, w, n: gmm(g, w, n, BF16, tuple(blocks), transpose_rhs=True), [g, w, sizes], "gmm"
    if ours:
        return (lambda g, x, w, n: op("grouped_matmul_backward")(g, x, w, n, blocks)[1], [g, x, w, sizes],
                "weights_grouped")
    return lambda g, x, n: tgmm(x.T, g, n, BF16, tuple(blocks)), [g, x, sizes], "tgmm"


def useful_flops(case):
    c, kernel = case, case["kernel"]
    if kernel.startswith("splash"):
        return (10 if "backward" in kernel else 4) * c["H"] * c["D"] * c["T"] * (c["T"] + 1) // 2
    return (4 if kernel.startswith("paired") else 2) * c["N"] * c["D"] * c.get("F", c.get("V"))


def cycles(case, code):
    """A whole problem's. Parts with matmuls run once a working step, other parts at the ends of a row of blocks,
    what is too short to be a part in every step."""
    c, kernel, ours = case, case["kernel"], case["who"] == "ours"
    work = [bundles for bundles, slots in code.parts if slots["mxu"]]
    ends = sorted(bundles for bundles, slots in code.parts if not slots["mxu"] and bundles >= 64)
    every = code.rest[0] + sum(bundles for bundles, slots in code.parts if not slots["mxu"] and bundles < 64)
    if kernel.startswith("splash"):
        q, kv = c["blocks"][4:6] if ours and "backward" in kernel else c["blocks"][:2]
        flags = kernels.splash_steps(1, c["T"], True, 0, q, kv, range(c["T"]), None)[2]
        full, partial = (int((flags & flag > 0).sum()) for flag in (kernels.FULL, kernels.PARTIAL))
        if ours:
            once = sum(ends[-2:]) if "backward" in kernel else 0  # the gradients of a head's keys: cleared, written
            ends = ends[:-2] if "backward" in kernel else ends
            return once + c["H"] * (len(flags) * every + full * work[0] + partial * work[1] + c["T"] // q * sum(ends))
        grid = (c["T"] // q) * (c["T"] // kv)  # empty blocks are steps too
        rows = c["T"] // kv if "backward" in kernel else c["H"] * (c["T"] // q)
        return c["H"] * (grid * every + (full + partial) * work[0]) + rows * sum(ends)
    if kernel.startswith("linear_cross_entropy"):
        tokens, vocab = c["blocks"]
        grid = c["N"] // tokens, -(-c["V"] // vocab)
        return grid[0] * grid[1] * (every + sum(work)) + (grid[1] if kernel.endswith("dw") else grid[0]) * sum(ends)
    sizes = group_sizes(c)
    last = np.cumsum(sizes)
    rows, columns, deep = c["blocks"][0], c["D"] if kernel.endswith("dx") else c["F"], 1
    if kernel.endswith("dw"):
        rows, d, f = c["blocks"][4:7] if ours else (c["blocks"][0], *c["blocks"][1:])
        columns, block, deep = c["F"], f, -(-c["D"] // d)
    elif ours:
        rows, block = c["blocks"][2:4] if kernel.endswith("dx") else c["blocks"][:2]
    else:
        block, deep = c["blocks"][2], -(-(c["F"] if kernel.endswith("dx") else c["D"]) // c["blocks"][1])
    visits = int((-(-last // rows) - (last - sizes) // rows)[sizes > 0].sum())
    groups = int((sizes > 0).sum())
    per_visit = visits * (every + work[-1])
    if kernel.endswith("dw"):
        first = work[0] - work[-1] if ours else 0  # our first visit of a group sets the sum, the others add to it
        per_visit += groups * (first + sum(ends))
    return -(-columns // block) * deep * per_visit


# -------------------------------------------------------------------------------------- compile, measure


def compile_case(case, topology):
    fn, shapes, _ = program(case, topology.split(":")[0])
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1]
    sharding = NamedSharding(Mesh(np.array(device), ("x",)), P())
    jax.jit(fn).lower(*(jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in shapes)).compile()


def measure(case, topology):
    """-> {"cycles", "bundles_per_block", ...}, or {"error"}."""
    with tempfile.TemporaryDirectory() as folder:
        # Both sides get the same share of VMEM; JAX's kernels ask for none of their own.
        limit = kernels.vmem_limit(topology.split(":")[0]) >> 10
        env = os.environ | {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_tpu_scoped_vmem_limit_kib={limit}",
                            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        run = subprocess.run([sys.executable, __file__, "compile", json.dumps(case), topology], env=env,
                             capture_output=True, text=True)
        if run.returncode:
            return case | {"error": run.stderr.strip().splitlines()[-1][:200]}
        code = read_dump(folder, program(case, topology.split(":")[0])[2])
    bundles, slots = next(((b, s) for b, s in code.parts if s["mxu"]), code.rest)  # the first: without a mask
    total = cycles(case, code)
    return case | {"cycles": total, "bundles_per_block": bundles, "bundles_per_mflop": total / useful_flops(case) * 1e6,
                   "mxu": slots["mxu"] / (code.capacity["mxu"] * bundles), "spills": slots["spill"]}


def best(results):
    return min((r for r in results if "cycles" in r), key=lambda r: r["cycles"])


# ----------------------------------------------------------------------------------------- the commands

SPLASH_SIZES = [(512, 512), (1024, 1024), (2048, 1024), (1024, 2048), (2048, 2048)]


def candidates(kernel):
    """-> our blocks, JAX's, and what of either must agree to be called equal."""
    if kernel == "splash":
        return ([[q, kv, 512, 256] for q, kv in SPLASH_SIZES[:4]],
                [[q, kv, c] for q, kv in SPLASH_SIZES for c in (512, 1024) if c <= kv], lambda b: b[:2])
    if kernel == "splash_backward":
        return ([[1024, 1024, 512, 256, q, kv, 512, 512] for q, kv in SPLASH_SIZES[:2]],
                [[q, kv, c] for q, kv in SPLASH_SIZES[:2] for c in (512, 1024) if c <= kv],
                lambda b: b[4:6] if len(b) > 3 else b[:2])
    if kernel == "grouped_matmul":
        return ([[rows, 768, 256, 2048, 256, 1024, 768] for rows in (128, 256, 512)],
                [[rows, k, 768] for rows in (128, 256, 512) for k in (1024, 2048)],
                lambda b: b[:2] if len(b) > 3 else ([b[0], b[2]] if b[1] == 2048 else None))
    if kernel == "grouped_matmul_dx":
        return ([[256, 768, rows, columns, 256, 1024, 768] for rows in (128, 256, 512) for columns in (1024, 2048)],
                [[rows, 768, columns] for rows in (128, 256, 512) for columns in (1024, 2048)],
                lambda b: b[2:4] if len(b) > 3 else [b[0], b[2]])
    return ([[256, 768, 256, 2048, rows, d, 768] for rows in (128, 256, 512) for d in (1024, 2048)],
            [[rows, d, 768] for rows in (128, 256, 512) for d in (1024, 2048)],
            lambda b: b[4:] if len(b) > 3 else b)


COMPARED = {"splash": ATTENTION, "splash_backward": ATTENTION, "grouped_matmul": EXPERTS, "grouped_matmul_dx": EXPERTS,
            "grouped_matmul_dw": EXPERTS}
EQUAL = {"splash": [1024, 1024], "splash_backward": [1024, 1024], "grouped_matmul": [256, 768],
         "grouped_matmul_dx": [256, 2048], "grouped_matmul_dw": [256, 1024, 768]}


def kernels_command(args):
    """Ours and JAX's own at equal blocks and at each one's best, in the compiler's cycles for a whole problem."""
    print(f"{args.topology}: attention {ATTENTION} causal; experts {EXPERTS}. A bundle is a cycle; memory is not counted.")
    print(f"{'':18} {'':6} {'':5} {'blocks':34} {'bundles/block':>13} {'bundles/Mflop':>13} {'mxu':>4} {'spills':>6} {'cycles':>11}"
          " ours/jax")
    report = []
    for kernel, shapes in COMPARED.items():
        ours, theirs, size = candidates(kernel)
        results = {who: [measure({"kernel": kernel, "who": who, "blocks": b} | shapes, args.topology) for b in blocks]
                   for who, blocks in (("ours", ours), ("jax", theirs))}
        for label, keep in (("equal", lambda r: size(r["blocks"]) == EQUAL[kernel]), ("best", lambda r: True)):
            pair = {who: best([r for r in rs if keep(r)]) for who, rs in results.items()}
            for who, r in pair.items():
                ratio = f"{r['cycles'] / pair['jax']['cycles']:8.3f}" if who == "ours" else ""
                print(f"{kernel:18} {label:6} {who:5} {str(r['blocks']):34} {r['bundles_per_block']:13,} "
                      f"{r['bundles_per_mflop']:13.3f} {r['mxu']:4.0%} {r['spills']:6,} {r['cycles']:11,} {ratio}", flush=True)
        report += results["ours"] + results["jax"]
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"topology": args.topology, "results": report}, f, indent=1)


def tune(args):
    """Ranks block sizes that fit VMEM by cycles and writes the best into tuned_blocks.json, which kernels.py reads."""
    chip = args.topology.split(":")[0]
    config = importlib.import_module(args.model).SIZES[args.size]
    best_blocks = {}

    def search(name, kernel, blocks, **shapes):
        results = [measure({"kernel": kernel, "who": "ours", "blocks": b} | shapes, args.topology) for b in blocks]
        for r in sorted(results, key=lambda r: r.get("cycles", 1e99)):
            print(f"{name} {kernel} {r['blocks']}: " + (f"{r['cycles']:,} cycles" if "cycles" in r else r["error"]), flush=True)
        return best(results)["blocks"]

    D = config.head_dim
    name = f"splash_attention D={D}"
    shapes = {"T": 8192, "H": config.n_heads // config.n_kv_heads, "D": D}
    parts = [(512, 256), (256, 256), (512, 512), (1024, 256)]
    forward = search(name, "splash", [[q, kv, *c] for q, kv in SPLASH_SIZES[:4] for c in parts if c[0] <= q], **shapes)
    backward = search(name, "splash_backward",
                      [[*forward, q, kv, *c] for q, kv in SPLASH_SIZES[:3] for c in parts[:3] if c[0] <= q], **shapes)
    best_blocks[name] = backward
    if hasattr(config, "n_experts"):
        for pair, D, F in ((True, config.dim, config.ffn), (False, config.ffn, config.dim)):  # gate and up; down
            shapes = {"N": 8192 * config.top_k, "D": D, "F": F, "E": config.n_experts}
            op = "paired_" * pair + "grouped_matmul"
            name = f"{op} D={D} F={F}"
            fits = [b for b in (
                [rows, columns, rows, dx_columns, rows, d, f] for rows in (128, 256, 512) for columns in kernels.cuts(F)[:2]
                for dx_columns in kernels.cuts(D)[:2] for d in kernels.cuts(D)[:3] for f in kernels.cuts(F)[:2])
                if max(kernels.grouped_vmem(GroupedBlocks(*b), D, F, pair, 2).values()) <= kernels.vmem_limit(chip)]
            pick = {}
            for kernel, fields in ((op, (0, 2)), (f"{op}_dx", (2, 4)), (f"{op}_dw", (4, 7))):
                distinct = {tuple(b[slice(*fields)]): b for b in fits}
                pick[fields] = search(name, kernel, list(distinct.values()), **shapes)[slice(*fields)]
            best_blocks[name] = [b for fields in sorted(pick) for b in pick[fields]]
    tuned = json.loads(kernels.TUNED_FILE.read_text()) if kernels.TUNED_FILE.exists() else {}
    tuned.setdefault(chip, {}).update(best_blocks)
    kernels.TUNED_FILE.write_text("{" + ",\n".join(
        f'\n"{chip}": {{\n' + ",\n".join(f"  {json.dumps(n)}: {json.dumps(b)}" for n, b in sorted(rows.items())) + "}"
        for chip, rows in sorted(tuned.items())) + "\n}\n")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = p.add_subparsers(dest="command", required=True)
    c = commands.add_parser("kernels")
    c.add_argument("--topology", default="tpu7x:2x2x1")
    c.add_argument("--json")
    c.set_defaults(run=kernels_command)
    c = commands.add_parser("tune")
    c.add_argument("--topology", default="tpu7x:2x2x1")
    c.add_argument("--model", default="llama3")
    c.add_argument("--size", default="8b")
    c.set_defaults(run=tune)
    c = commands.add_parser("compile")  # what `measure` starts
    c.add_argument("case", type=json.loads)
    c.add_argument("topology")
    c.set_defaults(run=lambda args: compile_case(args.case, args.topology))
    args = p.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
