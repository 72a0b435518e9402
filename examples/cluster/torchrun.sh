#!/bin/bash
# Start a run on several machines by torchrun. Run it on each of them, with the same arguments:
#   HEAD=node0 NODES=2 bash examples/cluster/torchrun.sh --config examples/gsm8k.yaml
# HEAD is a machine that all others reach. torchrun starts all ranks again after a failure, up to RESTARTS times, and
# `--ckpt_path last` goes on from the newest checkpoint, which a folder that all machines share holds.
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise ranks that start again look for those that have ended
DEVICES=${DEVICES:-$(nvidia-smi --list-gpus | wc -l)}

exec torchrun --nnodes "$NODES" --nproc-per-node "$DEVICES" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --no-python \
    lightning-realloc fit "$@" --trainer.num_nodes "$NODES" --trainer.devices "$DEVICES" --ckpt_path last
