import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import plan
import recipes
from train import UsageError

V5E = plan.CHIPS["TPU v5 lite"]
BANDWIDTH = {"ici": plan.link_bandwidth("v5e:2x2", V5E), "dcn": 1e9, "host": 32e9, "hbm": V5E.hbm_bandwidth}
DEBUG = ["--topology", "v5e:2x2", "--model", "llama3", "--layers", "2", "--scan", "--seq", "128",
         "--kernels", "reference"]


@pytest.fixture(scope="module")
def mesh():
    return Mesh(plan.topology_devices("v5e:2x2").ravel(), ("x",))


def compiled(mesh, f, *shapes, spec=P()):
    xs = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s in shapes]
    return jax.jit(f).lower(*xs).compile().as_text()


def replay(text, slice_size=4):
    computations, entry = plan.parse_hlo(text)
    return plan.Replay(computations, V5E, BANDWIDTH, slice_size).run(entry)


def test_loops_in_loops_count_as_often_as_they_run(mesh):
    """The compiler's own program of 7 x 5 matmuls of 512 cubed has 7 times the flops and cycles of 5."""
    def nested(x, w):
        inner = lambda x, _: (jnp.tanh(x @ w), None)
        return lax.scan(lambda x, _: (lax.scan(inner, x, None, length=5)[0], None), x, None, length=7)[0]

    once = replay(compiled(mesh, lambda x, w: lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0], (512, 512), (512, 512)))
    many = replay(compiled(mesh, nested, (512, 512), (512, 512)))
    assert once.flops == 5 * 2 * 512**3
    assert many.flops == 7 * once.flops
    assert many.seconds["matmul"] / once.seconds["matmul"] == pytest.approx(7, rel=0.2)
    assert not many.unknown_loops


def test_a_loop_whose_length_is_data_is_reported_and_counted_once(mesh):
    f = lambda x, w: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)
    r = replay(compiled(mesh, f, (512, 512), (512, 512)))
    assert len(r.unknown_loops) == 1 and r.flops == 2 * 512**3


def test_flops_of_batched_matmuls_are_exact(mesh):
    f = lambda a, b: jnp.einsum("bik,bjk->bij", a, b)
    assert replay(compiled(mesh, f, (6, 256, 384), (6, 128, 384))).flops == 2 * 6 * 256 * 128 * 384


def test_an_all_gather_costs_its_bytes_over_the_links(mesh):
    f = jax.shard_map(lambda x: lax.all_gather(x, "x", tiled=True), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    r = replay(compiled(mesh, f, (4096, 1024), spec=P("x")))
    size = 4096 * 1024 * 2 * 3 / 4
    assert r.moved["ici"] == size
    assert r.seconds["all-gather"] == pytest.approx(size / BANDWIDTH["ici"])


HLO = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %ag = (f32[250000], f32[1000000]) all-gather-start(%i), replica_groups={{0,1,2,3}}
  %work = f32[8] fusion(%i), kind=kLoop, calls=%none, backend_config={"estimated_cycles":"CYCLES"}
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


def test_an_asynchronous_collective_costs_what_compute_does_not_hide():
    transfer = 3e6 / BANDWIDTH["ici"]  # three quarters of 4 MB
    for share in (0, 0.25, 2):
        cycles = round(share * transfer * V5E.peak / V5E.mxu)
        r = replay(HLO.replace("CYCLES", str(cycles)))
        hidden = min(share, 1) * transfer
        assert r.hidden["all-gather"] == pytest.approx(10 * hidden, rel=1e-3, abs=1e-9)
        assert r.seconds["all-gather"] == pytest.approx(10 * (transfer - hidden), rel=1e-3, abs=1e-9)
        assert r.seconds["elementwise"] == pytest.approx(10 * share * transfer, rel=1e-3, abs=1e-9)


def test_replica_groups_in_both_spellings():
    assert plan.replica_group("replica_groups={{0,2},{1,3}}, x") == [0, 2]
    assert plan.replica_group("replica_groups=[2,2]<=[4]") == [0, 1]
    assert plan.replica_group("replica_groups=[2,2]<=[2,2]T(1,0), x") == [0, 2]


def test_links_wrap_around_in_full_tori_only():
    v6e, tpu7x = plan.CHIPS["TPU v6 lite"], plan.CHIPS["TPU7x"]
    assert plan.link_bandwidth("v6e:16x16", v6e) == 2 * plan.link_bandwidth("v6e:4x4", v6e)
    assert plan.link_bandwidth("tpu7x:4x4x4", tpu7x) == 2 * plan.link_bandwidth("tpu7x:2x2x2", tpu7x)


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
    assert "attention" in out and "assumed:" in out and "197.0 TFLOP/s" in out
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize("argv, says", [
    (["--topology", "v9z:2x2"], "v5e:2x2"),
    ([], "--topology NAME or --recipe NAME is needed"),
    (["--recipe", "gpt5"], "llama3_8b"),
    ([*DEBUG, "--libtpu-init-flags=--xla_tpu_warp_drive=1"], "no flag xla_tpu_warp_drive"),
])
def test_what_cannot_be_is_one_clear_line(argv, says, capsys):
    assert plan.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan.py: error: ") and says in error and "Traceback" not in error


def test_what_does_not_fit_says_by_how_much(capsys):
    assert plan.main([*DEBUG, "--per-device-batch", "16384"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"does not fit: needs [\d.]+ GB of HBM a device, the compiler allows [\d.]+: [\d.]+ GB too much", error)
    assert "Levers" in error


def test_recipes_are_flags_that_the_parser_takes_and_later_ones_override():
    for name in recipes.RECIPES:
        command, args = plan.parse(["batch", "--recipe", name, "--seq", "4096"])
        assert command == "batch" and args.seq == 4096 and args.scan and args.topology == recipes.RECIPES[name].topology
    with pytest.raises(UsageError):
        plan.parse(["--recipe", "llama3_8b", "--no-such-flag"])


def test_compiler_options_are_names_and_values():
    assert recipes.compiler_options("--xla_a=1 --xla_b") == {"xla_a": "1", "xla_b": True}
    assert recipes.compiler_options(None) == {}


def test_a_pallas_kernel_costs_its_ops_flops_shared_with_the_ops_other_kernels():
    """HLO as libtpu prints it: line breaks inside a kernel's metadata, no cycles."""
    call = '''  %KERNEL = bf16[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(f)/llama3 flops=2000000000 :0 tpu.splash_attention_backward.default/pallas_call"}
'''
    text = ("ENTRY %main (a: bf16[8]) -> bf16[8] {\n  %a = bf16[8]{0} parameter(0)\n"
            + call.replace("KERNEL", "dq.1") + call.replace("KERNEL", "dkv.2") + "}\n")
    r = replay(text)
    assert r.flops == 2e9
    assert r.kernels["dq"][0] == r.kernels["dkv"][0] == 1
    assert r.seconds["attention"] == pytest.approx(2e9 / V5E.peak / plan.KERNEL_EFFICIENCY["splash"])
