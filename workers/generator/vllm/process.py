"""The arguments of a generator process that concern vLLM, and the engine they describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from workers.generator.stop import text_decoder
from workers.generator.vllm.adapters import RANKS, LoraLimits, targets
from workers.model.card import read_card
from workers.model.device import ModelDevice

if TYPE_CHECKING:
    from workers.generator.vllm.engine import VllmEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch", help="what runs the model")
    parser.add_argument("--vllm-program", type=Path, default=Path("vllm"), help="the vllm command, to start it")
    parser.add_argument("--vllm-url", default="", help="a vLLM that is there already, instead")
    parser.add_argument("--vllm-folder", type=Path, help="where adapters are written for vLLM; emptied")
    parser.add_argument("--vllm-adapters", type=int, default=16, help="adapters in one batch")
    parser.add_argument("--vllm-rank", type=int, choices=RANKS, default=64, help="highest rank of an adapter")
    parser.add_argument("--vllm-kv-bytes", type=int, default=1 << 30, help="for keys and values, on a CPU")


def vllm_engine(name: str, path: Path, args: argparse.Namespace, where: ModelDevice) -> VllmEngine:
    """An engine whose vLLM has answered its first requests. Raises VllmFailed."""
    # Its HTTP client is imported where there is a vLLM only.
    from workers.generator.vllm.engine import VllmEngine
    from workers.generator.vllm.server import Launch

    card = read_card(name, path)
    limits = LoraLimits(args.vllm_adapters, args.vllm_rank)
    context = min(args.context, card.context_length)
    launch = Launch(
        program=args.vllm_program,
        model=path,
        targets=targets(card.config),
        context=context,
        slots=args.slots,
        limits=limits,
        dtype=str(where.dtype).removeprefix("torch."),
        threads=args.threads or 1,
        kv_bytes=args.vllm_kv_bytes,
        cpu=where.device.type == "cpu",
    )
    engine = VllmEngine(
        card.config,
        card.eos_token_ids,
        slots=args.slots,
        context=context,
        limits=limits,
        folder=(args.vllm_folder or args.data_dir / "vllm") / name.replace("/", "--"),
        launch=None if args.vllm_url else launch,
        url=args.vllm_url,
        decode_text=text_decoder(path),
    )
    engine.wait_ready()
    return engine
