"""Text from a Hugging Face folder of any of the text models.

    python sample.py --hf Qwen3-0.6B --prompt "The capital of France is" --max-new 32 --greedy
    python sample.py --hf out --tokens 1,2,3 --temperature 0.8 --top-p 0.95
    python sample.py --model flux --hf out --prompt "a red square" --out red.png   # sample_flux.py

Notable features:
- the models know nothing of caches: while one is captured, `Cached` answers its calls of splash attention from
  keys and values that are kept. So every model that calls the kernel can be sampled from, windows and all
- reading the prompt and adding a token are one function, captured for two lengths: like a training step, each is
  one graph and one XLA program, with the cache as its state, updated in place
- one sequence, one device
"""

import argparse
import os
import sys

import lowering  # first: it sets libtpu's environment before jax loads

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec as P
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode

import checkpoint
import data
import graph_trainer
import kernels
import simple_fsdp
from train import MODELS, UsageError


# ------------------------------------------------------------------------------------------- the cache


class Cached(TorchFunctionMode):
    """While active, the n-th call of splash attention adds its keys and values to the n-th layer's cache and
    attends to all of that: to the positions up to the query's own, and within the window if there is one.

    cache: a (keys, values) pair a layer, (1, K, S, D) each, replaced as it grows; positions: (T,), of the queries.
    """

    def __init__(self, cache, positions):
        super().__init__()
        self.cache, self.positions, self.layer = cache, positions, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.tpu.splash_attention:
            return func(*args, **(kwargs or {}))
        q, k, v, _, _, window, softcap, scale, _ = args
        k, v = (torch.ops.aten.index_put(old, [None, None, self.positions], new)
                for old, new in zip(self.cache[self.layer], (k, v)))
        self.cache[self.layer] = k, v
        self.layer += 1

        (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
        s = (q.reshape(B, K, H // K * T, D).float() @ k.float().mT * scale).view(B, H, T, S)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        ahead = torch.arange(S) - self.positions[:, None]  # (T, S)
        s = s.masked_fill(ahead > 0, -torch.inf)
        s = s.masked_fill(ahead <= -window, -torch.inf) if window else s
        y = s.softmax(-1).view(B, K, H // K * T, S) @ v.float()
        return y.view(B, H, T, D).to(q.dtype), None


def extend(model):
    """-> step(cache, params, tokens (1, T), start) -> (cache, logits (vocab,) of the next token), to capture.
    start: position of the first of the tokens, all before it being in the cache."""

    def step(cache, params, tokens, start):
        positions = start + torch.arange(tokens.shape[1])
        with torch.no_grad(), _reparametrize_module(model, params), Cached(list(cache), positions) as cached:
            x = model(tokens, None, positions)
            x = x[0] if isinstance(x, tuple) else x  # a mixture of experts also gives its balance
            return cached.cache, model.logits(x[0, -1])

    return step


class Generator:
    """A model's weights and its compiled steps, for texts of at most max_len tokens.

    model: on the meta device, not sharded, not scanned; params: {name: jax.Array} of it on `mesh` (one device).
    """

    def __init__(self, model, params, mesh, max_len, dtype=torch.float32):
        c = model.config
        self.model, self.params, self.mesh, self.max_len = model, params, mesh, max_len
        self.spec = [tuple(torch.empty(1, c.n_kv_heads, max_len, c.head_dim, dtype=dtype, device="meta")
                           for _ in "kv") for _ in range(c.n_layers)]
        self.programs = {}

    def program(self, T):
        """The step for T tokens at once, compiled when first needed."""
        if T not in self.programs:
            params = {name: torch.empty(x.shape, dtype=torch.bfloat16 if x.dtype == jnp.bfloat16 else torch.float32,
                                        device="meta") for name, x in self.params.items()}
            start = torch.empty((), dtype=torch.int32, device="meta")
            tokens = torch.empty(1, T, dtype=torch.int32, device="meta")
            graph = graph_trainer.capture(extend(self.model), self.spec, params, tokens, start)
            cache = [(P(), P())] * len(self.spec)
            program = lowering.Program(graph, self.mesh, (cache, dict.fromkeys(params, P()), P(), P()), (cache, P()),
                                       kernels.lowerings("reference"), donate=1)
            program.lower()
            program.compile()
            self.programs[T] = program
        return self.programs[T]

    def generate(self, prompt, max_new, choose, eos=()):
        """Yields up to max_new token ids after the list of ids `prompt`, the last of them perhaps one of eos.

        choose: logits (vocab,) fp32 numpy -> id.
        """
        if not prompt or len(prompt) + max_new > self.max_len:
            raise ValueError(f"{len(prompt)} + {max_new} tokens: want a prompt, and at most {self.max_len} in all")
        replicated = jax.sharding.NamedSharding(self.mesh, P())
        put = lambda x: jax.device_put(np.asarray(x, np.int32), replicated)  # noqa: E731
        cache = [tuple(jax.device_put(jnp.zeros(x.shape, lowering.DTYPES[x.dtype]), replicated) for x in kv)
                 for kv in self.spec]
        tokens, start = list(prompt), 0
        for _ in range(max_new):
            cache, logits = self.program(len(tokens))(cache, self.params, put([tokens]), put(start))
            start += len(tokens)
            tokens = [choose(np.asarray(logits))]
            yield tokens[0]
            if tokens[0] in eos:
                return


# ------------------------------------------------------------------------------------------- choosing


def greedy(logits):
    return int(logits.argmax())


def nucleus(temperature, top_p, seed):
    """-> choose(logits): draws from softmax(logits / temperature), cut to the fewest likeliest tokens whose
    probabilities reach top_p (nucleus sampling, arXiv:1904.09751)."""
    rng = np.random.default_rng(seed)

    def choose(logits):
        p = probabilities(logits, temperature, top_p)
        return int(rng.choice(len(p), p=p))

    return choose


def probabilities(logits, temperature, top_p):
    z = logits.astype(np.float64) / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]  # of the likelier ones
    p[order[before >= top_p]] = 0
    return p / p.sum()


# ----------------------------------------------------------------------------------------- command line


def parse_args(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = lambda message: (_ for _ in ()).throw(UsageError(message))
    p.add_argument("--hf", metavar="DIR", required=True, help="config.json, safetensors, tokenizer.json")
    g = p.add_mutually_exclusive_group(required=True)
    g.add_argument("--prompt", metavar="TEXT")
    g.add_argument("--tokens", metavar="1,2,3", help="the prompt as token ids; the answer is printed as ids too")
    p.add_argument("--max-new", type=int, default=64, help="tokens to add at most")
    p.add_argument("--greedy", action="store_true", help="always the likeliest token")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on TPU, float32 on CPU")
    args = p.parse_args(argv)
    if args.max_new < 1:
        raise UsageError(f"--max-new {args.max_new} must be at least 1")
    if not args.temperature > 0:
        raise UsageError(f"--temperature {args.temperature} must be above 0 (--greedy takes the likeliest token)")
    if not 0 < args.top_p <= 1:
        raise UsageError(f"--top-p {args.top_p} must be above 0 and at most 1")
    if args.greedy and (args.temperature != 1.0 or args.top_p != 1.0):
        raise UsageError("--greedy takes the likeliest token: leave out --temperature and --top-p")
    return args


def choose_model(folder):
    """The model class that config.json's model_type names."""
    by_type = {m.hf_type: m for m in MODELS.values() if hasattr(m, "hf_type")}
    kind = checkpoint.read_json(folder, "config.json").get("model_type")
    if kind not in by_type:
        raise UsageError(f"--hf {folder}: model_type {kind!r} in config.json is none of {', '.join(by_type)}")
    return by_type[kind]


def eos_ids(folder):
    """The ids that end a text, as transformers' generate finds them: generation_config.json, else config.json."""
    files = ["generation_config.json"] if os.path.exists(os.path.join(folder, "generation_config.json")) else []
    for file in [*files, "config.json"]:
        h = checkpoint.read_json(folder, file)
        eos = h.get("eos_token_id", h.get("text_config", {}).get("eos_token_id"))
        if eos is not None:
            return eos if isinstance(eos, list) else [eos]
    return []


def codec(folder, vocab):
    """-> text to ids, ids to text. Without a tokenizer.json a vocabulary of 257 is data.Bytes'."""
    path = os.path.join(folder, "tokenizer.json")
    if os.path.exists(path):
        tokenizer = data.Tokenizer(path).tokenizer
        return lambda text: tokenizer.encode(text).ids, tokenizer.decode  # with the beginning-of-text id if it has one
    if vocab == data.Bytes.vocab_size:
        return lambda text: data.Bytes().encode(text).tolist(), data.Bytes().decode
    raise UsageError(f"--prompt needs {path}, which is not there: put one there or give --tokens 1,2,3")


def parse_tokens(text, vocab):
    try:
        ids = [int(t) for t in text.split(",")]
    except ValueError:
        raise UsageError(f"--tokens {text!r}: want ids with commas between, 1,2,3") from None
    if not all(0 <= t < vocab for t in ids):
        raise UsageError(f"--tokens {text!r}: ids must be 0 to {vocab - 1}")
    return ids


def sample(args):
    model_class = choose_model(args.hf)
    config = checkpoint.read_config(args.hf, model_class)
    if args.tokens is not None:
        prompt = parse_tokens(args.tokens, config.vocab)
    else:
        encode, decode = codec(args.hf, config.vocab)
        prompt = encode(args.prompt)
        if not prompt:
            raise UsageError("--prompt is empty: give at least one character")

    mesh = lowering.make_mesh(devices=jax.devices()[:1])
    dtype = args.dtype or ("bfloat16" if mesh.devices.flat[0].platform == "tpu" else "float32")
    with torch.device("meta"):
        model = model_class(config)
    simple_fsdp.cast(model, param_dtype=getattr(torch, dtype), keep_fp32=model.keep_fp32)
    params = checkpoint.load_hf(args.hf, model, mesh, getattr(jnp, dtype))
    generator = Generator(model, params, mesh, len(prompt) + args.max_new, getattr(torch, dtype))
    choose = greedy if args.greedy else nucleus(args.temperature, args.top_p, args.seed)
    new = list(generator.generate(prompt, args.max_new, choose, eos_ids(args.hf)))
    if args.tokens is not None:
        print(",".join(map(str, new)))
    else:  # decoded together: alone, the new tokens would lose the space before them
        print(args.prompt + decode(prompt + new)[len(decode(prompt)):])


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:2] == ["--model", "flux"]:  # pictures
        import sample_flux
        return sample_flux.main(argv[2:])
    try:
        return sample(parse_args(argv))
    except (UsageError, data.DataError, checkpoint.CheckpointError) as e:
        print(f"sample.py: error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
