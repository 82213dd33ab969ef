"""Adapter and expert products of the decoder on a CUDA device, called by `lora` and `mixture`; results equal those of
the CPU code up to rounding. Needs Triton, which CUDA builds of torch bring."""
