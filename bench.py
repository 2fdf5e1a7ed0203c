"""Side-by-side measurements, each in one run: medians and ratios, because machines are shared and noisy.

    python bench.py step --model llama3        # tokens/s: PyTorch eager, torch.compile, ours unrolled, ours with scan
    python bench.py compile --model llama3     # compile seconds against depth, scan and unrolled
    python bench.py save --model llama3        # step time with a save in the background beside none
    python bench.py kernels --topology tpu7x:2x2x1; python bench.py tune ...   # see bench_kernels.py
"""

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from unittest import mock

import lowering  # first: it sets libtpu's environment before jax loads

import numpy as np
import torch
import torch.nn.functional as F

import checkpoint
import data
import graph_trainer
import train
from train import count


def sdpa(q, k, v, segment_ids=None, *, causal=True, window=0, scale=None):
    T = q.shape[2]
    mask = torch.ones(T, T, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    mask = mask.triu(1 - window) if window else mask
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def cross_entropy(x, weight, targets, *, multiplier=1.0, softcap=0.0):
    logits = multiplier * F.linear(x, weight)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return F.cross_entropy(logits, targets.long(), ignore_index=-100, reduction="none")


def expert_loop(x, w, group_sizes):
    return torch.cat([rows @ w[e] for e, rows in enumerate(x.split(group_sizes.tolist()))])


def paired_expert_loop(x, gate, up, group_sizes):
    return F.silu(expert_loop(x, gate, group_sizes)) * expert_loop(x, up, group_sizes)


@contextlib.contextmanager
def plain_torch():
    """Swaps the custom ops in the models' files for what a PyTorch user would write, with autograd's own backward."""
    plain = {"splash_attention": sdpa, "linear_cross_entropy": cross_entropy,
             "grouped_matmul": expert_loop, "paired_grouped_matmul": paired_expert_loop}
    with contextlib.ExitStack() as stack:
        for model_class in train.MODELS.values():  # their files import from each other
            file = sys.modules[model_class.__module__]
            stack.enter_context(mock.patch.multiple(file, **{name: op for name, op in plain.items() if hasattr(file, name)}))
        yield


def eager_trainer(model_class, config, params, opt, compile=False):
    """-> step(batch of numpy) -> loss: autograd, clip_grad_norm_ and torch.optim.AdamW from the same weights.

    params: {name: array}, unstacked. No captured graph, no custom op, no JAX.
    """
    model = model_class(config)
    model.load_state_dict({name: torch.from_numpy(np.array(p)) for name, p in params.items()})
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == decay],
               "weight_decay": opt.weight_decay * decay} for decay in (True, False)]
    adamw = torch.optim.AdamW(groups, lr=opt.lr, betas=opt.betas, eps=opt.eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda i: opt.lr_at(torch.tensor(float(i + 1))).item() / opt.lr)
    loss_fn = torch.compile(model.loss) if compile else model.loss

    def step(batch):
        with plain_torch():
            loss, aux_loss = loss_fn({name: torch.from_numpy(x) for name, x in batch.items()})
            adamw.zero_grad(set_to_none=True)
            (loss + aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), opt.clip)
        adamw.step()
        schedule.step()
        return loss.item()

    return step


def graph_trainer_step(args, config, opt, scan):
    """-> (step(batch of numpy, save) -> loss, initial parameters, seconds to compile). save gets the state after the step."""
    args = argparse.Namespace(**vars(args) | {"scan": scan})
    mesh = lowering.make_mesh()
    model = train.build_model(args, config, None)
    program, _ = train.build_programs(args, model, opt, None, mesh)
    program.lower()
    start = time.perf_counter()
    program.compile()
    seconds = time.perf_counter() - start
    state = lowering.initial_state(model, mesh, args.seed)
    params = {name: np.array(p) for name, p in state["params"].items()}

    def step(batch, save=None):
        nonlocal state
        state, metrics = program(state, lowering.shard_batch(lambda rows: batch, (args.batch, args.seq), mesh))
        loss = float(metrics["loss"])
        if save:
            save(state)
        return loss

    return step, params, seconds


