"""data.py: what goes into a row, in which order rows come, and what is said of bad input."""

import json
import os

import numpy as np
import pytest

import data
from data import DataError, load


@pytest.fixture(scope="module")
def stdlib():
    return load(seq=64)


def write_bin(path, ids, item="<u2", /, **sidecar):
    np.asarray(ids).astype(item).tofile(path)
    if sidecar:
        path.with_name(path.name + ".json").write_text(json.dumps(sidecar))
    return path


def write_docs(folder, count, size=400):
    """`count` documents, document i made of the letter i alone: any mixing of documents shows in the tokens."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        (folder / f"{i:03d}.txt").write_bytes(bytes([i]) * (size + i))
    return folder


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def epoch(n, number, seed):
    return data._shuffle(np.arange(n * number, n * (number + 1)), n, seed)


# ---- rows --------------------------------------------------------------------------------------------------------


def test_the_default_data_is_megabytes_of_python_source(stdlib):
    assert 2e6 < len(stdlib.train) + len(stdlib.val) < 3e7
    assert stdlib.vocab_size == 257
    rows = stdlib.batch(0, 4)
    assert {k: (v.shape, v.dtype) for k, v in rows.items()} == {
        k: ((4, 64), np.dtype(np.int32)) for k in ("tokens", "targets", "segment_ids")}
    text = "".join(data.Bytes().decode(row) for row in stdlib.batch(0, 500)["tokens"])
    assert "def " in text and "import " in text


def test_a_target_is_the_next_token_of_the_same_document_and_ignored_at_its_end(tmp_path):
    d = load(write_docs(tmp_path / "d", 60), seq=64)
    b = d.batch(0, 300)
    inside = b["segment_ids"][:, 1:] == b["segment_ids"][:, :-1]
    assert (b["targets"][:, :-1][inside] == b["tokens"][:, 1:][inside]).all()
    assert (b["targets"][:, :-1][~inside] == -100).all() and (~inside).any()
    assert ((b["targets"] == -100) == (b["tokens"] == 256)).all()


def test_a_segment_never_holds_tokens_of_two_documents(tmp_path):
    b = load(write_docs(tmp_path / "d", 60, size=10), seq=64).batch(0, 30)
    assert (b["segment_ids"][:, 0] == 0).all() and b["segment_ids"].max() >= 2
    for tokens, segments in zip(b["tokens"], b["segment_ids"]):
        for s in range(segments.max() + 1):
            assert len(set(tokens[segments == s]) - {256}) <= 1


def test_a_document_longer_than_seq_goes_on_in_the_next_row(tmp_path):
    d = load(write_bin(tmp_path / "t.bin", np.arange(1000)), seq=10)
    b = d.batch(0, 94)  # 950 training ids: 94 whole rows with a next token
    order = np.argsort(b["tokens"][:, 0])
    assert (b["tokens"][order].ravel() == np.arange(940)).all()
    assert (b["targets"][order].ravel() == np.arange(1, 941)).all()


def test_bytes_that_are_not_utf8_are_fine_and_come_back(tmp_path):
    (tmp_path / "f.txt").write_bytes(bytes(range(256)) * 4)
    d = load(tmp_path / "f.txt", seq=16)
    assert set(d.batch(0, 60)["tokens"].ravel()) == set(range(256))
    assert data.Bytes().decode([104, 105, 256, 0xFF]) == "hi\ufffd"


# ---- order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 65, 1000])
def test_every_epoch_visits_every_row_once(n):
    for seed in (0, 7, -1):
        for number in (0, 1, 10**9):
            assert (np.sort(epoch(n, number, seed)) == np.arange(n)).all()


def test_orders_differ_between_epochs_and_seeds_and_look_random():
    n = 10_000
    a, b, c = epoch(n, 0, 0), epoch(n, 1, 0), epoch(n, 0, 1)
    for x, y in ((a, b), (a, c), (b, c), (a, np.arange(n)), (a[1:], a[:-1])):
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.05  # 5 standard deviations
    assert (a == b).sum() < 10
    first = [epoch(3, e, 0).tobytes() for e in range(1200)]  # all 6 orders of 3, 200 times each
    assert len(set(first)) == 6 and all(130 < first.count(f) < 270 for f in set(first))


def test_a_batch_depends_on_seed_and_step_alone(stdlib):
    again = load(seq=64)
    again.batch(3, 8)
    assert same(stdlib.batch(1234, 8), again.batch(1234, 8))
    assert not same(stdlib.batch(1234, 8), stdlib.batch(1235, 8))
    assert not same(stdlib.batch(1234, 8), load(seq=64, seed=1).batch(1234, 8))


def test_rows_of_two_hosts_are_the_global_batch_and_only_those_are_read(stdlib, monkeypatch):
    whole = stdlib.batch(5, 8)
    built = []
    build = data.Dataset._rows
    monkeypatch.setattr(data.Dataset, "_rows", lambda self, ids, i, seed: built.append(len(i)) or build(self, ids, i, seed))
    halves = [stdlib.batch(5, 8, rows) for rows in (slice(0, 4), slice(4, 8))]
    assert built == [4, 4]
    assert same(whole, {k: np.concatenate([h[k] for h in halves]) for k in whole})


def test_ten_billion_rows_and_a_million_steps_cost_nothing(tmp_path, monkeypatch):
    path = tmp_path / "huge.bin"
    with open(path, "wb") as f:
        f.truncate(2 * 10**12)  # two terabytes of zeros, sparse: no disk
    (tmp_path / "huge.bin.json").write_text('{"vocab_size": 50257, "eod": 0}')
    monkeypatch.setattr(data, "SCAN", 1 << 20)
    d = load(path, seq=100)
    assert len(d.train) > 9.9e11
    assert d.batch(10**6, 8)["tokens"].shape == (8, 100)
    assert len(d.val_batches(8, 3)) == 3


# ---- validation --------------------------------------------------------------------------------------------------


def test_validation_documents_are_the_same_for_every_seed_and_never_trained_on(tmp_path):
    folder = write_docs(tmp_path / "d", 60)
    a, b = load(folder, seq=64, seed=0), load(folder, seq=64, seed=1)
    assert np.array_equal(a.val, b.val) and np.array_equal(a.train, b.train)
    assert set(a.val) & set(a.train) == {256}
    assert set(a.val) | set(a.train) == set(range(60)) | {256}
    assert all(same(x(), y()) for x, y in zip(a.val_batches(2, 3), b.val_batches(2, 3)))


def test_a_new_document_moves_no_other_between_training_and_validation(tmp_path):
    folder = write_docs(tmp_path / "d", 60)
    before = load(folder, seq=64)
    (folder / "new.txt").write_bytes(b"\xc8" * 500)
    after = load(folder, seq=64)
    assert set(after.val) - {200} == set(before.val) and set(after.train) - {200} == set(before.train)


def test_two_files_are_one_to_train_on_and_one_to_validate(tmp_path):
    d = load(write_docs(tmp_path / "d", 2), seq=64)
    assert len(set(d.train)) == len(set(d.val)) == 2 and not set(d.train) & set(d.val) - {256}


def test_a_single_text_keeps_its_last_twentieth_for_validation(tmp_path):
    (tmp_path / "f.txt").write_bytes(b"a" * 9500 + b"b" * 499)
    d = load(tmp_path / "f.txt", seq=16)
    assert len(d.val) == 500 and set(d.train) == {97} and set(d.val) == {98, 256}


def test_validation_batches_hold_each_row_once_before_any_comes_again(tmp_path):
    d = load(write_bin(tmp_path / "t.bin", np.arange(1000)), seq=10)  # 50 validation ids: 4 rows
    batches = [rows_of() for rows_of in d.val_batches(3, 99)]
    assert len(batches) == 2
    first = np.concatenate([b["tokens"][:, 0] for b in batches])
    assert set(first[:4]) == {950, 960, 970, 980} and len(first) == 6


def test_unigram_loss_is_the_entropy_of_known_frequencies(tmp_path):
    ids = np.random.default_rng(0).choice(4, 200_000, p=[0.5, 0.25, 0.125, 0.125])
    assert load(write_bin(tmp_path / "t.bin", ids), seq=50).unigram_loss() == pytest.approx(1.75 * np.log(2), abs=0.02)


def test_a_vocabulary_larger_than_the_datas_leaves_the_unigram_loss_alone(stdlib):
    assert load(seq=64, vocab_size=128_256).unigram_loss() == stdlib.unigram_loss()


def test_unigram_loss_on_python_source_is_what_byte_counts_give(stdlib):
    train, val = (part[part < 256] for part in (stdlib.train, stdlib.val))
    p = np.bincount(train, minlength=256) + 1
    expected = -np.log(p / p.sum())[val].mean()
    assert stdlib.unigram_loss() == pytest.approx(expected, abs=0.02)  # ids are counted as targets there


# ---- .bin and tokenizer ------------------------------------------------------------------------------------------


def test_a_headerless_uint16_bin_just_works(tmp_path):
    d = load(write_bin(tmp_path / "t.bin", np.arange(1000) % 300), seq=10)
    assert d.vocab_size == 300 and d.eod is None
    assert (d.batch(0, 50)["segment_ids"] == 0).all() and (d.batch(0, 50)["targets"] >= 0).all()


def test_a_sidecar_gives_dtype_and_end_of_document_and_vocabulary(tmp_path):
    ids = np.arange(1000) + 100_000
    d = load(write_bin(tmp_path / "t.bin", ids, "<u4", dtype="uint32", eod=100_005, vocab_size=151_936), seq=10)
    b = d.batch(0, 94)
    assert d.vocab_size == 151_936 and b["tokens"].min() == 100_000
    row = int(np.argmin(b["tokens"][:, 0]))
    assert b["targets"][row].tolist() == [*range(100_001, 100_006), -100, *range(100_007, 100_011)]
    assert b["segment_ids"][row].tolist() == [0] * 6 + [1] * 4


def test_nanogpts_val_bin_beside_train_bin_is_the_validation(tmp_path):
    write_bin(tmp_path / "val.bin", np.full(100, 7))
    d = load(write_bin(tmp_path / "train.bin", np.full(1000, 3)), seq=10)
    assert len(d.train) == 1000 and set(d.val) == {7} and d.vocab_size == 8


def make_tokenizer(path, specials=("<|endoftext|>",)):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {w: i for i, w in enumerate(("[UNK]", "the", "cat", "sat"))}
    t = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.add_special_tokens(list(specials))
    t.save(str(path))
    return path


def test_a_tokenizer_makes_ids_that_decode_to_the_text(tmp_path):
    (tmp_path / "f.txt").write_text("the cat sat " * 100)
    d = load(tmp_path / "f.txt", make_tokenizer(tmp_path / "tokenizer.json"), seq=8)
    assert d.vocab_size == 5 and d.eod == 4 and d.val[-1] == 4
    assert data.Tokenizer(tmp_path / "tokenizer.json").decode([1, 2, 3]) == "the cat sat"


def test_a_larger_vocab_size_is_kept(tmp_path):
    (tmp_path / "f.txt").write_text("x" * 500)
    assert load(tmp_path / "f.txt", seq=8, vocab_size=512).vocab_size == 512


# ---- bad input: one line that names the flag, the value and the fix ----------------------------------------------


def refused(*parts, **arguments):
    with pytest.raises(DataError) as e:
        load(**arguments)
    message = str(e.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message
    return True


def test_missing_and_empty_data_are_refused(tmp_path):
    assert refused("--data", tmp_path / "no.txt", "No such file", path=str(tmp_path / "no.txt"))
    assert refused("--data", tmp_path / "no.bin", "No such file", path=tmp_path / "no.bin")
    for name, message in (("empty.txt", "empty"), ("empty.bin", "0 bytes")):
        (tmp_path / name).touch()
        assert refused("--data", name, message, path=tmp_path / name)
    (tmp_path / "folder").mkdir()
    assert refused("--data", "folder", "empty", path=tmp_path / "folder")


def test_text_shorter_than_one_row_is_refused(tmp_path):
    (tmp_path / "f.txt").write_text("short")
    assert refused("f.txt has 0 tokens to train on and 6", "--seq 256", path=tmp_path / "f.txt")
    assert refused("--seq 4096", "smaller --seq", path=write_docs(tmp_path / "d", 3), seq=4096)


def test_an_id_outside_the_vocabulary_is_refused_with_its_place(tmp_path):
    ids = np.arange(1000) % 50
    ids[321] = 777
    path = write_bin(tmp_path / "t.bin", ids)
    assert refused("id 777", "token 321", "vocabulary of 50", path=path, seq=10, vocab_size=50)
    d = load(path, seq=10)
    d.vocab_size = 50  # as if the id lay beyond what load() scans
    with pytest.raises(DataError, match="id 777 at token 1 of the row that starts at token 320"):
        d.batch(0, 94)
    assert refused("vocabulary of 100", vocab_size=100)


def test_a_bin_that_is_not_whole_items_is_refused(tmp_path):
    (tmp_path / "t.bin").write_bytes(b"x" * 1001)
    assert refused("1001 bytes", "uint16", "t.bin.json", path=tmp_path / "t.bin")


def test_uint32_ids_without_a_sidecar_are_refused_not_misread(tmp_path):
    path = write_bin(tmp_path / "t.bin", np.arange(1000) * 50, "<u4")
    assert refused("looks like uint32", "t.bin.json", path=path, seq=10)
    write_bin(path, np.arange(1000) * 50, "<u4", dtype="uint32")
    assert load(path, seq=10).vocab_size == 49_951


def test_uint16_ids_declared_uint32_are_refused(tmp_path):
    path = write_bin(tmp_path / "t.bin", np.arange(1000), "<u2", dtype="uint32")
    assert refused("hardly a token id", "uint16", path=path, seq=10)


def test_an_end_of_document_id_that_never_occurs_is_refused(tmp_path):
    path = write_bin(tmp_path / "t.bin", np.arange(1000), eod=50256, vocab_size=50257)
    assert refused("50256", "never", "eod", path=path, seq=10)


@pytest.mark.parametrize("note", ["{", "[]", '{"dtype": "int8"}', '{"eos": 3}', '{"eod": -1}', '{"vocab_size": "9"}'])
def test_a_malformed_sidecar_is_refused(tmp_path, note):
    path = write_bin(tmp_path / "t.bin", np.arange(1000))
    (tmp_path / "t.bin.json").write_text(note)
    assert refused("t.bin.json", "dtype", path=path, seq=10)


def test_a_tokenizer_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"not": "a tokenizer"}')
    assert refused("--tokenizer", "x.json", "tokenizer.json", tokenizer=tmp_path / "x.json")
    assert refused("--tokenizer", "No such file", tokenizer=tmp_path / "no.json")
    none = make_tokenizer(tmp_path / "t.json", specials=())
    assert refused("--tokenizer", "end-of-document", "<|endoftext|>", tokenizer=none)


def test_text_that_is_not_utf8_is_refused_with_a_tokenizer(tmp_path):
    (tmp_path / "f.txt").write_bytes(b"the cat \xff sat")
    assert refused("f.txt", "UTF-8 at byte 8", path=tmp_path / "f.txt", tokenizer=make_tokenizer(tmp_path / "t.json"))


def test_a_file_that_cannot_be_read_or_is_not_text_is_named(tmp_path):
    folder = write_docs(tmp_path / "d", 3)
    os.symlink("nowhere", folder / "broken.txt")  # unreadable even for root
    assert refused("broken.txt", "No such file", path=folder)
    os.remove(folder / "broken.txt")
    for name in ("ids.bin", "table.parquet", "text.gz", "picture.png"):
        (folder / name).write_bytes(b"x")
        assert refused(name, "not text", path=folder)
        os.remove(folder / name)

