"""What kvctl does to an engine: decisions over the port, on the engine's thread."""
