"""Train a model on TPU, or on this machine's CPU, through the same captured graph.

    python train.py --model qwen3_moe --scan
    python train.py --model llama3 --fsdp 8 --devices 8 --steps 20

The story: a plain torch.nn model on the meta device, its layers perhaps in one loop (--scan), its parameters
perhaps sharded (--fsdp); one captured graph of the whole step; one XLA program; a loop that feeds it.

Flags that TorchTitan TPU spells differently take both spellings.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import re
import signal
import statistics
import sys
import threading
import time

import lowering  # first: it sets libtpu's environment before jax loads

import jax
import torch
from jax.sharding import PartitionSpec as P

import checkpoint
import data
import flux_data
import graph_trainer
import kernels
import profiling
import recipes
import run_log
import simple_fsdp
from flux import Flux
from llama3 import Llama3
from muse_glimmer import MuseGlimmer
from qwen3 import Qwen3
from qwen3_moe import Qwen3MoE

MODELS = {"llama3": Llama3, "qwen3": Qwen3, "qwen3_moe": Qwen3MoE, "muse_glimmer": MuseGlimmer, "flux": Flux}
BLOCKS = {"sa": kernels.SplashBlocks, "ce": kernels.CrossEntropyBlocks}  # by the prefix of their flags

# By device_kind: the chip's name and the peak bf16 FLOP/s of one JAX device of it.
CHIPS = {"TPU v5 lite": ("v5e", 197e12), "TPU v5": ("v5p", 459e12), "TPU v6 lite": ("v6e", 918e12), "TPU7x": ("tpu7x", 1153.5e12)}


class UsageError(Exception):
    """What the user asked for cannot be; the message is one line that names the flag, the value and the fix."""


def number(kind, zero=False):
    """A type for argparse: above 0, or from 0 up."""
    def parse(text):
        value = kind(text)
        if not (0 < value < math.inf or zero and value == 0):
            raise argparse.ArgumentTypeError(f"{text} is not a {'number from 0 up' if zero else 'positive number'}")
        return value
    parse.__name__ = kind.__name__
    return parse


count, natural, positive, not_negative = number(int), number(int, zero=True), number(float), number(float, zero=True)


def parse_args(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.error = lambda message: (_ for _ in ()).throw(UsageError(message))
    on_off = argparse.BooleanOptionalAction

    add = p.add_argument_group("model").add_argument
    add("--model", default="llama3", choices=MODELS)
    add("--size", default="debug", help="a size of the model file (default: debug)")
    add("--init-from", metavar="DIR", help="start from a Hugging Face folder: its weights, size and tokenizer.json")
    add("--layers", type=count, help="override the size's number of layers")
    add("--dtype", choices=["float32", "bfloat16"], help="of compute (default: bfloat16 on TPU); weights and moments are fp32")

    add = p.add_argument_group("data").add_argument
    add("--data", metavar="PATH", help="text file, folder of text or .bin of ids (default: Python's standard library, as bytes)")
    add("--tokenizer", metavar="FILE", help="tokenizer.json (default: bytes)")
    add("--seq", type=count, default=256, help="tokens in a row")
    add("--batch", type=count, help="rows in a step, over all devices (default: 8; flux 32)")

    add = p.add_argument_group("optimization").add_argument
    add("--steps", type=count, default=250)
    add("--lr", type=positive, help="the highest learning rate (default: 1e-3; flux 3e-3)")
    add("--warmup", type=natural, default=20, help="steps until the full learning rate; then a cosine to lr/10")
    add("--weight-decay", type=not_negative, default=0.1)
    add("--clip", type=not_negative, default=1.0, help="largest gradient norm; 0: any (lets --split update within a backward)")
    add("--seed", type=natural, default=0)

    add = p.add_argument_group("how it runs").add_argument
    add("--mode", default="graph", choices=["graph", "compile", "eager"])
    add("--tpu_config.eager_mode", dest="mode", type=lambda text: {"DEFER_AND_FUSE": "eager"}.get(text, text), choices=["eager"],
        metavar="DEFER_AND_FUSE", help="--mode eager")
    add("--compile.enable", dest="mode", action="store_const", const="compile", help="--mode compile")
    add("--tpu_config.use_graph_trainer", dest="mode", action="store_const", const="graph", help="--mode graph")
    add("--eager-strict", action="store_true", help="--mode eager, one program an op instead of deferred and fused")
    add("--device", choices=["xla", "tpu"], help="of --mode eager and compile: torch_xla's (default) or torch_tpu's")
    add("--scan", "--tpu_config.use_scan_layers", action=on_off, default=False, help="one loop over the layers: one is compiled")
    add("--remat", choices=graph_trainer.REMAT, help="what a layer saves for its backward besides its input: nothing (full; "
        "default with --scan and --split), attention's results, those of all matmuls (dots), all (none; default otherwise)")
    add("--offload", action=on_off, default=False, help="with --scan: what layers save lies in host memory (--split: always)")
    add("--split", "--tpu_config.use_graph_split", type=count, nargs="?", const=1, default=0, metavar="GROUPS",
        help="forward and backward as programs of their own, one pair for each group of layers")
    add("--grad-accum", type=count, default=1, metavar="N", help="take the batch as N micro-batches, one after the other")
    add("--fsdp", "--parallelism.use_simple_fsdp", type=count, nargs="?", const=0, metavar="N", help="shard over N devices or all")
    add("--replicas", type=count, default=1, metavar="R", help="R replicas (slices): shard within, all-reduce across")
    add("--devices", type=count, metavar="N", help="N virtual CPU devices")
    add("--coordinator", metavar="HOST:PORT", help="of process 0, where several train as one (a TPU pod: leave all three out)")
    add("--num-processes", type=count)
    add("--process-id", type=int)

    add = p.add_argument_group("full-size runs, on TPUs that are here or are not").add_argument
    add("--recipe", metavar="NAME", help=f"flags of a full-size run, before all others: {', '.join(recipes.RECIPES)}")
    add("--topology", metavar="NAME", help="compile for a TPU that is not here, e.g. v6e:4x4, and stop")
    add("--slices", type=count, default=1, help="so many of the topology, over the data-center network")
    add("--per-device-batch", type=count, metavar="N", help="rows a device, instead of --batch")
    add("--libtpu-init-flags", "--xla-flags", metavar="FLAGS", help='compiler flags, "--xla_a=1 --xla_b=2"')
    add("--report", metavar="FILE.json", help="the plan as flat JSON")
    add("--picture", metavar="FILE.png", help="the plan as a picture")
    add = p.add_argument_group("kernels").add_argument
    add("--kernels", choices=["pallas", "interpret", "reference"], help="attention, loss and grouped matmuls in Pallas "
        "(default on TPU), in Pallas interpreted (anywhere, slow) or in XLA (default on CPU)")
    add("--splash", "--splash_attention_kernel.use_splash_attention_kernel", action=on_off, help="attention's kernel, or XLA")
    add("--fused-ce", action=on_off, help="the loss's kernel, or XLA")
    add("--paired-gmm", "--use_pallas_paired_grouped_mm", action=on_off, help="the grouped matmuls' kernels, or XLA")
    for prefix, blocks in BLOCKS.items():
        for field in dataclasses.fields(blocks):
            add(f"--{prefix}-block-{field.name.replace('_', '-')}", type=count, metavar="N",
                help=f"{blocks.__name__}.{field.name} (default: tuned for the chip)")

    add = p.add_argument_group("checkpoints: written in the background; SIGTERM saves and exits with code 143").add_argument
    add("--checkpoint", metavar="DIR", help="save to DIR (every process must see it), and at the end")
    add("--save-every", type=count, default=100, metavar="N", help="steps between saves")
    add("--local-checkpoint", metavar="DIR", help="save to this DIR too, a faster one, more often")
    add("--local-save-every", type=count, default=20, metavar="N")
    add("--keep", type=count, default=2, metavar="K", help="checkpoints to keep in each DIR")
    add("--resume", action="store_true", help="from the newest whole checkpoint, on any mesh (or the start, if there was none)")

    add = p.add_argument_group("what it shows").add_argument
    add("--save-hf", metavar="DIR", help="write the trained weights as a new Hugging Face folder at the end")
    add("--metrics", metavar="FILE", help="one JSON object a step")
    add("--profile", "--profiler.enable_profiling", nargs="?", const="5:7", metavar="START:STOP",
        help="where the time of these steps goes (default: 5:7): a trace, and a table of the model's lines")
    add("--profile-dir", metavar="DIR", default="profile", help="where --profile puts both")
    add("--print-graph", action="store_true", help="print the captured graph and stop")
    add("--print-sharding", action="store_true", help="print where every parameter lies and stop")
    add("--val-batches", type=count, default=8, help="batches of the validation loss at the end")
    add("--validate-every", type=count, metavar="N", help="validation loss every N steps too")
    add("--target-loss", type=positive, metavar="X", help="stop when the validation loss is X or less")
    add("--tensorboard", metavar="DIR", help="TensorBoard's event files of the metrics")
    add("--goodput", metavar="JOB", help="hand goodput to ml-goodput-measurement too, under this name")

    args = p.parse_args(argv)
    if args.recipe:
        if args.recipe not in recipes.RECIPES:
            raise UsageError(f"--recipe {args.recipe} is not one of: {', '.join(recipes.RECIPES)}")
        own, args = args, p.parse_args([*recipes.RECIPES[args.recipe].flags.split(), *argv])
        if args.fsdp is None and not args.topology and args.mode == "graph":
            args.fsdp = 0  # over all devices, as planned
        if own.batch and not own.per_device_batch:  # the user's, instead of the recipe's
            args.per_device_batch = None
        if own.init_from:  # which has a size
            args.size = own.size
    if args.batch and (args.per_device_batch or args.topology):  # before the model's own batch stands in
        raise UsageError(f"--batch {args.batch} is over all devices, --per-device-batch N on each: give one (with --topology the "
                         "latter)")
    for name, value in MODELS[args.model].defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check_args(args, p.get_default)
    return args


def check_args(args, default):
    """Raises UsageError for flags that do not go together."""
    span = re.fullmatch(r"(\d+):(\d+)", args.profile or "")
    saves = [os.path.abspath(folder) for folder in (args.checkpoint, args.local_checkpoint) if folder]
    empty = [name.replace("_", "-") for name, value in vars(args).items() if value == "" and name != "libtpu_init_flags"]
    odd = [flag for flag in (args.libtpu_init_flags or "").split() if not re.fullmatch(r"--\w+(=\S+)?", flag)]
    for wrong, message in [
            (empty, f"--{' --'.join(empty)} is empty: give it a value, or leave it out"),
            (odd, f"--libtpu-init-flags: {' '.join(odd)} is not --name=value"),
            (args.coordinator and not re.fullmatch(r".+:\d+", args.coordinator), f"--coordinator {args.coordinator} is not HOST:PORT"),
            (args.save_hf and os.path.abspath(args.save_hf) in saves, f"--save-hf {args.save_hf} is a checkpoint's: name a new folder"),
            (args.report and args.report == args.picture, f"--report {args.report} and --picture are two files"),
            (args.paired_gmm and args.model != "qwen3_moe", f"--paired-gmm is of qwen3_moe's experts, and this is {args.model}"),
            (args.model == "flux" and args.tokenizer, f"--tokenizer {args.tokenizer}: --model flux reads no text, leave it out"),
            ((args.report or args.picture or args.slices != 1) and not args.topology,
             "--report, --picture and --slices go with --topology NAME"),
            (args.offload and not args.scan, "--offload goes with --scan (--split keeps what it saves in host memory by itself)"),
            (args.split and args.scan,
             "--split cuts unrolled layers into programs: leave out --scan (or add --no-scan, after --recipe)"),
            (args.split and args.grad_accum > 1, "--split cuts one batch's step into programs: leave out --grad-accum"),
            (args.split and args.profile, "--profile reads one program: leave out --split"),
            (args.profile and not (span and 3 <= int(span[1]) <= int(span[2]) <= args.steps),
             f"--profile {args.profile} must be START:STOP, from step 3 (two to warm up) to --steps {args.steps}"),
            (args.picture and not args.picture.endswith((".png", ".svg", ".pdf")),
             f"--picture {args.picture} must end in .png, .svg or .pdf"),
            (args.seed >= 2**31, f"--seed {args.seed} is too large: below 2147483648"),
            (args.resume and not (args.checkpoint or args.local_checkpoint),
             "--resume needs --checkpoint DIR or --local-checkpoint DIR"),
            (args.target_loss and not args.validate_every, f"--target-loss {args.target_loss} needs --validate-every N")]:
        if wrong:
            raise UsageError(message)
    check_outputs(args)
    if args.topology:
        for flag in ("fsdp", "devices", "coordinator", "num_processes", "process_id", "data", "tokenizer", "checkpoint", "keep",
                     "save_every", "local_checkpoint", "local_save_every", "resume", "save_hf", "metrics", "tensorboard", "goodput",
                     "profile", "profile_dir", "print_graph", "print_sharding", "val_batches", "validate_every", "target_loss"):
            if getattr(args, flag) != default(flag):
                raise UsageError(f"--{flag.replace('_', '-')} trains, and --topology {args.topology} only compiles: leave one out")
    if args.mode != "graph":
        for flag in ("scan", "split", "remat", "offload", "grad_accum", "fsdp", "replicas", "devices", "coordinator",
                     "num_processes", "process_id", "topology", "per_device_batch", "checkpoint", "local_checkpoint", "kernels",
                     "splash", "fused_ce", "paired_gmm", "libtpu_init_flags", "profile", "print_graph", "print_sharding",
                     *(name for name in vars(args) if "_block_" in name)):
            if getattr(args, flag) != default(flag):
                raise UsageError(f"--{flag.replace('_', '-')} needs --mode graph (got --mode {args.mode})")
    if args.eager_strict and args.mode != "eager" or args.device and args.mode == "graph":
        raise UsageError(f"--eager-strict goes with --mode eager, --device with --mode eager or compile (got --mode {args.mode})")


def check_outputs(args):
    """Raises UsageError for what could not be written, before minutes of compiling."""
    for flag in ("metrics", "report", "picture"):
        if path := getattr(args, flag):
            taken = os.path.isdir(path) or os.path.exists(path) and flag != "metrics"  # which --resume goes on with
            if taken or not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
                raise UsageError(f"--{flag} {path}: no new file can be written there")
    for flag in ("tensorboard", "save_hf", "profile_dir"):
        if folder := getattr(args, flag):
            while not os.path.exists(folder := os.path.abspath(folder)):  # it is made, and what it lies in
                folder = os.path.dirname(folder)
            if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
                raise UsageError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: no new folder can be written there")


def choose_devices(args):
    """-> (mesh of the devices to train on, DeviceMesh to capture for: None for one device). A TPU where JAX sees
    one, this machine's CPU otherwise."""
    if args.mode != "graph":
        import eager  # torch_xla, of which graph mode knows nothing
        args.torch_device = eager.open_device(args)
        say(f"device: {args.torch_device}, of torch")
        return lowering.make_mesh(devices=jax.devices()[:1]), None
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    processes = [args.coordinator, args.num_processes, args.process_id]
    if any(x is not None for x in processes):
        if any(x is None for x in processes):
            raise UsageError("--coordinator, --num-processes and --process-id go together: give all three")
        if not 0 <= args.process_id < args.num_processes:
            raise UsageError(f"--process-id {args.process_id} must be 0 to {args.num_processes - 1} (--num-processes)")
        jax.distributed.initialize(*processes)
    elif lowering.ON_TPU_HOST and not args.devices:
        try:
            jax.distributed.initialize()  # one process a host: finds the others by itself
        except ValueError as e:  # no cluster that JAX knows: with a TPU its other hosts would each train alone
            if jax.devices()[0].platform == "tpu":
                raise UsageError("JAX does not find this TPU's other hosts by itself: give --coordinator HOST:PORT "
                                 f"--num-processes N --process-id I (of a single host, localhost:1234 1 0). It says: {e}") from e
    devices = jax.devices()
    shards = max(len(devices) // args.replicas, 1) if args.fsdp == 0 else args.fsdp or 1
    n, given = shards * args.replicas, f"--fsdp {shards} x --replicas {args.replicas}"
    if n > len(devices):
        raise UsageError(f"{given} is {n} devices and there are {len(devices)} (--devices {n} gives virtual ones on the CPU)")
    args.batch = args.per_device_batch * n if args.per_device_batch else args.batch
    if args.batch % n:
        raise UsageError(f"--batch {args.batch} does not divide over {n} devices ({given}): make it a multiple of {n}")
    if args.batch // n % args.grad_accum:
        raise UsageError(f"--grad-accum {args.grad_accum} does not divide a device's {args.batch // n} rows (--batch "
                         f"{args.batch} over {n} devices)")
    if n < len(devices) and jax.process_count() > 1:
        raise UsageError(f"{given} must use all {len(devices)} devices of the {jax.process_count()} processes")
    say(f"device: {devices[0].device_kind} ({devices[0].platform}), using {n} of {len(devices)}")
    device_mesh = simple_fsdp.capture_mesh(shards, args.replicas) if n > 1 else None
    return lowering.make_mesh(args.replicas, shards, devices[:n]), device_mesh


def choose_size(args):
    """-> the model's Config with --layers. At debug size the vocabulary is None: it will be the data's."""
    if args.init_from:
        for flag in ("size", "layers"):
            if (value := getattr(args, flag)) not in (None, "debug"):
                raise UsageError(f"--{flag} {value}: --init-from {args.init_from} has its own, leave it out")
        return checkpoint.read_config(args.init_from, MODELS[args.model])
    sizes = MODELS[args.model].sizes
    if args.size not in sizes:
        raise UsageError(f"--size {args.size} is not a size of {args.model}: {', '.join(sizes)}")
    config = sizes[args.size]
    if args.layers:
        try:
            config = dataclasses.replace(config, n_layers=args.layers)
        except ValueError as e:
            raise UsageError(f"--layers {args.layers}: {e}") from e
    return config


def build_model(args, config, device_mesh):
    """-> the model on the meta device: nothing allocated, sharded over a torch DeviceMesh (None: one device)."""
    with torch.device("meta"):
        model = MODELS[args.model](config)
    simple_fsdp.fully_shard(model, device_mesh, param_dtype=getattr(torch, args.dtype), reduce_op="sum",
                            keep_fp32=model.keep_fp32)
    remat = args.remat or "full"
    for name, module in list(model.named_children()):  # FLUX has two stacks
        if type(module).__name__ != "Layers":
            continue
        if args.split and len(module) % args.split:
            raise UsageError(f"--split {args.split} does not divide the {len(module)} {name} of {args.model}: make it one of "
                             + ", ".join(str(n) for n in range(1, len(module) + 1) if len(module) % n == 0))
        if args.scan:
            setattr(model, name, graph_trainer.ScanLayers(module, remat, args.offload))
        elif args.split or args.remat not in (None, "none"):
            setattr(model, name, graph_trainer.UnrolledLayers(module, remat, args.split))
    return model


def optimizer(args):
    return graph_trainer.AdamW(lr=args.lr, min_lr=args.lr / 10, warmup=args.warmup, steps=args.steps,
                               weight_decay=args.weight_decay, clip=args.clip)


def build_programs(args, model, opt, device_mesh, mesh):
    """-> the training step, (state, batch) -> (state, metrics), and the evaluation, (params, batch) -> loss,
    captured: two lowering.Programs to lower and compile."""
    if args.mode != "graph":
        import eager
        return eager.programs(args, model, opt)

    def psum(x, dims=None):
        return simple_fsdp.all_sum(x, device_mesh, dims) if device_mesh else x

    shape = args.batch // mesh.size, args.seq
    try:
        batch = model.batch_spec(*shape) if hasattr(model, "batch_spec") else {
            name: torch.empty(shape, dtype=torch.int32, device="meta") for name in ("segment_ids", "targets", "tokens")}
    except ValueError as e:
        raise UsageError(f"--seq {args.seq}: {e}") from e
    state = graph_trainer.state_spec(model)
    params = {name: lowering.partition_spec(p) for name, p in model.named_parameters()}
    states, batches = {"m": params, "params": params, "step": P(), "v": params}, {k: P(mesh.axis_names) for k in batch}
    metrics = dict.fromkeys(["loss", "aux_loss", "grad_norm", "lr"], P())
    axes = {device_mesh.get_group(name).group_name: name for name in device_mesh.mesh_dim_names} if device_mesh else {}
    table = kernel_table(args, mesh.devices.flat[0]) | lowering.collectives(axes)

    step = graph_trainer.capture(graph_trainer.train_step(model, opt, psum, args.grad_accum), state, batch)
    evaluate = graph_trainer.capture(graph_trainer.eval_step(model, psum, args.grad_accum), state["params"], batch)

    def program(graph, in_specs, out_specs, donate=0):
        stages = graph_trainer.split(graph, len(batch)) if args.split else None
        return lowering.Program(graph, mesh, in_specs, out_specs, table, donate, stages)

    return program(step, (states, batches), (states, metrics), donate=1), program(evaluate, (params, batches), P())


def check_host_memory(step, args):
    """Refuses activations that this process's host cannot hold beside what it holds already."""
    devices = len(step.mesh.local_devices)
    needed = graph_trainer.host_bytes(step.graph.gm) * devices
    if needed > (available := available_memory()):
        raise UsageError(f"--{'offload' if args.offload else 'split'} needs {needed / 1e9:,.1f} GB of this host's memory for its "
                         f"{devices} devices, and {available / 1e9:,.1f} GB are free: lower --batch (got {args.batch}) or --seq")


def available_memory():
    with open("/proc/meminfo") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))


