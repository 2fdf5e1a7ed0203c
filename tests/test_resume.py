"""Checkpoints of training: kills, damage, full disks, signals, other meshes, other runs; and what a run logs."""

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import checkpoint
import train
from conftest import ROOT

SMALL = ["--layers", "1", "--batch", "8", "--seq", "32", "--data", os.path.join(ROOT, "llama3.py")]
KILLS = int(os.environ.get("KILLS", 5))  # 30 take minutes


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path):
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records(path)]


def snapshot(folder):
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*")}


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """XLA's programs on disk: a run and its resumption are the same program, also in other processes."""
    settings = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
                "jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
        del os.environ[name.upper()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(*flags) -> a folder: run.jsonl of 6 uninterrupted steps, and ckpt/ with the states of steps 2 and 4 of
    a run that ended there. Each combination once."""
    made = {}

    def saved(*flags):
        if flags not in made:
            folder = made[flags] = tmp_path_factory.mktemp("saved")
            assert train.main([*SMALL, *flags, "--steps", "6", "--metrics", str(folder / "run.jsonl")]) is None
            assert train.main([*SMALL, *flags, "--steps", "4", "--metrics", str(folder / "m.jsonl"),
                               "--checkpoint", str(folder / "ckpt"), "--save-every", "2"]) is None
        return made[flags]

    return saved


@pytest.fixture
def copy(saved, tmp_path):
    def copy(*flags):
        subprocess.run(["cp", "-a", f"{saved(*flags)}/.", tmp_path], check=True)
        return tmp_path
    return copy


def resume(folder, *flags, steps=6):
    return train.main(resuming(folder, *flags, steps=steps))


def resuming(folder, *flags, steps=6):
    return [*SMALL, *flags, "--steps", str(steps), "--metrics", str(folder / "m.jsonl"),
            "--checkpoint", str(folder / "ckpt"), "--save-every", "2", "--resume"]


# ------------------------------------------------------------------------------------------ going on


@pytest.mark.parametrize("flags", [(), ("--scan", "--fsdp", "4")], ids=str)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(copy, flags):
    folder = copy(*flags)
    assert resume(folder, *flags) is None
    assert losses(folder / "m.jsonl") == losses(folder / "run.jsonl")
    assert sorted(os.listdir(folder / "ckpt")) == ["00000004", "00000006"]


def test_fewer_steps_than_the_checkpoint_has_are_one_line(copy, capsys):
    assert resume(copy(), steps=3) == 2
    assert "--steps 3: the checkpoint is of step 4, give more" in capsys.readouterr().err


def test_a_checkpoint_with_other_shapes_is_one_line_and_stays(copy, monkeypatch, capsys):
    """As a version of the code that stored a weight in another shape has left it."""
    folder, init = copy(), checkpoint.Checkpoints.__init__
    monkeypatch.setattr(checkpoint.Checkpoints, "__init__", lambda self, tiers, keep, run, flags, shapes, resume: init(
        self, tiers, keep, run, flags, shapes | {"norm.weight": (4, 96)}, resume))
    assert resume(folder) == 2
    assert "of another version of this code: norm.weight is (4, 96) now and was (384,)" in capsys.readouterr().err
    assert sorted(os.listdir(folder / "ckpt")) == ["00000002", "00000004"]


@pytest.mark.parametrize("before, after", [("", "--fsdp 8"), ("", "--fsdp 4 --replicas 2"), ("--scan --fsdp 4", "--scan")])
def test_a_run_resumes_on_another_mesh(copy, before, after):
    folder = copy(*before.split())
    assert resume(folder, *after.split()) is None
    np.testing.assert_allclose(losses(folder / "m.jsonl"), losses(folder / "run.jsonl"), rtol=1e-5)


def test_two_processes_save_on_sigterm_to_one_of_them_and_one_process_goes_on(tmp_path, saved):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    flags = [*SMALL, "--steps", "2000", "--fsdp", "4", "--devices", "2", "--coordinator", f"localhost:{port}", "--num-processes",
             "2", "--checkpoint", str(tmp_path / "ckpt"), "--save-every", "3", "--local-checkpoint", str(tmp_path / "fast"),
             "--local-save-every", "2", "--metrics", str(tmp_path / "m.jsonl")]
    processes = [subprocess.Popen([sys.executable, "train.py", *flags, "--process-id", str(i)], cwd=ROOT, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in range(2)]
    wait_for_steps(tmp_path / "m.jsonl", 7)
    processes[1].terminate()
    outputs = [p.communicate(timeout=300) for p in processes]
    assert [p.returncode for p in processes] == [143, 143], outputs
    last = records(tmp_path / "m.jsonl")[-1]["step"]
    assert f"saved step {last}" in outputs[0][0]
    for folder in ("ckpt", "fast"):
        assert f"{last:08}" in os.listdir(tmp_path / folder)
        assert os.path.exists(tmp_path / folder / f"{last:08}" / "digests.1.json")
    assert resume(tmp_path, steps=last + 1) is None
    run = losses(tmp_path / "m.jsonl")
    assert [r[0] for r in run] == list(range(1, last + 2))
    np.testing.assert_allclose(run[:6], losses(saved() / "run.jsonl"), rtol=1e-5)


def wait_for_steps(path, n, alive=lambda: True):
    """Until the metrics know step n."""
    end = time.monotonic() + 300
    while not (path.exists() and f'"step": {n},' in path.read_text()) and alive():
        assert time.monotonic() < end, f"no step {n}"
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------- kills and signals


def start(*flags):
    """train.main in a process of its own, forked from one that has imported it: a start without seconds of imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    process = context.Process(target=run_quietly, args=(flags,))
    process.start()
    return process


def run_quietly(flags):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(train.main(flags) or 0)


def newest(folder):
    return max((int(p.name) for p in folder.glob("*/0*") if p.name.isdigit()), default=0)


def test_a_run_that_is_killed_at_random_moments_equals_the_uninterrupted_one(tmp_path):
    """KILLS times SIGKILL: within 0.3 seconds of a new step, or (1 in 5) of the start. By turns a fast folder is written
    after every step, so that the kill comes during a save, and after every eighth, so that it perhaps does not."""
    metrics, steps, rng = tmp_path / "m.jsonl", 120 * KILLS, random.Random(KILLS)  # more than a quiet machine does before the last
    flags = [*SMALL, "--batch", "2", "--steps", str(steps), "--metrics"]
    start(*flags, str(tmp_path / "run.jsonl")).join()
    flags += [str(metrics), "--checkpoint", str(tmp_path / "ckpt"), "--save-every", "5",
              "--local-checkpoint", str(tmp_path / "fast"), "--resume"]
    during = whole = 0
    for kill in range(KILLS):
        done = records(metrics)[-1]["step"] if metrics.exists() and metrics.stat().st_size else 0
        unfinished = {os.stat(path).st_ino for path in tmp_path.glob("*/*.unfinished")}
        process = start(*flags, "--local-save-every", "1" if kill % 2 else "8")
        if kill % 5 < 4:
            wait_for_steps(metrics, done + 1, process.is_alive)
        time.sleep(rng.uniform(0, 0.3 if kill % 5 < 4 else 4))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it ended before it was killed"
        during += bool({os.stat(path).st_ino for path in tmp_path.glob("*/*.unfinished")} - unfinished)
        assert newest(tmp_path) >= whole, "a kill cost the last complete checkpoint"
        whole = newest(tmp_path)
    print(f"{KILLS} kills up to step {whole}, {during} of them during a save")
    process = start(*flags)
    process.join()
    assert process.exitcode == 0
    assert losses(metrics) == losses(tmp_path / "run.jsonl")
    assert 0 < during < KILLS or KILLS < 30


def test_sigterm_saves_and_exits_with_143(tmp_path, saved):
    flags = [*SMALL, "--steps", "2000", "--metrics", str(tmp_path / "m.jsonl"), "--checkpoint", str(tmp_path / "ckpt")]
    process = start(*flags)
    wait_for_steps(tmp_path / "m.jsonl", 3, process.is_alive)
    process.terminate()
    process.join()
    assert process.exitcode == 143
    last = records(tmp_path / "m.jsonl")[-1]["step"]
    assert os.listdir(tmp_path / "ckpt") == [f"{last:08}"]
    assert resume(tmp_path, steps=max(last, 6) + 1) is None
    run = losses(tmp_path / "m.jsonl")
    assert [r[0] for r in run] == list(range(1, len(run) + 1)) and run[:6] == losses(saved() / "run.jsonl")


# ------------------------------------------------------------------------------------ damage, full disks, other runs


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {"a flipped bit": flip, "a lost end": lambda path: os.truncate(path, path.stat().st_size - 1),
          "an emptied file": lambda path: os.truncate(path, 0), "a lost file": os.remove}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_of_a_checkpoint_is_found(copy, damage):
    folder = copy()
    tier = checkpoint.Tier(str(folder / "ckpt"), 2, 2, {})
    whole, files = folder / "ckpt" / "00000004", [p for p in (folder / "ckpt" / "00000004").rglob("*") if p.is_file()]
    assert tier.damage(4) == "" and len(files) > 10
    for file in files:
        content = file.read_bytes()
        DAMAGE[damage](file)
        assert tier.damage(4), file.relative_to(whole)
        file.write_bytes(content)
    assert tier.damage(4) == ""


def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_it(copy, capsys):
    folder = copy()
    largest = max((folder / "ckpt" / "00000004").rglob("d/*"), key=lambda p: p.stat().st_size)
    os.truncate(largest, 1000)
    assert resume(folder) is None
    out, err = capsys.readouterr()
    assert f"warning: checkpoint {folder}/ckpt/00000004 is damaged" in err and largest.name in err and err.count("\n") == 1
    assert "resuming after step 2" in out
    assert losses(folder / "m.jsonl") == losses(folder / "run.jsonl")
    assert sorted(os.listdir(folder / "ckpt")) == ["00000004", "00000004.damaged", "00000006"]


def test_without_a_whole_checkpoint_nothing_is_written(copy, capsys):
    folder = copy()
    for step in ("00000002", "00000004"):
        flip(folder / "ckpt" / step / "run.json")
    before = snapshot(folder)
    assert resume(folder) == 2
    assert "none of the checkpoints is whole" in capsys.readouterr().err and snapshot(folder) == before


def test_the_newest_of_the_fast_and_the_safe_folder_is_resumed(copy, tmp_path, capsys):
    folder = copy()
    os.makedirs(folder / "fast")
    os.rename(folder / "ckpt" / "00000004", folder / "fast" / "00000004")
    fast = ["--local-checkpoint", str(folder / "fast"), "--local-save-every", "1"]
    assert resume(folder, *fast) is None
    assert "resuming after step 4" in capsys.readouterr().out
    assert losses(folder / "m.jsonl") == losses(folder / "run.jsonl")
    assert sorted(os.listdir(folder / "fast")) == ["00000005", "00000006"]


def test_a_full_disk_costs_no_good_checkpoint_and_not_the_training(copy, capsys):
    """A limit on the size of files: what is too large fails to be written, as on a full disk (that was tried too, by hand)."""
    folder = copy()
    out = subprocess.run(["bash", "-c", 'ulimit -f 100; exec "$@"', "-", sys.executable, "train.py", *resuming(folder)],
                         cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 2  # it trains to the end, and the end is not saved
    err = out.stderr
    assert f"checkpoint {folder}/ckpt/00000006 could not be written (" in err
    assert f"the last good one: {folder}/ckpt/00000004" in err
    # At the end of the process orbax may add what became of its other writes: that is its own, and depends on timing.
    assert err.count("warning: checkpoint") == err.count("train.py: error:") == 1
    assert losses(folder / "m.jsonl") == losses(folder / "run.jsonl")
    assert sorted(os.listdir(folder / "ckpt")) == ["00000002", "00000004"]
    assert resume(folder) is None
    assert sorted(os.listdir(folder / "ckpt")) == ["00000004", "00000006"]
    assert losses(folder / "m.jsonl") == losses(folder / "run.jsonl")


OTHER = {
    "--model qwen3": "model was llama3 and is now qwen3",
    "--layers 2": "n_layers was 1 and is now 2",
    "--data {words}": "vocab was 257 and is now 64",
    "--scan": "scan was False and is now True",
    "--batch 4": "batch was 8 and is now 4",
    "--seed 1": "seed was 0 and is now 1",
}


@pytest.mark.parametrize("flags", OTHER)
def test_another_run_is_refused_in_one_line_before_anything_is_written(copy, tmp_path_factory, flags, capsys):
    folder, words = copy(), tmp_path_factory.mktemp("words") / "words.bin"
    np.arange(4000, dtype=np.uint16).__mod__(64).tofile(words)
    before = snapshot(folder)
    assert resume(folder, *flags.format(words=words).split(), "--local-checkpoint", str(folder / "new")) == 2
    err = capsys.readouterr().err
    assert f"--resume: {folder}/ckpt/00000004 is another run's: " in err and OTHER[flags] in err and err.count("\n") == 1
    assert snapshot(folder) == before


def test_nothing_is_resumed_or_mixed_without_being_asked(copy, capsys):
    folder = copy()
    before = snapshot(folder)
    assert train.main([*SMALL, "--checkpoint", str(folder / "ckpt")]) == 2
    assert f"{folder}/ckpt is not empty: add --resume" in capsys.readouterr().err
    assert train.main([*SMALL, "--checkpoint", str(folder / "a"), "--local-checkpoint", str(folder / "a")]) == 2
    assert "--local-checkpoint" in capsys.readouterr().err
    assert train.main([*SMALL, "--resume"]) == 2
    assert "--resume needs --checkpoint DIR" in capsys.readouterr().err
    assert train.main([*resuming(folder), "--profile", "5:6"]) == 2
    assert "START must be 7 or later" in capsys.readouterr().err
    assert snapshot(folder) == before


def test_a_file_that_holds_no_metrics_is_not_cut(copy, capsys):
    folder = copy()
    for text in ("my notes", "my notes\nmore\n", '{"other": 1}\n'):
        (folder / "m.jsonl").write_text(text)
        assert resume(folder) == 2
        assert "is no file of metrics" in capsys.readouterr().err
        assert (folder / "m.jsonl").read_text() == text


def test_a_state_that_is_not_finite_is_never_saved(tmp_path):
    process = start(*SMALL, "--lr", "1e30", "--warmup", "0", "--clip", "1e30", "--metrics", str(tmp_path / "m.jsonl"),
                    "--checkpoint", str(tmp_path / "ckpt"), "--save-every", "1")
    process.join()
    assert process.exitcode == 2
    assert newest(tmp_path) == records(tmp_path / "m.jsonl")[-1]["step"] - 1


# ------------------------------------------------------------------------------------------------------ the log


def test_seconds_are_all_accounted_for_and_steps_done_again_are_not_goodput(copy):
    folder = copy()
    os.rename(folder / "ckpt" / "00000004", folder / "old")  # as if step 4 had not been saved: 3 and 4 are done again
    (folder / "m.jsonl").open("a").write('{"step": 5, "lo')  # a kill's
    assert resume(folder) is None
    run = records(folder / "m.jsonl")
    assert losses(folder / "m.jsonl") == losses(folder / "run.jsonl")
    lost = [r["lost_s"] for r in run[2:]]
    assert lost[1]["restart"] - lost[0]["restart"] == pytest.approx(run[3]["step_s"], abs=2e-3)
    assert run[3]["goodput"] == 0
    assert lost[3]["restart"] == lost[1]["restart"] and run[5]["goodput"] > run[4]["goodput"] > 0
    assert {"compile", "data", "checkpoint", "restart", "other"} <= lost[3].keys()
    productive = run[4]["step_s"] + run[5]["step_s"] - (lost[3]["data"] - lost[1]["data"])
    assert run[5]["goodput"] == pytest.approx(productive / (productive + sum(lost[3].values())), abs=1e-3)


def test_validation_stops_at_the_target_and_tensorboard_and_plot_show_the_run(tmp_path, capsys):
    metrics = tmp_path / "m.jsonl"
    assert train.main([*SMALL, "--steps", "40", "--metrics", str(metrics), "--tensorboard", str(tmp_path / "tb"), "--checkpoint",
                       str(tmp_path / "ckpt"), "--validate-every", "3", "--val-batches", "1", "--target-loss", "4.6"]) is None
    run = records(metrics)
    validated = {r["step"]: r["validation_loss"] for r in run if r["validation_loss"] is not None}
    assert list(validated) == list(range(3, len(run) + 1, 3)) and len(run) < 40
    assert [v <= 4.6 for v in validated.values()] == [False] * (len(validated) - 1) + [True]
    assert os.listdir(tmp_path / "ckpt") == [f"{len(run):08}"]
    events = [e for e in read_events(next((tmp_path / "tb").iterdir())) if e.summary.value]
    assert [(e.step, e.summary.value[0].simple_value) for e in events if e.summary.value[0].tag == "loss"] == [
        (r["step"], pytest.approx(r["loss"])) for r in run]
    assert train.main(["plot", str(metrics)]) is None
    assert (tmp_path / "m.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "m.jsonl").write_text("no")
    assert train.main(["plot", str(metrics)]) == 2
    assert f"plot {metrics}" in capsys.readouterr().err


def read_events(path):
    """TensorBoard's file: (8 bytes length, 4 bytes crc, a protocol buffer, 4 bytes crc) again and again."""
    from tensorboardX.proto.event_pb2 import Event

    content, events = path.read_bytes(), []
    while content:
        n = int.from_bytes(content[:8], "little")
        events.append(Event.FromString(content[12:12 + n]))
        content = content[n + 16:]
    return events


def test_goodput_goes_to_ml_goodput_measurement_where_it_is(tmp_path, monkeypatch, capsys):
    flags = [*SMALL, "--steps", "2", "--goodput", "job", "--validate-every", "1"]
    monkeypatch.setitem(sys.modules, "ml_goodput_measurement", None)
    assert train.main(flags) == 2
    assert "--goodput job: " in (err := capsys.readouterr().err) and "pip install ml-goodput-measurement" in err

    calls = []

    class Recorder:
        def __init__(self, *args, **kwargs):
            calls.append(("made", *args, *kwargs.values()))

        def __getattr__(self, name):
            return lambda *args: calls.append((name, *args))

    for name in ("ml_goodput_measurement", "ml_goodput_measurement.src", "ml_goodput_measurement.src.goodput"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    sys.modules["ml_goodput_measurement.src.goodput"].GoodputRecorder = Recorder
    assert train.main(flags) is None
    assert calls[0] == ("made", "job", "job", True)
    lost = ["custom_badput_event_start_time", "custom_badput_event_end_time"]  # validation, checkpoint
    assert [call[0].removeprefix("record_") for call in calls[1:]] == [
        "job_start_time", "training_preparation_start_time",
        "training_preparation_end_time", "step_start_time", *lost * 2,
        "step_start_time", *lost * 3, "job_end_time", "flush"]
