"""Generation by vLLM, in a process and an environment of its own; nothing here imports it (docs/vllm.md)."""
