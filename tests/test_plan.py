import functools
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import graph_trainer
import hlo
import kernels
import lowering
import plan
import recipes
import simple_fsdp
import train
from train import UsageError

V5E = plan.CHIPS["TPU v5 lite"]
BANDWIDTH = {"ici": plan.link_bandwidth("v5e:2x2", V5E), "dcn": 1e9, "host": 32e9, "hbm": V5E.hbm_bandwidth}
CYCLE = V5E.mxu / V5E.peak
DEBUG = ["--topology", "v5e:2x2", "--model", "llama3", "--layers", "2", "--scan", "--seq", "128",
         "--kernels", "reference"]


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(plan.topology_devices("v5e:2x2")), ("x",))


def compiled(mesh, f, *shapes, spec=P()):
    xs = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s in shapes]
    return jax.jit(f).lower(*xs).compile().as_text()


def replay(text):
    """-> (sum of the phases, names of loops of unknown length)"""
    r = hlo.Replay(text, CYCLE, V5E.peak, BANDWIDTH, slices=1, kernel_seconds=functools.partial(plan.kernel_seconds, V5E))
    return hlo.total(r.run()), r.unknown_loops


def test_loops_in_loops_count_as_often_as_they_run(mesh):
    """The compiler's own program of 7 x 5 matmuls of 512 cubed takes 7 times the cycles of 5."""
    def nested(x, w):
        inner = lambda x, _: (jnp.tanh(x @ w), None)
        return lax.scan(lambda x, _: (lax.scan(inner, x, None, length=5)[0], None), x, None, length=7)[0]

    once, _ = replay(compiled(mesh, lambda x, w: lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0], (512, 512), (512, 512)))
    many, unknown = replay(compiled(mesh, nested, (512, 512), (512, 512)))
    assert many["s", "matmul"] / once["s", "matmul"] == pytest.approx(7, rel=0.2)
    assert once["s", "matmul"] > 5 * 2 * 512**3 / V5E.peak and not unknown


def test_a_loop_whose_length_is_data_is_reported_and_counted_once(mesh):
    f = lambda x, w: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)
    once, unknown = replay(compiled(mesh, f, (512, 512), (512, 512)))
    twice, _ = replay(compiled(mesh, lambda x, w: x @ w, (512, 512), (512, 512)))
    assert len(unknown) == 1 and once["s", "matmul"] == pytest.approx(twice["s", "matmul"], rel=0.5)


def test_the_calibration_is_what_the_compiler_says(mesh):
    text = compiled(Mesh(mesh.devices[:1], ("x",)), jnp.matmul, (16384, 16384), (16384, 16384))
    assert 2 * 16384**3 / (replay(text)[0]["s", "matmul"] / CYCLE) == pytest.approx(V5E.matmul, rel=1e-3)


@pytest.mark.parametrize("f, shapes", [
    (lambda x, w: x.T @ w.T, [(1024, 512), (768, 1024)]),
    (lambda x, w: jnp.einsum("bik,bjk->bij", x, w), [(6, 512, 1024), (6, 128, 1024)]),  # as many flops
    (lambda x, w: jnp.swapaxes((x @ w).reshape(1, 512, 6, 128), 1, 2), [(512, 1024), (1024, 768)]),  # into heads
])
def test_a_matmul_takes_the_matrix_units_time_however_few_cycles_the_compiler_says(mesh, f, shapes):
    text = compiled(mesh, lambda x, w: jnp.tanh(f(x, w)), *shapes)
    r, _ = replay(re.sub(r'estimated_cycles":"\d+"', 'estimated_cycles":"1"', text))
    assert r["s", "matmul"] == pytest.approx(2 * 512 * 1024 * 768 / V5E.peak, rel=0.01)


