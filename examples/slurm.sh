#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGUSR1 reaches this script two minutes before the time is over; a preemption sends SIGTERM, and Slurm queues the
# job again by itself (PreemptMode=REQUEUE).
#SBATCH --signal=B:USR1@120
#
# sbatch slurm.sh python train.py
#
# The script saves at a boundary between two iterations, on all ranks at the same one, and goes on from there when
# the job starts again. HOLDFAST_STORE has to be where all nodes see it: a shared directory, or s3://bucket/prefix.

grace_seconds=110 # less than Slurm gives
srun holdfast run --stay never --grace "$grace_seconds" -- "$@" &
training=$!
queue_again=no
trap 'queue_again=yes; kill -TERM "$training"' USR1
trap 'kill -TERM "$training"' TERM

wait "$training"
status=$?
while kill -0 "$training" 2> /dev/null; do # a trap has ended that wait, not the training
    wait "$training"
    status=$?
done
if [ "$queue_again" = yes ] && [ "$status" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
