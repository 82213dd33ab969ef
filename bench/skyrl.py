"""Beside SkyRL-tx: the same model, clients and work on two servers of the Tinker protocol, in one run.

    git clone https://github.com/NovaSky-AI/SkyRL FOLDER        # and, in it, for Python 3.12:
    python3.12 -m venv .venv && .venv/bin/pip install uv -e '.[tinker,jax]'
    python bench/skyrl.py FOLDER [--json] [--out FILE] [--rounds 3]

The model is a Qwen3-MoE of half a million parameters, with which both servers start at their users' commands; SkyRL is
told to keep no more adapters than there are tenants (its time grows with that number) and to sample sixteen at a time
(else it compiles for every number of them). The clients are one process for each server, of the SDK that SkyRL's
environment holds, a thread for each tenant. Both servers are up all the time; rounds alternate between them, each kind
of work is done once before it counts, and the median of the rounds is what is shown. Seconds are those of the wall:
clients and servers share the cores.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

TENANTS, RANK, SEQUENCES, LENGTH, SAMPLED, VOCAB = 16, 8, 4, 128, 32, 512
STEPS, EMPTY_STEPS, START_S = 4, 20, 120.0
#: The work of both servers: a name, the kind of work, and how many tenants do it at once.
WORK = (
    ("train, 1 tenant", "train", 1),
    ("train, 16 tenants", "train", TENANTS),
    ("sample, 16 tenants", "sample", TENANTS),
    ("empty steps, 1 tenant", "step", 1),
    ("empty steps, 16 tenants", "step", TENANTS),
)


def client(url: str, model: str, keys: Sequence[str]) -> None:
    """Reads lines of [kind, tenants]; answers each with a line of how much work was done per second. Runs in SkyRL's
    environment."""
    import tinker
    from tinker import types

    runs = [
        tinker.ServiceClient(base_url=url, api_key=key).create_lora_training_client(base_model=model, rank=RANK)
        for key in keys
    ]
    adam = types.AdamParams(learning_rate=1e-4)
    samplers: list[Any] = []

    def tokens(tenant: int, length: int) -> list[int]:
        return [(31 * tenant + 7 * place) % (VOCAB - 2) + 1 for place in range(length)]

    def train(tenant: int) -> int:
        drawn = tokens(tenant, LENGTH + 1)
        inputs: Any = {"target_tokens": drawn[1:], "weights": [1.0] * LENGTH}
        datum = types.Datum(model_input=types.ModelInput.from_ints(drawn[:-1]), loss_fn_inputs=inputs)
        for _ in range(STEPS):
            backward = runs[tenant].forward_backward([datum] * SEQUENCES, "cross_entropy")
            update = runs[tenant].optim_step(adam)
            backward.result()
            update.result()
        return STEPS * SEQUENCES * LENGTH

    def sample(tenant: int) -> int:
        prompt = types.ModelInput.from_ints(tokens(tenant, SAMPLED))
        params = types.SamplingParams(max_tokens=SAMPLED, temperature=1.0, seed=tenant)
        found = samplers[tenant].sample(prompt, 1, params).result()
        return sum(len(sequence.tokens) for sequence in found.sequences)

    def step(tenant: int) -> int:
        for _ in range(EMPTY_STEPS):
            runs[tenant].optim_step(adam).result()
        return EMPTY_STEPS

    kinds = {"train": train, "sample": sample, "step": step}
    for line in sys.stdin:
        kind, tenants = json.loads(line)
        if kind == "sample" and not samplers:
            samplers += [run.save_weights_and_get_sampling_client(name="bench") for run in runs]
        with ThreadPoolExecutor(tenants) as pool:
            began = time.monotonic()
            done = sum(pool.map(kinds[kind], range(tenants)))
            print(json.dumps(done / (time.monotonic() - began)), flush=True)


@contextmanager
def skyrl(folder: Path, model: Path, work: Path) -> Iterator[str]:
    """Start SkyRL's server as its README does, without fetching anything."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    backend = json.dumps({"max_lora_adapters": TENANTS + 1, "max_lora_rank": RANK, "sample_max_num_sequences": TENANTS})
    bin_ = folder / ".venv" / "bin"
    command = [str(bin_ / "uv"), "run", "--no-sync", "-m", "skyrl.tinker.api", "--base-model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--backend", "jax", "--backend-config", backend]
    command += ["--database-url", f"sqlite:///{work / 'skyrl.db'}", "--checkpoints-base", str(work / "checkpoints")]
    environment = os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu", "UV_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    with (work / "skyrl.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not answers(f"{url}/api/v1/healthz"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((work / "skyrl.log").read_text()[-3000:])
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


class Client:
    def __init__(self, python: Path, url: str, model: str, keys: Sequence[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(python), __file__, "client", url, model, *keys]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def per_second(self, kind: str, tenants: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([kind, tenants]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a client ended: see above what it said")
        return float(json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def make_model(folder: Path) -> None:
    """Make a model that both servers load, with a tokenizer of bytes: nothing here is text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(["<end>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(shape).save_pretrained(folder)


def main() -> None:
    # Imported here: the rest runs in SkyRL's environment, too.
    from bench.parts.results import asked, claim, machine, tell
    from bench.parts.serving import make_key, serve

    parser = asked(__doc__)
    parser.add_argument("folder", type=Path, help="SkyRL's checkout, with its environment in .venv")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    rates: dict[str, dict[str, list[float]]] = {"weft": {}, "skyrl": {}}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-bench-")))
        model = work / "model"
        make_model(model)
        python = args.folder.resolve() / ".venv" / "bin" / "python"
        ours, data_dir = stack.enter_context(serve("--model", f"toy={model}"))
        theirs = stack.enter_context(skyrl(args.folder.resolve(), model, work))
        keys = [make_key(data_dir, f"tenant-{number}") for number in range(TENANTS)]
        clients = {
            "weft": Client(python, ours, "toy", keys),
            "skyrl": Client(python, theirs, str(model), ["tml-dummy"] * TENANTS),
        }
        for each in clients.values():
            stack.callback(each.close)
        for number in range(args.rounds + 1):
            for name, kind, tenants in WORK:
                for server, each in clients.items():
                    rate = each.per_second(kind, tenants)
                    print(f"round {number}: {name}: {server} {rate:.1f}/s", file=sys.stderr)
                    if number:
                        rates[server].setdefault(name, []).append(rate)
        versions = subprocess.run(
            [python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True
        ).stdout
    found = {server: {name: statistics.median(each) for name, each in kinds.items()} for server, kinds in rates.items()}
    result = {
        "bench": "skyrl",
        "compares": "Weft and SkyRL-tx on JAX: tokens or operations per second, the same clients and model",
        "machine": machine(),
        "skyrl": {
            "commit": commit(args.folder),
            "packages": {
                package["name"]: package["version"]
                for package in json.loads(versions)
                if package["name"] in ("jax", "flax", "tinker")
            },
        },
        "per_second": found,
        "rounds": rates,
        "claims": [
            claim(
                f"{name}: Weft / SkyRL",
                found["weft"][name] / found["skyrl"][name],
                1.0,
                found["weft"][name] > found["skyrl"][name],
            )
            for name, _, _ in WORK
        ],
    }
    tell(result, args)


def commit(folder: Path) -> str:
    """The checkout's commit; empty if the folder is no checkout."""
    found = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        client(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
