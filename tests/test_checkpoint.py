import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

import checkpoint
import data
import graph_trainer
import hf_models
import lowering
import sample
import simple_fsdp
import train
from llama3 import Llama3
from qwen3_moe import Qwen3MoE


@pytest.fixture(scope="module", params=hf_models.CASES)
def case(request, tmp_path_factory):
    """Our model class, transformers' model, and its folder of several safetensors files."""
    model_class, theirs = hf_models.make(request.param)
    folder = str(tmp_path_factory.mktemp(request.param) / "hf")
    theirs.save_pretrained(folder, max_shard_size="150KB")
    return model_class, theirs, folder


def meta_model(model_class, folder, shards=1, scan=False):
    """-> the model on meta, as train.py builds it, and the JAX mesh."""
    with torch.device("meta"):
        model = model_class(checkpoint.read_config(folder, model_class))
    if shards > 1:
        simple_fsdp.fully_shard(model, simple_fsdp.capture_mesh(shards), reduce_op="sum")
    if scan:
        model.layers = graph_trainer.ScanLayers(model.layers)
    return model, lowering.make_mesh(1, shards, jax.devices()[:shards])


def eager_model(model_class, folder):
    """Our model in plain PyTorch, with the folder's weights."""
    meta, mesh = meta_model(model_class, folder)
    model = model_class(meta.config)
    weights = {name: torch.from_numpy(np.array(x)) for name, x in checkpoint.load_hf(folder, meta, mesh).items()}
    model.load_state_dict(weights)
    return model


def all_tensors(folder):
    files = [f for f in os.listdir(folder) if f.endswith(".safetensors")]
    return {name: x for f in files for name, x in load_file(os.path.join(folder, f)).items()}


def largest_relative(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def test_logits_and_gradients_are_transformers(case, tmp_path):
    """The gradients go through save_pretrained and load_hf like weights, so that both have our names and layout."""
    model_class, theirs, folder = case
    ours = eager_model(model_class, folder)
    tokens = torch.randint(0, 318, (2, 129), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": torch.zeros(2, 128, dtype=torch.int32)}

    logits = theirs(input_ids=batch["tokens"]).logits
    x = ours(batch["tokens"], batch["segment_ids"])
    assert largest_relative(ours.logits(x[0] if isinstance(x, tuple) else x), logits) < 1e-4

    theirs.zero_grad()
    F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten()).backward()
    ours.loss(batch)[0].backward()
    gradients = type(theirs)(theirs.config)
    for p, q in zip(gradients.parameters(), theirs.parameters()):
        p.data = torch.zeros_like(q) if q.grad is None else q.grad
    gradients.save_pretrained(tmp_path)
    meta, mesh = meta_model(model_class, folder)
    wanted = checkpoint.load_hf(tmp_path, meta, mesh)
    got = {name: p.grad for name, p in ours.named_parameters()}
    assert got.keys() == wanted.keys()
    for name in got:
        # Muse Glimmer's post-norms divide by small numbers, which makes more of rounding.
        assert largest_relative(got[name], torch.from_numpy(np.array(wanted[name]))) < (2e-4 if model_class.hf_type == "muse_glimmer" else 1e-4), name


@pytest.mark.parametrize("shards,scan", [(1, False), (8, True)], ids=["one device", "scan on 8 devices"])
def test_a_round_trip_is_bit_identical_and_transformers_loads_it(case, shards, scan, tmp_path):
    model_class, theirs, folder = case
    model, mesh = meta_model(model_class, folder, shards, scan)
    out = str(tmp_path / "out")
    checkpoint.save_hf(out, model, checkpoint.load_hf(folder, model, mesh), shard_bytes=100_000)
    before = {name: x for name, x in all_tensors(folder).items() if not name.startswith("model.vision_")}
    after = all_tensors(out)
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]), name
    assert len([f for f in os.listdir(out) if f.endswith(".safetensors")]) > 1

    if model_class.hf_type == "muse_glimmer":  # our folder has no vision tower: take the small one's shape
        config = transformers.AutoConfig.from_pretrained(out)
        config.vision_config, config.out_hidden_size = theirs.config.vision_config, theirs.config.out_hidden_size
        config.projector_hidden_size = theirs.config.projector_hidden_size
        again = type(theirs).from_pretrained(out, config=config)
    else:
        again = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.arange(100).view(1, 100)
    assert torch.equal(again(input_ids=tokens).logits, theirs(input_ids=tokens).logits)


