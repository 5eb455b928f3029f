#!/usr/bin/env bash
# collect_wheels.sh [FOLDER]: wheels for a machine without a network, whose image has torch with CUDA and Python 3.12.
# What Holdfast needs comes first; a library to compare with that cannot be had is left out. On that machine:
#   python3 -m pip install -q --no-index --no-deps --target /tmp/site FOLDER/*.whl && export PYTHONPATH=/tmp/site
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-.wheels}
python=${COLLECT_PYTHON:-python3}
mkdir -p "$folder"
fetch() { # package: the pinned version of it, without what it needs
  pin=$(grep -hi "^$1==" constraints.txt benchmarks/constraints.txt | head -1)
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -d "$folder" "${pin:-$1}"
}
for package in backports.zstd msgspec xxhash; do fetch "$package"; done
for package in torch_checkpointing nvidia-resiliency-ext defusedxml pynvml; do
  fetch "$package" || echo "without $package" >&2
done
du -sh "$folder" && ls "$folder"
