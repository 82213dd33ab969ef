"""The cookbook's training functions that have no command line of their own; run by the cookbook's own Python.

`loops.py (supervised | kl | dpo | weights) MODEL LOG_FOLDER`, in the shadow folder.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

RENDERER = "qwen3_disable_thinking"


def supervised(model: str, logs: str) -> None:
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.data import FromConversationFileBuilder

    data = FromConversationFileBuilder(common_config=_common(model), file_path="conversations.jsonl")
    config = train.Config(
        log_path=logs,
        model_name=model,
        recipe_name="weft_supervised",
        renderer_name=RENDERER,
        dataset_builder=data,
        learning_rate=1e-3,
        num_epochs=1,
        lora_rank=8,
        max_steps=3,
        save_every=2,
        eval_every=0,
    )
    asyncio.run(train.main(config))


def kl(model: str, logs: str) -> None:
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
    from tinker_cookbook.rl import train

    data = ArithmeticDatasetBuilder(
        batch_size=4, model_name_for_tokenizer=model, renderer_name=RENDERER, n_batches=4, group_size=4
    )
    config = train.Config(
        log_path=logs,
        model_name=model,
        recipe_name="weft_kl",
        renderer_name=RENDERER,
        dataset_builder=data,
        learning_rate=1e-4,
        max_tokens=5,
        lora_rank=8,
        max_steps=2,
        eval_every=0,
        num_substeps=2,
        compute_post_kl=True,
        kl_penalty_coef=0.1,
        kl_reference_config=train.KLReferenceConfig(base_model=model),
    )
    asyncio.run(train.main(config))


def dpo(model: str, logs: str) -> None:
    from tinker_cookbook.preference import train_dpo
    from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
    from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl

    data = DPODatasetBuilderFromComparisons(
        common_config=_common(model), comparison_builder=ComparisonBuilderFromJsonl(train_path="comparisons.jsonl")
    )
    config = train_dpo.Config(
        log_path=logs,
        model_name=model,
        recipe_name="weft_dpo",
        renderer_name=RENDERER,
        dataset_builder=data,
        learning_rate=1e-4,
        dpo_beta=0.1,
        lora_rank=8,
        max_steps=2,
        eval_every=0,
    )
    train_dpo.main(config)


def weights(model: str, logs: str) -> None:
    """Train a run, download it, and merge it into a Hugging Face model."""
    import tinker
    from tinker_cookbook import weights as exported

    service = tinker.ServiceClient()
    run = service.create_lora_training_client(model, rank=8).result()
    path = run.save_state("final").result().path
    adapter = exported.download(tinker_path=path, output_dir=f"{logs}/adapter")
    exported.build_hf_model(base_model=model, adapter_path=adapter, output_path=f"{logs}/merged", dtype="float32")
    assert list(Path(f"{logs}/merged").glob("*.safetensors"))


def _common(model: str) -> object:
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=256, batch_size=4
    )


if __name__ == "__main__":
    {"supervised": supervised, "kl": kl, "dpo": dpo, "weights": weights}[sys.argv[1]](*sys.argv[2:])
