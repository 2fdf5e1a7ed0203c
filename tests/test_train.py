import dataclasses
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import bench
import data
import graph_trainer
import lowering
import train
from conftest import ROOT


def column(records, name):
    return np.array([r[name] for r in records])


@pytest.mark.parametrize("model", ["llama3", "qwen3_moe"])  # the others: test_models.py, test_flux.py
def test_twenty_steps_give_plain_pytorchs_losses(run, documents, model):
    """Autograd, clip_grad_norm_ and torch.optim.AdamW on the same weights and batches. 1e-4: the two sum in other orders,
    and Adam divides small gradients by their own size, so rounding grows over the steps."""
    ours = run("--model", model)
    args = train.parse_args(["--model", model, "--layers", "2", "--seq", "64", "--steps", "20", "--data", documents])
    args.dtype = "float32"
    dataset = data.load(documents, seq=64)
    config = dataclasses.replace(train.choose_size(args), vocab=dataset.vocab_size)
    params = lowering.initial_state(train.build_model(args, config, None), lowering.make_mesh(), 0)["params"]
    opt = graph_trainer.AdamW(lr=args.lr, min_lr=args.lr / 10, warmup=args.warmup, steps=20)
    step = bench.eager_trainer(train.MODELS[model], config, params, opt)
    theirs = [step(dataset.batch(i, 8)) for i in range(20)]
    np.testing.assert_allclose(column(ours, "loss"), theirs, rtol=1e-4)


@pytest.mark.parametrize("model", ["llama3", "qwen3_moe"])  # the others: test_models.py, test_flux.py
def test_scan_gives_the_unrolled_losses_and_gradient_norms(run, model):
    unrolled, scan = run("--model", model), run("--model", model, "--scan")
    for name in ("loss", "aux_loss", "grad_norm"):
        np.testing.assert_allclose(column(scan, name), column(unrolled, name), rtol=1e-5)


def test_the_learning_rate_warms_up_and_decays(run):
    lr = column(run("--model", "llama3"), "lr")
    assert lr[0] == pytest.approx(1e-3 / 20) and len(lr) == 20 and lr[-1] == pytest.approx(1e-3)
    opt = graph_trainer.AdamW(lr=1.0, min_lr=0.1, warmup=2, steps=10)
    import torch
    assert opt.lr_at(torch.tensor(6.0)).item() == pytest.approx(0.55)
    assert opt.lr_at(torch.tensor(10.0)).item() == pytest.approx(0.1)


@pytest.mark.parametrize("scan", [[], ["--scan"]], ids=["unrolled", "scan"])
def test_the_step_is_one_executable_that_updates_its_state_in_place(scan):
    args = train.parse_args(["--model", "qwen3_moe", "--layers", "8", "--batch", "1", "--seq", "16", *scan])
    args.dtype = "float32"
    config = dataclasses.replace(train.choose_size(args), vocab=257)
    model = train.build_model(args, config, None)
    step, _ = train.build_programs(args, model, graph_trainer.AdamW(), None, lowering.make_mesh())
    step.lower()
    step.compile()
    memory = step.pieces[0].executable.memory_analysis()
    params = 4 * sum(p.numel() for p in model.parameters())
    assert memory.alias_size_in_bytes >= 3 * params  # weights and both moments: outputs are the inputs' own memory
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 4096  # only the metrics are new
    assert memory.temp_size_in_bytes < 2 * params  # the gradients, and at 16 tokens hardly any activations


def test_training_on_text_beats_token_frequencies(capsys):
    assert train.main(["--model", "llama3", "--layers", "2", "--seq", "128", "--steps", "60"]) is None
    last = capsys.readouterr().out.splitlines()[-1]
    loss, baseline = float(last.split("validation loss ")[1].split()[0]), float(last.split("alone: ")[1].rstrip(")"))
    assert loss < baseline - 0.3


