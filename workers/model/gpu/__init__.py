"""The decoder's adapter and expert work on a CUDA device. `workers.model.lora` and `workers.model.moe` hand it tensors
that lie there; the results are those of the CPU code up to rounding. Needs Triton, which CUDA builds of torch bring."""
