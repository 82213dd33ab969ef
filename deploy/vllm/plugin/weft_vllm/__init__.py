"""A plugin of vLLM (`vllm.general_plugins`), loaded by every process of it. Written against vLLM 0.32.0.

On the CPU platform it makes mixture-of-experts models serve LoRA adapters (experts.py), and keeps requests without an
adapter from getting that of another (ops.py). Logprobs are those of the distribution that is drawn from, as Weft has
them, at any temperature (temperature.py). `weft_vllm.worker.Swap` is the worker extension for policies in flight.
"""

from __future__ import annotations


def register() -> None:
    from vllm.platforms import current_platform

    from weft_vllm import temperature

    temperature.install()
    if current_platform.is_cpu():
        from weft_vllm import experts, ops

        experts.install()
        ops.install()