def kernel_table(args, device):
    """kernels.lowerings as the flags and the device (perhaps of a topology that is not here) want them."""
    on_tpu = device.platform == "tpu"
    kind = args.kernels or ("pallas" if on_tpu else "reference")
    if kind == "pallas" and not on_tpu:
        raise UsageError("--kernels pallas needs a TPU: --kernels interpret runs the same kernels here, slowly")
    kinds = {name: "reference" if getattr(args, name) is False else kind for name in ("splash", "fused_ce", "paired_gmm")}
    if kind == "reference" and (wanted := [name for name in kinds if getattr(args, name)]):
        raise UsageError(f"--{wanted[0].replace('_', '-')} needs a TPU, or --kernels interpret to run here, slowly")
    if kind == "pallas" and device.device_kind not in CHIPS:
        raise UsageError(f"--kernels pallas knows {', '.join(CHIPS)}, and this is {device.device_kind}: add it to CHIPS in "
                         "train.py and to kernels.VMEM_MIB, or use --kernels reference")
    chip = CHIPS[device.device_kind][0] if on_tpu and kind == "pallas" else "tpu7x"  # interpreted kernels take tpu7x's limits

    def blocks(prefix, op):
        given = {f.name: n for f in dataclasses.fields(BLOCKS[prefix]) if (n := getattr(args, f"{prefix}_block_{f.name}"))}
        if given and kinds[op] == "reference":
            raise UsageError(f"--{prefix}-block-{min(given).replace('_', '-')} is of the Pallas kernel, and {op.replace('_', '-')} "
                             "runs in XLA: leave it out, or --kernels interpret")
        return BLOCKS[prefix](**given) if given else None

    return kernels.lowerings(kind, **kinds, splash_blocks=blocks("sa", "splash"), ce_blocks=blocks("ce", "fused_ce"), chip=chip)


