#!/bin/bash
# Start a run on several machines by Slurm:
#   sbatch examples/cluster/slurm.sh --config examples/gsm8k.yaml
# Three minutes before the time limit, Slurm's signal makes Lightning save a checkpoint and queue the job again, which
# then goes on from it. After a failure, `--ckpt_path last` goes on from the newest checkpoint.
#SBATCH --job-name=realloc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --distribution=block
#SBATCH --time=12:00:00
#SBATCH --signal=SIGUSR1@180
#SBATCH --requeue
set -euo pipefail

srun --kill-on-bad-exit=1 lightning-realloc fit "$@" \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" --ckpt_path last
