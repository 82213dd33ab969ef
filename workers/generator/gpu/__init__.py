"""Decode steps on a CUDA device: attention that reads pages in place, and steps that are captured once and replayed.
Needs Triton, which CUDA builds of torch bring."""
