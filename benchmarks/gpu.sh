#!/usr/bin/env bash
# Try NCCL on one GPU, and measure it, in half an hour, the most valuable first, into runs/gpu:
#
#     CIFAR10_DIR=data bash benchmarks/gpu.sh
#     bash benchmarks/gpu.sh nccl     # this step alone, or several
#     bash benchmarks/gpu.sh --dry    # the same commands on a CPU, with little work
#
# CIFAR10_DIR has cifar-10-batches-py; without it, images are synthetic. Needs `pip install
# '.[test,lint]'`, and then no network. OUT= names another folder, PYTHON= another interpreter. A
# step has a limit in seconds. Its output is in NAME.txt; steps.txt has exit codes and seconds. Exit
# status 1: a step failed.
# shellcheck disable=SC2086  # flags are words
set -uo pipefail
cd "$(dirname "$0")/.." || exit
OUT=$(realpath -m "${OUT:-runs/gpu}") PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
DATA="--data synthetic" SLOW=1
[ -n "${CIFAR10_DIR:-}" ] && DATA="--data cifar10 --data-dir $CIFAR10_DIR"
FAST="$DATA --epochs 50 --compile --log-every 100 --checkpoint-every 500"
SHORT="--data synthetic --max-steps 90 --log-every 30 --precision bf16" SIZES="128 512"
BENCH="--rounds 1 --steps 30 --minutes 4" TESTS="-q -n 4" NCCL=
if [ "${1:-}" = --dry ]; then
    shift
    export TORCH_COMPILE_DISABLE=1 TESTS=--collect-only
    FAST="--cpu --data synthetic --model simple_cnn --max-steps 2 --log-every 1 --precision bf16"
    SHORT=$FAST SIZES=8 SLOW=10 NCCL="--cpu --cases ddp-2"
    BENCH="--rounds 1 --steps 1 --batch-size 8 --model simple_cnn --processes 1"
fi
STEPS=$* FAILED=0
step() {  # step NAME LIMIT COMMAND
    [[ " ${STEPS:-$1} " = *" ${1%% *} "* ]] || return 0
    local began=$SECONDS code=0
    timeout --kill-after 30 $(($2 * SLOW)) "${@:3}" > "$OUT/$1.txt" 2>&1 || code=$? FAILED=1
    echo "$1: exit code $code, $((SECONDS - began)) s ($OUT/$1.txt)" | tee -a "$OUT/steps.txt"
}
train() {  # train NAME LIMIT COPY FLAGS
    step "$1" "$2" "$PYTHON" "$OUT/$3.py" --output-dir "$OUT/$1" "${@:4}"
}
mkdir -p "$OUT"
step nccl 590 "$PYTHON" benchmarks/nccl.py --output-dir "$OUT/nccl" $NCCL
step nccl-one-machine 300 "$PYTHON" benchmarks/nccl.py --output-dir "$OUT/nccl-one-machine" \
    --one-machine --cases ddp-2 sharded-2 pipeline-2 killed replicas-4 1f1b-4 $NCCL
for example in fast_cifar "fast_cifar ema"; do
    step "new $example" 20 "$PYTHON" tools/new.py new "$OUT/${example/ /_}.py" --recipe amp --with $example
done
step tests 300 "$PYTHON" -m pytest $TESTS tests/test_gpu.py
# 500 divides the test set: a smaller last batch would be compiled, too.
train fast 240 fast_cifar $FAST --batch-size 500 --evaluate-every 500
step bench 250 "$PYTHON" benchmarks/bench.py $BENCH --output-dir "$OUT/bench" --recipes plain_ddp \
    'plain_ddp --tuned' 'amp_cifar --compile'
for value in True False; do
    sed "s/\(cudnn.benchmark = \).*/\1$value/" recipes/amp_cifar.py > "$OUT/$value.py"
    for size in $SIZES; do train "cudnn-$value-$size" 40 $value $SHORT --batch-size "$size"; done
done
train fast-ema 240 fast_cifar_ema $FAST --batch-size 500 --evaluate-every 500
exit "$FAILED"
