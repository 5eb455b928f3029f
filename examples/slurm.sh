#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGUSR1 reaches this script two minutes before the time limit. A preemption sends SIGTERM, and Slurm requeues the job
# (PreemptMode=REQUEUE).
#SBATCH --signal=B:USR1@120
#
# sbatch slurm.sh python train.py
#
# The script saves at an iteration boundary, the same one on all ranks, and resumes from there when the job starts
# again. All nodes must reach HOLDFAST_STORE: a shared directory, or s3://bucket/prefix.

grace_seconds=110 # less than Slurm gives
srun holdfast run --stay never --grace "$grace_seconds" -- "$@" &
training=$!
queue_again=no
trap 'queue_again=yes; kill -TERM "$training"' USR1
trap 'kill -TERM "$training"' TERM

wait "$training"
status=$?
while kill -0 "$training" 2> /dev/null; do # a trap ended the wait, and training still runs
    wait "$training"
    status=$?
done
if [ "$queue_again" = yes ] && [ "$status" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
