#!/bin/bash
# What each task of a job does: it becomes the rank that Slurm numbers it as. No torchrun is needed.
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
exec python -m dcdm train "$@"
