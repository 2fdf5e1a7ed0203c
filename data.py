"""Tokens for training: text or token ids in, packed (B, T) batches with document ids out.

    data = load("corpus/", seq=1024)        # or FILE.txt, FILE.bin; None: Python's own standard library
    data.batch(step, 32)                    # dict of int32 (32, 1024): tokens, targets, segment_ids

Notable:
- everything becomes one flat stream of ids in which an end-of-document id (eod) closes each document. Row w is
  ids [w*T, w*T + T], so a long document goes on in the next row, and a row's document ids count the eods before it
- batch() is a pure function of (seed, step): resuming needs the step alone. Each epoch visits every row once, in an
  order that a Feistel network computes row by row: no permutation array, whatever the size
- a .bin is memory-mapped; several hosts read only their own rows. Text is held in memory, 2 or 4 bytes a token

A .bin is headerless little-endian ids: uint16 without document ends, unless FILE.bin.json beside it says otherwise,
{"dtype": "uint32", "eod": 151643, "vocab_size": 151936}, each key optional. nanoGPT's GPT-2 files want {"eod": 50256};
Megatron's .bin with a vocabulary above 65,500 is uint32 here.

Validation never depends on the seed: documents whose hash says so (1 in 20, at least one); of a single text or a .bin
the last 1/20, at most 16M tokens; of a train.bin the val.bin beside it, where there is one.
"""

import json
import os
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import tokenizers

SCAN = 1 << 30  # ids of a .bin looked at when loading: about a second from a warm disk
SAMPLE = 1 << 24  # tokens that unigram_loss counts, and the longest validation tail
NOT_TEXT = set(".arrow .bin .gif .gz .jpeg .jpg .npy .npz .parquet .pdf .png .pt .pyc .safetensors .xz .zip .zst".split())


class DataError(ValueError):
    """Bad --data, --tokenizer or --images. One line that names the flag, its value and the fix."""


class Bytes:
    """Ids 0..255 are the bytes, 256 ends a document. Any file will do: nothing has to be valid UTF-8."""

    vocab_size, eod = 257, 256

    def encode(self, text, special=False):
        return np.frombuffer(text, np.uint8)

    def decode(self, ids):
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", "replace")


class Tokenizer:
    """A Hugging Face tokenizer.json. It ends a document with the first of EOD_NAMES that it knows, else eod is None."""

    EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # GPT-2 and Qwen, Llama 3, Llama 2, Gemma

    def __init__(self, path):
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain Exception
            raise DataError(f"--tokenizer {path}: {' '.join(str(e).split())}; give a Hugging Face tokenizer.json") from None
        vocab = self.tokenizer.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1  # not len(vocab): ids may have gaps
        self.eod = next((vocab[name] for name in self.EOD_NAMES if name in vocab), None)

    def encode(self, text, special=False):
        """UTF-8 bytes -> ids. special: with what the tokenizer puts around a text, its beginning-of-text id say."""
        return np.array(self.tokenizer.encode(text.decode(), add_special_tokens=special).ids, np.int64)

    def decode(self, ids):
        return self.tokenizer.decode([int(i) for i in ids])


