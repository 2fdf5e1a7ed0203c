import functools
import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import lowering  # noqa: F401, sets libtpu's environment before anything loads jax

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """A folder of texts of very different lengths: document ends, and so ignored targets, fall unevenly on the rows."""
    folder = tmp_path_factory.mktemp("documents")
    for i in range(120):
        (folder / f"{i}.txt").write_text(f"{i} document {i * i}. " * (1 + i * i % 23))
    return str(folder)


@pytest.fixture(scope="session")
def run(tmp_path_factory, documents):
    """run(*flags) -> train.py's --metrics records of 20 small steps; each combination runs once a session."""
    import train

    @functools.cache
    def run(*flags):
        metrics = tmp_path_factory.mktemp("run") / "metrics.jsonl"
        argv = ["--layers", "2", "--batch", "8", "--seq", "64", "--steps", "20", "--data", documents, "--metrics", str(metrics)]
        assert train.main([*argv, *flags]) is None
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    return run
