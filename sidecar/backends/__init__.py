"""How a replica reaches its engines: the bridge's Unix socket, or stock vLLM's HTTP routes."""
