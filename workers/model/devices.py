"""What this machine can compute with, as one line of JSON: `python -m workers.model.devices`, for `weftd doctor`, which
never loads torch itself."""

from __future__ import annotations

import json
from typing import Any

import torch

from workers.model.native.build import library


def devices() -> dict[str, Any]:
    """Torch's version, the GPUs, and whether the kernels of the CPU and of the GPU are there."""
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append({"name": facts.name, "capability": f"{facts.major}.{facts.minor}", "free": free, "total": total})
    return {"torch": torch.__version__, "gpus": gpus, "native": library() is not None, "triton": _triton()}


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


if __name__ == "__main__":
    print(json.dumps(devices()))
