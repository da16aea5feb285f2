#!/usr/bin/env bash
# The main job on the embedded default: a LoRA teaches the tiny Stage C a word, [sides], for what it never saw: two objects.
# What `make demo` runs, on the CPU, offline. Stage C, B and A of the package paint the pictures, before and after. A run
# that is finished is not trained again: remove runs/demo to start over. Further arguments are overrides of the run:
# scripts/demo.sh train.max_steps=20
set -euo pipefail
cd "$(dirname "$0")/.."

folder=runs/demo run=runs/demo/sides
prompts='prompts=["a large red circle at the [sides] on a white background",
  "a large blue cross at the [sides] on a yellow background",
  "a small yellow square at the [sides] on a purple background",
  "a large green circle at the bottom on a pink background"]'
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1

paint() {
  .venv/bin/cascade-train generate from="$1" decoder=package:tiny "$prompts" count=4 out="$2" >/dev/null
}

paint package:tiny "$folder/before"
.venv/bin/torchrun --standalone --nproc_per_node 2 -m cascade_train experiment=tiny_token run.dir="$run" "$@"
paint "$run" "$folder/after"

printf '\n%s\n' "$run"
printf '  before      %s\n' "$folder/before/grid.png"
printf '  after       %s\n' "$folder/after/grid.png"
printf '  metrics     %s\n' "$run/metrics.jsonl"
printf '  loss curve  %s\n' "$run/loss.png"
printf '  checkpoint  %s\n' "$(ls -d "$run"/checkpoints/step_* | sort -V | tail -n 1)"
printf '  samples     %s\n' "$(ls "$run"/samples/step_*/grid.png | sort -V | tail -n 1)"
printf '  weights     %s\n' "$(ls -d "$run"/export/*/)"