BAD = {
    "--size 9b": "--size 9b is not a size of llama3: debug, 8b, 70b, 405b",
    "--model gpt5": "invalid choice: 'gpt5' (choose from 'llama3', 'qwen3', 'qwen3_moe'",
    "--scan --mode eager": "--scan needs --mode graph (got --mode eager)",
    "--scan --tpu_config.eager_mode=DEFER_AND_FUSE": "--scan needs --mode graph (got --mode eager)",
    "--fsdp 2 --compile.enable": "--fsdp needs --mode graph (got --mode compile)",
    "--kernels reference --mode eager": "--kernels needs --mode graph (got --mode eager)",
    "--replicas 2 --mode compile": "--replicas needs --mode graph (got --mode compile)",
    "--profile --mode compile": "--profile needs --mode graph (got --mode compile)",
    "--eager-strict": "--eager-strict goes with --mode eager, --device with --mode eager or compile (got --mode graph)",
    "--device xla": "--device with --mode eager or compile (got --mode graph)",
    "--mode compile --device tpu": "--device tpu needs a TPU and torch_tpu, which is not installed: pip install torch_tpu",
    "--profile 2:4": "--profile 2:4 must be START:STOP, from step 3 (two to warm up) to --steps 250",
    "--profile --split": "--profile reads one program: leave out --split",
    "--grad-accum 2 --mode eager": "--grad-accum needs --mode graph (got --mode eager)",
    "--profile 5:9 --steps 8": "--profile 5:9 must be START:STOP, from step 3 (two to warm up) to --steps 8",
    "--steps 0": "argument --steps: 0 is not a positive number",
    "--lr -1": "argument --lr: -1 is not a positive number",
    "--lr nan": "argument --lr: nan is not a positive number",
    "--warmup -1": "argument --warmup: -1 is not a number from 0 up",
    "--data /nowhere": "--data /nowhere: No such file",
    "--tokenizer /nowhere": "--tokenizer /nowhere: No such file",
    "--seq 99999999": "fewer than a row of --seq 99999999",
    "--batch 3 --fsdp 2": "--batch 3 does not divide over 2 devices",
    "--fsdp 64": "--fsdp 64 x --replicas 1 is 64 devices and there are 8",
    "--frobnicate": "unrecognized arguments: --frobnicate",
    "--coordinator localhost:1": "--coordinator, --num-processes and --process-id go together",
    "--metrics /nowhere/m.jsonl": "--metrics /nowhere/m.jsonl",
    "--model flux --tokenizer t.json": "--tokenizer t.json: --model flux reads no text",
    "--model flux --data /nowhere": "--data /nowhere holds 0 rows",
    "--batch 8 --per-device-batch 2": "--batch 8 is over all devices, --per-device-batch N on each: give one",
    "--per-device-batch -3": "argument --per-device-batch: -3 is not a positive number",
    "--mode eager --per-device-batch 2": "--per-device-batch needs --mode graph (got --mode eager)",
    "--sa-block-q 128": "--sa-block-q is of the Pallas kernel, and splash runs in XLA",
    "--kernels interpret --no-fused-ce --ce-block-vocab 128": "--ce-block-vocab is of the Pallas kernel, and fused-ce runs in XLA",
    "--save-hf /proc/cpuinfo/hf": "--save-hf /proc/cpuinfo/hf: no new folder can be written there",
    "--tensorboard /proc/cpuinfo": "--tensorboard /proc/cpuinfo: no new folder can be written there",
    "--checkpoint=": "--checkpoint is empty: give it a value, or leave it out",
    "--libtpu-init-flags=xla_a=1": "--libtpu-init-flags: xla_a=1 is not --name=value",
    "--coordinator localhost --num-processes 1 --process-id 0": "--coordinator localhost is not HOST:PORT",
    "--checkpoint a --save-hf ./a": "--save-hf ./a is a checkpoint's: name a new folder",
    "--paired-gmm": "--paired-gmm is of qwen3_moe's experts, and this is llama3",
    "--seed 9999999999": "--seed 9999999999 is too large",
    "--checkpoint gs://bucket/run": "gs://bucket/run: checkpoints go to a mounted folder",
    "--topology v5e:2x2 --metrics m.jsonl": "--metrics trains, and --topology v5e:2x2 only compiles",
    "--topology v5e:2x2 --batch 64": "--batch 64 is over all devices, --per-device-batch N on each: give one (with --topology the latter)",
    "--topology v5e:2x2 --per-device-batch 3 --grad-accum 2": "--grad-accum 2 does not divide a device's 3 rows",
}


