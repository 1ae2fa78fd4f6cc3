"""Kubernetes CacheOperation resources, run by the coordinator's own execution; the resources are the store."""
