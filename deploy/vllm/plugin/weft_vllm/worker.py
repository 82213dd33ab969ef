"""The methods that the service calls in vLLM's worker through /collective_rpc: `--worker-extension-cls
weft_vllm.worker.Swap`."""

from __future__ import annotations

from typing import Any


class Swap:
    def weft_about(self) -> dict[str, Any]:
        """What this vLLM can do for Weft. The plugin knows the older model runner, on a CPU; the newer one, which vLLM
        takes wherever Triton is installed, draws tokens by other code."""
        import vllm
        from vllm.platforms import current_platform

        tempered = current_platform.is_cpu() and not self.use_v2_model_runner
        return {"vllm": vllm.__version__, "tempered_logprobs": bool(tempered)}

    def weft_adapters(self) -> list[int]:
        """The adapters in memory, by the front end's numbers, in ascending order."""
        return sorted(self.list_loras())

    def weft_swap(self, name: str, int_id: int, path: str) -> bool:
        """Replace the weights of a loaded adapter by those in `path`, for requests in flight too."""
        from vllm.lora.request import LoRARequest

        return self.add_lora(LoRARequest(name, int_id, path, load_inplace=True))
