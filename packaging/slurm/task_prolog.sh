#!/bin/sh
# TaskProlog of slurmd: its output sets variables of each task. The job's checkouts get this label.

echo "export MIRRORD_LABEL=slurm/$SLURM_JOB_ID"