def test_a_batch_after_a_recipe_takes_the_place_of_the_recipes_own():
    assert train.parse_args("--recipe llama3_8b --batch 64".split()).per_device_batch is None
    assert train.parse_args("--recipe llama3_8b --batch 64".split()).batch == 64
    assert train.parse_args("--recipe llama3_8b --per-device-batch 3".split()).per_device_batch == 3


def test_real_weights_have_their_size_with_a_recipe_too():
    args = train.parse_args(["--recipe", "llama3_8b", "--init-from", "dir"])
    assert args.size == "debug" and train.parse_args(["--recipe", "llama3_8b"]).size == "8b"


def test_each_model_has_its_own_batch_and_learning_rate_where_none_is_given():
    for argv, want in [("--model llama3", (8, 1e-3)), ("--model flux", (32, 3e-3)), ("--model flux --batch 4", (4, 3e-3))]:
        args = train.parse_args(argv.split())
        assert (args.batch, args.lr) == want


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_and_exit_code_2(flags, capsys):
    assert train.main(flags.split()) == 2
    err = capsys.readouterr().err
    assert BAD[flags] in err and err.count("\n") == 1


def test_metrics_are_never_overwritten(tmp_path, capsys):
    (tmp_path / "m.jsonl").write_text("mine")
    assert train.main(["--metrics", str(tmp_path / "m.jsonl")]) == 2
    assert (tmp_path / "m.jsonl").read_text() == "mine"


def test_a_token_outside_the_vocabulary_is_refused(tmp_path, capsys):
    ids = np.full(4000, 200000, np.uint32)
    ids.tofile(tmp_path / "a.bin")
    (tmp_path / "a.bin.json").write_text(json.dumps({"dtype": "uint32"}))
    assert train.main(["--size", "8b", "--layers", "1", "--data", str(tmp_path / "a.bin")]) == 2
    assert "id 200000 at token 0" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(documents, capsys):
    flags = ["--layers", "1", "--seq", "64", "--steps", "50", "--lr", "1e30", "--warmup", "0", "--clip", "1e30"]
    assert train.main([*flags, "--data", documents]) == 2
    err = capsys.readouterr().err
    assert "is not finite" in err and "step " in err


def test_the_graph_path_never_imports_torch_xla_and_prints_no_warnings(documents):
    code = ("import sys, train; train.main(['--layers', '1', '--seq', '64', '--steps', '2', '--data', sys.argv[1]]); "
            "assert 'torch_xla' not in sys.modules")
    out = subprocess.run([sys.executable, "-c", code, documents], cwd=ROOT, capture_output=True, text=True,
                         env={k: v for k, v in os.environ.items() if not k.startswith("TPU")})
    assert out.returncode == 0, out.stderr
    assert out.stderr == ""


def test_print_graph_shows_the_ops_and_the_models_lines(capsys):
    assert train.main(["--model", "llama3", "--layers", "1", "--print-graph"]) is None
    out = capsys.readouterr().out
    assert "torch.ops.tpu.splash_attention" in out and "llama3.py" in out


def test_parameters_and_flops_are_the_published_ones():
    for name, size, billions in (("llama3", "8b", 8.03), ("llama3", "405b", 405.85), ("qwen3_moe", "235b-a22b", 235.09)):
        args = train.parse_args(["--model", name, "--size", size, "--dtype", "bfloat16"])
        model = train.build_model(args, train.choose_size(args), None)
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    assert math.isclose(model.flops_per_token(0) / 6e9, 21.5, rel_tol=0.05)  # 22B active less the embedding


@pytest.mark.parametrize("argv, said", [
    (["step", "--size", "9b"], "--size 9b"), (["compile", "--depths", "0"], "--depths: 0"), (["nope"], "'nope'"),
    (["kernels", "--topology", "v9:2x2"], "--topology v9:2x2"), (["kernels", "--json", "/nope/x.json"], "--json /nope/x.json"),
    (["tune", "--size", "9z"], "--size 9z"), (["tune", "--size", "debug"], "--size debug"), (["step", "--model", "flux"], "'flux'")])
def test_bad_flags_of_bench_are_one_line(argv, said, capsys):
    try:
        code = bench.main(argv)
    except SystemExit as e:  # argparse's own
        code = e.code
    assert code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
