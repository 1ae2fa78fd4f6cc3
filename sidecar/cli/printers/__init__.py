"""How results are printed: one module a kind of result, and `encoding` for json, yaml and name."""