def test_an_all_gather_costs_its_bytes_over_the_links(mesh):
    f = jax.shard_map(lambda x: lax.all_gather(x, "x", tiled=True), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    r, _ = replay(compiled(mesh, f, (4096, 1024), spec=P("x")))
    size = 4096 * 1024 * 2 * 3 / 4
    assert r["bytes", "ici"] == size
    assert r["s", "all-gather"] == pytest.approx(size / BANDWIDTH["ici"])


HLO = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %ag = (f32[250000], f32[1000000]) all-gather-start(%i), replica_groups={{0,1,2,3}}
  %ar = (f32[250000], f32[1000000]) all-gather-start(%i), replica_groups=[2,4]<=[8]
  %work = f32[8] fusion(%i), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"CYCLES"}
  %ard = f32[1000000] all-gather-done(%ar)
  %agd = f32[1000000] all-gather-done(%ag)
  ROOT %t = (s32[], f32[8]) tuple(%i, %work)
}

%cond (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] constant(10)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (a: f32[8]) -> (s32[], f32[8]) {
  %a = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]) tuple(%zero, %a)
  ROOT %w = (s32[], f32[8]) while(%init), condition=%cond, body=%body
}
"""


@pytest.mark.parametrize("share", [0, 0.25, 2, 5])
def test_asynchronous_collectives_cost_what_compute_does_not_hide(share):
    """Two of 4 MB, three quarters of each on the links, one behind the other, in a loop of 10."""
    transfer = 3e6 / BANDWIDTH["ici"]
    r, _ = replay(HLO.replace("CYCLES", str(round(share * transfer / CYCLE))))
    assert r["busy", "all-gather"] == pytest.approx(10 * 2 * transfer)
    assert r["s", "all-gather"] == pytest.approx(10 * max(2 - share, 0) * transfer, rel=1e-3, abs=1e-8)
    assert r["s", "elementwise"] == pytest.approx(10 * share * transfer, rel=1e-3, abs=1e-8)


def test_what_the_sparse_cores_gather_is_hidden_like_any_collective():
    """libtpu's spelling on tpu7x: call-start of a computation that holds the collective."""
    r, _ = replay("""
%called (q: bf16[1000000], k: token[]) -> bf16[1000000] {
  %q = bf16[1000000]{0:T(1024)(128)(2,1)} parameter(0)
  ROOT %all-reduce.1 = bf16[1000000]{0:T(1024)(128)(2,1)} all-reduce(%q), replica_groups={{0,1,2,3}}, to_apply=%add
}

ENTRY %main (a: bf16[1000000]) -> bf16[1000000] {
  %a = bf16[1000000]{0:T(1024)(128)(2,1)} parameter(0)
  %s = ((bf16[1000000]{0:T(1024)}, token[]), bf16[1000000]{0:T(1024)}) call-start(%a, %k), to_apply=%called
  %work = f32[8] fusion(%a), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"900000000"}
  ROOT %d = bf16[1000000]{0:T(1024)(128)(2,1)} call-done(%s)
}
""")
    assert r["busy", "all-reduce"] == pytest.approx(2 * 2e6 * 3 / 4 / BANDWIDTH["ici"]) and r["s", "all-reduce"] == 0


def test_links_wrap_around_in_full_tori_only():
    v6e, tpu7x = plan.CHIPS["TPU v6 lite"], plan.CHIPS["TPU7x"]
    assert plan.link_bandwidth("v6e:16x16", v6e) == 2 * plan.link_bandwidth("v6e:4x4", v6e)
    assert plan.link_bandwidth("tpu7x:4x4x4", tpu7x) == 2 * plan.link_bandwidth("tpu7x:2x2x2", tpu7x)


def test_a_group_that_is_a_part_of_a_torus_has_fewer_links():
    """16 replicas of 128 devices on tpu7x:8x8x16: one plane's half, 4 of 8 by all of 16, so 1 + 2 of 6 links."""
    devices = lowering.make_mesh(16, 128, plan.topology_devices("tpu7x:8x8x16")).devices[0]
    tpu7x = plan.CHIPS["TPU7x"]
    assert plan.link_bandwidth("tpu7x:8x8x16", tpu7x, devices) == plan.link_bandwidth("tpu7x:8x8x16", tpu7x) / 2


def test_what_crosses_replicas_takes_the_links_of_their_group():
    slow, fast = (hlo.total(hlo.Replay(HLO.replace("CYCLES", "1"), CYCLE, V5E.peak, BANDWIDTH | more, 1, None).run()) for more in ({}, {"ici_4": 2 * BANDWIDTH["ici"]}))
    assert slow["busy", "all-gather"] == pytest.approx(2 * fast["busy", "all-gather"]) and slow["bytes", "ici"] == fast["bytes", "ici"]