def load(path=None, tokenizer=None, seq=256, vocab_size=None, seed=0):
    """The Dataset at `path` (None: the standard library's sources), in rows of `seq` > 0 tokens. Raises DataError.
    tokenizer: path of a tokenizer.json (None: bytes). vocab_size: the model's, where it is larger than the data's."""
    codec = Tokenizer(tokenizer) if tokenizer else Bytes()
    name = f"--data {path}" if path else "Python's standard library"
    try:
        if path and Path(path).suffix == ".bin" and not os.path.isdir(path):
            train, note = _open_bin(Path(path), {})
            beside = Path(path).with_name("val.bin")
            val = _open_bin(beside, note)[0] if Path(path).name == "train.bin" and beside.exists() else None
            eod = note.get("eod", codec.eod if tokenizer else None)
            vocab_size = vocab_size or note.get("vocab_size") or (codec.vocab_size if tokenizer else None)
            if eod is not None and not (train[:SCAN] == eod).any():
                raise DataError(f"{name} never holds its end-of-document id {eod}: write the id that does end its "
                                f'documents to {path}.json as "eod", or null for none')
        else:
            train, val = _read_text(name, path, codec)
            eod, vocab_size = codec.eod, vocab_size or codec.vocab_size
    except OSError as e:
        raise DataError(f"--data {e.filename or path}: {e.strerror}; give a FILE.txt, a DIR of text or a FILE.bin") from None
    if val is None:  # a single stream
        tail = max(seq + 1, min(len(train) // 20, SAMPLE))
        train, val = train[:-tail], train[-tail:]
    vocab_size = vocab_size or int(max(ids[:SCAN].max(initial=0) for ids in (train, val))) + 1
    return Dataset(name, train, val, seq, vocab_size, eod, seed)


def _read_text(name, path, codec):
    """-> ids to train on, ids to validate on (of a single document None)."""
    if codec.eod is None:
        raise DataError(f"--tokenizer has no end-of-document token: give one with any of {', '.join(codec.EOD_NAMES)}")
    dtype = np.uint16 if codec.vocab_size <= 1 << 16 else np.uint32
    documents = []  # (hash, ids)
    for file in [Path(path)] if path and not os.path.isdir(path) else _text_files(path):
        if file.suffix in NOT_TEXT:
            raise DataError(f"--data: {file} is not text: take it out, convert it, or (ids) give it by name, --data FILE.bin")
        try:
            if text := file.read_bytes():
                documents.append((zlib.crc32(text), np.append(codec.encode(text), codec.eod).astype(dtype)))
        except UnicodeDecodeError as e:
            raise DataError(f"--data: {file} is not UTF-8 at byte {e.start}: convert it, or leave --tokenizer out") from None
    if not documents:
        raise DataError(f"{name} is empty: give a file or directory that holds text")
    if len(documents) == 1:
        return documents[0][1], None
    # by content, so that copies of a document are on one side, and a new file moves no other
    threshold = max(2**32 // 20, min(h for h, _ in documents))
    sides = ([ids for h, ids in documents if (h <= threshold) == held_out] for held_out in (False, True))
    return [np.concatenate(side or [np.empty(0, dtype)]) for side in sides]


def _text_files(path):
    """Files of a folder (None: the standard library's) in an order that is always the same."""
    skip = {"__pycache__"} if path else {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}

    def unreadable(error):
        raise error
    for folder, folders, names in os.walk(path or sysconfig.get_paths()["stdlib"], onerror=unreadable):
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        yield from (Path(folder, n) for n in sorted(names) if not n.startswith(".") and (path or n.endswith(".py")))


def _open_bin(path, note):
    """-> a read-only memory map of a .bin, and what FILE.bin.json says of it (`note` where there is none)."""
    sidecar = Path(f"{path}.json")
    try:
        note = json.loads(sidecar.read_bytes()) if sidecar.exists() else note
        dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[note.get("dtype", "uint16")])
        valid = note.keys() <= {"dtype", "eod", "vocab_size"} and all(
            n is None or type(n) is int and n >= 0 for key, n in note.items() if key != "dtype")
    except (AttributeError, KeyError, TypeError, ValueError):  # no JSON, no object in it, another dtype
        valid = False
    if not valid:
        raise DataError(f"--data {path}: {sidecar} must look like "
                        '{"dtype": "uint16" or "uint32", "eod": 50256, "vocab_size": 50257}')
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise DataError(f"--data {path} has {size} bytes, not whole {dtype.name} ids: copy it again, or correct {sidecar}")
    ids = np.asarray(np.memmap(path, dtype, "r"))
    head = ids[: 1 << 16]
    # uint32 ids read as uint16 alternate with their high halves, which are next to nothing
    if "dtype" not in note and len(head) > 1 and head[1::2].max() < 16 and head[::2].max() >= 256:
        raise DataError(f'--data {path} looks like uint32: write {{"dtype": "uint32"}} to {sidecar} (or "uint16", if it is)')
    if head.max() >= 1 << 24:
        raise DataError(f'--data {path} holds {head.max()}, hardly a token id: if it is uint16, correct its dtype in {sidecar}')
    return ids, note


class Dataset:
    """train, val: flat arrays or memory maps of ids. See load()."""

    def __init__(self, name, train, val, seq, vocab_size, eod, seed):
        self.name, self.train, self.val, self.seq = name, train, val, seq
        self.vocab_size, self.eod, self.seed = vocab_size, eod, seed
        if min(len(train), len(val)) <= seq:
            raise DataError(f"{name} has {len(train)} tokens to train on and {len(val)} to validate, fewer than a row of "
                            f"--seq {seq} plus one: give more text, a smaller --seq, or its files joined to one FILE.txt")
        self.check(train[:SCAN], "the training part")  # every batch checks its own ids besides
        self.check(val[:SCAN], "the validation part")

    def __str__(self):
        return f"{self.name}: {len(self.train):,} training, {len(self.val):,} validation tokens, vocabulary {self.vocab_size:,}"

    def batch(self, step, batch, rows=slice(None)):
        """Training batch of `step`: int32 (B, T) tokens, targets (-100: no loss), segment_ids (0, 1, ... in each row;
        positions are not needed: rotary attention sees only differences). rows: the slice of the global batch to build."""
        return self._rows(self.train, np.arange(step * batch, (step + 1) * batch)[rows], self.seed)

    def val_batches(self, batch, n):
        """At most n functions of a slice of rows, of a batch each, the same for every seed. The last is filled up with
        rows already seen."""
        n = min(n, -(-((len(self.val) - 1) // self.seq) // batch))
        return [lambda rows=slice(None), s=s: self._rows(self.val, np.arange(s * batch, (s + 1) * batch)[rows], 0) for s in range(n)]

    def unigram_loss(self):
        """Validation loss, in nats a token, of the best model that knows only how frequent each token is (in train's
        first SAMPLE). Add-one smoothing over the ids that occur at all: over a vocabulary much larger than the data's
        it would weaken the baseline."""
        train, val = (np.bincount(ids[:SAMPLE], minlength=self.vocab_size) for ids in (self.train, self.val))
        train, val = (train + 1)[train + val > 0], val[train + val > 0]
        return float(-(val @ np.log(train / train.sum())) / val.sum())

    def check(self, ids, where):
        """Raises DataError for an id outside the vocabulary: on a TPU an embedding lookup would clamp it, silently."""
        if ids.max() >= self.vocab_size:
            at = int(np.argmax(ids >= self.vocab_size))
            raise DataError(f"{self.name}: id {ids[at]} at token {at} of {where} is outside the vocabulary of "
                            f"{self.vocab_size}: give a model with a larger one, or the --tokenizer that made this id")

    def _rows(self, ids, numbers, seed):
        """Rows `numbers` (B,) of the endless epochs of a stream. A row's last target is the next row's first token."""
        T = self.seq
        starts = _shuffle(numbers, (len(ids) - 1) // T, seed) * T
        x = np.stack([ids[start : start + T + 1] for start in starts])  # (B, T + 1)
        for start, row in zip(starts, x):
            self.check(row, f"the row that starts at token {start}")
        x = x.astype(np.int32)
        tokens, targets = x[:, :-1].copy(), x[:, 1:].copy()
        segment_ids = np.zeros_like(tokens)
        if self.eod is not None:
            ends = tokens == self.eod
            targets[ends] = -100  # no loss: the next token belongs to another document
            segment_ids[:, 1:] = np.cumsum(ends[:, :-1], axis=1)
        return dict(tokens=tokens, targets=targets, segment_ids=segment_ids)


def _shuffle(i, n, seed):
    """Where sample numbers i (int64 array) fall in an endless run of epochs, each a permutation of 0..n-1. A Feistel
    network permutes 0..4^h-1, the smallest such range that holds n; a value that falls outside 0..n-1 goes round again
    until it is inside (cycle walking, Black and Rogaway 2002): fewer than 4 turns on average."""
    key = _mix(_mix(np.full(i.shape, seed % 2**64, np.uint64)) + (i // n).astype(np.uint64))  # one per epoch
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    x, out = (i % n).astype(np.uint64), np.ones(i.shape, bool)
    while out.any():
        left, right = x >> half, x & low
        for r in range(6):
            left, right = right, left ^ (_mix(right + key + np.uint64(r << 32)) & low)
        x = np.where(out, left << half | right, x)
        out = x >= n
    return x.astype(np.int64)


def _mix(x):
    """splitmix64's finalizer (Steele et al. 2014): uint64 array to well-mixed uint64 array, wrapping."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
