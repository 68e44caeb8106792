#!/usr/bin/env bash
# What one GPU says about the learner, in at most half an hour: Markdown for docs/performance.md.
#
#     bash perf/gpu.sh                       # all parts
#     bash perf/gpu.sh layers check-3b       # some of them
#     DEVICE=cpu bash perf/gpu.sh            # does the script run? tiny sizes, minutes
#
# Every part has a time limit of its own, and one that fails keeps no other from running. Where a command may take ten
# minutes at most, three commands do:
#
#     bash perf/gpu.sh doctor check-3b memory
#     bash perf/gpu.sh check-7b layers speed-3b speed-3b-kept
#     bash perf/gpu.sh speed-3b-long speed-7b
#
# vLLM is not needed; the doctor takes the transformers sampler without it. What else a machine without a network lacks,
# or has too old, comes as wheels in the folder .whl, or in WHEELS (docs/gpu.md says how to fetch them). This script
# installs them in a temporary folder, and names all versions first.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
wheels=(${WHEELS:-.whl}/*.whl)
if [[ -e ${wheels[0]} ]]; then
	site=$(mktemp -d)
	trap 'rm -rf "$site"' EXIT
	"$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
		--root-user-action ignore --target "$site" "${wheels[@]}" || exit 2
	PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
failed=0

"$PYTHON" - <<'END' || exit 2
import platform
from importlib.metadata import PackageNotFoundError, version

print(f"Python {platform.python_version()}", end="")
for name in (
    "torch torchvision triton transformers huggingface-hub tokenizers safetensors accelerate peft deepspeed pydantic "
    "omegaconf numpy liger-kernel trl vllm"
).split():
    try:
        print(f", {name} {version(name)}", end="")
    except PackageNotFoundError:
        print(f", no {name}", end="")
print()

import torch

card = "no GPU"
if torch.cuda.is_available():
    card = f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 2**30:.1f} GiB"
print(f"{card}; CUDA {torch.version.cuda}")
END

part() { # name, seconds, command: run it and print its output as a section
	local name=$1 seconds=$2 begun=$SECONDS code=0
	shift 2
	printf '\n### %s\n\n```bash\n%s\n```\n\n' "$name" "${*/#$PYTHON/python}"
	[[ $name == doctor ]] && echo '```'
	timeout --kill-after 20 "$seconds" "$@" || code=$?
	[[ $name == doctor ]] && echo '```'
	((code)) && failed=1 && printf '\n**%s: exit code %d** (124: the limit of %d s)\n' "$name" "$code" "$seconds"
	printf '\n%s took %d s.\n' "$name" $((SECONDS - begun))
}

learner=("$PYTHON" perf/gpu_learner.py) speed=("$PYTHON" perf/gpu_learner.py --speed)
memory=$("$PYTHON" -c 'import torch; print(torch.cuda.mem_get_info()[1] >> 30 if torch.cuda.is_available() else 0)')
state=(--optimizer none) # of 7B, and of 3B without checkpointing: with AdamW they need more than 80 GB
((memory >= 130)) && state=(--optimizer adamw)

run() {
	if [[ ${DEVICE:-cuda} == cpu ]]; then
		case $1 in
		doctor) part doctor 600 "$PYTHON" -m vlm_rl doctor --runs . ;;
		memory) part memory 600 "$PYTHON" perf/memory.py --tokens 256 ;;
		check-*) part "$1" 300 "${learner[@]}" --device cpu --size tiny --check ;;
		layers) part layers 120 "$PYTHON" perf/gpu_layers.py --device cpu --tokens 256 --parameters 1e6 ;;
		speed-3b-kept) part "$1" 300 "${speed[@]}" --device cpu --size tiny --prompts 1 --rounds 1 --optimizer none ;;
		speed-*) part "$1" 300 "${speed[@]}" --device cpu --size tiny --prompts 1 --rounds 1 --checkpointing ;;
		esac
		return
	fi
	case $1 in
	doctor) part doctor 240 "$PYTHON" -m vlm_rl doctor --runs . ;;
	check-3b) part check-3b 150 "${learner[@]}" --size 3b --check ;;
	memory) part memory 180 "$PYTHON" perf/memory.py --tokens 8192 ;;
	check-7b) part check-7b 120 "${learner[@]}" --size 7b --check ;;
	layers) part layers 90 "$PYTHON" perf/gpu_layers.py ;;
	speed-3b) part speed-3b 190 "${speed[@]}" --size 3b --checkpointing --rounds 3 ;;
	speed-3b-kept) part speed-3b-kept 150 "${speed[@]}" --size 3b --rounds 3 "${state[@]}" ;;
	speed-3b-long) part "$1" 220 "${speed[@]}" --size 3b --prompts 2 --tokens 4000 --checkpointing --rounds 2 ;;
	speed-7b) part speed-7b 320 "${speed[@]}" --size 7b --prompts 2 --tokens 2000 --checkpointing --rounds 2 "${state[@]}" ;;
	esac
}

all=(doctor check-3b memory check-7b layers speed-3b speed-3b-kept speed-3b-long speed-7b) # 1,660 s at most
for name in "${@:-${all[@]}}"; do
	if [[ " ${all[*]} " != *" $name "* ]]; then
		echo "perf/gpu.sh: no part $name; there are: ${all[*]}" >&2
		exit 2
	fi
done
for name in "${@:-${all[@]}}"; do run "$name"; done
exit $failed
