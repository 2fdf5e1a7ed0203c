import functools
import json
import shutil

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import checkpoint
import hf_models
import sample

PROMPT = [5, 99, 3, 77, 250]


@pytest.fixture(scope="module", params=["llama-3.1", "qwen3-tied", "qwen3_moe", "muse_glimmer"])
def folder(request, tmp_path_factory):
    _, theirs = hf_models.make(request.param)
    folder = str(tmp_path_factory.mktemp(request.param))
    theirs.save_pretrained(folder)
    return folder, theirs


def theirs_greedy(theirs, max_new, **more):
    prompt = torch.tensor([PROMPT])
    more["attention_mask"] = torch.ones_like(prompt)
    out = theirs.generate(prompt, max_new_tokens=max_new, do_sample=False, **more)
    return out[0, len(PROMPT):].tolist()


def test_greedy_text_is_transformers_generate(folder, capsys):
    """32 tokens: well past Muse Glimmer's window of 12."""
    folder, theirs = folder
    assert sample.main(["--hf", folder, "--tokens", "5,99,3,77,250", "--max-new", "32", "--greedy"]) is None
    ours = [int(t) for t in capsys.readouterr().out.split(",")]
    assert ours == theirs_greedy(theirs, 32)
    assert len(set(ours)) > 4  # a text that moves, not one token


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A small Qwen3's folder with a tokenizer of 320 made-up words, and generate() on it for 16 tokens."""
    model_class, theirs = hf_models.make("qwen3")
    folder = tmp_path_factory.mktemp("qwen")
    theirs.save_pretrained(folder)
    words = {f"w{i}": i for i in range(320)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = sample.load_model(folder, model_class, checkpoint.read_config(folder, model_class), "float32")
    return folder, theirs, functools.partial(sample.generate, *loaded, PROMPT, 11, programs={})


def test_an_end_of_text_token_ends_it_where_transformers_does(qwen):
    _, theirs, generate = qwen
    free = list(generate(np.argmax))
    eos = free[4]
    ended = list(generate(np.argmax, [eos]))
    assert ended == free[:free.index(eos) + 1] == theirs_greedy(theirs, 11, eos_token_id=eos)


def test_a_seed_gives_the_same_text_and_another_seed_another(qwen):
    _, _, generate = qwen
    texts = [list(generate(sample.nucleus(2.0, 0.95, seed))) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_goes_through_the_tokenizer_and_back(qwen, capsys):
    folder, theirs, _ = qwen
    assert sample.main(["--hf", str(folder), "--prompt", "w5 w99 w3 w77 w250", "--max-new", "4", "--greedy"]) is None
    assert capsys.readouterr().out.split()[-4:] == [f"w{i}" for i in theirs_greedy(theirs, 4)]


@pytest.mark.parametrize("temperature,top_p", [(1.0, 1.0), (0.7, 1.0), (1.0, 0.5), (1.6, 0.9), (1.0, 1e-6)])
def test_probabilities_are_those_of_transformers_warpers(temperature, top_p):
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32) * 3
    z = transformers.TemperatureLogitsWarper(temperature)(None, torch.from_numpy(logits)[None])
    z = transformers.TopPLogitsWarper(top_p)(None, z)
    ours = sample.probabilities(logits, temperature, top_p)
    np.testing.assert_allclose(ours, z[0].softmax(-1).numpy(), rtol=1e-4, atol=1e-8)


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    choose = sample.nucleus(1.0, 0.9, seed=0)
    counts = np.bincount([choose(logits) for _ in range(20_000)], minlength=4)
    np.testing.assert_allclose(counts / counts.sum(), np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.01)


@pytest.mark.parametrize("argv,message", [
    (["--tokens", "1,x"], "--tokens: invalid comma_separated_ids value: '1,x'"),
    (["--tokens", "1,320"], "id 320: "), (["--tokens", "-1"], "--tokens"), (["--tokens", ""], "--tokens"),
    (["--tokens", "1", "--seed", "-1"], "--seed -1"), (["--tokens", "1", "--top-p", "nan"], "--top-p nan"),
    (["--tokens", "1", "--temperature", "inf"], "--temperature inf"), (["--tokens", "1", "--model", "llama3"], "--model qwen3"),
    (["--prompt", "\udcff"], "not UTF-8"), (["--prompt", "w1", "--out", "a.png"], "unrecognized arguments: --out"),
    (["--model", "flux", "--pixels", "20"], "--pixels 20 must be a multiple of 16"),
    (["--model", "flux", "--out", "/nowhere/a.png"], "--out /nowhere/a.png"), (["--model", "flux", "--out", "a.gif"], "--out a.gif"),
    (["--model", "flux", "--cfg", "nan"], "--cfg nan"), (["--model", "flux"], "is --model qwen3"),
    (["--prompt", ""], "--prompt is empty"),
    (["--tokens", "1", "--max-new", "0"], "--max-new 0"),
    (["--tokens", "1", "--max-new", "99999999999"], "--max-new 99999999999 must be from 1 to 131072"),
    (["--tokens", "1", "--top-p", "1.5"], "--top-p 1.5"),
    (["--tokens", "1", "--temperature", "0"], "--temperature 0.0"),
    (["--tokens", "1", "--greedy", "--top-p", "0.5"], "--greedy"),
    ([], "--prompt --tokens"),
], ids=str)
def test_a_wrong_flag_is_one_line_and_exit_code_2(qwen, capsys, argv, message):
    assert sample.main(["--hf", str(qwen[0]), *argv]) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("sample.py: error: ") and err.count("\n") == 1


def test_a_wrong_folder_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert sample.main(["--hf", str(tmp_path / "nowhere"), "--tokens", "1"]) == 2
    assert "nowhere" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert sample.main(["--hf", str(tmp_path), "--tokens", "1"]) == 2
    assert "model_type 'gpt2' in config.json is none of llama, qwen3" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(hf_models.qwen3(True).config.to_dict()))
    assert sample.main(["--hf", str(tmp_path), "--prompt", "hello"]) == 2
    assert "--prompt needs" in capsys.readouterr().err


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_refused(qwen, tmp_path, capsys):
    folder = shutil.copytree(qwen[0], tmp_path / "hf")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"w7": 7', '"w7": 7007'))
    assert sample.main(["--hf", str(folder), "--prompt", "w1 w7"]) == 2
    assert "--prompt: id 7007" in capsys.readouterr().err
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert sample.main(["--hf", str(folder), "--prompt", "w1"]) == 2
    assert "eos_token_id 'x'" in capsys.readouterr().err
