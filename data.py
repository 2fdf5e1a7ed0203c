"""Tokens for training: text or token ids in, packed (B, T) batches with document ids out.

    data = load("corpus/", seq=1024)        # or FILE.txt, FILE.bin; None: Python's own standard library
    data.batch(step, 32)                    # dict of int32 (32, 1024): tokens, targets, segment_ids

Notable:
- Everything becomes one flat stream of ids in which an end-of-document id (eod) closes each document, as
  nanoGPT and Megatron (--append-eod) write it. Row w is ids [w*T, w*T + T], so a long document goes on in
  the next row, and a row's document ids are a running count of the eods before it. Nothing else is stored.
- batch() is a pure function of (seed, step): resuming needs the step alone. Each epoch visits every row
  once, in an order that a Feistel network computes row by row: no permutation array, whatever the size.
- A .bin is memory-mapped. Multi-host: `rows` picks this process's rows, and only those are read.

A .bin is headerless little-endian ids: uint16 without document ends, unless FILE.bin.json beside it says
otherwise: {"dtype": "uint32", "eod": 151643, "vocab_size": 151936}, each key optional. nanoGPT's GPT-2 files are
uint16 with {"eod": 50256}; Megatron's .bin with a vocabulary above 65,500 is uint32 here.

Validation never depends on the seed: documents whose hash says so (1 in 20, at least one); of a single text
or a .bin the last 1/20, at most 16M tokens; of a train.bin the val.bin beside it, where there is one.
Text is held in memory, 2 bytes a token (4 if the vocabulary is above 65,536): write a .bin for more than a few GB.
"""

import json
import os
import platform
import sysconfig
import zlib
from pathlib import Path

import numpy as np

IGNORED = -100  # a target without loss, PyTorch's cross_entropy default
SCAN = 1 << 30  # ids of a .bin looked at when loading: about a second from a warm disk
SAMPLE = 1 << 24  # tokens that unigram_loss counts, and the longest validation tail
NOT_TEXT = {".arrow", ".gz", ".npy", ".npz", ".parquet", ".pt", ".pyc", ".safetensors", ".xz", ".zip", ".zst"}


class DataError(ValueError):
    """Bad --data, --tokenizer or --seq. One line that names the flag, its value and the fix."""


# ---- text <-> ids ------------------------------------------------------------------------------------------------


class Bytes:
    """Ids 0..255 are the bytes, 256 ends a document. Any file will do: nothing has to be valid UTF-8."""

    vocab_size, eod = 257, 256

    def encode(self, text):
        return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)

    def decode(self, ids):
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", "replace")


class Tokenizer:
    """A Hugging Face tokenizer.json. It ends a document with the first of EOD_NAMES that it knows, else eod is None."""

    EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # GPT-2 and Qwen, Llama 3, Llama 2, Gemma

    def __init__(self, path):
        import tokenizers

        if not Path(path).is_file():
            raise DataError(f"--tokenizer {path}: no such file; give the path of a Hugging Face tokenizer.json")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain Exception
            why = str(e).splitlines()[0]
            raise DataError(f"--tokenizer {path} is not a Hugging Face tokenizer.json ({why}); give one") from None
        vocab = self.tokenizer.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1  # not len(vocab): ids may have gaps
        self.eod = next((vocab[name] for name in self.EOD_NAMES if name in vocab), None)

    def encode(self, text):
        text = text if isinstance(text, str) else text.decode()
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids):
        return self.tokenizer.decode([int(i) for i in ids])


# ---- files -> one stream of ids ----------------------------------------------------------------------------------