@contextlib.contextmanager
def phase(name):
    """Says that something long runs, every ten seconds that it still does, and how long it took."""
    start, done = time.perf_counter(), threading.Event()

    def tick():
        while not done.wait(10):
            say(f" {time.perf_counter() - start:.0f}", end="")

    say(f"{name} ...", end="")
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
        say(f" {time.perf_counter() - start:.1f} s")


def train(args):
    log = run_log.RunLog()
    if args.metrics and os.path.exists(args.metrics) and not args.resume:
        raise UsageError(f"--metrics {args.metrics} exists: name a new file, or --resume")
    mesh, device_mesh = choose_devices(args)
    device = mesh.devices.flat[0]
    chip, peak = CHIPS.get(device.device_kind, (None, None))
    args.dtype = args.dtype or ("bfloat16" if device.platform == "tpu" else "float32")
    if args.save_hf and os.path.exists(args.save_hf):
        raise UsageError(f"--save-hf {args.save_hf} exists: name another folder")
    config = choose_size(args)
    if args.init_from and not args.tokenizer and os.path.exists(own := os.path.join(args.init_from, "tokenizer.json")):
        args.tokenizer = own
    with log.lost("data"):
        if args.model == "flux":
            dataset = flux_data.load(config, args.data, args.seed)
            args.seq = dataset.seq  # the pictures'
        else:
            dataset = data.load(args.data, args.tokenizer, args.seq, vocab_size=config.vocab, seed=args.seed)
            config = dataclasses.replace(config, vocab=dataset.vocab_size)
    say(f"data: {dataset}")

    model = build_model(args, config, device_mesh)
    say(f"model: {args.model} {args.init_from or args.size}, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.dtype}; {args.batch} x {args.seq} tokens a step")
    if args.init_from:  # now, not after minutes of compiling
        checkpoint.check(args.init_from, model, checkpoint.open_hf(args.init_from))
    if args.print_sharding:
        for name, p in model.named_parameters():
            say(f"{name:60} {str(tuple(p.shape)):28} {getattr(p, 'placements', 'whole')}")
        return
    tiers = [(args.checkpoint, args.save_every), (args.local_checkpoint, args.local_save_every)]
    run = {name: getattr(args, name) for name in ("model", "scan", "batch", "seq", "seed")} | dataclasses.asdict(config)
    flags = {name: getattr(args, name) for name in ("steps", "lr", "warmup", "weight_decay", "clip", "dtype", "grad_accum")}
    with log.lost("restart" if args.resume else "checkpoint"):
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        saves = checkpoint.Checkpoints(tiers, args.keep, run, flags | {"data": str(dataset)}, shapes, args.resume)

    if saves.step > args.steps:
        raise UsageError(f"--steps {args.steps}: the checkpoint is of step {saves.step}, give more")
    if args.profile and int(args.profile.split(":")[0]) < saves.step + 3:
        raise UsageError(f"--profile {args.profile}: --resume goes on after step {saves.step}, START must be {saves.step + 3} or "
                         "later")
    with log.lost("compile"), phase("tracing"):
        step, evaluate = build_programs(args, model, optimizer(args), device_mesh, mesh)
    if args.print_graph:
        return print(step.graph.gm.print_readable(print_output=False))
    if args.offload or args.split:
        check_host_memory(step, args)
    if args.mode == "graph":
        with log.lost("compile"), phase("lowering"):
            step.lower()
            evaluate.lower()
        options = recipes.compiler_options(recipes.flags_of(args.recipe, chip, args.libtpu_init_flags))
        with log.lost("compile"), phase("compiling"):
            step.compile(options)
            evaluate.compile(options)
    if saves.stopping:
        return 128 + signal.SIGTERM  # nothing is done yet
    log.open(args, saves.step)
    with log.lost("initialization"):
        state = lowering.initial_state(model, mesh, args.seed)
    if saves.step:
        with log.lost("restart"), phase(f"resuming after step {saves.step}"):
            state = saves.newest.restore(saves.step, state)
    elif args.init_from:
        state["params"] = None  # frees them first
        state["params"] = checkpoint.load_hf(args.init_from, model, mesh)

    def validate(params):
        with log.lost("validation"):
            return statistics.mean(float(evaluate(params, lowering.shard_batch(rows_of, (args.batch, args.seq), mesh)))
                                   for rows_of in dataset.val_batches(args.batch, args.val_batches))

    profile = profiling.Profile(args.profile_dir, *map(int, args.profile.split(":"))) if args.profile else None

    def validates(number):
        return args.validate_every and number % args.validate_every == 0

    def wanted(number):  # the state after this step
        return saves.due(number) or validates(number) or profile and number in profile.edges

    flops = model.flops_per_token(args.seq) / mesh.size
    rates, loss = [], None
    for number, state, metrics, seconds, waited in run_steps(step, state, dataset, mesh, args, saves.step, wanted):
        log.step(number, seconds, waited)
        rates.append(rate := args.batch * args.seq / seconds)
        mfu = flops * rate / peak if peak else None
        loss = validate(state["params"]) if validates(number) else None
        say(f"step {number:5d}  loss {metrics['loss']:.4f}  grad_norm {metrics['grad_norm']:.3f}  "
            f"lr {metrics['lr']:.2e}  {rate:,.0f} tokens/s" + (f"  mfu {mfu:.1%}" if mfu else "")
            + (f"  validation loss {loss:.4f}" if loss is not None else ""))
        log.write(number, metrics | {"tokens_per_s": rate, "step_s": seconds, "mfu": mfu, "validation_loss": loss})
        if profile and (text := profile.after(number, state, step)):
            say(text)
        if not all(map(math.isfinite, metrics.values())):
            saves.close()
            log.close()
            raise UsageError(f"step {number}: {metrics} is not finite; lower --lr (got {args.lr}) or raise --warmup")
        reached = args.target_loss and loss is not None and loss <= args.target_loss
        if state:
            with log.lost("checkpoint"):
                saves.save(number, state, last=reached or number == args.steps)
        if reached or state and saves.stopping:
            break

    with log.lost("checkpoint"):
        saves.close()
    if saves.stopping:
        done = f"saved step {number}, --resume goes on" if saves.tiers else f"stopped after step {number}"
        say(f"SIGTERM: {done}; {log.close()}")
        return 128 + signal.SIGTERM
    loss = validate(state["params"]) if loss is None else loss
    say(log.close())
    say((f"median {statistics.median(rates):,.0f} tokens/s; " if rates else "") + f"validation loss {loss:.4f} "
        + ("mean squared error of the velocity" if args.model == "flux" else
           f"nats a token (token frequencies alone: {dataset.unigram_loss():.4f})"))
    if args.save_hf:
        if args.mode != "graph":  # torch's, on its device
            state["params"] = {name: jax.numpy.asarray(x.cpu().numpy()) for name, x in state["params"].items()}
        checkpoint.save_hf(args.save_hf, model, state["params"], eos=getattr(dataset, "eod", None), tokenizer=args.tokenizer)


