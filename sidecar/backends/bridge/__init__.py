"""Engines with the bridge inside, reached over its Unix socket and its memory-mapped page."""
