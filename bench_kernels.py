"""Our Pallas kernels against JAX's own, and their block sizes, by the TPU compiler's count. No TPU needed.

    python bench.py kernels --topology tpu7x:2x2x1 [--json FILE]
    python bench.py tune --topology tpu7x:2x2x1 --model llama3 --size 8b      # writes tuned_blocks.json

Notable features:
- the compiler dumps a kernel's machine code: bundles, one a cycle, and which slots each of them fills
- a whole problem's cycles are the bundles of each part of the kernel times how often the grid runs that part, so skipped
  blocks, masks and group borders count. Waiting for memory does not
- a part takes at least what the matrix units need for its flops: bundles that issue faster wait. XLA's own matmul of 8192^3 is
  1.5M bundles on tpu7x, and the compiler's cost model gives it 2.3M cycles
- a size that the table holds is not tuned again: delete its line first
"""

import argparse
import glob
import json
import os
import re
import tempfile

import lowering  # noqa: F401, first: it sets libtpu's environment before jax loads

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import SingleDeviceSharding

import kernels
import plan
from train import MODELS, UsageError

MXU_FLOPS = {"v5e": 131072, "v5p": 131072, "v6e": 524288, "tpu7x": 524288}  # a cycle of one core: peak / clock / cores
CORES = {"v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 1}  # of a device: they share a grid's parallel blocks
MXU_WIDTH = {"v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 256}  # a narrower matmul leaves the rest of it empty
ATTENTION = {"T": 8192, "H": 8, "D": 128}  # causal, one key head: a device's share of a llama3 or qwen3 layer
EXPERTS = {"N": 65536, "D": 2048, "F": 768, "E": 128}  # qwen3_moe 30b-a3b, 8,192 tokens a device

# op: lowerings' option, its blocks, and its kernels with the number of fields of the blocks that are their own, in order
GROUPED = {"grouped_matmul": 2, "grouped_matmul_dx": 2, "grouped_matmul_dw": 3}
OURS = {"splash_attention": ("splash_blocks", kernels.SplashBlocks, {"splash_attention": 4, "splash_attention_backward": 5}),
        "linear_cross_entropy": ("ce_blocks", kernels.CrossEntropyBlocks, {
            "linear_cross_entropy": 2, "linear_cross_entropy_dx": 3, "linear_cross_entropy_dw": 3}),
        "grouped_matmul": ("grouped_blocks", kernels.GroupedBlocks, GROUPED),
        "paired_grouped_matmul": ("grouped_blocks", kernels.GroupedBlocks, {"paired_" + k: n for k, n in GROUPED.items()})}


def read_dump(folder, kernel):
    """A kernel's machine code (its name, or a pattern) -> the MXU slots of a bundle, and [(bundles, MXU slots filled, spills)]:
    of what every step of the grid runs, then of its conditional parts in order."""
    listing, = (f for f in glob.glob(f"{folder}/*-{kernel}.*-final_bundles.txt") if "schedule-analysis" not in f)
    table, = glob.glob(re.sub(r"\d+-final_bundles", "*-final_hlo-static-per-bundle-utilization", listing))
    rows = [line.split() for line in open(table)]  # MXU, XLU, VALU, VPOP, EUP, VLOAD, fills, VSTORE, spills, SALU
    capacity, *used = [(int(row[0]), int(row[8])) for row in rows if len(row) == 10 and "".join(row).isdigit()]
    branches, labels = [], {}
    for line in open(listing):
        if m := re.match(r"\s*(0x[0-9a-f]+|0)\s*\w*\s*:", line):
            at = int(m.group(1), 16)
            branches += [(at, int(target)) for target in re.findall(r"sbr\.rel \(.*?\) target = \$region(\d+)", line)]
            for region in re.findall(r"(?:Start region|Start/End empty region) (\d+)", line):
                labels.setdefault(int(region), at)
    spans = {(a, labels[t]) for a, t in branches if labels.get(t, 0) >= a + 64}  # shorter ones count as always run
    spans -= {s for s in spans if any(o != s and o[1] == s[1] and o[0] <= s[0] < o[0] + 64 for o in spans)}
    start, end = max(spans, key=lambda s: s[1] - s[0])  # the body of the grid's loop
    spans = sorted((s for s in spans if start <= s[0] and s[1] <= end), key=lambda s: (s[0], -s[1]))
    innermost = np.full(len(used), -1)
    for i, (a, b) in enumerate(spans):  # those within it come later and take their bundles
        innermost[a:b] = i
    own = [np.array(used)[innermost == i] for i in range(len(spans))]
    return capacity[0], [(len(bundles), *bundles.sum(0).tolist()) for bundles in own]


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def our_program(op, s, blocks, chip):
    """-> one of our ops forward and backward at the sizes s, and its arguments."""
    if op == "splash_attention":
        options, g, kv = [True, 0, 0.0, s["D"] ** -0.5], shape(1, s["H"], s["T"], s["D"]), shape(1, 1, s["T"], s["D"])
        tensors, saved = [g, kv, kv, None], [g, shape(1, s["H"], s["T"], dtype=jnp.float32)]
    elif op == "linear_cross_entropy":
        options, g = [-100, 0.0, 1.0, 0.0], shape(s["N"], dtype=jnp.float32)
        tensors, saved = [shape(s["N"], s["D"]), shape(s["V"], s["D"]), shape(s["N"], dtype=jnp.int32)], [g]
    else:
        options, g, pair, w = [], shape(s["N"], s["F"]), op.startswith("paired"), shape(s["E"], s["D"], s["F"])
        tensors, saved = [shape(s["N"], s["D"]), *[w] * (1 + pair), shape(s["E"], dtype=jnp.int32)], [g, g] * pair
    option, cls, _ = OURS[op]
    table = kernels.lowerings("pallas", chip=chip, **{option: cls(*blocks)})
    forward, backward = (table[getattr(torch.ops.tpu, op + suffix).default] for suffix in ("", "_backward"))
    return (lambda g, tensors, saved: (forward(*tensors, *options), backward(g, *tensors, *saved, *options))), [g, tensors, saved]


def jax_program(kernel, s, blocks):
    """-> function, arguments and kernel's name of JAX's own. blocks: (q, kv, kv_compute) or (rows, contraction, columns)."""
    if kernel.startswith("splash"):
        (T, H, D), (q, kv, part), backward = s.values(), blocks, kernel.endswith("backward")
        sizes = splash_attention_kernel.BlockSizes(block_q=q, block_kv=kv, block_kv_compute=part, block_q_dkv=q, block_kv_dkv=kv,
                                                   block_kv_dkv_compute=part, use_fused_bwd_kernel=True)
        mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))] * H)
        attend = splash_attention_kernel.make_splash_mqa_single_device(mask, block_sizes=sizes, save_residuals=not backward)
        qkv = [shape(H, T, D), shape(T, D), shape(T, D)]
        return ((lambda g, *qkv: jax.vjp(attend, *qkv)[1](g), qkv[:1] + qkv, "splash_mqa_dkv*") if backward else
                (attend, qkv, "splash_mqa_fwd*"))
    x, w, g, n = (shape(s["N"], s["D"]), shape(s["E"], s["D"], s["F"]), shape(s["N"], s["F"]), shape(s["E"], dtype=jnp.int32))
    return {"grouped_matmul": (lambda x, w, n: gmm(x, w, n, x.dtype, blocks), [x, w, n], "gmm*"),
            "grouped_matmul_dx": (lambda g, w, n: gmm(g, w, n, g.dtype, blocks, transpose_rhs=True), [g, w, n], "gmm*"),
            "grouped_matmul_dw": (lambda g, x, n: tgmm(x.T, g, n, x.dtype, blocks), [g, x, n], "tgmm*")}[kernel]


