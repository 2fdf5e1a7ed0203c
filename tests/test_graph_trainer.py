import dataclasses
import json
import os
import re

import jax
import numpy as np
import pytest
import torch
import torch.nn as nn

import graph_trainer
import lowering
import simple_fsdp
import train
from graph_trainer import CaptureError, ScanLayers, capture


def test_a_matrix_turned_twice_is_itself():
    gm = capture(lambda x: [x.t().t() + 1, x.movedim(1, 0).t() * 2], torch.empty(3, 4, device="meta")).gm
    assert [str(node.target) for node in gm.graph.nodes if node.op == "call_function"] == ["aten.add.Tensor", "aten.mul.Tensor"]


def test_a_branch_on_a_tensors_value_is_refused_by_its_line():
    def f(x):
        if x.sum() > 0:  # the line
            return x
        return -x

    with pytest.raises(CaptureError, match=r"looks at a tensor's value.*test_graph_trainer.py:\d+: if x.sum\(\) > 0"):
        capture(f, torch.ones(3))


def test_an_in_place_op_on_fresh_memory_becomes_functional():
    def f(x):
        y = x * 2
        y.add_(1)
        return y * y

    graph = capture(f, torch.ones(3))
    (out,) = lowering.lower(graph.gm)(torch.arange(3.0).numpy())
    assert out.tolist() == [1, 9, 25]


CONSTANT = torch.zeros(3)
ALIASED = {
    "an input": lambda x: x.add_(1),
    "a view": lambda x: (x * 2)[0].add_(1),
    "memory that a view reads": lambda x: (y := x * 2, v := y[0], y.add_(1), v)[-1],
    "a piece of a split": lambda x: (y := x * 2, y.chunk(3)[0].add_(1), y)[-1],
    "memory that a piece reads": lambda x: (y := x * 2, v := y.chunk(3)[0], y.add_(1), v)[-1],
    "a constant": lambda x: x + CONSTANT.add_(1),
}


@pytest.mark.parametrize("f", ALIASED.values(), ids=ALIASED)
def test_an_in_place_op_that_something_aliases_is_refused(f):
    with pytest.raises(CaptureError, match="in-place op"):
        capture(f, torch.ones(3))


def test_an_output_that_aliases_an_input_is_its_own_value():
    graph = capture(lambda x: (x.view(4), x), torch.ones(2, 2))
    a, b = lowering.lower(graph.gm)(torch.ones(2, 2).numpy())
    assert a.shape == (4,) and b.shape == (2, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(4, 4))

    def forward(self, x, scale):
        y = torch.tanh(x @ self.w) * scale
        return x + y, y.sum()


def test_the_loop_op_is_bit_identical_to_the_python_loop():
    """The loop's eager form, forward and the cut-out recomputing backward, against autograd over a Python loop."""
    torch.manual_seed(0)
    w, x, scale = torch.randn(5, 4, 4), torch.randn(3, 4), torch.tensor(0.5)

    def python(w, x):
        total = 0
        for i in range(5):
            y = torch.tanh(x @ w[i]) * scale
            x, total = x + y, total + y.sum() * i
        return (x * x).sum() + total

    with torch.device("meta"):
        layers = nn.ModuleList(Layer() for _ in range(5))
    scan = ScanLayers(layers)

    def looped(w, x):
        with torch.nn.utils.stateless._reparametrize_module(scan, {"stack.w": w}):
            x, sums = scan(x, scale)
        return (x * x).sum() + (sums * torch.arange(5)).sum()

    def grads(f):
        return lambda w, x: torch.autograd.grad(f(w.requires_grad_(), x.requires_grad_()), (w, x))

    graph = capture(grads(looped), w, x)
    got = graph.gm(w.detach(), x.detach())
    want = grads(python)(w, x)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    loops = [n for n in graph.gm.graph.nodes if n.target is graph_trainer.loop]
    assert [n.args[-2] for n in loops] == [False, True]  # forward, then backward from the last layer


# ------------------------------------------------------------------- remat, offload, split, gradient accumulation

FAST = ["--layers", "4", "--libtpu-init-flags=--xla_backend_optimization_level=0"]  # half the time
LARGE = ["--remat full", "--remat dots", "--scan --remat attention", "--scan --remat none", "--scan --offload",
         "--split", "--split 2", "--split 4 --remat attention"]


@pytest.mark.parametrize("flags", [*LARGE, "--grad-accum 4", "--grad-accum 2 --scan"])
def test_every_way_to_save_memory_gives_the_plain_steps_losses(run, flags):
    """1e-5: the same operations in another order. llama3 on one device, qwen3_moe (below) on eight."""
    same_run(run("--model", "llama3", *FAST), run("--model", "llama3", *FAST, *flags.split()))


@pytest.mark.parametrize("flags", LARGE if os.environ.get("ALL") else ["--remat dots", "--scan --offload", "--split 2"])  # a minute each
def test_every_way_to_save_memory_gives_the_plain_steps_losses_on_8_devices(run, flags):
    plain = run("--model", "qwen3_moe", *FAST)
    same_run(plain, run("--model", "qwen3_moe", *FAST, "--fsdp", "4", "--replicas", "2", *flags.split()))


