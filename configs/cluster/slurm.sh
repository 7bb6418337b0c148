#!/bin/bash
# Two nodes of 8 GPUs under Slurm; everything after the script's name goes to train.py:
#
#     sbatch configs/cluster/slurm.sh configs/transformer2d-720m.yaml data.path=/videos
#
# Ten minutes before its time is over, or when it is preempted, the job writes a checkpoint and puts itself back into the
# queue; docs/cluster.md explains each line. What your site wants besides (account, partition) goes on sbatch's own line.
#SBATCH --job-name=dsp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

export OMP_NUM_THREADS=8
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=540  # seconds that torchrun leaves its ranks for a checkpoint, instead of 30
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))  # two jobs may share a node

stopped=
stop() { # the steps alone get the signal: this script has to outlive them
    stopped=1
    interrupted=1
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap stop USR1 TERM

srun --kill-on-bad-exit=1 dsp-launch \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:$port" \
    train.py "$@" resume=true &
step=$!
interrupted=1
while [ -n "$interrupted" ]; do # a signal ends `wait`, and not the step
    interrupted=
    wait "$step"
    status=$?
done

if [ -n "$stopped" ] && [ "$status" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
