"""Decode steps on a CUDA device: attention that reads pages in place, and steps captured in CUDA graphs. Needs Triton,
which CUDA builds of torch bring."""
