import collections
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer
import lowering
import simple_fsdp
import train
from conftest import ROOT


def build(*flags):
    """-> model, step Program (lowered), mesh, for train.py's flags."""
    args = train.parse_args(["--dtype", "float32", *flags])
    mesh, device_mesh = train.choose_devices(args)
    model = train.build_model(args, dataclasses.replace(train.choose_size(args), vocab=264), device_mesh)
    step, _ = train.build_programs(args, model, graph_trainer.AdamW(), device_mesh, mesh)
    return model, step, mesh


MESHES = ["--fsdp 2", "--fsdp 4", "--fsdp 8", "--fsdp 4 --replicas 2", "--replicas 2"]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("scan", [(), ("--scan",)], ids=["unrolled", "scan"])
@pytest.mark.parametrize("model", ["llama3", "qwen3_moe"])
def test_every_mesh_gives_one_devices_losses_and_gradient_norms(run, model, scan, mesh):
    """1e-5 relative over 20 steps in fp32, on rows with unequal numbers of valid targets."""
    one, many = run("--model", model, *scan), run("--model", model, *scan, *mesh.split())
    for name in ("loss", "aux_loss", "grad_norm"):
        np.testing.assert_allclose([r[name] for r in many], [r[name] for r in one], rtol=1e-5, err_msg=name)


