"""The public Python library: fleets of replicas from asyncio and from blocking code."""
