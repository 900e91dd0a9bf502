#!/bin/bash
# What to run on a machine with a GPU, the most telling first: six parts, each below ten minutes, half an hour in all.
#
#     scripts/gpu_session.sh                 every part that has not been completed yet
#     scripts/gpu_session.sh faults resizes  these parts, also if they have been
#     scripts/gpu_session.sh --list          the commands alone
#
# Results and logs are in out/gpu. A part that fails or is cut off does not end the others, and runs again the next time.
# GPU_PYTHON: a Python with torch for CUDA and pytest. SEED: of faults and testbed; with another one, pieces add up.
# The testbed needs out/benchmark_data.npz, made before and elsewhere by scripts/make_benchmark_data.py (it needs fonts).
set -u
cd "$(dirname "$0")/.."
PY=${GPU_PYTHON:-python3} SEED=${SEED:-31} OUT=out/gpu
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
PARTS="tests faults resizes testbed fsdp overhead"

command_of() {
  case $1 in
    # NCCL in the job's store, precision, no waits for the device, out of memory, checkpoints
    tests) echo "$PY -m pytest -q tests/unit/train/test_gpu.py" ;;
    # killed and frozen replicas: hangs, lost jobs, wrong examples, seconds to the next step (docs/performance.md)
    faults) echo "$PY benchmarks/gpu_faults.py --faults 60 --seed $SEED --limit-s 420 --replicas 2 7 --out $OUT/faults.json" ;;
    # stall and whole time of 1 -> 2 -> 4 -> 3 -> 1, and what it is made of (group, model, state in the log)
    resizes) echo "$PY benchmarks/gpu_faults.py --resizes --limit-s 280 --logs $OUT/resize-logs-$SEED --out $OUT/resizes.json" ;;
    # average JCT, quality and energy of ten real jobs, against static sizes tuned by hand
    testbed) echo "$PY benchmarks/testbed.py --slots-per-gpu 4 --data out/benchmark_data.npz --arms pollux tuned --seed $SEED --limit-s 560 --out $OUT/testbed" ;;
    # a sharded model: values against unsharded training, lost shards
    fsdp) echo "$PY benchmarks/fsdp.py --parts values kills --limit-s 200 --out $OUT/fsdp.jsonl" ;;
    # a step against plain DDP with two replicas
    overhead) echo "$PY benchmarks/train_overhead.py --replicas 2 --rounds 8 --json" ;;
    *) return 1 ;;
  esac
}

if [ "${1:-}" = --list ]; then
  for part in $PARTS; do printf '%-9s %s\n' "$part" "$(command_of "$part")"; done
  exit 0
fi
for part in "$@"; do
  command_of "$part" >/dev/null || { echo "no part is called $part; there are: $PARTS"; exit 2; }
done
mkdir -p "$OUT"
failed=""
for part in ${*:-$PARTS}; do
  command=$(command_of "$part")
  if [ $# = 0 ] && [ -e "$OUT/$part-$SEED.done" ]; then echo "== $part: done before"; continue; fi
  echo "== $part: $command"
  begun=$SECONDS
  if timeout --kill-after=10 590 $command 2>&1 | tee "$OUT/$part-$SEED.log" && [ "${PIPESTATUS[0]}" = 0 ]; then
    touch "$OUT/$part-$SEED.done"
  else
    failed="$failed $part"
  fi
  echo "== $part: $((SECONDS - begun)) s"
done
if [ -n "$failed" ]; then echo "not completed:$failed (logs in $OUT)"; exit 1; fi