def work(kernel, s, blocks, ours, chip):
    """-> the problem's useful flops (as kernels.tuned counts; half of an op's for each of two backward kernels), grid steps, for
    each part with matmuls how often it runs and the matrix units' cycles, at how many ends of a row of blocks others run, and
    how many blocks are parallel."""
    (a, b), peak, backward, twice = blocks[:2], MXU_FLOPS[chip], kernel.endswith("backward"), 1 + (kernel[-2:] in ("dx", "dw"))
    if kernel.startswith("splash"):
        T, H, D = s.values()
        flags = kernels.splash_steps(1, T, True, 0, a, b, range(T), None)[2]
        runs = [H * int((flags & flag > 0).sum()) for flag in (kernels.FULL, kernels.PARTIAL)]
        matmuls, wide, rows = 10 if backward else 4, -(-D // MXU_WIDTH[chip]) * MXU_WIDTH[chip], H * T // a
        steps, runs, ends = ((H * len(flags), runs, rows) if ours else  # JAX's empty blocks are steps too
                             (rows * (T // b), [sum(runs)], T // b if backward else rows))
        runs = [(n, matmuls * a * b * wide / peak) for n in runs]
        return matmuls * H * D * T * (T + 1) // 2, steps, runs, ends, H  # a device has several heads of keys
    if kernel.startswith("linear"):
        grid = -(-s["N"] // a), -(-s["V"] // b)
        tiles, mxu, pieces = grid[0] * grid[1], 2 * a * b * s["D"] * twice / peak, s["D"] // [s["D"], *blocks[2:]][-1]
        runs = [(tiles * n, mxu / 2 / pieces) for n in (1, pieces - 1, 1, pieces - 1)] if pieces > 1 else [(tiles, mxu)]
        outer = grid[kernel.endswith("dw")]
        return (1 + twice) * s["N"] * s["D"] * s["V"], sum(n for n, _ in runs), runs, outer, outer
    pair, dw, rng = 1 + kernel.startswith("paired"), kernel.endswith("dw"), np.random.default_rng(0)
    sizes = rng.multinomial(s["N"], rng.dirichlet(np.full(s["E"], 20.0)))  # as a router's: uneven
    n_visits, (*_, part) = kernels.visits(jnp.array(sizes), s["N"], a, every_group=dw)
    n_visits, mxu, ends = int(n_visits), 2 * pair * a * b * blocks[-1] / peak, 0
    width, depth = (s["D"], s["F"]) if kernel.endswith("dx") else (s["F"], s["D"])
    if dw:
        cuts = -(-s["D"] // b) * -(-s["F"] // blocks[-1])
        runs = [(s["E"], mxu), (n_visits - s["E"], mxu)] if ours else [(n_visits, mxu)]  # the first of a group sets its sum
        ends = cuts * s["E"]
    elif ours:
        cuts, mxu = -(-width // b), 2 * pair * a * b * depth / peak
        halves = int(np.isin(part[:n_visits], (kernels.LOWER, kernels.UPPER)).sum())
        runs = [(n_visits - halves, mxu), (halves, mxu / 2)]
    else:
        cuts, runs = -(-width // blocks[-1]) * -(-depth // b), [(n_visits, mxu)]
    return 2 * pair * s["N"] * s["D"] * s["F"], cuts * n_visits, [(cuts * n, mxu) for n, mxu in runs], ends, cuts


def measure(fn, args, kernel_blocks, sizes, topology, name=None):
    """Compiles a function with kernels in it. kernel_blocks: {kernel: its own blocks}; name: in the dump, of a kernel of JAX's.
    -> {kernel: measured}."""
    chip, results, ours = topology.split(":")[0], {}, name is None
    for f in glob.glob(f"{FOLDER.name}/*"):
        os.remove(f)
    jax.jit(fn, in_shardings=SingleDeviceSharding(plan.topology_devices(topology)[0])).lower(*args).compile()
    for kernel, blocks in kernel_blocks.items():
        slots, parts = read_dump(FOLDER.name, name or kernel)
        flops, steps, runs, n_ends, parallel = work(kernel, sizes, blocks, ours, chip)
        matmuls = [part for part in parts if part[1]]
        assert len(matmuls) == len(runs), f"{kernel} {blocks}: parts with matmuls {matmuls}, want {len(runs)}"
        ends = sorted(n for n, mxu, _ in parts[1:] if not mxu and n >= 64)
        others = steps * (sum(n for n, mxu, _ in parts if not mxu) - sum(ends))
        n_once = 2 * (ours and kernel == "splash_attention_backward")  # the gradients of a head's keys: cleared, written
        others += n_ends * sum(ends[:len(ends) - n_once]) + sum(ends[len(ends) - n_once:])
        scheduled, cycles = (int(others + sum(n * max(bundles, least * mxu) for (n, mxu), (bundles, *_) in zip(runs, matmuls)))
                             // min(parallel, CORES[chip]) for least in (0, 1))
        bundles, filled, spills = matmuls[0]  # without a mask, of a whole tile
        results[kernel] = {
            "kernel": kernel, "who": "ours" if ours else "jax", "blocks": list(blocks), "scheduled": scheduled, "cycles": cycles,
            "flops": int(flops), "bundles_per_block": bundles, "bundles_per_mflop": scheduled / flops * 1e6, "spills": spills,
            "mxu_slots": filled / (slots * bundles), "efficiency": flops / cycles / (MXU_FLOPS[chip] * CORES[chip])}
    return results


def measure_ours(op, sizes, blocks, topology):
    """-> {kernel: measured} of an op's kernels, empty if the blocks do not fit."""
    fields = iter(blocks)
    own = {kernel: [next(fields) for _ in range(n)] for kernel, n in OURS[op][2].items()}
    try:
        results = measure(*our_program(op, sizes, blocks, topology.split(":")[0]), own, sizes, topology)
    except (kernels.KernelError, jax.errors.JaxRuntimeError) as e:
        print(f"{op} {blocks}: {str(e).splitlines()[0][:150]}", flush=True)
        return {}
    for r in results.values():
        print(f"  {r['kernel']} {r['blocks']}: {r['cycles']:,} cycles, {r['efficiency']:.0%} of the MXU's peak", flush=True)
    return results


# Each first one is what both have equal: q, kv, then parts; rows, contraction, columns.
JAX_BLOCKS = {
    "splash_attention": [(1024, 1024, 1024), (1024, 1024, 512), (2048, 1024, 1024), (1024, 2048, 1024)],
    "splash_attention_backward": [(1024, 1024, 1024), (1024, 1024, 512), (512, 512, 512)],
    "grouped_matmul": [(256, 2048, 768), (512, 2048, 768), (128, 2048, 768)],
    "grouped_matmul_dx": [(256, 768, 2048), (512, 768, 2048), (128, 768, 2048)],
    "grouped_matmul_dw": [(256, 2048, 768), (512, 2048, 768), (512, 1024, 768), (128, 1024, 768)]}


def candidates(op, s, chip):
    """Blocks to try, each kernel's own fields side by side. Rows and outer blocks are not so small as to wait for memory."""
    if op == "splash_attention":
        forward = [(1024, 1024, 512, 256), (2048, 1024, 512, 256), (1024, 1024, 256, 256)]
        backward = [(1024, 1024, 512, 512), (512, 512, 512, 512), (1024, 1024, 512, 256)]
        return [[*a, *b, 8192] for a, b in zip(forward, backward)]
    if op == "linear_cross_entropy":
        D = s["D"]
        forward, dx = [(1024, 512), (512, 512), (512, 256)], [(512, 512, D), (512, 256, D), (256, 512, D)]
        if D > 8192:  # in pieces: few tokens with many words at a time leave the matrix units waiting for weights
            forward, dx = [(512, 512), (512, 256), (256, 512)], [(512, 512, D // 4), (256, 512, D // 4), (256, 256, D // 2)]
        return [[*a, *b, *b[1::-1], b[2]] for a, b in zip(forward, dx)]  # dw: words and tokens change places
    ws = [shape(s["E"], s["D"], s["F"])] * (1 + op.startswith("paired"))
    b, D, F = kernels.grouped_blocks(None, shape(s["N"], s["D"]), ws, chip), s["D"] // CORES[chip], s["F"] // CORES[chip]
    return [[n, min(b.columns, F), n, min(b.dx_columns, D), n, b.dw_d, min(b.dw_f, F)] for n in (256, 512, 128)]  # as wide as fit


def kernels_command(args):
    """Ours and JAX's own at equal blocks and at each one's best, in the compiler's cycles for a whole problem."""
    report, lines, chip = [], [], args.topology.split(":")[0]
    for op, sizes in (("splash_attention", ATTENTION), ("grouped_matmul", EXPERTS)):
        ours = [measure_ours(op, sizes, blocks, args.topology) for blocks in candidates(op, sizes, chip)]
        if not ours[0]:
            raise kernels.KernelError(f"{chip} {op}: the first candidate, JAX's blocks, does not fit: bench_kernels.candidates")
        for kernel in (k for k in JAX_BLOCKS if k.startswith(op)):
            both = [r[kernel] for r in ours if r], []
            for blocks in JAX_BLOCKS[kernel]:
                fn, arguments, name = jax_program(kernel, sizes, blocks)
                both[1].append(measure(fn, arguments, {kernel: blocks}, sizes, args.topology, name)[kernel])
            report += sum(both, [])
            for label in ("equal", "best"):
                pair = [rs[0] if label == "equal" else min(rs, key=lambda r: r["cycles"]) for rs in both]
                ratios = [f"{pair[0][key] / pair[1][key]:6.3f}" for key in ("scheduled", "cycles")]
                lines += [f"{kernel:25} {label:6} {r['who']:5} {str(r['blocks']):30} {r['bundles_per_block']:7,} "
                          f"{r['bundles_per_mflop']:13.3f} {r['mxu_slots']:4.0%} {r['spills']:6,} {r['scheduled']:11,} "
                          f"{r['cycles']:11,} {' '.join(ratios * (r is pair[0]))}" for r in pair]
    print(f"\n{args.topology}: attention {ATTENTION} causal; experts {EXPERTS}. Scheduled: all bundles that run. Cycles: with "
          "the matrix units' own time.",
          f"{'':39}{'blocks':30} bundles bundles/Mflop  mxu spills   scheduled      cycles  ours/jax", *lines, sep="\n")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"topology": args.topology, "results": report}, f, indent=1)


def tune(args):
    """Ranks block sizes that fit VMEM by cycles; each kernel's best go into tuned_blocks.json, which kernels.py reads."""
    chip, c = args.topology.split(":")[0], MODELS[args.model].sizes[args.size]
    head_dim, heads = getattr(c, "head_dim", 0) or c.dim // c.n_heads, c.n_heads // getattr(c, "n_kv_heads", c.n_heads)
    wanted = {"splash_attention": {"T": 8192, "H": heads, "D": head_dim}}
    if hasattr(c, "vocab"):
        wanted["linear_cross_entropy"] = {"N": 8192, "D": c.dim, "V": c.vocab}
    if hasattr(c, "n_experts"):
        wanted["paired_grouped_matmul"] = {"N": 8192 * c.top_k, "E": c.n_experts, "D": c.dim, "F": c.ffn}  # gate and up
        wanted["grouped_matmul"] = {"N": 8192 * c.top_k, "E": c.n_experts, "D": c.ffn, "F": c.dim}  # down
    table = kernels.TABLE.setdefault(chip, {})
    for op, sizes in wanted.items():
        name = " ".join([op, *(f"{key}={sizes[key]}" for key in "DF" if key in sizes)])
        print(f"{chip} {name}" + " is in the table" * (name in table), flush=True)
        if name in table:
            continue
        tries = [r for blocks in candidates(op, sizes, chip) if (r := measure_ours(op, sizes, blocks, args.topology))]
        if not tries:
            raise kernels.KernelError(f"{chip} {name}: no candidate fits; see bench_kernels.candidates")
        # Equals: the first one.
        best = [max((r[kernel] for r in tries), key=lambda r: round(r["efficiency"], 2)) for kernel in OURS[op][2]]
        entry = {"blocks": [size for r in best for size in r["blocks"]]}
        for label, part in (("forward", best[:1]), ("backward", best[1:])):
            cycles, flops = (sum(r[key] for r in part) for key in ("cycles", "flops"))
            efficiency = flops / cycles / (MXU_FLOPS[chip] * CORES[chip])
            entry[label] = {"efficiency": round(efficiency, 3), "cycles": cycles, "flops": flops,
                            "bundles": {r["kernel"]: r["bundles_per_block"] for r in part}}
        print(f"best: {json.dumps(entry)}", flush=True)
        table[name] = entry
        kernels.TABLE_FILE.write_text("{" + ",\n".join(
            f'\n"{chip}": {{\n' + ",\n".join(f"  {json.dumps(n)}: {json.dumps(e)}" for n, e in sorted(rows.items())) + "}"
            for chip, rows in sorted(kernels.TABLE.items())) + "\n}\n")


def main(argv):
    global FOLDER
    p = argparse.ArgumentParser(prog="bench.py", usage=argparse.SUPPRESS, description=__doc__.split("\n")[0])
    p.add_argument("command", choices=["kernels", "tune"])
    p.add_argument("--topology", default="tpu7x:2x2x1")
    p.add_argument("--json", metavar="FILE", help="kernels: everything measured")
    p.add_argument("--model", default="llama3", choices=MODELS, help="tune")
    p.add_argument("--size", default="8b", help="tune")
    args = p.parse_args(argv)
    chip = args.topology.split(":")[0]
    if chip not in CORES:
        raise UsageError(f"--topology {args.topology}: chips are {', '.join(CORES)}, e.g. tpu7x:2x2x1")
    if args.size not in MODELS[args.model].sizes:
        raise UsageError(f"--size {args.size} is not a size of {args.model}: {', '.join(MODELS[args.model].sizes)}")
    if args.command == "tune" and getattr(MODELS[args.model].sizes[args.size], "vocab", 0) is None:
        raise UsageError(f"--size {args.size} has the data's vocabulary, not one of its own: name a full size")
    if args.json and (os.path.isdir(args.json) or not os.path.isdir(os.path.dirname(args.json) or ".")):
        raise UsageError(f"--json {args.json}: name a file in a folder that is there")
    FOLDER = tempfile.TemporaryDirectory()
    # libtpu reads it once, when the first topology is made. JAX's kernels ask for no VMEM of their own: the same for both sides.
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={FOLDER.name} --xla_jf_dump_llo_pass_label_regex=final.* "
        f"--xla_tpu_scoped_vmem_limit_kib={kernels.VMEM_MIB[chip] << 10}")
    plan.topology_devices(args.topology)  # raises for one that the compiler does not know
    {"kernels": kernels_command, "tune": tune}[args.command](args)
