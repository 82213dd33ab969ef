"""A process that has used a client is forked, as `multiprocessing` does on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client_sdk.stub_server import SESSION, Stub

ROOT = Path(__file__).parents[2]

SCRIPT = """
import multiprocessing, pickle, socket, threading, weft, weft.tokenizer

service = weft.ServiceClient(base_url={url!r}, api_key="tml-x")
sampler = service.create_sampling_client(base_model="org/tiny").result()
silent = socket.create_server(("127.0.0.1", 0))
silent_url = f"http://127.0.0.1:{{silent.getsockname()[1]}}"
late = weft.ServiceClient(base_url=silent_url, api_key="tml-x").create_sampling_client(base_model="org/tiny")
pickled = pickle.dumps(sampler)

loading, going_on = threading.Event(), threading.Event()

def load(folder):
    loading.set()
    going_on.wait()

weft.tokenizer._load = load
threading.Thread(target=weft.tokenizer.load_tokenizer, args=("",), daemon=True).start()
loading.wait()

def loaded():
    going_on.set()
    weft.tokenizer.load_tokenizer("")
    return "loaded"

def mine():
    with weft.ServiceClient(base_url={url!r}, api_key="tml-x") as service:
        return drawn(service.create_sampling_client(base_model="org/tiny"))

def drawn(sampler):
    return sampler.sample([1, 2], 1, weft.SamplingParams(max_tokens=2)).result().sequences[0].tokens

def child(answers):
    try:
        answers.put(str({child}))
    except weft.WeftError as error:
        answers.put(f"WeftError: {{error}}")

fork = multiprocessing.get_context("fork")
answers = fork.SimpleQueue()
process = fork.Process(target=child, args=(answers,))
process.start()
print(answers.get(), flush=True)
process.join()
print(drawn(sampler), flush=True)
service.close().result()
"""


@pytest.mark.parametrize(
    ("child", "answer"),
    [
        ("mine()", "[1, 2]"),
        ("drawn(pickle.loads(pickled))", "[1, 2]"),
        ("drawn(sampler)", "WeftError: this client was made in process "),
        ("service.create_lora_training_client('org/tiny').result()", "WeftError: this client was made in process "),
        ("drawn(late)", "WeftError: this was under way when the process was forked"),
        ("loaded()", "loaded"),
        ("service.close().result()", "WeftError: this client was made in process "),
    ],
)
def test_a_fork_makes_clients_of_its_own_and_uses_no_others(stub: Stub, child: str, answer: str) -> None:
    script = SCRIPT.format(url=stub.base_url, child=child)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "client_sdk")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    first, parent = done.stdout.splitlines()
    assert first.startswith(answer)
    assert parent == "[1, 2]"
    assert stub.paths().count(f"/sessions/{SESSION}/finish") == 1 + (child == "mine()")
