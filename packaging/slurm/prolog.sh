#!/bin/sh
# Prolog of slurmd: start to prepare the dataset that the job names by a word mirrord=DATASET in its
# --comment, or in its --extra if Slurm supports that. It does not wait, and the job starts even without
# mirrord: a prolog that fails would drain the node.

export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}"
set -f
for word in $SLURM_JOB_COMMENT $SLURM_JOB_EXTRA; do
    case $word in
    mirrord=?*)
        timeout --kill-after=1 5 mirrord rehearse --prewarm --no-wait --dataset="${word#mirrord=}"
        break
        ;;
    esac
done >/dev/null 2>&1
exit 0
