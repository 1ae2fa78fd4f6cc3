"""Generated from proto/kvctl/v1 by proto/generate.sh."""
