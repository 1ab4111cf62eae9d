#!/bin/bash
# On every machine, with the name of the first one:
#     HEAD=node1 NODES=2 CONFIG=digits_resnet20_hsadmm examples/torchrun.sh
set -eu

HEAD=${HEAD:-$(hostname)}
NODES=${NODES:-1}
PROCESSES=${PROCESSES:-1}
CONFIG=${CONFIG:-digits_resnet20_hsadmm}
# On a disk that all machines share.
WORKDIR=${WORKDIR:-$PWD/runs/prunex}

exec torchrun --nnodes="$NODES" --nproc-per-node="$PROCESSES" \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:29500" --rdzv-id=prunex \
    -m prunex_jax.train --config="$CONFIG" --workdir="$WORKDIR" "$@"
