"""Many replicas: discovery, channels, fan-out, rollouts, the operation store, the service."""
