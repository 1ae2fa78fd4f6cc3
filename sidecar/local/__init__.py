"""A fleet on this machine: real vLLM on the CPU, load, the demo."""
