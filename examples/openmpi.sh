#!/bin/bash
# A run on the machines of a hostfile, one process on each:
#     CONFIG=digits_resnet20_hsadmm examples/openmpi.sh
# Open MPI kills what it ends after a second; 120 of them let a run save.
set -eu

HOSTFILE=${HOSTFILE:-$(dirname "$0")/hostfile}
CONFIG=${CONFIG:-digits_resnet20_hsadmm}
# On a disk that all machines share.
WORKDIR=${WORKDIR:-$PWD/runs/prunex}

exec mpirun --hostfile "$HOSTFILE" --map-by ppr:1:node --bind-to none \
    --mca odls_base_sigkill_timeout 120 -x PATH \
    python -m prunex_jax.train --config="$CONFIG" --workdir="$WORKDIR" "$@"
