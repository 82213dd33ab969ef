"""Memory of a GPU that several processes have: by CUDA's IPC handles, as torch makes and opens them. Never run yet:
there was no GPU.

What holds of them, and where it is said:

- The process that has allocated must outlive all that have opened: after a `cudaFree`, theirs is undefined (CUDA
  driver API, `cuIpcCloseMemHandle`; "Sharing CUDA tensors" in torch.multiprocessing's manual). So a process that does
  nothing else allocates, and whoever uses its memory ends with it (`holder.py`).
- A handle cannot be opened by the process that made it, nor handed on by one that has opened it ("Attempted to send
  CUDA tensor received from another process", torch/csrc/StorageSharing.cpp).
- It is one of a whole cudaMalloc. Torch adds the storage's offset in it ("CUDA IPC and the caching allocator",
  torch/multiprocessing/reductions.py), and counts the takers in a file in /dev/shm (torch/csrc/CudaIPCTypes.cpp),
  which a killed holder leaves there: 80 kB. Its count says when the maker may free a tensor that it has let go of,
  which a holder never does: so one handle serves all takers. An event makes who opens wait for what was written
  before.
- With `expandable_segments` torch passes file descriptors instead, by pidfd_getfd, which containers refuse (pytorch
  #165685, #179220). The holder allocates without (`environment`); what its takers' own allocators do is their affair.
- Memory is opened for writing: CUDA has no other kind. Nothing writes to a frozen weight.
- An address is good until the process ends, since nobody closes a handle; so a CUDA graph may have it captured.
- Both must see each other's pid: in containers, one IPC and one PID namespace (vllm #55906: "invalid device context"
  without).
- Not between GPU instances of a MIG ("Application Considerations" in NVIDIA's MIG User Guide), whose memory is not
  one anyway.
- Devices are numbered by CUDA_VISIBLE_DEVICES, so the number in a handle is the maker's: it is opened as the taker's
  own.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


def environment() -> dict[str, str]:
    """Environment variables for the process that allocates: torch's plain caching allocator, whatever the workers
    use."""
    kept = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    return {**kept, "PYTORCH_ALLOC_CONF": "expandable_segments:False"}


def identity(device: torch.device) -> str:
    """A name of the device that is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def room(size_bytes: int, device: torch.device) -> Tensor:
    """Allocate that many bytes that can be shared. Raises torch.OutOfMemoryError."""
    torch.cuda.set_device(device)
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def handle(whole: Tensor) -> list[Any]:
    """The handle with which other processes open it, as ints, bytes and a bool. Everything written before is visible to
    them."""
    torch.cuda.synchronize(whole.device)
    return list(whole.untyped_storage()._share_cuda_()[1:])  # type: ignore[no-untyped-call]


def opened(found: list[Any], device: torch.device) -> Tensor:
    """The bytes behind a handle. They stay for as long as this process lives."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *found)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