def test_accumulated_gradients_are_reduced_once_and_give_the_same_losses(run):
    flags = ["--model", "llama3", *FAST, *"--batch 16 --fsdp 4 --replicas 2".split()]
    same_run(run(*flags), run(*flags, "--grad-accum", "2"))
    model, step, _ = build(*flags, "--grad-accum", "2")
    (loop,) = [n for n in step.graph.gm.graph.nodes if n.target is graph_trainer.loop]
    inside, whole = getattr(step.graph.gm, loop.args[0].target), step.graph.gm
    for collective in ("all_gather", "reduce_scatter"):
        counts = [sum(collective in str(n.target) for n in gm.graph.nodes) for gm in (inside, whole)]
        assert counts == [0, len(list(model.parameters()))]


def test_without_clipping_a_groups_update_is_part_of_its_backward(run):
    flags = ["--model", "llama3", *FAST, "--split", "2"]
    same_run(run("--model", "llama3", *FAST, "--clip", "0"), run(*flags, "--clip", "0"))
    clipped, free = (len(build(*flags, "--clip", clip)[1].stages) for clip in ("1", "0"))
    assert free == clipped - 4  # updates of two groups, of the embedding, and of the norm and output layer


def test_muse_glimmer_splits_alike(run):
    """Its first ten steps: its post-norms divide by small numbers, and rounding then grows by half a digit a step."""
    flags = ["--model", "muse_glimmer", "--layers", "8", *FAST[2:]]
    same_run(run(*flags)[:10], run(*flags, "--split", "2")[:10])


def test_flux_splits_both_its_stacks_alike(tmp_path):
    flags = ["--model", "flux", "--batch", "8", "--steps", "3", "--val-batches", "1", *FAST[2:], "--metrics"]
    for name, split in (("whole", []), ("split", ["--split", "2"])):
        assert train.main([*flags, str(tmp_path / name), *split]) is None
    same_run(*([json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("whole", "split")))


def same_run(want, got):
    for name in ("loss", "aux_loss", "grad_norm"):
        np.testing.assert_allclose([r[name] for r in got], [r[name] for r in want], rtol=1e-5, err_msg=name)


def build(*flags):
    """-> model, step Program, mesh of train.py's flags, with a vocabulary of 264."""
    args = train.parse_args(["--dtype", "float32", *flags])
    mesh, device_mesh = train.choose_devices(args)
    model = train.build_model(args, dataclasses.replace(train.choose_size(args), vocab=264), device_mesh)
    step, _ = train.build_programs(args, model, graph_trainer.AdamW(clip=args.clip), device_mesh, mesh)
    return model, step, mesh


def test_evaluation_takes_the_batch_in_micro_batches_too():
    """Rows with unequal numbers of valid targets. 1e-6: another order of a sum in fp32."""
    model, _, mesh = build("--model", "qwen3_moe", "--layers", "2", "--scan")
    params = lowering.initial_state(model, mesh, 0)["params"]
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(264, (8, 32), generator=generator, dtype=torch.int32) for name in ("segment_ids", "targets", "tokens")}
    batch["segment_ids"] = batch["segment_ids"].sort(-1).values // 100
    batch["targets"] = torch.where(torch.arange(32) < 4 * torch.arange(8)[:, None], -100, batch["targets"])
    losses = []
    for n in (1, 4):
        graph = capture(graph_trainer.eval_step(model, micro_batches=n), graph_trainer.state_spec(model)["params"], batch)
        losses.append(float(jax.jit(lowering.lower(graph.gm, train.kernels.lowerings()))(*params.values(), *(x.numpy() for x in batch.values()))[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("wrap", [ScanLayers, graph_trainer.UnrolledLayers])
@pytest.mark.parametrize("change, named", [
    (lambda layer: setattr(layer, "window", 4), "window is 4, layer 0's None"),
    (lambda layer: setattr(layer, "weight", nn.Parameter(torch.empty(2, 4))), r"weight is \(\(2, 4\), torch.float32\), layer 0's"),
    (lambda layer: setattr(layer, "bias", nn.Parameter(torch.empty(4))), "bias is"),
    (lambda layer: setattr(layer, "__class__", type("Other", (nn.Linear,), {})), "class is"),
])
def test_layers_that_are_not_alike_are_refused(wrap, change, named):
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False, device="meta") for _ in range(3))
    wrap(layers)
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False, device="meta") for _ in range(3))
    change(layers[2])
    with pytest.raises(CaptureError, match=f"layer 2's .*{named}"):
        wrap(layers)


def size(piece):
    return len(piece.inputs)


def test_equal_groups_share_one_program_and_deeper_models_add_none():
    few, many = (build("--layers", layers, "--split", groups)[1] for layers, groups in (("4", "2"), ("12", "6")))
    assert len(many.pieces) == len(few.pieces) and len(many.stages) == len(few.stages) + 3 * 4  # forward, backward, update
    assert max(size(piece) for piece in few.pieces) == max(size(piece) for piece in many.pieces)