def load(path=None, tokenizer=None, seq=256, vocab_size=None, seed=0):
    """The Dataset at `path` (None: the standard library's sources), in rows of `seq` tokens. Raises DataError.

    tokenizer: path of a tokenizer.json (None: bytes). vocab_size: the model's, where it is larger than the data's.
    """
    if seq < 1:
        raise DataError(f"--seq {seq}: give a positive number")
    codec = Tokenizer(tokenizer) if tokenizer else Bytes()
    if path is None:
        return _load_text(f"Python {platform.python_version()} standard library", None, codec, seq, vocab_size, seed)
    path = Path(path)
    if not path.exists():
        raise DataError(f"--data {path}: no such file or directory; give a FILE.txt, a DIR of text or a FILE.bin")
    if path.suffix == ".bin" and path.is_file():
        return _load_bin(path, codec if tokenizer else None, seq, vocab_size, seed)
    return _load_text(f"--data {path}", path, codec, seq, vocab_size, seed)


def _load_text(name, path, codec, seq, vocab_size, seed):
    if codec.eod is None:
        raise DataError(f"--tokenizer has no end-of-document token: give one with any of {', '.join(codec.EOD_NAMES)}")
    dtype = np.uint16 if codec.vocab_size <= 1 << 16 else np.uint32
    documents, hashes = [], []
    for file in _text_files(path):
        text = _read(file)
        if not text:
            continue
        try:
            documents.append(np.append(codec.encode(text), codec.eod).astype(dtype))
        except UnicodeDecodeError as e:
            raise DataError(f"--data: {file} is not UTF-8 at byte {e.start}, which --tokenizer needs: "
                            "convert it, or leave --tokenizer out") from None
        hashes.append(zlib.crc32(text))
    if not documents:
        raise DataError(f"{name} is empty: give a file or directory that holds text")
    if len(documents) == 1:
        train, val = _cut_tail(documents[0], seq, name)
    else:  # by content, so that copies of a document are on one side, and a new file moves no other
        threshold = max(2**32 // 20, min(hashes))
        train, val = (np.concatenate([d for d, h in zip(documents, hashes) if (h <= threshold) == held_out]
                                     or [np.empty(0, dtype)]) for held_out in (False, True))
    dataset = Dataset(name, train, val, seq, vocab_size or codec.vocab_size, codec.eod, seed, codec)
    dataset.check(train, "the training text")
    dataset.check(val, "the validation text")
    return dataset


def _load_bin(path, codec, seq, vocab_size, seed):
    train, sidecar = _open_bin(path)
    beside = path.with_name("val.bin")
    if path.name == "train.bin" and beside.exists():
        val, val_name = _open_bin(beside, sidecar)[0], beside
    else:
        train, val = _cut_tail(train, seq, f"--data {path}")
        val_name = f"the validation part ({path} from token {len(train)} on)"
    eod = sidecar.get("eod", codec and codec.eod)
    vocab_size = vocab_size or sidecar.get("vocab_size") or (codec and codec.vocab_size)
    if vocab_size is None:
        if len(train) > SCAN:
            raise DataError(f'--data {path} is too long to search for its largest id: '
                            f'write {{"vocab_size": N}} to {path}.json')
        vocab_size = int(max(train.max(), val.max())) + 1
        if vocab_size > 1 << 24:
            raise DataError(f'--data {path} holds {vocab_size - 1}, hardly a token id: if it is uint16, '
                            f'write {{"dtype": "uint16"}} to {path}.json')
    dataset = Dataset(f"--data {path}", train, val, seq, vocab_size, eod, seed, codec)
    dataset.check(train[:SCAN], path)  # every batch checks its own ids besides
    dataset.check(val[:SCAN], val_name)
    if eod is not None and not (train[:SCAN] == eod).any():
        raise DataError(f"--data {path} never holds its end-of-document id {eod}: "
                        f'write the id that does end its documents to {path}.json as "eod", or null for none')
    return dataset


def _open_bin(path, sidecar=None):
    """(ids, sidecar) of a .bin: a read-only memory map and what FILE.bin.json says of it."""
    note = path.with_name(path.name + ".json")
    if note.exists():
        try:
            sidecar = json.loads(_read(note))
        except ValueError:
            sidecar = None
        valid = {
            "dtype": lambda v: v in ("uint16", "uint32"),
            "eod": lambda v: v is None or type(v) is int and v >= 0,
            "vocab_size": lambda v: type(v) is int and v > 0,
        }
        if not (isinstance(sidecar, dict) and all(k in valid and valid[k](v) for k, v in sidecar.items())):
            raise DataError(f'--data {path}: {note} must look like '
                            '{"dtype": "uint16" or "uint32", "eod": 50256, "vocab_size": 50257}')
    sidecar = sidecar or {}
    dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[sidecar.get("dtype", "uint16")])
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"--data {path} is empty: give a file of token ids")
    if size % dtype.itemsize:
        raise DataError(f"--data {path} has {size} bytes, not a multiple of {dtype.name}'s {dtype.itemsize}: "
                        f"copy it again, or correct its dtype in {note}")
    try:
        ids = np.asarray(np.memmap(path, dtype, "r"))
    except OSError as e:
        raise DataError(f"--data {path} cannot be read ({e.strerror}): fix it or name another") from None
    head = ids[: 1 << 16]
    # uint32 ids read as uint16 alternate with their high halves, which are next to nothing
    if "dtype" not in sidecar and len(head) > 1 and head[1::2].max() < 16 and head[::2].max() >= 256:
        raise DataError(f'--data {path} looks like uint32: write {{"dtype": "uint32"}} to {note} '
                        '("uint16" if that is what it is)')
    return ids, sidecar


