"""Checkpoints of training: kills, damage, full disks, signals, other meshes, other runs; and what a run logs."""

import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import checkpoint
import run_log
import train
from conftest import ROOT

SMALL = ["--layers", "1", "--batch", "8", "--seq", "32", "--data", os.path.join(ROOT, "llama3.py")]
KILLS = int(os.environ.get("KILLS", 30))


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path):
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records(path)]


def snapshot(folder):
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*")}


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
    return train.main([*SMALL, *flags, "--steps", str(steps), "--metrics", str(folder / "m.jsonl"),
                       "--checkpoint", str(folder / "ckpt"), "--save-every", "2", "--resume"])


# ------------------------------------------------------------------------------------------ going on


@pytest.mark.parametrize("flags", [(), ("--model", "qwen3_moe", "--scan", "--fsdp", "8")], ids=str)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(copy, flags):
    folder = copy(*flags)
    assert resume(folder, *flags) is None
    assert losses(folder / "m.jsonl") == losses(folder / "run.jsonl")
    assert sorted(os.listdir(folder / "ckpt")) == ["00000004", "00000006"]


@pytest.mark.parametrize("before, after", [("", "--fsdp 8"), ("", "--fsdp 4 --replicas 2"), ("--fsdp 8", "--replicas 2")])
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