def test_bfloat16_goes_in_and_out_bit_identical(tmp_path):
    _, theirs = hf_models.make("qwen3_moe")
    theirs.bfloat16().save_pretrained(tmp_path / "hf")
    model, mesh = meta_model(Qwen3MoE, tmp_path / "hf", 8, scan=True)
    params = checkpoint.load_hf(tmp_path / "hf", model, mesh)
    assert all(x.dtype == jnp.float32 for x in params.values())
    checkpoint.save_hf(tmp_path / "out", model, params, dtype="BF16")
    before, after = all_tensors(tmp_path / "hf"), all_tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert all(x.dtype == torch.bfloat16 for x in after.values())


def test_each_device_reads_its_own_shard_and_a_stack_is_read_layer_by_layer(tmp_path, monkeypatch):
    _, theirs = hf_models.make("qwen3_moe")
    theirs.save_pretrained(tmp_path / "hf")
    sizes, open_file = [], checkpoint.safe_open

    class Spy:
        def __init__(self, *args, **kwargs):
            self.file = open_file(*args, **kwargs)
            self.keys = self.file.keys

        def get_slice(self, name):
            header = self.file.get_slice(name)

            class Slice:
                get_shape, get_dtype = header.get_shape, header.get_dtype

                def __getitem__(self, index):
                    sizes.append((header[index].numel(), int(np.prod(header.get_shape())), name))
                    return header[index]
            return Slice()

    monkeypatch.setattr(checkpoint, "safe_open", Spy)
    model, mesh = meta_model(Qwen3MoE, tmp_path / "hf", 8, scan=True)
    checkpoint.load_hf(tmp_path / "hf", model, mesh)
    matrices = [(part, whole) for part, whole, name in sizes if "norm" not in name and ".experts." not in name]
    assert all(part == whole // 8 for part, whole in matrices) and len(matrices) == 8 * (2 + 5 * 2)
    experts = [(part, whole) for part, whole, name in sizes if ".experts." in name]
    assert len(experts) == 2 * 8 * 3 and all(part == whole for part, whole in experts)  # one of 8 experts on each device


@pytest.mark.parametrize("scan", [False, True])
def test_shards_that_end_within_an_expert_hold_its_rows_and_export_gathers_a_layers_experts_once(tmp_path, monkeypatch, scan):
    theirs = hf_models.qwen3_moe(num_experts=3)
    theirs.save_pretrained(tmp_path / "hf")
    whole = {name: np.asarray(x) for name, x in checkpoint.load_hf(tmp_path / "hf", *meta_model(Qwen3MoE, tmp_path / "hf", scan=scan)).items()}
    model, mesh = meta_model(Qwen3MoE, tmp_path / "hf", 8, scan)
    params = checkpoint.load_hf(tmp_path / "hf", model, mesh)
    experts = [name for name in params if ".experts.gate_proj" in name]
    assert all(x.addressable_shards[2].data.shape[scan] == 3 * 64 // 8 for x in map(params.get, experts))  # 48 to 72 of 64 each
    assert all(np.array_equal(np.asarray(params[name]), whole[name]) for name in whole)

    gathered, to_host = [], checkpoint.to_host
    monkeypatch.setattr(checkpoint, "to_host", lambda x: gathered.append(x.shape) or to_host(x))
    checkpoint.save_hf(tmp_path / "out", model, params)
    before, after = all_tensors(tmp_path / "hf"), all_tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    entry = ["norm", "norm.weight", (0, 0), params["norm.weight"].shape[0], False]
    assert dict(checkpoint.gather([entry], params, np.dtype("float32"), True)).keys() == {"norm"}
    assert list(checkpoint.gather([entry], params, np.dtype("float32"), False)) == []  # a process that writes nothing holds nothing
    assert len(gathered) - 2 == sum(p.shape[0] if ".stack." in name else 1 for name, p in model.named_parameters())


def broken(tmp_path, change, config=None):
    """A folder of a small Qwen3-MoE whose tensors `change` has changed, and whose config.json `config` overrides."""
    _, theirs = hf_models.make("qwen3_moe")
    theirs.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    return str(tmp_path / "hf")


def test_all_that_is_wrong_with_the_tensors_is_in_one_error_and_nothing_is_read(tmp_path, monkeypatch):
    def change(tensors):
        del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 65)
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int32)
        tensors["model.layers.2.mlp.gate.weight"] = torch.zeros(8, 64)

    folder = broken(tmp_path, change)
    model, mesh = meta_model(Qwen3MoE, folder, scan=True)
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(checkpoint.CheckpointError) as e:
        checkpoint.load_hf(folder, model, mesh)
    lines = str(e.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "misshapen: model.layers.0.self_attn.q_proj.weight is (64, 65), the model wants (64, 64)",
        "missing: model.layers.1.mlp.experts.5.up_proj.weight (48, 64)",
        "dtype: model.norm.weight is I32, known are F32, BF16, F16",
        "unexpected: model.layers.2.mlp.gate.weight"]


