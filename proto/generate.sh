#!/bin/sh
# Generates proto/gen/kvctl/v1 from proto/kvctl/v1. Usage: proto/generate.sh [PYTHON]
set -eu
python=$(realpath -s "${1:-$(dirname "$0")/../.venv/bin/python}")
cd "$(dirname "$0")"
bin=$(dirname "$python")
rm -rf gen/kvctl
mkdir -p gen
PATH="$bin:$PATH" "$python" -m grpc_tools.protoc --proto_path=. \
  --python_out=gen --grpc_python_out=gen --mypy_out=gen --mypy_grpc_out=gen kvctl/v1/*.proto
printf '"""Generated from proto/kvctl/v1 by proto/generate.sh."""\n' | tee gen/kvctl/__init__.py > gen/kvctl/v1/__init__.py
