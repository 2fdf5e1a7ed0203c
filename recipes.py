"""Named runs on Cloud TPU: model, chips, batch, and the compiler's flags with what each one does.

    python plan.py --recipe llama3_405b             # does it fit, how fast will it be
    python train.py --recipe llama3_8b --steps 100  # on the TPU itself; any flag after --recipe overrides it

Notable features:
- a recipe is nothing but command-line flags; compiler flags go with the chips, in FLAGS
- flags are passed as compiler options of the one program. For libtpu 0.0.42 that gives the same program as
  LIBTPU_INIT_ARGS (checked: same estimated cycles), but a wrong name is an error message instead of a dead process.
  Dump flags (--xla_jf_dump_to) work in LIBTPU_INIT_ARGS only
- `python plan.py flags --recipe NAME --libtpu-init-flags="..."` shows what a flag changes
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    topology: str  # of one slice
    flags: str  # of train.py, to be followed by the user's own
    published: tuple | None = None  # (MFU, where): the yardstick


# Each flag: what it does; whether it can change rounding ("free": same values bit for bit, by what it is
# documented or seen to do in the HLO; the check on a TPU is `plan.py flags`).

# v6e, found by compiling llama3_8b (RESULTS.md).
TRILLIUM = {
    # Of 128 MiB VMEM a fusion may use 80 instead of 16: matmuls 729 -> 607 ms of the step. 98304: 581, but `plan.py --recipe
    # llama3_8b` takes 180 s instead of 144. Can change rounding: other blocks, another order of a sum.
    "xla_tpu_scoped_vmem_limit_kib": "81920",
    # Gathers and reductions run on the SparseCores, beside whatever the TensorCore does. tpu7x does so by default.
    # The ND reduce-scatter is the one that keeps a reduce-scatter: without it libtpu 0.0.42 sends a whole all-reduce, twice
    # the bytes, and slices (MaxText's xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 and its kin change nothing).
    # Can change rounding: another order of the sum.
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_enable_all_gather_offload_tracing": "true",  # named in profiles
    "xla_tpu_enable_reduce_scatter_offload_tracing": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
}

# tpu7x, found by compiling llama3_405b (RESULTS.md).
IRONWOOD = {
    # Of 64 MiB VMEM a fusion may use 60 instead of 16: a matmul with its neighbours' arithmetic in it 44 to 62 % -> 81 to 93 %
    # of the MXU's peak. Compiling takes twice as long. Can change rounding: other blocks, another order of a sum.
    "xla_tpu_scoped_vmem_limit_kib": "61440",
    # On a full torus an all-gather stays one. Otherwise: an all-reduce of zeros and the shard, twice the bytes and the memory. Free.
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    # Reduce-scatters of more than 1 GiB on 2,048 devices stay such. Otherwise: an all-reduce, then a slice. Can change rounding.
    "xla_tpu_check_legacy_constraints_in_reduce_scatter_legalizer": "false",
    # The scheduler's older estimates of how long an op takes. By the "real" ones a transfer to or from the host takes no time, so
    # that nothing is put beside it, and gradients lie longer: 4 layers of 405b with --offload 37 -> 25 GB. On v6e the step gets
    # 8 % slower. Free: another order of the same ops.
    "xla_tpu_scheduler_using_real_cost_model": "false",
    # graph_trainer.loop fetches an iteration ahead itself; the compiler doing so once more ties each transfer to the next. Free.
    "xla_tpu_pipeline_memory_host_transfers": "false",
}

FLAGS = {"v6e": TRILLIUM, "tpu7x": IRONWOOD}  # of every recipe, by generation of chips

TITAN = "TorchTitan TPU"

RECIPES = {
    "llama3_8b": Recipe("v6e:4x4", "--model llama3 --size 8b --seq 8192 --per-device-batch 1 --scan"),
    "llama3_70b": Recipe("tpu7x:4x4x4", "--model llama3 --size 70b --seq 8192 --per-device-batch 1 --scan"),
    "llama3_405b": Recipe("tpu7x:8x8x16", "--model llama3 --size 405b --seq 8192 --per-device-batch 1 --scan",
                          published=(0.57, f"tpu7x, {TITAN}")),
    "qwen3_8b": Recipe("tpu7x:2x2x2", "--model qwen3 --size 8b --seq 8192 --per-device-batch 2 --scan --remat dots",
                       published=(0.515, f"tpu7x, {TITAN}")),
    "qwen3_32b": Recipe("tpu7x:4x4x4", "--model qwen3 --size 32b --seq 8192 --per-device-batch 1 --scan"),
    # 8,192 tokens a device reach 13 % MFU, 32,768 24 %
    "qwen3_30b_a3b": Recipe("tpu7x:2x2x2", "--model qwen3_moe --size 30b-a3b --seq 8192 --per-device-batch 4 --scan"),
    # 64k tokens a device: fewer do not keep it busy while a layer's 128 experts are gathered
    "qwen3_235b": Recipe("tpu7x:8x8x16", "--model qwen3_moe --size 235b-a22b --seq 4096 --per-device-batch 16 --scan",
                         published=(0.324, f"tpu7x, {TITAN}")),
    # 512 tokens of text and 512 x 512 pixels. 16 replicas of 128 devices: 2,048 divide no dimension of most weights (3,072)
    "flux_12b": Recipe("tpu7x:8x8x16", "--model flux --size 12b --seq 1536 --per-device-batch 4 --scan --replicas 16",
                       published=(0.194, f"tpu7x:8x8x16, {TITAN}")),
    "muse_glimmer_30b": Recipe("tpu7x:4x4x8", "--model muse_glimmer --size 30b --seq 8192 --per-device-batch 1 --scan --remat dots",
                               published=(0.434, f"tpu7x:4x4x8, {TITAN}")),
}


def flags_of(recipe, chip, given=None):
    """The compiler flags of a run on a chip generation ("v6e"; None: a CPU), as one string "--a=1 --b=2": those given, which
    replace the recipe's, or what a recipe (None: no recipe) has for such chips."""
    if given is not None or not recipe:
        return given or ""
    return " ".join(f"--{name}={value}" for name, value in FLAGS.get(chip, {}).items())


def compiler_options(flags):
    """"--a=1 --b" -> {"a": "1", "b": True}, for .compile(compiler_options=...). libtpu takes almost every flag of
    LIBTPU_INIT_ARGS there, to the same effect, but per program and with an error instead of an exit."""
    options = {}
    for flag in flags.split():
        name, _, value = flag.lstrip("-").partition("=")
        options[name] = {"true": True, "": True, "false": False}.get(value, value)
    return options
