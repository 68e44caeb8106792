#!/usr/bin/env bash
# What one GPU says about the learner, in at most half an hour: Markdown for docs/performance.md.
#
#     bash perf/gpu.sh                       # all parts
#     bash perf/gpu.sh layers check-3b       # some of them
#     DEVICE=cpu bash perf/gpu.sh            # does the script run? tiny sizes, minutes
#
# Every part has a time limit of its own, and one that fails keeps no other from running. Seven billion parameters with
# AdamW's state need a card of 141 GB. vLLM is not needed; the doctor takes the transformers sampler without it. On a
# machine without a network, bring the wheels of what is missing there (pip download --no-deps; pip wheel for
# antlr4-python3-runtime), and name their folder in PYTHONPATH: deepspeed, pydantic, omegaconf, qwen-vl-utils,
# math-verify, pebble and what these need; liger-kernel and trl (1.16, with accelerate and datasets) for the comparisons
# with them.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTHON=${PYTHON:-python3}
failed=0

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

learner=("$PYTHON" perf/gpu_learner.py)
run() {
	if [[ ${DEVICE:-cuda} == cpu ]]; then
		case $1 in
		doctor) part doctor 600 "$PYTHON" -m vlm_rl doctor --runs . ;;
		check-*) part "$1" 300 "${learner[@]}" --device cpu --size tiny --check ;;
		layers) part layers 120 "$PYTHON" perf/gpu_layers.py --device cpu --tokens 256 --parameters 1e6 ;;
		speed-*) part "$1" 300 "${learner[@]}" --device cpu --size tiny --prompts 1 --rounds 1 --checkpointing ;;
		esac
		return
	fi
	case $1 in
	doctor) part doctor 300 "$PYTHON" -m vlm_rl doctor --runs . ;;
	check-3b) part check-3b 120 "${learner[@]}" --size 3b --check ;;
	check-7b) part check-7b 150 "${learner[@]}" --size 7b --check ;;
	layers) part layers 120 "$PYTHON" perf/gpu_layers.py ;;
	speed-3b) part speed-3b 270 "${learner[@]}" --size 3b ;;
	speed-3b-long) part speed-3b-long 270 "${learner[@]}" --size 3b --prompts 2 --tokens 4000 --checkpointing ;;
	speed-7b) part speed-7b 400 "${learner[@]}" --size 7b --prompts 2 --tokens 2000 --checkpointing --rounds 3 ;;
	esac
}

all=(doctor check-3b check-7b layers speed-3b speed-3b-long speed-7b) # 1,630 s at most
for name in "${@:-${all[@]}}"; do
	if [[ " ${all[*]} " != *" $name "* ]]; then
		echo "perf/gpu.sh: no part $name; there are: ${all[*]}" >&2
		exit 2
	fi
done
for name in "${@:-${all[@]}}"; do run "$name"; done
exit $failed
