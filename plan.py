"""Plan a run on chips you do not have: compile the training step for them, read what the compiler says.

    python plan.py --recipe llama3_8b [--report r.json] [--picture r.png]
    python plan.py --topology v6e:4x4 --model llama3 --size 8b --scan --seq 8192 --per-device-batch 1
    python plan.py batch --recipe llama3_8b
    python plan.py scaling 64 1024 8192 --recipe qwen3_235b
    python plan.py flags --recipe llama3_8b --libtpu-init-flags="--xla_tpu_scoped_vmem_limit_kib=65536"

Notable features:
- the real TPU compiler (libtpu, ahead of time): its memory, its errors, its schedule. Nothing is executed or allocated
- time is a replay of the compiled schedule (hlo.py); a step of several programs is the sum of theirs
- all devices of a slice are one FSDP group, or R of them in all with --replicas; slices are replicas
- the report is one flat dict: the table on the terminal and the JSON are the same. What the compiler does not say
  (links, clock, a kernel's cost) is an assumption and stands in it as assumed_*
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # only compiles: may share the machine with another libtpu
import lowering  # before jax: it sets libtpu's environment

import jax
import numpy as np
import torch
from jax.experimental import topologies

import graph_trainer
import hlo
import kernels
import recipes
import simple_fsdp
import train
from train import UsageError

# ----------------------------------------------------------------------------------------------- the chips


@dataclass(frozen=True)
class Chip:
    """Figures of one JAX device (a tpu7x chip has two). Sources: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}."""

    peak: float  # bf16 FLOP/s
    mxu: int  # matmul flops the MXUs can do in a cycle; the clock is peak / mxu
    matmul: int  # flops a cycle that the compiler expects of a 16384-cubed bf16 matmul (a test asks it again)
    hbm: float  # bytes that the compiler lets a program have (it names them when they do not suffice)
    hbm_bandwidth: float  # bytes/s
    links: int  # ICI links a chip (2 an axis of the torus)
    ici: float  # bytes/s of one link, one way: the table's bidirectional figure / links / 2
    dcn: float  # bytes/s of a chip
    devices: int = 1  # a chip


GiB, GB = 2**30, 1e9
CHIPS = {  # by device_kind
    "TPU v5 lite": Chip(197e12, 131072, 120892, 15.75 * GiB, 819e9, 4, 50e9, 25e9 / 8),
    "TPU v5": Chip(459e12, 262144, 246028, 95.74 * GiB, 2765e9, 6, 100e9, 50e9 / 8),
    "TPU v6 lite": Chip(918e12, 524288, 408750, 31.25 * GiB, 1638e9, 4, 100e9, 100e9 / 8),
    "TPU7x": Chip(1153.5e12, 524288, 444834, 94.75 * GiB, 3690e9, 6, 100e9, 100e9 / 8, devices=2),
}
LINK_EFFICIENCY = 0.9  # of a link's figure that large transfers reach (jax-ml.github.io/scaling-book: 45 and 90 GB/s)
HOST_BANDWIDTH = 32e9  # bytes/s a device to host memory: PCIe Gen 5 x16 shared by two devices
KNOWN = "v5e:2x2, v5e:16x16, v5p:4x4x4, v5p:8x8x16, v6e:4x4, v6e:16x16, tpu7x:2x2x1, tpu7x:4x4x8, tpu7x:8x8x16, tpu7x:16x16x16"
SCALES = {64: "tpu7x:4x4x4", 128: "tpu7x:4x4x8", 256: "tpu7x:4x8x8", 512: "tpu7x:8x8x8", 1024: "tpu7x:8x8x16",
          2048: "tpu7x:8x16x16", 4096: "tpu7x:16x16x16", 8192: "tpu7x:8x8x16"}  # the last one in 8 slices


def link_bandwidth(topology, chip, group=None):
    """Bytes/s into a chip, one way, on all axes of its torus at once: two links an axis that wraps around, one (an end's) on
    one that does not, or of which a group has a part. v5e and v6e wrap at 16, v5p and tpu7x in whole cubes of 4. What both
    devices of a chip need comes once. group: the devices that send each other (None: all of the topology)."""
    sizes = [int(s) for s in topology.split(":")[1].split("x")]
    spans = [len(set(axis)) for axis in zip(*(d.coords for d in group))] if group is not None else sizes
    wraps = (lambda s: s >= 16) if chip.links == 4 else (lambda s: all(t % 4 == 0 for t in sizes))
    links = sum(2 if span == size and wraps(size) else 1 for size, span in zip(sizes, spans) if span > 1)
    return links * chip.ici * LINK_EFFICIENCY or chip.ici


# --------------------------------------------------------------------------------------- the kernels' time

# Op of kernels.py -> (matmuls that it must do, share of the MXU peak to assume where tuned_blocks.json has none for the chip
# and shape: about what it has for tpu7x). The compiler gives kernels no cycles; the table's come from their schedules.
KERNELS = {"splash_attention": (2, 0.36), "splash_attention_backward": (5, 0.43),
           "linear_cross_entropy": (1, 0.9), "linear_cross_entropy_backward": (3, 0.7),
           "grouped_matmul": (1, 0.6), "grouped_matmul_backward": (2, 0.55),
           "paired_grouped_matmul": (1, 0.65), "paired_grouped_matmul_backward": (2, 0.55)}


def kernel_seconds(chip, scope, n_kernels, traffic):
    """A Pallas kernel's time: its op's matmuls at their share of the peak, at least its traffic at HBM speed. scope: as
    name_kernels wrote it, "... flops=N share=X ... tpu.OP"; n_kernels kernels share the op's work."""
    flops, share = re.search(r" flops=(\d+) share=([\d.]+)", scope).groups()
    return max(int(flops) / n_kernels / (chip.peak * float(share)), traffic / chip.hbm_bandwidth)


def name_kernels(gm, chip):
    """Puts the matmul flops of each op of kernels.py, and the share of a chip's peak that its kernels reach, into its node's
    source line, which the lowering carries into the HLO. -> matmul flops of the graph on one device: masked scores left out, what
    the backward computes again counted."""
    total = 0
    for node in gm.graph.nodes:
        name = str(node.target)
        if node.target is graph_trainer.loop:
            total += node.args[2][0].meta["val"].shape[0] * name_kernels(getattr(gm, node.args[0].target), chip)
        elif node.target is graph_trainer.call:
            total += name_kernels(getattr(gm, node.args[0].target), chip)
            node.meta["stack_trace"] = f'File "{node.name}", line 0, in call'  # layers may share one body
        elif name.startswith("tpu.") and (op := name.split(".")[1]) in KERNELS:
            shapes = [a.meta["val"].shape for a in node.args if isinstance(a, torch.fx.Node)]
            shapes = shapes["backward" in op:]  # a backward's first argument is the incoming gradient
            matmuls, share = KERNELS[op]
            if entry := kernels.tuned(op, chip, shapes):
                share = entry["backward" if "backward" in op else "forward"]["efficiency"]
            flops = matmuls * matmul_size(op, node, *shapes)
            total += flops
            node.meta["stack_trace"] = f'File "{node.name} flops={flops:.0f} share={share} ", line 0, in {name}'
        elif name in ("aten.mm.default", "aten.bmm.default", "aten.addmm.default"):
            left = node.args[name.startswith("aten.addmm")]
            total += 2 * node.meta["val"].numel() * left.meta["val"].shape[-1]
    return total


def matmul_size(op, node, x, w, *_):
    """Flops of one of the matmuls that an op of kernels.py consists of; a pair of grouped ones counts as one."""
    if "splash" not in op:
        return 2 * math.prod(x) * (w[0] if "entropy" in op else w[2]) * (2 if "paired" in op else 1)
    (B, H, T, D), S = x, w[2]
    causal, window = next(a for a in node.args if isinstance(a, bool)), next(a for a in node.args if type(a) is int)
    seen = np.arange(1, T + 1) if causal else np.full(T, S)
    return 2 * B * H * D * int((np.minimum(seen, window) if window else seen).sum())


# ------------------------------------------------------------------------------------------------ compiling


def topology_devices(name, slices=1):
    """-> the devices of a TPU topology nobody here has."""
    try:
        # The compiler knows names that Chip and the recipes' flags do not go by, and dies of planes of more than a pod.
        if not re.fullmatch(r"(v5e|v6e):(\d|1[0-6])x(\d|1[0-6])|(v5p|tpu7x):\d\d?x\d\d?x\d\d?", name):
            raise ValueError("a name is CHIP:AxB (at most 16x16) or CHIP:AxBxC")
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices
    except Exception as e:
        raise UsageError(f"--topology {name} --slices {slices}: the compiler does not know it. Some that it knows: {KNOWN}. "
                         f"It says: {str(e).splitlines()[0][:300]}") from e
    if devices[0].device_kind not in CHIPS:
        raise UsageError(f"--topology {name}: no figures for {devices[0].device_kind}, only for {', '.join(CHIPS)}")
    return devices


def report(args):
    """Compiles the step of train.py's flags for args.topology -> (flat dict of figures, phases of hlo.Replay).

    Nothing is executed, no parameter allocated. The dict: bytes and seconds of one device, flops of the whole step over all
    devices; keys s_<kind> add up to predicted_step_s, hidden_<kind> ran behind compute, bytes_<kind> are memory.
    """
    jax.config.update("jax_enable_compilation_cache", False)  # without a TPU its entries cannot be read back
    devices, clock = topology_devices(args.topology, args.slices), [time.perf_counter()]
    chip, n = CHIPS[devices[0].device_kind], len(devices)
    args.dtype, args.batch = args.dtype or "bfloat16", args.per_device_batch * n
    config = train.choose_size(args)
    if getattr(config, "vocab", 0) is None:
        config = replace(config, vocab=512)  # debug sizes take the data's: bytes, rounded up
    with train.phase("tracing"):
        replicas = args.replicas if args.replicas > 1 else args.slices
        if n % replicas or replicas % args.slices:
            raise UsageError(f"--replicas {replicas} does not divide the {n} devices of {args.slices} {args.topology}"
                             + f", or is no multiple of --slices {args.slices}" * (args.slices > 1))
        mesh = lowering.make_mesh(replicas, n // replicas, devices)
        device_mesh = simple_fsdp.capture_mesh(n // replicas, replicas) if n > 1 else None
        model = train.build_model(args, config, device_mesh)
        step, _ = train.build_programs(args, model, train.optimizer(args), device_mesh, mesh)
        parts = step.parts()
        flops = n * sum(name_kernels(part.gm, train.CHIPS[devices[0].device_kind][0]) * times for _, part, times in parts)
    clock.append(time.perf_counter())
    with train.phase("lowering"):
        for _, part, _ in parts:
            part.lower()
    clock.append(time.perf_counter())
    flags = recipes.flags_of(args.recipe, args.topology.split(":")[0], args.libtpu_init_flags)
    with train.phase(f"compiling for {n} devices"):
        for _, part, _ in parts:
            part.compile(recipes.compiler_options(flags))
    clock.append(time.perf_counter())

    bandwidth = {"ici": link_bandwidth(args.topology, chip, mesh.devices[0]), "dcn": chip.dcn * LINK_EFFICIENCY / chip.devices,
                 "host": HOST_BANDWIDTH, "hbm": chip.hbm_bandwidth, "sparsecore": chip.hbm_bandwidth}
    across = mesh.devices[:replicas // args.slices, 0]  # the replicas of one slice
    if len(across) > 1:
        bandwidth.setdefault(f"ici_{n // replicas}", bandwidth["ici"])
        bandwidth.setdefault(f"ici_{len(across)}", link_bandwidth(args.topology, chip, across))
    phases = []
    for name, part, times in parts:
        replay = hlo.Replay(part.executable.as_text(), chip.mxu / chip.peak, chip.peak, bandwidth, args.slices,
                            lambda *kernel: kernel_seconds(chip, *kernel))
        phases += [(f"{name} {label}", hlo.total([(label, counts)], times)) for label, counts in replay.run()]
        if replay.unknown_loops:
            print(f"loops {', '.join(replay.unknown_loops)} have as many trips as the data says: counted once")
    counts = hlo.total(phases)
    seconds, busy, moved, kernel_s = ({re.sub("[ -]", "_", key): x for (what, key), x in sorted(counts.items()) if what == which}
                                      for which in ("s", "busy", "bytes", "kernel"))
    step_s, tokens = sum(seconds.values()), args.batch * args.seq
    model_flops = model.flops_per_token(args.seq) * tokens

    memory = [part.executable.memory_analysis() for _, part, _ in parts]
    peak, resident, largest = max(((hbm_peak(m) + part.resident_bytes, part.resident_bytes, m)
                                   for (_, part, _), m in zip(parts, memory)), key=lambda at: at[0])
    if resident and peak > chip.hbm:  # the compiler sees one program at a time
        raise lowering.DoesNotFit(f"{peak / GB:,.2f} of {chip.hbm / GB:,.2f} GB, {resident / GB:,.2f} of them other programs'")
    state = largest.argument_size_in_bytes + resident
    host = graph_trainer.host_bytes(step.graph.gm)
    saved = 0 if args.offload else sum(saved_bytes(part.gm) for _, part, _ in parts)
    published, where = args.recipe and recipes.RECIPES[args.recipe].published or (None, "nowhere")
    return {
        "model": args.model, "size": args.size, "topology": args.topology, "flags": flags,
        "slices": args.slices, "chips": n // chip.devices, "devices": n, "per_device_batch": args.per_device_batch,
        "seq": args.seq, "params": sum(p.numel() for p in model.parameters()), "hbm_bytes": peak, "hbm_limit_bytes": chip.hbm,
        "bytes_state": state, "bytes_saved_activations": saved, "bytes_temporaries": max(peak - state - saved, 0),
        "bytes_code": sum(m.generated_code_size_in_bytes for m in memory),
        "bytes_arguments_and_temporaries": state + largest.temp_size_in_bytes,
        "host_bytes": host,
        **{f"s_{kind}": s for kind, s in seconds.items()}, **{f"hidden_{kind}": s - seconds[kind] for kind, s in busy.items()},
        **{f"moved_{engine}_bytes": moved.get(engine, 0) for engine in ("ici", "dcn", "host")},
        "cycles": sum(s for kind, s in seconds.items() if kind not in busy) * chip.peak / chip.mxu,
        "model_flops": model_flops, "hardware_flops": flops, "predicted_step_s": step_s,
        "tokens_per_s_per_chip": tokens / step_s / n * chip.devices,
        "predicted_mfu": model_flops / step_s / chip.peak / n, "published_mfu": published, "published_where": where,
        "matmul_bound_mfu": chip.matmul / chip.mxu * min(model_flops / flops, 1),
        "trace_s": clock[1] - clock[0], "lower_s": clock[2] - clock[1], "compile_s": clock[3] - clock[2],
        "assumed_peak_flops_per_s": chip.peak, "assumed_mxu_flops_per_cycle": chip.mxu,
        "assumed_clock_per_s": chip.peak / chip.mxu, "assumed_matmul_flops_per_cycle": chip.matmul,
        **{f"assumed_{engine}_bytes_per_s": rate for engine, rate in bandwidth.items()},
        "assumed_for_ops_without_cycles_s": counts["guessed", "ops"],
        **{f"assumed_for_{op}_s": s for op, s in kernel_s.items()},
    }, phases


def hbm_peak(memory):
    """A program's peak in HBM. The compiler's own figure counts the host's buffers where they are larger than all else
    (--offload); arguments, temporaries and results together bound it from above."""
    return min(memory.peak_memory_in_bytes, memory.argument_size_in_bytes + memory.temp_size_in_bytes
               + memory.output_size_in_bytes - memory.alias_size_in_bytes)


def saved_bytes(gm):
    """What the layer loops save for their backward passes, stacked over layers (0 without --scan); in a loop of micro-batches
    one after the other."""
    total = 0
    for node in gm.graph.find_nodes(op="call_function", target=graph_trainer.loop):
        body, carry, _, _, reverse, _ = node.args
        total += saved_bytes(getattr(gm, body.target)) + sum(y.nbytes for y in node.meta["val"][len(carry):] if not reverse)
    return total


# --------------------------------------------------------------------------------------------------- showing


def show(r):
    """The flat dict, line by line, in units for people: of time also the share of the step."""
    for key, x in r.items():
        if x is None or isinstance(x, str):
            text = x or "none"
        elif "bytes" in key:
            text = f"{x / GB:12.2f} GB" + "/s" * key.endswith("per_s")
        elif re.search("^s_|^hidden_|^assumed_for|step_s$", key):
            text = f"{x * 1e3:12.1f} ms {x / r['predicted_step_s']:7.1%}"
        else:
            form = ".1%" if key.endswith("mfu") else ".3e" if x > 1e12 else "," if isinstance(x, int) else ",.1f"
            text = f"{x:12{form}}"
        print(f"{key:40} {text}")


def draw(r, phases, path):
    """The step's time by kind, in the order of its phases, and the memory by kind."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 5), height_ratios=[2, 1], layout="constrained")
    times = [(kind, s * 1e3) for _, part in phases for (what, kind), s in sorted(part.items()) if what == "s" and s]
    memory = [(key, r["bytes_" + key] / GB) for key in ("state", "saved_activations", "temporaries")]
    for axes, pieces, unit in ((top, times, "ms"), (bottom, memory, "GB a device")):
        colors, start = {}, 0
        for kind, width in pieces:
            label = None if kind in colors else kind
            color = colors.setdefault(kind, plt.get_cmap("tab20").colors[len(colors)])
            axes.barh(0, width, left=start, label=label, color=color)
            start += width
        axes.set(yticks=[], xlabel=unit)
    bottom.axvline(r["hbm_limit_bytes"] / GB, color="red", label="HBM")
    for axes in (top, bottom):
        axes.legend(ncols=8, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    top.set_title(f"{r['model']} {r['size']} on {r['topology']}: predicted MFU {r['predicted_mfu']:.1%}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


COLUMNS = {  # of a table: title -> key of the report, unit
    "HBM GB": ("hbm_bytes", GB), "arguments + temporaries": ("bytes_arguments_and_temporaries", GB),
    "step ms": ("predicted_step_s", 1e-3), "MFU %": ("predicted_mfu", 0.01), "tokens/s a chip": ("tokens_per_s_per_chip", 1),
    "Mcycles": ("cycles", 1e6), "ICI GB": ("moved_ici_bytes", GB), "DCN GB": ("moved_dcn_bytes", GB), "compile s": ("compile_s", 1)}


def row(name, args):
    """Compiles, and prints it as a line of a table. -> the report, None if it does not fit."""
    try:
        r, _ = report(args)
    except lowering.DoesNotFit as e:
        return print(f"| {name} | {str(e).splitlines()[0]} |", flush=True)
    print(f"| | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    print(f"| {name} | {' | '.join(f'{r[key] / unit:,.2f}' for key, unit in COLUMNS.values())} |", flush=True)
    return r


# -------------------------------------------------------------------------------------------- subcommands


def plan(args):
    r, phases = report(args)
    show(r)
    if args.report:
        with open(args.report, "w") as out:
            json.dump(r, out, indent=1)
    if args.picture:
        draw(r, phases, args.picture)


def batch(args):
    """The largest per-device batch that fits: doubles until one does not, then halves the gap down to 1/32. Memory is no line to
    follow: near the limit the compiler computes things twice to fit, which shows in the MFU."""
    fits, best, too_large, unit = {}, 0, math.inf, args.grad_accum
    while too_large - best > max(unit, best // 32):
        args.per_device_batch = (best + too_large) // 2 // unit * unit if too_large < math.inf else 2 * best or args.per_device_batch
        if r := row(f"batch {args.per_device_batch}", args):
            best = args.per_device_batch
            fits[best] = r["predicted_mfu"]
        else:
            too_large = args.per_device_batch
    for what, b in (("largest per-device batch that fits", best), ("best MFU", max(fits, key=fits.get, default=0))):
        print(f"{what}: {b or 'none'}, MFU {fits.get(b, 0):.1%}")


def scaling(args):
    """Weak scaling: the same rows a device on more and more chips."""
    for chips in args.chips or SCALES:
        args.topology, args.slices = SCALES[chips], 8 if chips == 8192 else 1
        row(f"{chips} chips, {args.slices} of {args.topology}", args)


def flags(args):
    """What compiler flags change against the recipe's own; on devices that are here, in the bits of step 1."""
    if args.libtpu_init_flags is None:
        raise UsageError("flags compares --libtpu-init-flags=... with what a run has without: give them")
    own = recipes.flags_of(args.recipe, (args.topology or "").split(":")[0])
    both = {"before": own, "with flags": f"{own} {args.libtpu_init_flags}".strip()}
    if args.topology and not lowering.ON_TPU_HOST:
        for name, args.libtpu_init_flags in both.items():
            row(name, args)
        return print("whether it changes rounding: run the same flags without --topology, on such chips")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, given in both.items():
            metrics = os.path.join(folder, name)
            run = subprocess.run([sys.executable, train.__file__, *args.argv, "--steps", "1", "--metrics", metrics,
                                  f"--libtpu-init-flags={given}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if run.returncode:
                said = run.stderr.strip() or f"exit code {run.returncode}"
                raise UsageError(f"{name}: {said.splitlines()[-1].removeprefix('train.py: error: ')}")
            first = json.loads(open(metrics).readline())
            found.append({key: first[key].hex() for key in ("loss", "grad_norm")})
            print(f"{name:12}", found[-1], first["loss"], first["grad_norm"])
    print("free: the same bits" if found[0] == found[1] else "changes rounding")


COMMANDS = {"plan": plan, "batch": batch, "scaling": scaling, "flags": flags}


def parse(argv):
    """-> (subcommand, args) by train.py's parser. A recipe's chips come first, so that later flags override them."""
    command, argv = (argv[0], argv[1:]) if argv[:1] and argv[0] in COMMANDS else ("plan", argv)
    numbers = list(itertools.takewhile(str.isdigit, argv))
    argv = argv[len(numbers):]
    recipe = train.parse_args(["--topology", "any", *argv]).recipe if "--recipe" in " ".join(argv) else None
    args = train.parse_args((["--topology", recipes.RECIPES[recipe].topology] if recipe else []) + argv)
    args.argv, args.chips, args.per_device_batch = argv, [int(n) for n in numbers], args.per_device_batch or 1
    if wrong := [n for n in args.chips if command != "scaling" or n not in SCALES]:
        raise UsageError(f"{command} {wrong[0]}: only scaling takes numbers, of {', '.join(map(str, SCALES))} chips")
    if command != "plan" and (args.report or args.picture):
        raise UsageError(f"--report and --picture are of one plan: leave them out with {command}")
    if args.per_device_batch % args.grad_accum:
        raise UsageError(f"--grad-accum {args.grad_accum} does not divide a device's {args.per_device_batch} rows "
                         "(--per-device-batch)")
    if not args.topology and command != "flags":
        raise UsageError(f"--topology NAME or --recipe NAME is needed. Topologies: {KNOWN}; recipes: "
                         f"{', '.join(recipes.RECIPES)}")
    if command == "scaling" and (args.slices > 1 or not args.topology.startswith("tpu7x:")):
        raise UsageError(f"scaling {args.topology} --slices {args.slices}: scaling has chips of its own, tpu7x: leave both out")
    return command, args


@train.command
def main(argv):
    command, args = parse(argv)
    COMMANDS[command](args)


if __name__ == "__main__":
    sys.exit(main())
