"""Everything of kvctl that runs beside the engine: the sidecar, the coordinator, the command line, the client."""
