"""vLLM as its own users run it, for bench/generator.py: its `LLM` in its own environment, without our server or queue.

    .vllm/bin/python bench/parts/vllm_peer.py MODEL [--adapters FOLDER]

For each line on standard input, a JSON list of prompts (lists of tokens), one generation of 32 tokens each at
temperature 1; answers with a line of seconds by the clock. Compiled, as vLLM is by default. With `--adapters` prompt n
has the n-th of the folder's PEFT adapters; without, LoRA is not enabled at all. Nothing of Weft is imported, but its
plugin is there, without which a vLLM for the CPU has no adapters of experts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

SAMPLED = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--adapters", type=Path)
    args = parser.parse_args()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    folders = sorted(args.adapters.iterdir()) if args.adapters else []
    lora: dict[str, Any] = {}
    if folders:
        lora = {"enable_lora": True, "max_loras": len(folders), "max_cpu_loras": len(folders), "max_lora_rank": 8}
    llm = LLM(
        args.model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=64,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **lora,
    )
    requests = [LoRARequest(place.name, number + 1, str(place)) for number, place in enumerate(folders)]
    sampling = SamplingParams(max_tokens=SAMPLED, ignore_eos=True, detokenize=False)
    print("ready", flush=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": tokens} for tokens in json.loads(line)]
        began = time.perf_counter()
        found = llm.generate(prompts, sampling, use_tqdm=False, lora_request=requests or None)
        took = time.perf_counter() - began
        if any(len(one.outputs[0].token_ids) != SAMPLED for one in found):
            raise SystemExit("vLLM sampled another number of tokens than it was asked for")
        print(f"seconds {took}", flush=True)


if __name__ == "__main__":
    main()
