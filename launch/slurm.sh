#!/usr/bin/env bash
# Train on a Slurm allocation; a job that is stopped or out of time saves, is queued again, and resumes by itself:
#
#   sbatch --nodes 4 launch/slurm.sh configs/virl39k_luspo_72b.yaml
#   SERVER_NODES=2 sbatch --nodes 4 launch/slurm.sh configs/virl39k_luspo_7b_servers.yaml out=runs/a
#
# Every node learns and samples. With SERVER_NODES=n the last n nodes serve instead, a server on each CARDS_PER_SERVER
# cards (rollout.tensor_parallel), for a configuration with rollout.sampler: server. All nodes need this folder, the
# run's, the model's and the home folder, where the servers' token is.
#SBATCH --job-name=vlm-rl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#SBATCH --signal=B:TERM@600
set -euo pipefail

SERVER_NODES=${SERVER_NODES:-0} CARDS_PER_SERVER=${CARDS_PER_SERVER:-1} CARDS=${CARDS:-${SLURM_GPUS_ON_NODE:-8}}
[ $# -ge 1 ] || { echo "usage: sbatch [--nodes N] launch/slurm.sh CONFIG [KEY=VALUE ...]" >&2; exit 2; }
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
learners=$((${#hosts[@]} - SERVER_NODES))
[ "$learners" -ge 1 ] || { echo "SERVER_NODES=$SERVER_NODES of ${#hosts[@]} nodes leave none to learn" >&2; exit 2; }

on() { # on HOST[,HOST...] COMMAND... &: one task on each of the hosts; signals to the job reach srun itself
    local list=$1 commas=${1//[^,]/}
    shift
    exec srun --nodes $((${#commas} + 1)) --ntasks-per-node 1 --nodelist "$list" --kill-on-bad-exit=1 "$@"
}

more=()
if [ "$SERVER_NODES" -gt 0 ]; then
    addresses=$PWD/servers-$SLURM_JOB_ID.txt
    : > "$addresses"
    for host in "${hosts[@]:learners}"; do
        for ((card = 0; card < CARDS; card += CARDS_PER_SERVER)); do
            cards=$(seq -s , "$card" $((card + CARDS_PER_SERVER - 1)))
            port=$((8000 + card))
            echo "http://$host:$port" >> "$addresses"
            on "$host" --overlap env CUDA_VISIBLE_DEVICES="$cards" \
                vlm-rl serve "$@" rollout.servers="$addresses" --host "$host" --port "$port" &
        done
    done
    more+=(rollout.servers="$addresses")
fi

out=$(python -c 'import sys; from vlm_rl.config import load_config; print(load_config(sys.argv[1], sys.argv[2:]).out)' \
    "$@" "${more[@]}")
[ ! -e "$out/config.yaml" ] || more+=(--resume)

# Ten minutes before its end the job is told: the run saves, and the job is queued again.
stopped=
on "$(IFS=,; echo "${hosts[*]:0:learners}")" \
    torchrun --nnodes "$learners" --nproc-per-node "$CARDS" --shutdown-timeout 3600 \
    --rdzv-backend c10d --rdzv-endpoint "${hosts[0]}:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m vlm_rl train "$@" "${more[@]}" &
learner=$!
trap 'stopped=yes; kill -TERM "$learner"' TERM
code=0
wait "$learner" || code=$?
[ -z "$stopped" ] || { code=0; wait "$learner" || code=$?; } # the first wait ended with the signal
trap - TERM
mapfile -t servers < <(jobs -pr)
[ ${#servers[@]} -eq 0 ] || kill "${servers[@]}"
[ -z "$stopped" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
