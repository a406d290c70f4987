#!/bin/sh
# TaskProlog of slurmd: what it prints is set in the environment of each task. The checkouts of a
# job get this label.

echo "export MIRRORD_LABEL=slurm/$SLURM_JOB_ID"
