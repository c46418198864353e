#!/usr/bin/env bash
# Train under Slurm, on one node or many, with one `accelerate launch` per node. From the top of
# this repository:
#
#   sbatch recipes/submit_job.sh
#   sbatch --nodes=2 recipes/submit_job.sh recipes/amp_cifar.py --epochs 30
#
# On two nodes or, when one of them has died, on the one that is left: the number of samples in a
# step is given, and each number of processes divides it.
#
#   sbatch --nodes=1-2 recipes/submit_job.sh recipes/ddp_cifar.py --global-batch-size 1024
#
# The first argument is the recipe (without any, ddp_cifar.py), the others are its flags. Every GPU
# of the job gets a process; where there are no GPUs, `sbatch --ntasks-per-node=4` says how many.
# PROCESSES_PER_NODE=1 in the environment overrides both, for data_parallel_cifar.py, one process
# over all GPUs. Before its time limit, and when it is preempted, the job saves a checkpoint, goes
# back into the queue by itself, and continues when it is started again.

# Where commands have to be activated first, put `. .venv/bin/activate` or `module load ...` before
# `set -u` below.
# Where your cluster asks for them, fill these in and take one of the two hashes away:
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION

#SBATCH --job-name=recipe
#SBATCH --nodes=1
# Whole nodes: all their cores, GPUs and, by --mem=0, memory. A part of a node is taken by
# `sbatch --oversubscribe --gpus-per-node=2 --cpus-per-task=16 --mem=64G`.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
# The warning, this many seconds before the time limit.
#SBATCH --signal=USR1@120
# The first node writes this file, the others slurm-JOB-node-N.out; being requeued does not begin a
# new one.
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append

set -u
trap : TERM # of scancel, which the training gets, too: let it save and end first

recipe=${1:-recipes/ddp_cifar.py}
# There a recipe finds its checkpoints when the job is started again.
flags=(--output-dir "runs/slurm-$SLURM_JOB_ID" "${@:2}")

per_node=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-${SLURM_NTASKS_PER_NODE:-1}}}
total=$((per_node * SLURM_NNODES))
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
address() { scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
first_node=$(address "$(head -n 1 <<< "$nodes")")
last_node=$(address "$(tail -n 1 <<< "$nodes")")
export first_node last_node
if [ "$total" -gt 1 ]; then
    launch=(
        --config_file accelerate_configs/nodes.yaml
        --num_machines "$SLURM_NNODES" --num_processes "$total"
        --main_process_ip "$first_node"
        --main_process_port $((12000 + SLURM_JOB_ID % 20000)) # two jobs on one node don't meet
    )
else
    launch=(--config_file accelerate_configs/1gpu.yaml)
fi
where="on $SLURM_NNODES node(s) with $per_node process(es) each"
echo "job $SLURM_JOB_ID: $recipe ${flags[*]} $where"

# What runs on each node. gloo would take the address of the host's name, which may be a loopback
# one: its interface is that of the route to the first node, or from there to the last. Slurm
# signals every process of a step. The ranks save and leave; the launcher has to wait for them, so
# it ignores the signal (PET_SIGNALS_TO_HANDLE: instead of stopping them), which the ranks inherit
# until they are up: hence again and again. Exit code 138 means that it was stopped, not that it
# failed.
# shellcheck disable=SC2016
on_node='
    warned=
    [ "$SLURM_NODEID" = 0 ] || exec >> "slurm-$SLURM_JOB_ID-node-$SLURM_NODEID.out" 2>&1
    if [ "$SLURM_NNODES" -gt 1 ] && [ -z "${GLOO_SOCKET_IFNAME:-}" ]; then
        if [ "$SLURM_NODEID" = 0 ]; then peer=$last_node; else peer=$first_node; fi
        route=$(ip route get "$(getent ahosts "$peer" | sed "s/ .*//;q")") &&
            export GLOO_SOCKET_IFNAME="$(sed -n "s/.* dev \([^ ]*\).*/\1/p" <<< "$route")"
    fi
    (
        trap "" USR1 TERM
        PET_SIGNALS_TO_HANDLE=SIGINT exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"
    ) &
    trap warned=yes USR1 TERM
    wait $! # which a signal ends
    while kill -0 $! 2> /dev/null; do
        pkill -USR1 --parent $!
        sleep 1
    done
    wait $! # again, for the exit code: where it is 0, the training was complete all the same
    code=$?
    if [ "$warned" ] && [ "$code" != 0 ]; then code=138; fi
    exit $code
'
# The fewest cores of a node, as nodes may differ: "32(x2),16" is two of 32 and one of 16.
cores=$(tr , '\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sort -n | head -n 1)
# Not --kill-on-bad-exit: where a node has died, Slurm needs time to see it and to requeue the job.
# The GPUs are named because a step doesn't get those that the job has by --exclusive alone.
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="${cores%%(*}" \
    --kill-on-bad-exit=0 --export=ALL \
    ${SLURM_GPUS_ON_NODE:+--gpus-per-node="$SLURM_GPUS_ON_NODE"} \
    bash -c "$on_node" on_node "${launch[@]}" "$recipe" "${flags[@]}"
code=$?

state=$(scontrol show job "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z]*')
if [ "$code" = 138 ] && [ "$state" = JobState=RUNNING ]; then # and not being cancelled
    echo "job $SLURM_JOB_ID: saved, back into the queue"
    # Until Slurm ends this script: ending by itself, it could fail the job.
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$code"
