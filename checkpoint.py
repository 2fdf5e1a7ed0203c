"""Weights in and out, as Hugging Face folders of any of the models; training states, saved and resumed.

    config = read_config("Qwen3-8B", Qwen3)               # from its config.json
    params = load_hf("Qwen3-8B", model, mesh)             # {name: jax.Array}
    save_hf("out", model, params)                         # transformers loads it
    python train.py --checkpoint DIR [--resume]           # Checkpoints

Notable features:
- every device's shard is read from the file by itself: no process ever holds the model, nor a whole stack of layers
- names, shapes and dtypes are checked from the files' headers before the first weight is read, and everything
  that is wrong is in one error
- writing holds one file's tensors at a time, and the folder appears only when it is complete
- a model file says its own names: `hf_name`, `hf_ignored`, `Config.from_hf`, `Config.to_hf`
- training states are written in the background by all processes, with digests, and fit any mesh
"""

import dataclasses
import glob
import itertools
import json
import logging
import os
import re
import shutil
import signal
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch.utils._pytree import tree_map

from lowering import partition_spec

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}


class CheckpointError(Exception):
    """The folder and the model do not go together; the message names every file, key or tensor at fault."""


def read_json(folder, name):
    try:
        with open(os.path.join(folder, name)) as f:
            if isinstance(value := json.load(f), dict):
                return value
        raise ValueError(f"a JSON object is wanted, not {str(value)[:40]}")
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{os.path.join(folder, name)}: {e}") from e


def read_config(folder, model_class):
    """config.json -> the model file's Config. Raises CheckpointError for another model, or what it does not compute."""
    h = read_json(folder, "config.json")
    try:
        kind = h.get("model_type", h.get("_class_name"))  # the latter is diffusers'
        if kind != model_class.hf_type:
            raise ValueError(f"model_type is {kind!r}, not {model_class.hf_type!r}")
        if h.get("quantization_config"):
            raise ValueError("quantization_config: quantized weights cannot be trained; take the unquantized ones")
        config = model_class.Config.from_hf(h)
        for field in dataclasses.fields(config):
            value, number = getattr(config, field.name), field.type in (int, float, int | None)
            if not isinstance(value, (int, float) if field.type is float else field.type) or (
                    number and not value >= (field.type is not float)):
                raise ValueError(f"{field.name} would be {value!r}")
        return config
    except KeyError as e:
        raise CheckpointError(f"{folder}/config.json has no {e}") from e
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as e:  # the first two: a value of another type
        raise CheckpointError(f"{folder}/config.json: {e}") from e


def open_hf(folder):
    """-> {tensor's name: the open safetensors file that holds it}. Only headers are read."""
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is not a folder")
    indices = [f for f in os.listdir(folder) if f.endswith(".safetensors.index.json")]
    if indices:
        weight_map = read_json(folder, indices[0]).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{os.path.join(folder, indices[0])} has no weight_map of tensors' names to files")
        files = sorted(set(weight_map.values()))
    else:
        files = [f for f in os.listdir(folder) if f.endswith(".safetensors")]
        if len(files) != 1:
            raise CheckpointError(f"{folder} holds {len(files)} .safetensors files and no .safetensors.index.json")
    tensors = {}
    for name in files:
        try:
            file = safe_open(os.path.join(folder, name), framework="pt")  # numpy has no bfloat16
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{os.path.join(folder, name)}: {e}") from e
        tensors |= dict.fromkeys(file.keys(), file)
    return tensors


