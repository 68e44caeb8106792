#!/usr/bin/env bash
# Fetch what perf/gpu.sh needs on a GPU machine that has torch but no network: wheels in .whl, which git ignores.
#
#     bash perf/gpu_wheels.sh                         # for Python 3.12 on x86-64
#     PYTHON_VERSION=3.13 bash perf/gpu_wheels.sh
#
# The versions are those of constraints.txt. Expected on the machine: torch 2.11 or newer with torchvision and Triton,
# numpy, SciPy, Pillow, pandas, pyarrow, accelerate, peft, rich, psutil, einops, msgpack, ninja, py-cpuinfo, and the
# libraries below transformers: huggingface-hub 1.31, tokenizers 0.23.1, safetensors 0.8, regex, PyYAML, tqdm, typer.
# Give the names of others that are missing there as arguments. DeepSpeed is published as sources and is built here.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} version=${PYTHON_VERSION:-3.12} folder=.whl
needed=(transformers hjson pydantic pydantic-core annotated-types typing-inspection omegaconf pebble math-verify
	latex2sympy2-extended antlr4-python3-runtime qwen-vl-utils)
compared=(liger-kernel trl==1.16.0 datasets dill multiprocess) # the comparisons with Liger and TRL

mkdir -p "$folder"
rm -f "$folder"/*.whl # two versions of one library would not install
platforms=()
for tag in manylinux1 manylinux2014 manylinux_2_17 manylinux_2_27 manylinux_2_28; do
	platforms+=(--platform "${tag}_x86_64")
done
"$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
	"${platforms[@]}" --constraint constraints.txt --dest "$folder" \
	"${needed[@]}" "${compared[@]}" "$@"
"$PYTHON" -m pip wheel --quiet --no-deps --constraint constraints.txt --wheel-dir "$folder" deepspeed
du -sh "$folder"