def _text_files(path):
    """Files of a text data set in an order that is always the same."""
    root = path or sysconfig.get_paths()["stdlib"]
    if os.path.isfile(root):
        return [root]
    skip = {"__pycache__"} if path else {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}

    def unreadable(e):
        raise DataError(f"--data {e.filename} cannot be read ({e.strerror}): fix it or take it out")

    files = []
    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        names = sorted(n for n in names if not n.startswith(".") and (path or n.endswith(".py")))
        files += [os.path.join(folder, n) for n in names]
    return files


def _read(file):
    suffix = Path(file).suffix
    if suffix == ".bin":
        raise DataError(f"--data: {file} holds token ids, not text: give it by its own name, --data {file}")
    if suffix in NOT_TEXT:
        raise DataError(f"--data: {file} is not text ({suffix}): convert it, or take it out")
    try:
        return Path(file).read_bytes()
    except OSError as e:
        raise DataError(f"--data: {file} cannot be read ({e.strerror}): fix it or take it out") from None


def _cut_tail(ids, seq, name):
    """(train, val) of a single stream."""
    if len(ids) < 2 * (seq + 1):
        raise DataError(f"{name} has {len(ids)} tokens, fewer than two rows of --seq {seq} plus one "
                        "(one to train on, one to validate): give more text or a smaller --seq")
    tail = max(seq + 1, min(len(ids) // 20, SAMPLE))
    return ids[:-tail], ids[-tail:]


# ---- the stream -> batches ---------------------------------------------------------------------------------------


class Dataset:
    """train, val: flat arrays or memory maps of ids. See load()."""

    def __init__(self, name, train, val, seq, vocab_size, eod, seed, codec):
        self.name, self.train, self.val, self.seq, self.codec = name, train, val, seq, codec
        self.vocab_size, self.eod, self.seed = vocab_size, eod, seed
        for ids, part in ((train, "training"), (val, "validation")):
            if len(ids) < seq + 1:
                raise DataError(f"{name} has {len(ids)} {part} tokens, fewer than a row of --seq {seq} plus one: "
                                "give more text, a smaller --seq, or its files joined to one FILE.txt")

    def __str__(self):
        return (f"{self.name}: {len(self.train):,} training and {len(self.val):,} validation tokens, "
                f"vocabulary {self.vocab_size:,}")

    def batch(self, step, batch, rows=slice(None)):
        """Training batch of `step`: int32 (B, T) tokens, targets (-100: no loss), segment_ids (0, 1, ... in each row).

        batch: B of the global batch; rows: the slice of it to build. Positions are not needed: rotary
        attention sees only differences, and segment_ids keep documents apart.
        """
        i = np.arange(step * batch, (step + 1) * batch)[rows]
        return self._build(self.train, _shuffle(i, self._windows(self.train), self.seed))

    def val_batches(self, batch, n, rows=slice(None)):
        """At most n batches, the same for every seed. The last is filled up with rows already seen."""
        windows = self._windows(self.val)
        steps = [np.arange(s * batch, (s + 1) * batch)[rows] for s in range(min(n, -(-windows // batch)))]
        return [self._build(self.val, _shuffle(i, windows, seed=0)) for i in steps]

    def unigram_loss(self):
        """Validation loss, in nats a token, of the best model that knows only how frequent each token is in train.

        Counts the targets of at most SAMPLE tokens, evenly spread. Add-one smoothing over the ids that occur at all:
        over a vocabulary much larger than the data's it would weaken the baseline.
        """
        train, val = self._count_targets(self.train), self._count_targets(self.val)
        train, val = (train + 1)[train + val > 0], val[train + val > 0]
        return float(-(val @ np.log(train / train.sum())) / max(val.sum(), 1))

    def decode(self, ids):
        if self.codec is None:
            raise DataError(f"{self.name} holds ids only: give the --tokenizer that made them")
        return self.codec.decode(ids)

    def check(self, ids, where):
        """Raises DataError for an id outside the vocabulary: on a TPU an embedding lookup would clamp it, silently."""
        if ids.max() >= self.vocab_size:
            at = int(np.argmax(ids >= self.vocab_size))
            raise DataError(f"{self.name}: id {ids[at]} at token {at} of {where} is outside the vocabulary of "
                            f"{self.vocab_size}: give a model with a larger one, or the --tokenizer that made this id")

    def _windows(self, ids):
        return (len(ids) - 1) // self.seq  # a row's last target is the first token of the next row

    def _build(self, ids, windows):
        """Rows `windows` (B,) of a stream."""
        T = self.seq
        x = np.stack([ids[w * T : w * T + T + 1] for w in windows])  # (B, T + 1)
        if x.max() >= self.vocab_size:
            row = np.argmax(x.max(axis=1) >= self.vocab_size)
            self.check(x[row], f"the row that starts at token {windows[row] * T}")
        x = x.astype(np.int32)
        tokens, targets = x[:, :-1].copy(), x[:, 1:].copy()
        segment_ids = np.zeros_like(tokens)
        if self.eod is not None:
            ends = tokens == self.eod
            targets[ends] = IGNORED  # the next token belongs to another document
            segment_ids[:, 1:] = np.cumsum(ends[:, :-1], axis=1)
        return dict(tokens=tokens, targets=targets, segment_ids=segment_ids)

    def _count_targets(self, ids):
        windows = self._windows(ids)
        windows = np.linspace(0, windows - 1, min(windows, max(1, SAMPLE // self.seq))).astype(np.int64)
        counts = np.zeros(self.vocab_size, np.int64)
        for some in np.array_split(windows, -(-len(windows) * self.seq >> 20) or 1):
            targets = self._build(ids, some)["targets"]
            counts += np.bincount(targets[targets != IGNORED], minlength=self.vocab_size)
        return counts


def _shuffle(i, n, seed):
    """Where sample numbers i (int64 array) fall in an endless run of epochs, each a permutation of 0..n-1.

    A Feistel network permutes 0..4^h-1, the smallest such range that holds n; a value that falls outside 0..n-1 goes
    round again until it is inside (cycle walking, Black and Rogaway 2002): fewer than 4 turns on average.
    """
    i = np.asarray(i, np.int64)
    key = _mix(_mix(np.full(i.shape, seed % 2**64, np.uint64)) + (i // n).astype(np.uint64))  # one per epoch
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    x = (i % n).astype(np.uint64)
    out = np.ones(i.shape, bool)
    while out.any():
        left, right = x[out] >> half, x[out] & low
        for r in range(6):
            left, right = right, left ^ (_mix(right + key[out] + np.uint64(r << 32)) & low)
        x[out] = left << half | right
        out = x >= n
    return x.astype(np.int64)


def _mix(x):
    """splitmix64's finalizer (Steele et al. 2014): uint64 array to well-mixed uint64 array, wrapping."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
