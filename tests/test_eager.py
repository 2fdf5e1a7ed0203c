import importlib.metadata
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import train
from conftest import ROOT

# Eager and compile have a process of their own: torch_xla must be there before autograd first runs. One pays for all of them.
SCRIPT = '''
import sys
import lowering, llama3, train

documents, folder = sys.argv[1:]
small = ["--layers", "2", "--val-batches", "1", "--batch", "8", "--seq", "64", "--data", documents]
for model in ("llama3", "qwen3_moe"):
    for mode in ("eager", "compile"):
        train.main([*small, "--model", model, "--mode", mode, "--steps", "20", "--metrics", f"{folder}/{model}-{mode}"])


def peeks(self, x, cos, sin, segment_ids):
    if x.sum() > 0:  # Python looks at a value
        x = x * 1
    return forward(self, x, cos, sin, segment_ids)


forward, llama3.Block.forward = llama3.Block.forward, peeks
tiny = ["--layers", "1", "--batch", "1", "--seq", "16", "--data", documents, "--steps", "1", "--val-batches", "1"]
print("compile exits with", train.main([*tiny, "--mode", "compile"]))
print("eager exits with", train.main([*tiny, "--mode", "eager"]))
llama3.Block.forward = forward
train.main([*small, "--mode", "eager", "--eager-strict", "--steps", "3", "--metrics", f"{folder}/strict", "--save-hf", f"{folder}/hf"])
'''


@pytest.fixture(scope="module")
def rungs(tmp_path_factory, documents):
    """-> (read(name) -> records of a run, the process's stdout, stderr)."""
    folder = tmp_path_factory.mktemp("rungs")
    env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles in half the time
    out = subprocess.run([sys.executable, "-c", SCRIPT, documents, str(folder)], cwd=ROOT, capture_output=True, text=True, env=env)
    assert out.returncode == 0, out.stderr

    def read(name):
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    return read, folder, out.stdout, out.stderr


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("model", ["llama3", "qwen3_moe"])
def test_twenty_steps_give_graph_modes_losses(run, rungs, model, mode):
    graph, ours = run("--model", model), rungs[0](f"{model}-{mode}")
    assert len(ours) == 20
    for name in ("loss", "aux_loss", "grad_norm", "lr"):
        np.testing.assert_allclose([r[name] for r in ours], [r[name] for r in graph], rtol=1e-4, err_msg=name)


def test_one_program_an_op_gives_the_same_losses_and_saves_weights(run, rungs):
    read, folder, _, _ = rungs
    np.testing.assert_allclose([r["loss"] for r in read("strict")], [r["loss"] for r in run("--model", "llama3")[:3]], rtol=1e-4)
    from safetensors.numpy import load_file
    weights = load_file(folder / "hf" / "model.safetensors")
    assert weights["lm_head.weight"].std() > 0.01 and "model.layers.1.mlp.up_proj.weight" in weights


def test_a_block_that_does_not_trace_is_named_with_its_line(rungs):
    _, _, out, err = rungs
    assert "compile exits with 2" in out
    line = next(line for line in err.splitlines() if "error" in line)
    assert "--mode compile: layers.0 (Block) does not trace: <string>:" in line and "--mode eager runs it" in line
    assert "eager exits with None" in out  # and so it does


@pytest.mark.parametrize("found", [None, "2.8.1"])
def test_a_torch_xla_that_is_missing_or_another_torchs_is_one_line(found, monkeypatch, capsys):
    version = importlib.metadata.version

    def fake(name):
        if name == "torch_xla" and found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found if name == "torch_xla" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", fake)
    assert train.main(["--mode", "eager"]) == 2
    err = capsys.readouterr().err
    torch = version("torch").split("+")[0]
    assert f"torch_xla is {found or 'not installed'}: pip install torch_xla=={torch}" in err and err.count("\n") == 1
