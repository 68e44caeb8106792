#!/usr/bin/env bash
# A day with a card: every part prints a table and ends in pass or fall short (perf/gpu_thresholds.yaml).
#
#     bash perf/gpu.sh                       # all parts, each of at most 250 s
#     bash perf/gpu.sh doctor step-3b        # some of them
#     DEVICE=cpu bash perf/gpu.sh            # does every part run? tiny sizes, six minutes on two cores
#     KEEP=runs/gpu bash perf/gpu.sh         # keep models, runs, logs and the profile of the update
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
all=(doctor quickstart switches check-3b learner-3b step-3b rollout-3b lora-7b versus-trl real)
for name in "${@:-${all[@]}}"; do
	if [[ " ${all[*]} " != *" $name "* ]]; then
		echo "perf/gpu.sh: no part $name; there are: ${all[*]}" >&2
		exit 2
	fi
done

"$PYTHON" perf/gpu_parts.py --about || exit 2
summary=""
trap 'exit 130' INT TERM # else Ctrl-C would end one part, and the next would begin
for name in "${@:-${all[@]}}"; do
	begun=$SECONDS
	printf '\n### %s\n\n' "$name"
	timeout --foreground --kill-after 20 270 "$PYTHON" perf/gpu_parts.py "$name" --device "$DEVICE" ${KEEP:+--work "$KEEP/$name"}
	code=$?
	verdict=$([[ $code == 0 ]] && echo pass || { [[ $code == 3 ]] && echo "falls short" || echo "failed with exit code $code"; })
	summary+="| $name | $verdict | $((SECONDS - begun)) |"$'\n'
done
printf '\n| part | | seconds |\n|---|---|---|\n%s' "$summary"
[[ $summary != *fail* && $summary != *short* ]]