@pytest.mark.parametrize("config,message", [
    ({"norm_topk_prob": False}, "norm_topk_prob is False"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type is 'yarn'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
    ({"vocab_size": "320"}, "vocab would be '320'"),
    ({"hidden_size": None}, "dim would be None"),
    ({"num_hidden_layers": 2.0}, "n_layers would be 2.0"),
    ({"num_local_experts": -1}, "n_experts would be -1"),
    ({"rope_parameters": "x"}, "config.json: 'str' object"),
    ({"rms_norm_eps": None}, "norm_eps would be None"),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_a_config_that_the_model_does_not_compute_is_refused(tmp_path, config, message):
    folder = broken(tmp_path, lambda tensors: None, config)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.read_config(folder, Qwen3MoE)


def test_a_missing_or_cut_file_is_named(case, tmp_path):
    model_class, _, folder = case
    shutil.copytree(folder, tmp_path / "hf")
    file = next(f for f in sorted(os.listdir(tmp_path / "hf")) if f.endswith(".safetensors"))
    os.truncate(tmp_path / "hf" / file, os.path.getsize(tmp_path / "hf" / file) - 8)
    with pytest.raises(checkpoint.CheckpointError, match=file):
        checkpoint.open_hf(tmp_path / "hf")
    os.remove(tmp_path / "hf" / file)
    with pytest.raises(checkpoint.CheckpointError, match=file):
        checkpoint.open_hf(tmp_path / "hf")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}"])
def test_an_index_that_is_none_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(checkpoint.CheckpointError, match="model.safetensors.index.json"):
        checkpoint.open_hf(tmp_path)


def test_config_json_of_transformers_4_is_read_too():
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    published = {  # Llama-3.1-8B's
        "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {**rope, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256}
    config = Llama3.Config.from_hf(published)
    assert config.rope_scaling == (8.0, 1.0, 4.0, 8192)
    assert config.__dict__ == {**Llama3.sizes["8b"].__dict__, "rope_scaling": config.rope_scaling}


def test_training_starts_from_a_folder_and_ends_in_one(tmp_path):
    """The first step's loss is transformers' on the same tokens; what is written, transformers and sample.py load."""
    _, theirs = hf_models.make("qwen3-tied")
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}. " for i in range(400)))
    argv = ["--model", "qwen3", "--init-from", str(tmp_path / "hf"), "--data", str(tmp_path / "text.txt"), "--scan",
            "--fsdp", "8", "--batch", "8", "--seq", "32", "--steps", "2", "--val-batches", "1"]
    assert train.main([*argv, "--metrics", str(tmp_path / "m.jsonl"), "--save-hf", str(tmp_path / "out")]) is None
    loss = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])["loss"]

    batch = data.load(str(tmp_path / "text.txt"), seq=32, vocab_size=320).batch(0, 8)
    assert (batch["segment_ids"] == batch["segment_ids"][:, :1]).all()  # one document: transformers sees no others
    with torch.no_grad():
        logits = theirs(input_ids=torch.from_numpy(batch["tokens"]).long()).logits
    targets = torch.from_numpy(batch["targets"]).long()
    assert loss == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), rel=1e-5)

    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    moved = largest_relative(trained.model.norm.weight, theirs.model.norm.weight)
    assert 0 < moved < 0.01 and trained.config.eos_token_id == data.Bytes.eod
    assert sample.main(["--hf", str(tmp_path / "out"), "--tokens", "1,2", "--max-new", "2"]) is None


def test_train_refuses_a_folder_of_another_model(tmp_path, capsys):
    _, theirs = hf_models.make("llama")
    theirs.save_pretrained(tmp_path)
    assert train.main(["--model", "qwen3", "--init-from", str(tmp_path)]) == 2
    assert "model_type is 'llama', not 'qwen3'" in capsys.readouterr().err
    for flag in (["--layers", "3"], ["--size", "8b"]):
        assert train.main(["--model", "llama3", "--init-from", str(tmp_path), *flag]) == 2
        assert f"{' '.join(flag)}: --init-from" in capsys.readouterr().err
    with pytest.raises(checkpoint.CheckpointError, match="exists"):
        checkpoint.save_hf(str(tmp_path), None, None)
