#!/bin/sh
# Prolog of slurmd: begin to make the dataset warm that a job names by a word mirrord=DATASET in its
# --comment, or in its --extra where Slurm has that. It waits for nothing, and the job starts without
# mirrord too: a prolog that fails would drain the node.

export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}"
set -f
for word in $SLURM_JOB_COMMENT $SLURM_JOB_EXTRA; do
    case $word in
    mirrord=?*)
        timeout --kill-after=1 5 mirrord dataset prepare --no-wait -- "${word#mirrord=}"
        break
        ;;
    esac
done >/dev/null 2>&1
exit 0