def test_two_processes_of_four_devices_give_one_devices_losses(run, documents, tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    flags = ["--layers", "2", "--batch", "8", "--seq", "64", "--steps", "20", "--data", documents, "--model", "qwen3_moe",
             "--scan", "--fsdp", "4", "--replicas", "2", "--devices", "4", "--coordinator", f"localhost:{port}", "--num-processes", "2"]
    processes = [subprocess.Popen([sys.executable, "train.py", *flags, "--process-id", str(i), "--metrics", str(tmp_path / f"{i}")],
                                  cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for i in range(2)]
    outputs = [p.communicate(timeout=500) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], outputs
    records = [json.loads(line) for line in (tmp_path / "0").read_text().splitlines()]
    assert not (tmp_path / "1").exists() and "step" not in outputs[1][0]  # process 0 alone reports
    one = run("--model", "qwen3_moe", "--scan")
    np.testing.assert_allclose([r["loss"] for r in records], [r["loss"] for r in one], rtol=1e-5)


@pytest.mark.parametrize("scan", [[], ["--scan"]], ids=["unrolled", "scan"])
def test_each_device_holds_its_share_of_weights_and_moments_and_the_same_weights_as_one(scan):
    model, _, mesh = build("--model", "qwen3_moe", "--layers", "2", "--fsdp", "8", *scan)
    alone, _, one = build("--model", "qwen3_moe", "--layers", "2", *scan)
    state, whole = lowering.initial_state(model, mesh, 0), lowering.initial_state(alone, one, 0)
    for part in ("params", "m", "v"):
        total = sum(x.nbytes for x in whole[part].values())
        mine = sum(x.addressable_shards[3].data.nbytes for x in state[part].values())
        assert mine == total / 8
    for name, p in whole["params"].items():
        np.testing.assert_array_equal(np.asarray(state["params"][name]), np.asarray(p), err_msg=name)


def test_a_parameter_is_cut_into_whole_tiles_or_evenly_or_not_at_all():
    assert simple_fsdp.shard_dim((6, 10), 4) is None
    assert simple_fsdp.shard_dim((8, 16, 20), 4) == 0
    assert simple_fsdp.shard_dim((8, 32, 64), 4) == 1
    assert simple_fsdp.shard_dim((6, 10, 32), 4) == 2
    assert simple_fsdp.shard_dim((32, 32), 4) == 0


def test_a_mesh_of_three_dimensions_is_refused():
    simple_fsdp.capture_mesh(8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="3 dimensions"):
        simple_fsdp.fully_shard(torch.nn.Linear(8, 8), mesh)


def test_with_scan_one_gathered_layer_is_live_not_all():
    def temporary(layers):
        _, step, _ = build("--layers", str(layers), "--scan", "--fsdp", "8", "--seq", "16")
        step.lower()
        step.compile()
        return step.pieces[0].executable.memory_analysis().temp_size_in_bytes

    c = train.MODELS["llama3"].sizes["debug"]
    layer = 4 * (c.dim * c.head_dim * 2 * (c.n_heads + c.n_kv_heads) + 3 * c.dim * c.ffn)  # bytes, whole
    growth = (temporary(16) - temporary(4)) / 12
    assert growth < 0.3 * layer  # the layer's gradient shard (1/8) and its saved input, not the layer


def collective_counts(gm):
    counts = collections.Counter()
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(body := getattr(gm, node.target), torch.fx.GraphModule):
            counts += collective_counts(body)
        elif "_c10d_functional" in str(node.target) and "wait" not in str(node.target):
            counts[node.target.__name__.split(".")[0]] += 1
            if "reduce_scatter" in str(node.target):
                assert node.meta["val"].dtype == torch.float32  # the reduce dtype, though compute is bf16
            if "all_gather" in str(node.target):
                assert node.meta["val"].dtype == torch.bfloat16 or "router" in str(node)
    return counts


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_one_all_gather_and_one_reduce_scatter_a_parameter(scan):
    """Under scan the recomputing backward gathers a layer's parameters once more, and a body stands for all layers."""
    model, step, _ = build("--model", "llama3", "--layers", "3", "--fsdp", "8", "--dtype", "bfloat16", *["--scan"] * scan)
    counts = collective_counts(step.graph.gm)
    names = [name for name, _ in model.named_parameters()]
    in_layers = sum(".stack." in name for name in names)
    assert counts["all_gather_into_tensor"] == len(names) + in_layers
    assert counts["reduce_scatter_tensor"] == len(names)
    assert counts["all_reduce"] == 4  # loss, auxiliary loss, valid tokens, squared gradient norm


def test_the_tpu_compiler_hides_gathers_behind_compute():
    """plan.py replays the compiled schedule: what lies between a collective's start and its done hides it."""
    import plan
    _, args = plan.parse("--topology v5e:2x4 --model llama3 --size 8b --layers 2 --scan --seq 1024".split())
    report, _ = plan.report(args)
    assert report["hidden_all_gather"] > 1e-3  # seconds


def test_hybrid_sharding_sends_shards_of_gradients_across_replicas_not_whole_ones():
    model, step, _ = build("--model", "llama3", "--layers", "1", "--fsdp", "4", "--replicas", "2")
    reduced = [node.meta["val"].numel() for node in step.graph.gm.graph.nodes if "all_reduce" in str(node.target)]
    assert sum(reduced) <= sum(p.to_local().numel() for p in model.parameters()) + 16  # the shards, and a few scalars


STANDALONE = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
import simple_fsdp
dist.init_process_group("gloo")
torch.manual_seed(0)
def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
def tied():
    m = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    m[1].weight = m[0].weight
    return m
for model, inputs in (tied, lambda: torch.randint(16, (4,))), (mlp, lambda: torch.randn(4, 8)):
    plain, ours = model(), model()
    ours.load_state_dict(plain.state_dict())
    simple_fsdp.fully_shard(ours, init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    reference = DistributedDataParallel(plain)
    torch.manual_seed(dist.get_rank())
    x = inputs()
    for m in (reference, ours):
        m(x).square().mean().backward()
    assert len(list(ours.parameters())) == len(list(plain.parameters()))
    for p, q in zip(plain.parameters(), ours.parameters()):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)
    torch.manual_seed(0)
state = ours.state_dict()
assert state["0.weight"].to_local().shape == (8, 8) and state["2.bias"].to_local().shape == (3,)
print("fine")
"""


def test_the_file_alone_works_under_torchrun_with_gloo(tmp_path):
    (tmp_path / "simple_fsdp.py").write_text(open(os.path.join(ROOT, "simple_fsdp.py")).read())
    (tmp_path / "main.py").write_text(STANDALONE)
    out = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
                          "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "main.py"],
                         cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert out.stdout.count("fine") == 2, out.stderr