def pieces(model, name, shape):
    """The tensors in Hugging Face's files that make up a parameter.

    -> {(layer, run of rows): tensor's name}, the shape of such a run, whether its tensor is its transpose. Layers are those of
    a stack (scan), else there is layer 0. One run is all rows, but where hf_name has a {}: there each expert's.
    """
    names, stacked = {}, ".stack." in name
    for layer in range(shape[0] if stacked else 1):
        template, transposed = model.hf_name(name.replace(".stack.", f".{layer}."))
        runs = model.config.n_experts if "{}" in template else 1
        names |= {(layer, run): template.format(run) for run in range(runs)}
    rows, *rest = shape[stacked:]
    return names, (rows // runs, *rest), transposed


def check(folder, model, tensors):
    """Holds the files' headers against the model. Raises CheckpointError that lists all that differs."""
    wrong, expected = [], set()
    for param, p in model.named_parameters():
        names, shape, transposed = pieces(model, param, tuple(p.shape))
        shape = shape[::-1] if transposed else shape
        for name in names.values():
            expected.add(name)
            if name not in tensors:
                wrong.append(f"missing: {name} {shape}")
                continue
            header = tensors[name].get_slice(name)
            if tuple(header.get_shape()) != shape:
                wrong.append(f"misshapen: {name} is {tuple(header.get_shape())}, the model wants {shape}")
            if header.get_dtype() not in DTYPES:
                wrong.append(f"dtype: {name} is {header.get_dtype()}, known are {', '.join(DTYPES)}")
    wrong += [f"unexpected: {name}" for name in sorted(tensors.keys() - expected)
              if not name.startswith(model.hf_ignored)]
    if wrong:
        raise CheckpointError(f"{folder} does not hold this {type(model).__name__}; nothing was loaded:\n  "
                              + "\n  ".join(wrong))


def load_hf(folder, model, mesh, dtype=jnp.float32):
    """A Hugging Face folder -> {name: jax.Array}, laid out like the (sharded, scanned, meta) model on a JAX mesh."""
    tensors = open_hf(folder)
    check(folder, model, tensors)

    def load(name, p):
        names, (rows, *_), transposed = pieces(model, name, tuple(p.shape))

        def read(index):  # slices of the parameter, one a dimension -> that part of it
            ranges = [range(n)[s] for n, s in zip(p.shape, index)]
            layers, own, *inner = ranges if ".stack." in name else [range(1), *ranges]
            out = np.empty([len(layers), len(own), *map(len, inner)], dtype)
            for layer, run in itertools.product(layers, range(own.start // rows, (own.stop - 1) // rows + 1)):
                start, stop = max(own.start, run * rows), min(own.stop, (run + 1) * rows)
                part = (slice(start - run * rows, stop - run * rows), *(slice(r.start, r.stop) for r in inner))
                tensor = names[layer, run]
                x = tensors[tensor].get_slice(tensor)[part[::-1] if transposed else part].float().numpy()
                out[layer - layers.start, start - own.start:stop - own.start] = x.T if transposed else x
            return out.reshape([len(r) for r in ranges])

        return jax.make_array_from_callback(tuple(p.shape), NamedSharding(mesh, partition_spec(p)), read)

    return {name: load(name, p) for name, p in model.named_parameters()}


def save_hf(folder, model, params, dtype="F32", eos=None, tokenizer=None, shard_bytes=5 * 10**9):
    """{name: jax.Array} of a model -> a new Hugging Face folder that transformers loads.

    dtype: "F32", "BF16" or "F16". eos: id of the token that ends a text. tokenizer: path of the tokenizer.json to
    put beside the weights. Where several processes train as one, all must call this; the first writes.
    """
    if os.path.exists(folder):
        raise CheckpointError(f"{folder} exists: name another folder")
    stem, dtype = getattr(model, "hf_file", "model"), DTYPES[dtype]
    files, room = [], 0
    for name, p in model.named_parameters():
        names, shape, transposed = pieces(model, name, tuple(p.shape))
        size = int(np.prod(shape)) * dtype.itemsize
        for at, tensor in names.items():
            if size > room:
                files.append([])
                room = shard_bytes
            files[-1].append((tensor, name, at, shape[0], transposed))
            room -= size

    writes, unfinished = jax.process_index() == 0, f"{folder}.unfinished"
    if writes:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
    weight_map, total = {}, 0
    for number, entries in enumerate(files, 1):
        file = f"{stem}-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else f"{stem}.safetensors"
        tensors = dict(gather(entries, params, dtype, writes))
        if writes:
            save_file(tensors, os.path.join(unfinished, file), {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(x.nbytes for x in tensors.values())
    if writes:
        config = model.config.to_hf()
        if "model_type" in config:  # transformers'
            config |= {"dtype": dtype.name, "bos_token_id": None, "eos_token_id": eos}
        write_json(unfinished, "config.json", config)
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(unfinished, f"{stem}.safetensors.index.json", index)
        if tokenizer:
            shutil.copy(tokenizer, os.path.join(unfinished, "tokenizer.json"))
        os.rename(unfinished, folder)
    multihost_utils.sync_global_devices(f"save_hf {folder}")


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w") as f:
        json.dump(value, f, indent=1)


@jax.jit
def part(x, layer):
    """One layer of a stack, with the stack's sharding behind it."""
    return x[layer]


def to_host(x):
    """A jax.Array as numpy; one process cannot read another's shards by itself."""
    return multihost_utils.process_allgather(x, tiled=True)


def gather(entries, params, dtype, writes):
    """Gives (name, numpy array) of a file's (tensor, parameter, (layer, run), rows of a run, transposed), where this process
    writes it; the others only help to gather."""
    held = None
    for tensor, name, (layer, run), rows, transposed in entries:
        if held != (name, layer):  # a layer's experts come together
            held, whole = (name, layer), to_host(part(params[name], layer) if ".stack." in name else params[name])
        if writes:
            x = whole[run * rows:(run + 1) * rows].astype(dtype, copy=False)
            yield tensor, np.ascontiguousarray(x.T if transposed else x)


class Checkpoints:
    """The checkpoint folders of a run, perhaps a fast one saved often and a safe one saved rarely.

    tiers: [(folder or None, save every so many steps)]. run: what must be the same to go on, flags: what may differ but is said;
    shapes: {name: shape} of the parameters, which must be the same too. resume: go on from the newest whole checkpoint of all
    tiers; else the folders must be new. It is in the Tier `newest` and was saved after `step`; None and 0 where there never was
    one. Where several processes train as one, all must see the folders and make the same calls. Raises CheckpointError before
    anything is written.
    """

    def __init__(self, tiers, keep, run, flags, shapes, resume):
        self.tiers = [Tier(folder, every, keep, {"run": run, "flags": flags}) for folder, every in tiers if folder]
        self.newest, self.step, self.stopping = None, 0, False
        for tier in self.tiers:
            if not resume and os.path.isdir(tier.folder) and os.listdir(tier.folder):
                raise CheckpointError(f"{tier.folder} is not empty: add --resume to go on from it, or name another folder")
        if len({tier.folder for tier in self.tiers}) < len(self.tiers):
            raise CheckpointError(f"--local-checkpoint {self.tiers[0].folder} is --checkpoint's: name another folder")
        if resume:
            self.find(shapes)
        try:
            for tier in self.tiers if jax.process_index() == 0 else []:
                os.makedirs(tier.folder, exist_ok=True)
        except OSError as e:
            raise CheckpointError(f"checkpoints cannot be written: {e}") from e
        multihost_utils.sync_global_devices("checkpoint folders")
        for tier in self.tiers:
            if not os.path.isdir(tier.folder):
                raise CheckpointError(f"{tier.folder}: process {jax.process_index()} does not see the folder that process 0 made")
        if self.tiers and jax.process_count() == 1:  # of several, JAX's preemption service takes the signal
            signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))

    def find(self, shapes):
        found = [(step, tier) for tier in reversed(self.tiers) for step in tier.steps()]
        damaged = []
        for step, tier in sorted(found, key=lambda at: at[0], reverse=True):  # of equal ones the fast folder's
            if not (wrong := tier.damage(step)):
                tier.check_run(step, shapes)
                self.newest, self.step = tier, step
                break
            damaged.append(tier.path(step))
            print(f"warning: checkpoint {damaged[-1]} is damaged ({wrong}): trying the one before it", file=sys.stderr)
        if found and not self.newest:
            raise CheckpointError("--resume: none of the checkpoints is whole: name another folder to start again")
        for path in damaged if jax.process_index() == 0 else []:  # their steps will be saved again
            shutil.rmtree(f"{path}.damaged", ignore_errors=True)
            os.rename(path, f"{path}.damaged")

    def due(self, step):
        """Whether to save after this step: it is its turn, or SIGTERM came (`stopping`). To be asked once a step."""
        if jax.process_count() > 1:
            self.stopping = multihost_utils.reached_preemption_sync_point(step) or self.stopping
        return self.stopping or any(step % tier.every == 0 for tier in self.tiers)

    def save(self, step, state, last):
        for tier in self.tiers:
            if last or self.stopping or step % tier.every == 0:
                tier.save(step, state)

    def close(self):
        """Waits for the saves in the background. Raises CheckpointError if the last one failed."""
        for tier in self.tiers:
            tier.wait()
            tier.orbax.close()
            if jax.process_index() == 0:
                tier.clean()
        if self.tiers and jax.process_count() == 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if failed := [tier.failed for tier in self.tiers if tier.failed]:
            raise CheckpointError("; ".join(failed))


class Tier:
    """A folder of training states, each written in the background, and whole or not there.

        DIR/00000120/state           orbax's: every process writes the shards of its devices
        DIR/00000120/run.json        what was trained
        DIR/00000120/digests.0.json  {file: [bytes, crc32]}, by process

    A save grows as DIR/00000120.unfinished, gets its name last, and only then do older ones go: neither a kill nor a
    full disk costs the last good one.
    """

    def __init__(self, folder, every, keep, run):
        import orbax.checkpoint as ocp  # half a second that only those who save pay

        if "://" in folder:
            raise CheckpointError(f"{folder}: checkpoints go to a mounted folder (gcsfuse, NFS), not to an address")
        # What fail() says in a line, orbax logs as a traceback, and so does each array whose write ends after orbax gave up.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        sys.unraisablehook = lambda e: "Event loop is closed" in str(e.exc_value) or sys.__unraisablehook__(e)
        self.ocp, self.folder, self.every, self.keep = ocp, os.path.abspath(folder), every, keep
        self.run = json.loads(json.dumps(run))  # tuples are lists in a file
        self.saving = self.failed = None
        processes = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=self.folder)
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=processes)  # weights hardly shrink
        self.orbax = ocp.AsyncCheckpointer(handler, multiprocessing_options=processes)
        self.thread = ThreadPoolExecutor(1)

    def path(self, step):
        return os.path.join(self.folder, f"{step:08}")

    def steps(self):
        """After which there are checkpoints, newest first."""
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def save(self, step, state):
        """Returns when the state is on the host, so that the next step may take its memory. Waits for the save before."""
        self.wait()
        unfinished, error = self.path(step) + ".unfinished", None
        try:
            if jax.process_index() == 0:
                self.clean()
                os.mkdir(unfinished)
                write_json(unfinished, "run.json", self.run)
        except OSError as e:
            error = e
        if multihost_utils.broadcast_one_to_all(np.array(error is not None)):  # nobody may wait in orbax for one not there
            return self.fail(step, error or "on process 0")
        try:
            self.orbax.save(os.path.join(unfinished, "state"), args=self.ocp.args.PyTreeSave(state))
            self.saving = step, self.thread.submit(self.finish, step, unfinished)
        except Exception as e:  # whatever orbax raises, training goes on without this checkpoint
            self.fail(step, e)

    def clean(self):
        """Removes what a kill or a failed save left; orbax may still have written after it gave up."""
        for path in glob.glob(os.path.join(glob.escape(self.folder), "*.unfinished")):
            shutil.rmtree(path, ignore_errors=True)

    def finish(self, step, unfinished):
        """In the background: the digests, the name, and away with what is too old."""
        self.orbax.wait_until_finished()
        index, names = jax.process_index(), contents(unfinished)[jax.process_index()::jax.process_count()]
        write_json(unfinished, f"digests.{index}.json", {name: digest(os.path.join(unfinished, name)) for name in names})
        self.ocp.multihost.get_barrier_sync_fn()(key=f"{unfinished} has its digests", timeout_ms=20 * 60 * 1000)
        if index == 0:
            os.rename(unfinished, self.path(step))
            for old in map(self.path, self.steps()[self.keep:]):
                os.rename(old, f"{old}.unfinished")  # at once; a kill can come between the files
                shutil.rmtree(f"{old}.unfinished")

    def wait(self):
        """For the save in the background. Warns if it failed."""
        if self.saving:
            (step, future), self.saving, self.failed = self.saving, None, None
            try:
                future.result()
            except Exception as e:
                self.fail(step, e)

    def fail(self, step, error):
        if jax.process_index() == 0:
            shutil.rmtree(self.path(step) + ".unfinished", ignore_errors=True)  # room for the next one
        why = re.search(r"[\w ]+(?= \[os_error_code)", str(error)) or re.search(".*", str(error))  # tensorstore's, or anybody's
        self.failed = f"checkpoint {self.path(step)} could not be written ({why.group().strip()})"
        good = self.path(self.steps()[0]) if self.steps() else "none"
        print(f"warning: {self.failed}; the last good one: {good}", file=sys.stderr)

    def damage(self, step):
        """-> what is wrong with a checkpoint's files, "" if nothing. Several processes share the reading."""
        folder = self.path(step)
        paths = sorted(glob.glob(os.path.join(glob.escape(folder), "digests.*")))
        try:
            listed = lambda paths: {k: v for path in paths for k, v in read_json(folder, os.path.basename(path)).items()}
            wrong = sorted(set(contents(folder)) ^ listed(paths).keys()) if jax.process_index() == 0 else []
            mine = listed(paths[jax.process_index()::jax.process_count()])
            wrong = ", ".join(wrong or [name for name in mine if digest(os.path.join(folder, name)) != mine[name]])
        except (OSError, AttributeError, TypeError, ValueError, CheckpointError) as e:
            wrong = str(e)
        anywhere = multihost_utils.process_allgather(np.array(bool(wrong))).any()
        return wrong or ("says another process" if anywhere else "")

    def check_run(self, step, shapes):
        saved = read_json(self.path(step), "run.json")
        run, flags = ([f"{k} was {saved[part].get(k)} and is now {v}" for k, v in self.run[part].items()
                       if saved[part].get(k) != v] for part in ("run", "flags"))
        if run:
            raise CheckpointError(f"--resume: {self.path(step)} is another run's: {'; '.join(run)}")
        params = self.orbax.metadata(os.path.join(self.path(step), "state")).item_metadata.tree["params"]
        for name, shape in shapes.items():
            was = params[name].shape if name in params else "not there"
            if was != shape:
                raise CheckpointError(f"--resume: {self.path(step)} is of another version of this code: {name} is {shape} now "
                                      f"and was {was}")
        if flags and jax.process_index() == 0:
            print(f"note: --resume with other flags: {'; '.join(flags)}")

    def restore(self, step, state):
        """-> the saved state on the devices of `state`, on whatever mesh; frees the memory of `state` first."""
        wanted = jax.tree.map(lambda x: self.ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype), state)
        jax.tree.map(lambda x: x.delete(), state)
        args = self.ocp.args.PyTreeRestore(restore_args=wanted)
        restored = self.orbax.restore(os.path.join(self.path(step), "state"), args=args)
        return tree_map(lambda _, x: x, state, restored)  # with keys in the order of a Program's arguments


def contents(folder):
    """Paths within a checkpoint of all files but the digests."""
    names = [os.path.relpath(os.path.join(path, name), folder) for path, _, files in os.walk(folder) for name in files]
    return sorted(name for name in names if not name.startswith("digests."))


def digest(path):
    """-> [bytes, crc32] of a file."""
    crc = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 24):
            crc = zlib.crc32(block, crc)
        return [f.tell(), crc]