def run_steps(step, state, dataset, mesh, args, done, wanted):
    """Yields (number, state, metrics as floats, seconds, how many of them the device had no data at most) of the
    steps after `done`. Runs one step ahead of what it reads, so that the device never waits for the host, unless the
    state is wanted(number) or the step is the last: else state is None, for the next step has taken its memory."""
    started, running, waited, start = done, [], 0.0, time.perf_counter()
    for number in range(done + 1, args.steps + 1):
        while started < args.steps and (started < number or started == number and not wanted(number)):
            began = time.perf_counter()
            rows_of = functools.partial(dataset.batch, started, args.batch)
            batch = lowering.shard_batch(rows_of, (args.batch, args.seq), mesh)
            if not running or isinstance(last := running[-1]["loss"], torch.Tensor) or last.is_ready():
                waited += time.perf_counter() - began
            state, metrics = step(state, batch)
            running.append(metrics)
            started += 1
        metrics = {k: float(v) for k, v in running.pop(0).items()}
        now = time.perf_counter()
        yield number, state if started == number else None, metrics, now - start, waited
        waited, start = 0.0, now if running else time.perf_counter()


def say(*text, end="\n"):
    """Prints on one process of many."""
    if jax.process_index() == 0:
        print(*text, end=end, flush=True)


def command(main):
    """main(argv) -> main(argv or the command line's): what the user can put right is one line on stderr and exit code 2."""
    def run(argv=None):
        try:
            return main(sys.argv[1:] if argv is None else argv)
        except (UsageError, data.DataError, graph_trainer.CaptureError, lowering.LoweringError,
                checkpoint.CheckpointError, kernels.KernelError, run_log.LogError) as e:
            print(f"{os.path.basename(main.__code__.co_filename)}: error: {e}", file=sys.stderr)
            return 2
    return run


@command
def main(argv):
    if argv[:1] == ["plot"]:
        return run_log.plot(argv[1:])
    args = parse_args(argv)
    if args.topology:  # chips that are not here: compile for them and say what it would be like
        import plan
        return plan.main(argv)
    return train(args)


if __name__ == "__main__":
    sys.exit(main())
