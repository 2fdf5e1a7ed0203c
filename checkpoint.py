"""Weights in and out: Hugging Face folders of any of the models, onto any mesh, scanned or not.

    config = read_config("Qwen3-8B", Qwen3)               # from its config.json
    params = load_hf("Qwen3-8B", model, mesh)             # {name: jax.Array}
    save_hf("out", model, params)                         # transformers loads it

Notable features:
- every device's shard is read from the file by itself: no process ever holds the model, nor a whole stack of layers
- names, shapes and dtypes are checked from the files' headers before the first weight is read, and everything
  that is wrong is in one error
- writing holds one tensor at a time, and the folder appears only when it is complete
- a model file says its own names: `hf_name`, `hf_ignored`, `Config.from_hf`, `Config.to_hf`
"""

import dataclasses
import itertools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open

from lowering import partition_spec

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}


class CheckpointError(Exception):
    """The folder and the model do not go together; the message names every file, key or tensor at fault."""


# ------------------------------------------------------------------------------------------- reading


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

    -> {index along the parameter's leading dimensions: tensor's name}, their common shape, whether each is the
    transpose of its part. Leading dimensions are scan's layers and what {} in hf_name counts (experts).
    """
    names = {}
    for layer in range(shape[0]) if ".stack." in name else [None]:
        lead = () if layer is None else (layer,)
        template, transposed = model.hf_name(name.replace(".stack.", f".{layer}."))
        counts = range(shape[len(lead)]) if "{}" in template else [None]
        names |= {lead + (() if i is None else (i,)): template.format(i) for i in counts}
    shape = tuple(shape[len(next(iter(names))):])
    return names, shape[::-1] if transposed else shape, transposed


def check(folder, model, tensors):
    """Holds the files' headers against the model. Raises CheckpointError that lists all that differs."""
    wrong, expected = [], set()
    for param, p in model.named_parameters():
        names, shape, _ = pieces(model, param, tuple(p.shape))
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
        names, _, transposed = pieces(model, name, tuple(p.shape))
        n_lead = len(next(iter(names)))

        def read(index):  # slices of the parameter, one a dimension -> that part of it
            ranges = [range(n)[s] for n, s in zip(p.shape, index)]
            out = np.empty([len(r) for r in ranges], dtype)
            inner = tuple(slice(r.start, r.stop) for r in ranges[n_lead:])
            for lead in itertools.product(*ranges[:n_lead]):
                tensor = names[lead]
                part = tensors[tensor].get_slice(tensor)[inner[::-1] if transposed else inner].float().numpy()
                out[tuple(i - r.start for i, r in zip(lead, ranges))] = part.T if transposed else part
            return out

        return jax.make_array_from_callback(tuple(p.shape), NamedSharding(mesh, partition_spec(p)), read)

    return {name: load(name, p) for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------------- writing


def save_hf(folder, model, params, dtype="F32", eos=None, tokenizer=None, shard_bytes=5 * 10**9):
    """{name: jax.Array} of a model -> a new Hugging Face folder that transformers loads.

    dtype: "F32", "BF16" or "F16". eos: id of the token that ends a text. tokenizer: path of the tokenizer.json to
    put beside the weights. Where several processes train as one, all must call this; the first writes.
    """
    if os.path.exists(folder):
        raise CheckpointError(f"{folder} exists: name another folder")
    plan = [(tensor, name, lead, shape, transposed) for name, p in model.named_parameters()
            for names, shape, transposed in [pieces(model, name, tuple(p.shape))] for lead, tensor in names.items()]
    stem = getattr(model, "hf_file", "model")
    files, room = [], 0
    for entry in plan:
        size = int(np.prod(entry[3])) * DTYPES[dtype].itemsize
        if size > room:
            files.append([])
            room = shard_bytes
        files[-1].append(entry)
        room -= size

    writes = jax.process_index() == 0
    unfinished = f"{folder}.unfinished"
    if writes:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
    weight_map = {}
    for number, entries in enumerate(files, 1):
        file = f"{stem}-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else f"{stem}.safetensors"
        weight_map |= {entry[0]: file for entry in entries}
        write_safetensors(os.path.join(unfinished, file) if writes else None, entries, params, dtype)
    if writes:
        config = model.config.to_hf()
        if "model_type" in config:  # transformers'
            config |= {"dtype": DTYPES[dtype].name, "bos_token_id": None, "eos_token_id": eos}
        write_json(unfinished, "config.json", config)
        if len(files) > 1:
            total = sum(int(np.prod(entry[3])) for entry in plan) * DTYPES[dtype].itemsize
            write_json(unfinished, f"{stem}.safetensors.index.json",
                       {"metadata": {"total_size": total}, "weight_map": weight_map})
        if tokenizer:
            shutil.copy(tokenizer, os.path.join(unfinished, "tokenizer.json"))
        os.rename(unfinished, folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"save_hf {folder}")


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w") as f:
        json.dump(value, f, indent=1)


@jax.jit
def part(x, lead):
    """x[lead], with x's sharding behind it."""
    return x[lead]


def to_host(x):
    """A jax.Array as numpy; one process cannot read another's shards by itself."""
    return np.asarray(x) if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)


def write_safetensors(path, entries, params, dtype):
    """One file, tensor after tensor. path: None where another process writes (this one helps to gather).

    The format: the header's length (8 bytes), the header (JSON: names, dtypes, shapes, offsets), the data. The
    safetensors library writes only from whole dictionaries.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for tensor, _, _, shape, _ in entries:
        end = offset + int(np.prod(shape)) * DTYPES[dtype].itemsize
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path or os.devnull, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, name, lead, _, transposed in entries:
            x = to_host(part(params[name], lead)).astype(DTYPES[dtype])
            f.write(np.ascontiguousarray(x.T if transposed else x).tobytes())
