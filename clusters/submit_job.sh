#!/usr/bin/env bash
# Train under Slurm, on one node or many, with one `accelerate launch` per node. From the top of
# this repository:
#
#   sbatch clusters/submit_job.sh
#   sbatch --nodes=2 clusters/submit_job.sh recipes/amp_cifar.py --epochs 30
#
# On two nodes or, if one of them dies, on the other one. A fixed global batch, which any number of
# the job's processes divides, makes both the same training:
#
#   sbatch --nodes=1-2 clusters/submit_job.sh recipes/ddp_cifar.py --global-batch-size 1024
#
# The first argument is the recipe (default: ddp_cifar.py), the others are its flags. Each GPU of
# the job gets a process. Without GPUs, `sbatch --ntasks-per-node=4` sets the number of processes.
# PROCESSES_PER_NODE=1 in the environment overrides both: data_parallel_cifar.py needs one process
# for all GPUs. Before its time limit, and when it is preempted, the job saves a checkpoint and goes
# back into the queue. When Slurm starts it again, it resumes.

# If your environment has to be activated, put `. .venv/bin/activate` or `module load ...` before
# `set -u` below.
# If your cluster asks for these, fill them in and remove one of the two hashes:
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION

#SBATCH --job-name=recipe
#SBATCH --nodes=1
# Whole nodes: all their cores, GPUs and, by --mem=0, memory. For a part of a node:
# `sbatch --oversubscribe --gpus-per-node=2 --cpus-per-task=16 --mem=64G`.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
# Warn the job so many seconds before its time limit.
#SBATCH --signal=USR1@120
# The first node writes this file, the others write slurm-JOB-node-N.out. A requeued job appends.
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append

set -u
trap : TERM # scancel sends it to the training, too, which saves first

recipe=${1:-recipes/ddp_cifar.py}
# A job that Slurm starts again finds its checkpoints there.
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
        # Two jobs on one node need different ports.
        --main_process_port $((12000 + SLURM_JOB_ID % 20000))
    )
else
    launch=(--config_file accelerate_configs/1gpu.yaml)
fi
where="on $SLURM_NNODES node(s) with $per_node process(es) each"
echo "job $SLURM_JOB_ID: $recipe ${flags[*]} $where"

# This runs on each node. gloo would take the address of the host's name, which may be a loopback
# address, and NCCL the first network. Both get the interface of the route to the first node or, on
# the first, to the last.
# Slurm signals every process of a step. The ranks save and exit. The launcher has to wait for them:
# it ignores the signal, and PET_SIGNALS_TO_HANDLE keeps it from stopping them. The ranks inherit
# that until they have started, so the signal is repeated. Exit code 138 means stopped, not failed.
# shellcheck disable=SC2016
on_node='
    warned=
    [ "$SLURM_NODEID" = 0 ] || exec >> "slurm-$SLURM_JOB_ID-node-$SLURM_NODEID.out" 2>&1
    if [ "$SLURM_NNODES" -gt 1 ] && [ -z "${GLOO_SOCKET_IFNAME:-}" ]; then
        if [ "$SLURM_NODEID" = 0 ]; then peer=$last_node; else peer=$first_node; fi
        route=$(ip route get "$(getent ahosts "$peer" | sed "s/ .*//;q")") &&
            export GLOO_SOCKET_IFNAME="$(sed -n "s/.* dev \([^ ]*\).*/\1/p" <<< "$route")"
    fi
    if [ "${GLOO_SOCKET_IFNAME:-}" ]; then # NCCL takes names that begin so, and with "=" this one
        export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$GLOO_SOCKET_IFNAME}"
    fi
    (
        trap "" USR1 TERM
        PET_SIGNALS_TO_HANDLE=SIGINT exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"
    ) &
    trap warned=yes USR1 TERM
    wait $! # until it ends, or a signal comes
    while kill -0 $! 2> /dev/null; do
        pkill -USR1 --parent $!
        sleep 1
    done
    wait $! # for the exit code: 0 if the training was complete in spite of the signal
    code=$?
    if [ "$warned" ] && [ "$code" != 0 ]; then code=138; fi
    exit $code
'
# The fewest cores of a node, as nodes may differ: "32(x2),16" is two of 32 and one of 16.
cores=$(tr , '\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sort -n | head -n 1)
# Not --kill-on-bad-exit: if a node dies, Slurm needs time to notice it and to requeue the job.
# A step does not get the GPUs that the job has by --exclusive alone: it has to ask for them.
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="${cores%%(*}" \
    --kill-on-bad-exit=0 --export=ALL \
    ${SLURM_GPUS_ON_NODE:+--gpus-per-node="$SLURM_GPUS_ON_NODE"} \
    bash -c "$on_node" on_node "${launch[@]}" "$recipe" "${flags[@]}"
code=$?

state=$(scontrol show job "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z]*')
if [ "$code" = 138 ] && [ "$state" = JobState=RUNNING ]; then # and not being cancelled
    echo "job $SLURM_JOB_ID: saved, back into the queue"
    # Wait until Slurm ends this script. If it ended by itself, the job could count as failed.
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$code"
