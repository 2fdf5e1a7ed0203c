"""The ladder's first rungs: a model on XLA before there is one graph of its step, on torch_xla.

    python train.py --model llama3 --mode eager [--eager-strict]
    python train.py --model llama3 --mode compile

Notable features:
- what runs is the very function that graph mode captures (graph_trainer.train_step), on XLA tensors instead of fake ones: same
  loss, optimizer, initial weights and batches, so the three modes can be held against each other
- eager: torch_xla's lazy tensors, deferred and fused, one program a step; data-dependent Python works and costs a
  compilation for each new shape. --eager-strict runs and compiles one op at a time
- compile: each decoder block one XLA program forward and one backward (torch.compile, backend "openxla"); a block that does
  not trace is named, with its line
- one device, plain XLA instead of Pallas kernels: this is for bringing a model up, not for speed
- --device tpu: torch_tpu's own device in torch_xla's place
"""

import importlib.metadata
import importlib.util
import os

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_map

import graph_trainer
import lowering

BACKENDS = {"xla": "openxla", "tpu": "tpu"}  # torch.compile's, by the type of the device


class EagerError(graph_trainer.CaptureError):
    """What is not installed, or a block that does not trace; one line."""


def open_device(args):
    """-> the torch.device to train on. Call it before autograd runs at all in this process: its engine counts the kinds of
    devices once. JAX, which draws the initial weights, stays on the CPU and leaves the TPU to torch."""
    if args.device == "tpu":
        if importlib.util.find_spec("torch_tpu") is None:
            raise EagerError("--device tpu needs a TPU and torch_tpu, which is not installed: pip install torch_tpu, or leave "
                             "--device out for torch_xla")
        jax.config.update("jax_platforms", "cpu")
        modes = torch.tpu.EagerMode  # importing torch has loaded torch_tpu
        torch.tpu.set_eager_mode(modes.DEFER_NEVER if args.eager_strict else modes.DEFER_AND_FUSE)
        return torch.device("tpu")
    wanted = torch.__version__.split("+")[0]
    try:
        found = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    # It is built for one torch: with another it dies of a missing symbol, if of anything as clear as that.
    if found.split(".")[:2] != wanted.split(".")[:2]:
        raise EagerError(f"--mode {args.mode} needs the torch_xla of torch {wanted}, and torch_xla is {found}: pip install "
                         f"torch_xla=={wanted}")
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("PJRT_DEVICE", "TPU" if lowering.ON_TPU_HOST else "CPU")
    try:
        import torch_xla
        device = torch_xla.device()
    except (ImportError, RuntimeError) as e:
        raise EagerError(f"--mode {args.mode}: torch_xla {found} does not start with torch {torch.__version__} "
                         f"and PJRT_DEVICE={os.environ['PJRT_DEVICE']}: {first_line(e)}") from e
    if args.eager_strict:
        torch_xla.experimental.eager_mode(True)
    return device


def programs(args, model, opt):
    """-> the training step and the evaluation, to call like graph mode's lowering.Programs."""
    if args.mode == "compile":
        torch._dynamo.config.recompile_limit = 64  # programs of one kind of block: windows differ, training and evaluation
        for name, layers in model.named_modules():
            if type(layers).__name__ == "Layers":  # FLUX has two stacks
                for i, block in enumerate(layers):
                    block.forward = compiled(block, f"{name}.{i}", BACKENDS[args.torch_device.type])
    return (Program(graph_trainer.train_step(model, opt), args.torch_device),
            Program(graph_trainer.eval_step(model), args.torch_device))


def compiled(block, name, backend):
    program = torch.compile(block.forward, backend=backend, fullgraph=True)

    def forward(*args):
        try:
            return program(*args)
        except torch._dynamo.exc.TorchDynamoException as e:
            frames = [f for f in getattr(e, "real_stack", None) or [] if f"{os.sep}torch{os.sep}" not in f.filename]
            line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "a line that torch does not tell"
            raise EagerError(f"--mode compile: {name} ({type(block).__name__}) does not trace: {line} ({first_line(e)}); "
                             "--mode eager runs it as it is") from e

    return forward


def first_line(e):
    return str(e).strip().partition("\n")[0]


class Program:
    """Stands where graph mode has a compiled lowering.Program; XLA compiles in the first step."""

    def __init__(self, fn, device):
        self.fn, self.device = fn, device

    def __call__(self, *args):
        # jax.Arrays (the initial state, batches) move to the device; the state then stays there
        args = tree_map(lambda x: x if isinstance(x, torch.Tensor) else torch.from_numpy(np.array(x)).to(self.device), args)
        self.sync()  # a new 0 or 1 is a constant to torch_xla: the first step, with its counter at 0, would be another program
        out = tree_map(torch.Tensor.detach, self.fn(*args))
        self.sync()
        return out

    def sync(self):
        """What was deferred runs, as one program."""
        if self.device.type == "xla":
            import torch_xla
            torch_xla.sync()
