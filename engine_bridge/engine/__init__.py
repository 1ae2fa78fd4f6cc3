"""The only package that names vLLM's internals."""