def test_replicas_of_one_device_send_each_other_over_all_links():
    r, _ = plan.report(plan.parse([*DEBUG, "--replicas", "4"])[1])
    assert r["assumed_ici_4_bytes_per_s"] == plan.link_bandwidth("v5e:2x2", V5E) > r["assumed_ici_bytes_per_s"]
    assert not jax.config.jax_enable_compilation_cache


def test_matmuls_with_a_bias_count_and_micro_batches_save_what_one_of_them_does():
    shapes = (6,), (8, 4), (4, 6), (8, 6)
    gm = graph_trainer.capture(lambda b, x, w, y: [torch.addmm(b, x, w), x @ w], *(torch.empty(s, device="meta") for s in shapes)).gm
    assert plan.name_kernels(gm, "tpu7x") == 2 * (2 * 8 * 4 * 6)

    def saved(*flags):
        args = train.parse_args(["--model", "llama3", "--layers", "2", "--scan", "--seq", "32", *flags])
        args.dtype = "float32"
        model = train.build_model(args, plan.replace(train.choose_size(args), vocab=512), None)
        step, _ = train.build_programs(args, model, graph_trainer.AdamW(), None, lowering.make_mesh())
        return plan.saved_bytes(step.graph.gm)

    assert saved("--batch", "8", "--grad-accum", "4") == saved("--batch", "2") > 0


def test_the_largest_batch_is_whole_micro_batches(monkeypatch):
    tried = []

    def fake(args):
        tried.append(args.per_device_batch)
        if args.per_device_batch > 26:
            raise lowering.DoesNotFit("too large")
        return {key: 1.0 for key, _ in plan.COLUMNS.values()} | {"predicted_mfu": 0.5}, []

    monkeypatch.setattr(plan, "report", fake)
    assert plan.main(["batch", *DEBUG, "--grad-accum", "4", "--per-device-batch", "12"]) is None
    assert tried == [12, 24, 48, 36, 28]


