import glob
import gzip
import json
import os
import re

import pytest
import torch

import graph_trainer
import lowering
import profiling
import train
from conftest import ROOT


def line_of(file, text):
    lines = open(os.path.join(ROOT, file)).read().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def nodes(gm):
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(body := getattr(gm, node.target), torch.fx.GraphModule):
            yield from nodes(body)
        if node.op == "call_function":
            yield node


def test_a_backward_node_has_the_line_of_its_forward_op():
    def loss(w, x):
        y = x.sin()  # its gradient has a cos
        z = y @ w  # its gradient has two mm
        return z.tanh().sum()

    def step(w, x):
        w, x = w.requires_grad_(), x.requires_grad_()
        return torch.autograd.grad(loss(w, x), (w, x))

    graph = graph_trainer.capture(step, torch.empty(4, 4), torch.empty(3, 4))
    first = loss.__code__.co_firstlineno
    lines = {}
    for node in nodes(graph.gm):
        lines.setdefault(str(node.target), []).append(int(re.match(r"test_profiling.py:(\d+) ", lowering.source(node))[1]) - first)
    assert lines["aten.sin.default"] == lines["aten.cos.default"] == [1]
    assert lines["aten.mm.default"] == [2, 2, 2]
    assert lines["aten.tanh.default"] == lines["aten.tanh_backward.default"] == [3]


@pytest.mark.parametrize("flags", [["--model", "llama3"], ["--model", "llama3", "--scan"], ["--model", "qwen3_moe", "--scan"]])
def test_every_node_of_a_step_names_a_line_of_the_model_or_the_optimizer(flags):
    args = train.parse_args([*flags, "--layers", "2", "--batch", "1", "--seq", "16", "--dtype", "float32"])
    config = train.dataclasses.replace(train.choose_size(args), vocab=257)
    step, _ = train.build_programs(args, train.build_model(args, config, None), graph_trainer.AdamW(), None, lowering.make_mesh())
    found, files = {}, ["llama3.py", "graph_trainer.py"] + ["qwen3_moe.py", "qwen3.py"] * (args.model == "qwen3_moe")
    for node in nodes(step.graph.gm):
        file, function = re.match(r"(\w+\.py):\d+ ([\w.]+)$", lowering.source(node)).groups()
        assert file in files
        found.setdefault(str(node.target), set()).add(function)
    for op in ("splash_attention", "linear_cross_entropy") + ("grouped_matmul",) * (args.model == "qwen3_moe"):
        assert found[f"tpu.{op}.default"] == found[f"tpu.{op}_backward.default"] and len(found[f"tpu.{op}.default"]) == 1
    assert {"Attention.forward"} < found["aten.mm.default"] and "AdamW.update" in found["aten.sqrt.default"]


def test_the_profile_names_the_lines_and_its_shares_add_up(documents, tmp_path, capsys):
    flags = ["--layers", "2", "--seq", "64", "--steps", "5", "--scan", "--data", documents]
    assert train.main([*flags, "--profile", "3:4", "--profile-dir", str(tmp_path)]) is None
    out = capsys.readouterr().out
    report, = glob.glob(f"{tmp_path}/plugins/profile/*/report.txt")
    text = open(report).read()
    assert text in out
    whole = float(re.search(r"2 steps traced: [\d.]+ ms a step, ([\d.]+) ms of ops", text)[1])
    tables = [[(row[:62].strip(), float(row[62:].split()[0].rstrip("%")), float(row[62:].split()[1])) for row in table.splitlines()[1:]]
              for table in text.strip().split("\n\n")[1:]]
    assert len(tables) == 3
    for rows in tables:
        assert sum(share for _, share, _ in rows) == pytest.approx(100, abs=0.06 * len(rows))
        assert sum(ms for _, _, ms in rows) == pytest.approx(whole, abs=0.1)
    kinds, lines = {name: share for name, share, _ in tables[0]}, {name: share for name, share, _ in tables[1]}
    assert {"matmul", "attention", "loss", "optimizer"} < kinds.keys() and max(kinds, key=kinds.get) == "matmul"
    # The MLP has 70 % of a layer's weights; its forward and backward are one line's.
    assert max(lines, key=lines.get) == f"llama3.py:{line_of('llama3.py', 'self.down_proj(F.silu')} MLP.forward"
    assert f"llama3.py:{line_of('llama3.py', 'nll = linear_cross_entropy')} next_token_loss" in lines
    assert lines.get("(made by the compiler)", 0) + lines.get("(not in the step)", 0) < 15

    events = json.load(gzip.open(glob.glob(f"{tmp_path}/plugins/profile/*/*.trace.json.gz")[0]))["traceEvents"]
    assert any("hlo_op" in event.get("args", {}) for event in events)  # what Perfetto opens


def test_what_the_tpu_compiler_writes_is_understood():
    """Tiled layouts, tuples, output fusions with a matmul inside, kernels and asynchronous collectives."""
    scope = 'metadata={op_name="jit(f)/graph_trainer.py:9 Loop/loop/while/body/llama3.py:137 MLP.forward/aten.mm.default/dot_general"}'
    hlo = f'''
%fused_computation.3 (p0: bf16[8,128]) -> f32[8,128] {{
  %dot.2 = f32[8,128]{{1,0:T(8,128)}} convolution(%p0, %p1), dim_labels=bf_io->bf
  ROOT %add.9 = f32[8,128]{{1,0:T(8,128)S(1)}} add(%dot.2, %p2)
}}
ENTRY %main.1 (a: bf16[8,128]) -> f32[8,128] {{
  %fusion.7 = (f32[8,128]{{1,0:T(8,128)(2,1)}}, f32[]{{:T(128)}}) fusion(%a), kind=kOutput, calls=%fused_computation.3, {scope}
  %all-gather-start.2 = (bf16[8]{{0:T(1024)}}, bf16[64]{{0:T(1024)}}) all-gather-start(%a), {scope}
  %attn.1 = f32[8]{{0}} custom-call(%a), metadata={{op_name="jit(f)/llama3.py:125 Attention.forward/tpu.splash_attention.default/pallas_call"}}
  %copy.4 = bf16[8,128]{{0,1:T(8,128)(2,1)}} copy(%a)
  ROOT %while.1 = (s32[]{{:T(128)}}, f32[8]{{0}}) while(%tuple.1), condition=%c, body=%b, {scope}
}}'''
    ops, mlp = profiling.describe(hlo), "llama3.py:137 MLP.forward"
    assert ops["fusion.7"] == ("matmul", mlp) and ops["all-gather-start.2"] == ("collectives", mlp)
    assert ops["attn.1"] == ("attention", "llama3.py:125 Attention.forward")
    assert ops["copy.4"] == ("copies", "(made by the compiler)") and ops["while.1"] is None