def test_what_no_later_program_needs_is_dropped():
    """After the last group's backward the weights, moments and gradients are all that is left."""
    _, step, _ = build("--layers", "4", "--split", "2")
    held, peak = set(step.inputs), []
    for _, inputs, outputs, dropped in step.stages:
        assert held >= set(inputs)
        held = (held | set(outputs)) - set(dropped)
        peak.append(sum(lowering.is_hosted(node) for node in held))
    assert held == set(step.outputs)
    assert peak[:5] == [0, 2, 4, 4, 2]  # embedding; each group's two layers, forward; loss; backward


def test_saving_less_costs_recomputation_and_takes_less_memory():
    def compiled(*flags):
        _, step, _ = build("--layers", "6", "--seq", "256", *flags)
        step.lower()
        step.compile({"xla_backend_optimization_level": 0})
        executable = step.pieces[0].executable
        dots = executable.as_text().count(" dot(")
        return executable.memory_analysis().temp_size_in_bytes, dots

    memory, dots = zip(*(compiled("--scan", "--remat", remat) for remat in ("full", "attention", "dots", "none")))
    assert memory[0] < memory[1] < memory[2] < memory[3]
    assert dots[0] > dots[2] and dots[2] == dots[3]
    unrolled = compiled("--remat", "full")[1]  # the barrier keeps XLA from merging it with the forward again
    assert unrolled > compiled()[1]


def compile_for_tpu(*flags):
    """-> HBM temporaries, host bytes and the optimized HLO of a step on tpu7x:2x2x1."""
    import plan
    _, args = plan.parse(["--topology", "tpu7x:2x2x1", "--model", "llama3", "--seq", "1024", "--kernels", "reference", *flags])
    devices = plan.topology_devices(args.topology)
    args.dtype, args.batch = "bfloat16", len(devices)
    mesh = lowering.make_mesh(1, len(devices), devices)
    device_mesh = simple_fsdp.capture_mesh(len(devices))
    model = train.build_model(args, dataclasses.replace(train.choose_size(args), vocab=512), device_mesh)
    step, _ = train.build_programs(args, model, graph_trainer.AdamW(), device_mesh, mesh)
    step.lower()
    step.compile()
    memory = [piece.executable.memory_analysis() for piece in step.pieces]
    return (max(m.temp_size_in_bytes for m in memory), sum(m.host_temp_size_in_bytes + m.host_output_size_in_bytes for m in memory),
            "\n".join(piece.executable.as_text() for piece in step.pieces))


def test_on_tpu_offloaded_activations_fill_the_host_not_the_hbm_and_move_asynchronously():
    short, deep = (compile_for_tpu("--scan", "--offload", "--layers", n) for n in ("2", "8"))
    kept_short, kept = (compile_for_tpu("--scan", "--layers", n) for n in ("2", "8"))
    row = 1024 * 384 * 2  # bytes of one layer's input
    assert deep[1] == 4 * short[1] == 8 * row and kept[1] == 0
    assert deep[0] - short[0] < kept[0] - kept_short[0] - 5 * row  # of six layers more; both also hold more parameters
    starts = re.findall(r"dynamic-(?:update-)?slice-start\(", deep[2])
    assert len(starts) >= 2 and "S(5)" in deep[2]


def test_on_tpu_a_splits_activations_leave_for_the_host_and_come_back_as_arguments():
    hbm, host, text = compile_for_tpu("--split", "2", "--layers", "4")
    assert host == 2 * 1024 * 384 * 2  # one program stands for both groups, of two layers each


@pytest.mark.parametrize("flags, message", [
    ("--split 4 --layers 6", "--split 4 does not divide the 6 layers of llama3: make it one of 1, 2, 3, 6"),
    ("--split 2 --scan", "leave out --scan"),
    ("--split 2 --grad-accum 2", "leave out --grad-accum"),
    ("--offload", "--offload goes with --scan"),
    ("--grad-accum 3", "--grad-accum 3 does not divide a device's 8 rows"),
    ("--remat some", "invalid choice: 'some'"),
    ("--split 2 --mode eager", "--split needs --mode graph"),
])
def test_what_cannot_be_combined_is_one_line(flags, message, capsys):
    assert train.main(["--model", "llama3", *flags.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_micro_batches_hold_their_activations_in_host_memory_one_after_the_other():
    whole, parts = (graph_trainer.host_bytes(build("--scan", "--offload", "--grad-accum", n)[1].graph.gm) for n in ("1", "4"))
    assert whole == 4 * parts > 0


def test_a_host_with_too_little_memory_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(train, "available_memory", lambda: 10**6)
    for flags in (["--scan", "--offload"], ["--split", "2"]):
        assert train.main(["--model", "llama3", *flags]) == 2
        assert "this host's memory" in capsys.readouterr().err