def bench_step(args):
    dataset = data.load(None, seq=args.seq)
    config = dataclasses.replace(train.choose_size(args), vocab=dataset.vocab_size)
    model_class, opt = train.MODELS[args.model], graph_trainer.AdamW(steps=1000)
    unrolled, params, _ = graph_trainer_step(args, config, opt, scan=False)
    scanned, _, _ = graph_trainer_step(args, config, opt, scan=True)
    steps = {"PyTorch eager": eager_trainer(model_class, config, params, opt),
             "torch.compile": eager_trainer(model_class, config, params, opt, compile=True),
             "ours, unrolled": unrolled, "ours, scan": scanned}

    losses, seconds = {}, {name: [] for name in steps}
    for i in range(args.rounds + 2):
        batch = dataset.batch(i, args.batch)
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name] = step(batch)
            if i >= 2:  # the first two warm up: torch.compile compiles, pages are touched
                seconds[name].append(time.perf_counter() - start)
        first = losses["PyTorch eager"]
        if any(abs(loss - first) > 1e-4 * abs(first) for loss in losses.values()):
            sys.exit(f"step {i + 1}: the losses differ: {losses}")
    median = {name: statistics.median(s) for name, s in seconds.items()}
    print(f"\n{args.title}, float32, {args.rounds} interleaved rounds; all four losses agree ({first:.4f})")
    for name, s in median.items():
        print(f"{name:16} {args.batch * args.seq / s:8,.0f} tokens/s   {median['PyTorch eager'] / s:5.2f}x eager")


def bench_compile(args):
    opt = graph_trainer.AdamW()
    print(f"{args.title}\n{'layers':>8} {'scan':>8} {'unrolled':>9}   compile seconds")
    first = None
    for layers in args.depths:
        config = dataclasses.replace(train.choose_size(args), n_layers=layers, vocab=257)
        scan, unrolled = (statistics.median(graph_trainer_step(args, config, opt, scan)[2] for _ in range(args.rounds))
                          for scan in (True, False))
        first = first or scan
        print(f"{layers:8} {scan:8.2f} {unrolled:9.2f}   scan is {scan / first:.2f}x that of {args.depths[0]} layers")


def bench_save(args):
    """Stretches of steps by turns without and with a save at their start, until it is on the disk."""
    dataset = data.load(None, seq=args.seq)
    config = dataclasses.replace(train.choose_size(args), vocab=dataset.vocab_size)
    step, params, _ = graph_trainer_step(args, config, graph_trainer.AdamW(steps=1000), args.scan)
    seconds, blocked = {False: [], True: []}, []
    with tempfile.TemporaryDirectory() as folder:
        saver = checkpoint.Tier(folder, 1, 2, {})

        def save(state):
            start = time.perf_counter()
            saver.save(stretch, state)
            blocked.append(time.perf_counter() - start)

        for stretch in range(2 * args.rounds + 2):
            saves, start = stretch % 2 == 1, time.perf_counter()
            for i in range(args.every):
                step(dataset.batch(stretch * args.every + i, args.batch), save if saves and i == 0 else None)
            saver.wait()
            if stretch >= 2:  # the first two warm up
                seconds[saves].append((time.perf_counter() - start) / args.every)
        if saver.failed:
            sys.exit(saver.failed)
    off, on = (statistics.median(seconds[saves]) for saves in (False, True))
    size = 12e-6 * sum(p.size for p in params.values())  # weights and both moments, fp32
    print(f"{args.title}; a save of {size:,.0f} MB every {args.every} steps, {args.rounds} interleaved rounds\n"
          f"step {off * 1e3:.1f} ms without, {on * 1e3:.1f} ms with: {on / off - 1:+.1%}; "
          f"of that the loop waited {statistics.median(blocked) * 1e3:.1f} ms a save")


def parse_args(argv):
    p = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["step", "compile", "save"])
    p.add_argument("--model", default="llama3", choices=[name for name in train.MODELS if name != "flux"])
    p.add_argument("--size", default="debug")
    p.add_argument("--layers", type=count)
    p.add_argument("--batch", type=count, default=8)
    p.add_argument("--seq", type=count, default=256)
    p.add_argument("--rounds", type=count)
    p.add_argument("--depths", type=count, nargs="+", default=[4, 16, 64], help="numbers of layers (compile)")
    p.add_argument("--every", type=count, default=20, help="steps for each save (save)")
    args = p.parse_args(argv)
    args.rounds = args.rounds or {"step": 11, "compile": 3, "save": 5}[args.what]
    args.title = f"{args.model} {args.size}, {args.batch} x {args.seq} tokens"
    return argparse.Namespace(**vars(train.parse_args(["--model", args.model, "--dtype", "float32"])) | vars(args))


@train.command
def main(argv):
    if argv[:1] in (["kernels"], ["tune"]):  # in the TPU compiler's cycles
        import bench_kernels
        return bench_kernels.main(argv)
    args = parse_args(argv)
    {"step": bench_step, "compile": bench_compile, "save": bench_save}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