def test_a_plan_of_the_debug_model_has_every_key_and_adds_up(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert plan.main([*DEBUG, "--report", str(path), "--picture", str(tmp_path / "plan.png")]) is None
    r = json.loads(path.read_text())
    for key in ("params devices chips hbm_bytes hbm_limit_bytes host_bytes model_flops hardware_flops cycles predicted_step_s "
                "predicted_mfu tokens_per_s_per_chip trace_s lower_s compile_s").split():
        assert isinstance(r[key], (int, float)), key
    assert (r["devices"], r["chips"], r["hbm_limit_bytes"]) == (4, 4, 15.75 * 2**30)
    assert sum(v for k, v in r.items() if k.startswith("s_")) == pytest.approx(r["predicted_step_s"])
    assert 0 < r["hbm_bytes"] < r["hbm_limit_bytes"] and 0 < r["predicted_mfu"] < r["matmul_bound_mfu"] < 1
    assert 0.9 < r["hardware_flops"] / r["model_flops"] < 1.6
    assert r["bytes_state"] >= 12 * r["params"] / 4  # fp32 weights and two moments, over 4 devices
    out = capsys.readouterr().out
    assert all(key in out for key in r), "what the JSON says is on the terminal"
    assert r["assumed_peak_flops_per_s"] == 197e12 and r["published_mfu"] is None
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize("argv, says", [
    (["--topology", "v9z:2x2"], "v5e:2x2"),
    *((["--topology", name], f"--topology {name} --slices 1: the compiler does not know it") for name in ("V6E:2x2", "v5e_2x2", "v5e:200x200")),
    (["--topology", "v5e:2x2", "--slices", "4", "--replicas", "2"], "no multiple of --slices 4"),
    (["--topology", "v5e:2x2", "--model", "llama3", "--layers", "1", "--seq", "100"], "that divides its axis, a multiple itself (--seq)"),
    (["flags", "--recipe", "llama3_8b"], "flags compares --libtpu-init-flags"),
    ([*DEBUG, "--report", __file__], f"--report {__file__}: no new file can be written there"),
    ([*DEBUG, "--data", "text.txt"], "--data trains"),
    ([], "--topology NAME or --recipe NAME is needed"),
    (["--recipe", "gpt5"], "llama3_8b"),
    (["batch", "64", "--recipe", "llama3_8b"], "batch 64: only scaling takes numbers"),
    (["scaling", "65", "--recipe", "llama3_8b"], "scaling 65"),
    ([*DEBUG, "--libtpu-init-flags=--xla_tpu_warp_drive=1"], "no flag xla_tpu_warp_drive"),
    ([*DEBUG, "--replicas", "3"], "--replicas 3 does not divide the 4 devices of 1 v5e:2x2"),
    ([*DEBUG, "--batch", "8"], "--batch 8 is over all devices"),
    ([*DEBUG, "--fsdp", "1"], "--fsdp trains"),
    ([*DEBUG, "--print-graph"], "--print-graph trains"),
    ([*DEBUG, "--init-from", "/nowhere"], "/nowhere"),
    ([*DEBUG, "--report", "/nowhere/r.json"], "--report /nowhere/r.json"),
    ([*DEBUG, "--report", "/tmp"], "--report /tmp"),
    ([*DEBUG, "--picture", "plan.pn"], "--picture plan.pn must end in"),
    (["batch", *DEBUG, "--report", "r.json"], "leave them out with batch"),
    (["scaling", "64", *DEBUG], "scaling v5e:2x2"),
    (["scaling", "64", "--model", "llama3"], "--topology NAME or --recipe NAME is needed"),
    (["--topology", "v5e:2x2", "--model", "flux"], "--seq 256: "),
    (["--recipe", "llama3_8b", "--kernels", "reference", "--sa-block-q", "128", "--size", "debug"], "--sa-block-q is of the Pallas kernel"),
])
def test_what_cannot_be_is_one_clear_line(argv, says, capsys):
    assert plan.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan.py: error: ") and says in error and "Traceback" not in error


def test_what_does_not_fit_says_by_how_much(capsys):
    assert plan.main([*DEBUG, "--per-device-batch", "16384"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"does not fit a device: Used [\d.]+G of [\d.]+G hbm. Exceeded hbm capacity by [\d.]+G|temporaries \([\d.]+G\) exceeds available HBM \([\d.]+G\)", error)
    assert "Levers" in error


def test_compiler_flags_are_the_chips_not_the_recipes_and_given_ones_replace_them():
    assert recipes.flags_of("llama3_405b", "tpu7x") == recipes.flags_of("llama3_8b", "tpu7x") != recipes.flags_of("llama3_8b", "v6e")
    assert recipes.flags_of("llama3_8b", None) == recipes.flags_of("llama3_8b", "v5p") == recipes.flags_of(None, "tpu7x") == ""
    assert recipes.flags_of("llama3_8b", "v6e", "--a=1") == "--a=1" and recipes.flags_of("llama3_8b", "v6e", "") == ""


def compiled_for_tpu7x(f, *arrays):
    """Each array: (shape, dtype), its first dimension whole on all of tpu7x:4x4x4's 128 devices -> the optimized HLO."""
    device_mesh = lowering.make_mesh(1, 128, plan.topology_devices("tpu7x:4x4x4"))
    whole = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(device_mesh, P())) for shape, dtype in arrays]
    f = jax.shard_map(f, mesh=device_mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(f).lower(*whole).compile(recipes.compiler_options(recipes.flags_of("llama3_405b", "tpu7x"))).as_text()


def test_on_a_full_torus_gathers_and_reductions_of_a_weight_stay_what_they_are():
    """26 rows a device make no whole tile, 8 columns do; without the flags every gather is an all-reduce."""
    table = lowering.collectives({"group": "fsdp"})
    gather = lambda x: table["_c10d_functional.all_gather_into_tensor.default"](x, 128, "group")
    reduce = lambda x: table["_c10d_functional.reduce_scatter_tensor.default"](x, "sum", 128, "group")
    shape = (26 * 128, 8 * 128)
    assert (dim := simple_fsdp.shard_dim(shape, 128)) == 1
    text = compiled_for_tpu7x(lambda x, g: reduce(jnp.moveaxis(lax.dot_general(g, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32), dim, 0)),
                              ((512, shape[1]), jnp.bfloat16), ((512, shape[0]), jnp.bfloat16))
    assert "reduce-scatter(" in text and "all-reduce(" not in text
    text = compiled_for_tpu7x(lambda x, w: x @ gather(w), ((512, shape[1]), jnp.bfloat16), ((8, shape[0]), jnp.bfloat16))
    assert "all-gather(" in text and "all-reduce(" not in text


def test_what_a_loop_keeps_in_host_memory_moves_beside_its_matmuls():
    """Without a buffer of its own a slice is fetched after the last use of the one before it, with nothing left to hide it."""
    table = lowering.host_memory()

    def step(x, w):
        x, saved = table["loop"](lambda x, w: [x + jax.nn.silu(x @ w), table["tpu.to_host.default"](x)], [x], [w], [], False, 0)
        return table["loop"](lambda g, x, w: [g + (g * jnp.tanh(x @ w)) @ w.T, (x.T @ g).astype(jnp.float32).sum()], [x], [saved, w], [], True, 1)

    text = compiled_for_tpu7x(step, ((4096, 4096), jnp.bfloat16), ((4, 4096, 4096), jnp.bfloat16))
    # A third of what an iteration computes, at so much bandwidth.
    phases = hlo.Replay(text, 1 / 2.2e9, 1.15e15, {"ici": 1e11, "host": 400e9, "hbm": 4e12, "sparsecore": 4e12}, 1, None).run()
    loops = hlo.total([(label, counts) for label, counts in phases if "loop" in label])
    assert loops["bytes", "host"] == 2 * 4 * 4096 * 4096 * 2
    assert loops["s", "copies to host"] < 0.1 * loops["busy", "copies to host"]


def test_a_peak_that_counts_the_hosts_buffers_is_bounded_by_what_lies_in_hbm():
    """llama3_405b --offload, as libtpu 0.0.42 gives it in GB: the peak is 2.38 of state and the host's 33.82."""
    memory = types.SimpleNamespace(peak_memory_in_bytes=36.20, argument_size_in_bytes=2.38, temp_size_in_bytes=27.14,
                                   output_size_in_bytes=2.38, alias_size_in_bytes=2.38)
    assert plan.hbm_peak(memory) == pytest.approx(29.52)
    memory.peak_memory_in_bytes = 18.0
    assert plan.hbm_peak(memory) == 18.0


def test_saved_activations_are_not_turned_around_for_the_weights_gradients():
    """The backward of an MLP that saved the results of its first two matmuls: if XLA chooses layouts, it copies both."""
    def seconds(t):
        def mlp(g, gate, up, x, w1, w2, w3):
            wide, hidden = gate.astype(jnp.float32), g @ w2
            sigmoid = jax.nn.sigmoid(wide)
            silu = (wide * sigmoid).astype(gate.dtype)
            of_gate = ((hidden * up).astype(jnp.float32) * sigmoid * (1 + wide * (1 - sigmoid))).astype(gate.dtype)
            of_up = hidden * silu
            of_weights = t(of_gate) @ x, t(g) @ (silu * up), t(of_up) @ x
            return [g + of_gate @ w1 + of_up @ w3, *(w.astype(jnp.float32) for w in of_weights)]

        arrays = [(shape, jnp.bfloat16) for shape in ((4096, 1024), *[(2, 4096, 3072)] * 2, (2, 4096, 1024), (2, 3072, 1024), (2, 1024, 3072), (2, 3072, 1024))]
        text = compiled_for_tpu7x(lambda g, *saved: lowering.TABLE["loop"](mlp, [g], saved, [], True, 0), *arrays)
        phases = hlo.Replay(text, 1 / 2.2e9, 1.15e15, {"ici": 1e11, "hbm": 4e12, "sparsecore": 4e12}, 1, None).run()
        return hlo.total([(label, counts) for label, counts in phases if "loop" in label])["s", "elementwise"]

    assert seconds(lowering.TABLE["aten.t.default"]) < 0.2 * seconds(jnp.transpose)


def test_the_gradient_of_the_loss_is_reduced_before_the_backward_loop_begins(monkeypatch):
    """Else the compiler keeps it whole, beside what the loop needs."""
    texts, replay = [], hlo.Replay
    monkeypatch.setattr(hlo, "Replay", lambda text, *rest: texts.append(text) or replay(text, *rest))
    plan.report(plan.parse("--recipe llama3_405b --size debug --topology tpu7x:2x2x1 --layers 2 --seq 512".split())[1])
    ops = list(hlo.parse(texts[0])["ENTRY"].values())
    loops = [i for i, op in enumerate(ops) if op.opcode == "while"]
    reduced = [i for i, op in enumerate(ops) if op.opcode == "call-done" and "reduce_scatter" in op.scope]
    assert loops[0] < reduced[0] < loops[1] < reduced[1]


def test_heads_are_split_after_their_matmul_and_few_matrices_are_summed_by_adds():
    def cycles(f, *arrays):
        return sum(int(c) for c in re.findall(r'estimated_cycles":"(\d+)"', compiled_for_tpu7x(f, *arrays)) if int(c) < 2**62)

    view, add = lowering.TABLE["aten.view.default"], lowering.TABLE["aten.sum.dim_IntList"]
    x, w = ((1, 4096, 4096), jnp.bfloat16), ((4096, 4096), jnp.bfloat16)
    rotated = lambda q: jnp.swapaxes(q, 1, 2) * jnp.bfloat16(0.5)
    assert (cycles(lambda x, w: rotated(view(x @ w, (1, 4096, 32, 128))), x, w)
            < 0.8 * cycles(lambda x, w: rotated((x @ w).reshape(1, 4096, 32, 128)), x, w))
    parts = ((8, 8192, 1024), jnp.bfloat16)
    assert cycles(lambda x: add(x, [0]), parts) < 0.5 * cycles(lambda x: x.sum(0), parts)


def test_recipes_are_flags_that_the_parser_takes_and_later_ones_override():
    for name in recipes.RECIPES:
        command, args = plan.parse(["batch", "--recipe", name, "--seq", "4096"])
        assert command == "batch" and args.seq == 4096 and args.scan and args.topology == recipes.RECIPES[name].topology
    with pytest.raises(UsageError):
        plan.parse(["--recipe", "llama3_8b", "--no-such-flag"])


@pytest.mark.parametrize("name, slices, replicas", [("v6e:4x4", 1, 2), ("v6e:4x4", 1, 8), ("v6e:4x4", 2, 2), ("tpu7x:2x2x1", 2, 4)])
def test_training_and_planning_lay_replicas_over_whole_slices(name, slices, replicas):
    devices = plan.topology_devices(name, slices)
    mesh = lowering.make_mesh(replicas, len(devices) // replicas, devices)
    assert mesh.shape == {"replicas": replicas, "fsdp": len(devices) // replicas} and len(set(mesh.devices.flat)) == len(devices)
    assert all(len({getattr(d, "slice_index", 0) for d in row}) == 1 for row in mesh.devices)


def test_shards_never_cross_slices():
    devices = plan.topology_devices("v6e:2x2", 2)
    with pytest.raises(lowering.LoweringError, match="2 slices cannot be 1 replicas"):
        lowering.make_mesh(1, len(devices), devices)


def test_compiler_options_are_names_and_values():
    assert recipes.compiler_options("--xla_a=1 --xla_b") == {"xla_a": "1", "xla_b": True}
    assert recipes.compiler_options("") == {}


def test_a_pallas_kernel_costs_its_matmuls_shared_with_the_ops_other_kernels():
    """HLO as libtpu prints it: line breaks inside a kernel's metadata, no cycles."""
    call = '''  %NUMBER = bf16[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(f)/ce_1 flops=6000000000 share=0.7 :0 tpu.linear_cross_entropy_backward.default/KERNEL/pallas_call"}
'''
    def seconds(*names):
        calls = [call.replace("NUMBER", f"call.{i}").replace("KERNEL", name) for i, name in enumerate(names)]
        r, _ = replay("ENTRY %main (a: bf16[8]) -> bf16[8] {\n  %a = bf16[8]{0} parameter(0)\n" + "".join(calls) + "}\n")
        assert r["s", "loss"] == r["kernel", "linear_cross_entropy_backward"]
        return r["s", "loss"] / (6e9 / V5E.peak / 0.7)

    assert seconds("dx", "dw") == pytest.approx(1)
    assert seconds("dx", "dw", "dx", "dw") == pytest.approx(2)  # the same op again: rematerialization, a peeled loop


@pytest.mark.parametrize("causal, window, pairs", [(True, 0, 8192 * 8193 // 2), (False, 0, 8192**2), (True, 2048, 8192 * 2048 - 2047 * 2048 // 2)])
def test_attention_counts_what_its_mask_leaves_at_the_schedules_efficiency(causal, window, pairs):
    def attend(q, k, v):
        return [torch.ops.tpu.splash_attention(q, k, v, None, causal, window, 0.0, 1.0)[0]]
    x = torch.empty(1, 4, 8192, 128, device="meta")
    gm = graph_trainer.capture(attend, x, torch.empty_like(x), torch.empty_like(x)).gm
    assert plan.name_kernels(gm, "tpu7x") == 2 * 2 * 4 * 128 * pairs
    (node,) = [n for n in gm.graph.nodes if "splash" in str(n.target)]
    assert f"share={kernels.TABLE['tpu7x']['splash_attention D=128']['forward']['efficiency']} " in node.meta["stack_trace"]


def test_hardware_flops_of_plain_matmuls_are_exact_in_loops_too():
    x, ws = torch.empty(32, 64, device="meta"), torch.empty(3, 64, 64, device="meta")
    layer = graph_trainer.capture(lambda x, w: [x @ w], x, ws[0]).gm
    gm = graph_trainer.capture(lambda x, ws: graph_trainer.loop(layer, [x], [ws], [], False, 0) + [x.T @ x], x, ws).gm
    assert plan.name_kernels(gm, "tpu7x") == 3 * 2 * 32 * 64 * 64 + 2 * 64 * 64 * 32


def test_a_step_of_several_programs_is_the_sum_of_its_calls_and_the_largest_memory(monkeypatch):
    argv = ["--topology", "v5e:2x2", "--model", "llama3", "--layers", "1", "--seq", "128", "--kernels", "reference"]
    whole, phases = plan.report(plan.parse(argv)[1])
    build, resident = train.build_programs, [1000]

    class Parts:
        def __init__(self, step):
            self.graph = step.graph
            (_, piece, _), = step.parts()
            piece.resident_bytes = resident[-1]
            self.parts = lambda: [("one", piece, 1), ("two", piece, 3)]

    monkeypatch.setattr(train, "build_programs", lambda *args: (Parts(build(*args)[0]), None))
    r, parts = plan.report(plan.parse(argv)[1])
    assert r["predicted_step_s"] == pytest.approx(4 * whole["predicted_step_s"])
    assert r["hardware_flops"] == 4 * whole["hardware_flops"]
    assert r["hbm_bytes"] == whole["hbm_bytes"] + 1000
    assert [name.split()[0] for name, _ in parts] == ["one"] * len(phases) + ["two"] * len(phases)
    resident.append(V5E.hbm)
    with pytest.raises(lowering.DoesNotFit, match="of 16.91 GB"):
        plan.report(plan.parse(argv)[1])


def test_flags_compares_the_bits_of_a_step_on_devices_that_are_here(capsys):
    argv = "flags --model llama3 --layers 1 --seq 64 --batch 2 --val-batches 1".split()
    assert plan.main([*argv, "--libtpu-init-flags=--xla_cpu_enable_fast_min_max=true"]) is None
    assert capsys.readouterr().out.splitlines()[-1] == "free: the same bits"
    assert plan.main([*argv, "--libtpu-init-flags=--xla_nope=1"]) == 2
    assert capsys.readouterr().err == "plan.py: error: with flags: this compiler has no flag xla_nope (--libtpu-init-flags)\n"


def test_clipping_is_planned_as_it_is_trained(monkeypatch):
    seen = []
    monkeypatch.setattr(train, "build_programs", lambda args, model, opt, *rest: seen.append(opt) or (_ for _ in ()).throw(UsageError("enough")))
    assert plan.main([*DEBUG, "--clip", "0"]) == 2 and seen[0].clip == 0
