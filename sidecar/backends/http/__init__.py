"""Stock vLLM over its own HTTP routes: what can be done without the engine bridge, and nothing pretended beyond it."""
