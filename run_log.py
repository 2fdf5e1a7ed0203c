"""What a run leaves to look at: --metrics, --tensorboard, goodput, and a plot.

    python train.py plot metrics.jsonl        # loss and throughput -> metrics.png

Notable features:
- goodput is the share of wall time that went into new steps. The rest has a name: compile, data (the device waited for
  it), checkpoint, validation, restart (loading, and steps that --metrics says a killed run had done), other
- with --resume the same --metrics goes on; the records of steps that will be done again are cut off first
- --goodput JOB hands the same events to ml-goodput-measurement, for Google Cloud Logging
"""

import argparse
import collections
import contextlib
import datetime
import json
import os

import jax


class LogError(Exception):
    """A file or library of the log is not there; the message is one line that names the flag and the fix."""


def now():
    return datetime.datetime.now(datetime.timezone.utc)


class RunLog:
    """Starts the clock; open() the files when the step is compiled. Every process calls it, process 0 writes."""

    def __init__(self):
        self.start, self.productive, self.lost_s, self.stepped = now(), 0.0, collections.Counter(), False
        self.metrics = self.events = self.recorder = None

    def open(self, args, done):
        """args: train.py's. done: steps that a resumed run has done."""
        self.done_before = done
        if jax.process_index() != 0:
            return
        if args.goodput:
            try:
                from ml_goodput_measurement.src.goodput import GoodputRecorder
                self.recorder = GoodputRecorder(args.goodput, args.goodput, logging_enabled=True)
            except Exception as e:  # not there, or Google Cloud is not
                raise LogError(f"--goodput {args.goodput}: {e}: pip install ml-goodput-measurement, and log in to Google "
                               "Cloud, or leave it out") from e
            self.recorder.record_job_start_time(self.start)
            self.recorder.record_training_preparation_start_time(self.start)
        if args.metrics:
            self.metrics = open(args.metrics, "a+b" if args.resume else "xb")  # train() has looked that it can
            self.done_before = self.cut(done)
        if args.tensorboard:
            from tensorboardX import SummaryWriter  # takes seconds
            self.events = SummaryWriter(args.tensorboard, purge_step=done + 1 if done else None)

    def cut(self, done):
        """Cuts what follows step `done` off the metrics, a torn last line too. -> the last step they knew."""
        last, end = done, 0
        if self.metrics.readable():
            self.metrics.seek(0)
            for line in self.metrics.read().splitlines(keepends=True):
                if not line.startswith(b'{"step": '):
                    raise LogError(f"--metrics {self.metrics.name} is no file of metrics ({line[:40]!r}): name another")
                step = json.loads(line)["step"] if line.endswith(b"}\n") else 0  # a kill tears the last line
                last, end = max(last, step), end + len(line) * (0 < step <= done)
            self.metrics.truncate(end)
        return last

    @contextlib.contextmanager
    def lost(self, what):
        """Around what is not training."""
        start = now()
        yield
        self.lost_s[what] += (now() - start).total_seconds()
        if self.recorder and self.stepped:  # what comes before the first step is its "training preparation"
            self.recorder.record_custom_badput_event_start_time(start, what)
            self.recorder.record_custom_badput_event_end_time(now(), what)

    def step(self, step, seconds, waited):
        """When a step has ended. waited: how many of its seconds the device had no data, at most."""
        if self.recorder:
            start = now() - datetime.timedelta(seconds=seconds)
            if not self.stepped:
                self.recorder.record_training_preparation_end_time(start)
            self.recorder.record_step_start_time(step, start)
        self.stepped = True
        if step <= self.done_before:
            self.lost_s["restart"] += seconds
        else:
            self.lost_s["data"] += waited
            self.productive += seconds - waited

    def write(self, step, record):
        goodput, lost = self.goodput()
        if self.metrics:
            self.metrics.write(json.dumps({"step": step, **record, "goodput": goodput, "lost_s": lost}).encode() + b"\n")
            self.metrics.flush()
        if self.events:
            for name, value in (record | {"goodput": goodput}).items():
                if value is not None:
                    self.events.add_scalar(name, value, step)

    def goodput(self):
        """-> the share of wall time that went into new steps, {what the other seconds went into: seconds}"""
        wall = (now() - self.start).total_seconds()
        other = wall - self.productive - self.lost_s.total()
        return self.productive / wall, {k: round(s, 3) for k, s in [*self.lost_s.items(), ("other", other)]}

    def close(self):
        """-> a line on goodput."""
        for file in (self.metrics, self.events):
            if file:
                file.close()
        if self.recorder:
            self.recorder.record_job_end_time()
            self.recorder.flush()
        goodput, lost = self.goodput()
        return f"goodput {goodput:.1%}; seconds lost to " + ", ".join(f"{k} {s:.1f}" for k, s in lost.items())


def plot(argv):
    """The command `plot`: FILE.jsonl -> FILE.png."""
    p = argparse.ArgumentParser(prog="train.py plot", usage=argparse.SUPPRESS,
                                description="Draws loss and throughput of --metrics FILE to FILE.png.")
    p.add_argument("file")
    path = p.parse_args(argv).file
    from matplotlib.figure import Figure  # takes a second

    try:
        with open(path) as f:
            records = [json.loads(line) for line in f]
        columns = {name: [(r["step"], r[name]) for r in records if r.get(name) is not None]
                   for name in ("loss", "validation_loss", "tokens_per_s")}
        if not records:
            raise ValueError("it is empty")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise LogError(f"plot {path}: {e}: give a --metrics file") from e
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True)
    top.plot(*zip(*columns["loss"]), label="training")
    if columns["validation_loss"]:
        top.plot(*zip(*columns["validation_loss"]), "o-", label="validation")
    top.set_ylabel("loss")
    top.legend()
    bottom.plot(*zip(*columns["tokens_per_s"]))
    bottom.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    picture = os.path.splitext(path)[0] + ".png"
    figure.savefig(picture)
    print(f"wrote {picture}")
