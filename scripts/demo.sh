#!/usr/bin/env bash
# The main job on the embedded default: a LoRA teaches the tiny Stage C a word, [star], for a shape that it never saw.
# What `make demo` runs, on the CPU, offline; the previewer shows the pictures, decoder=package:tiny would take Stage B. A
# run that is finished is not trained again: remove runs/demo to start over. Further arguments are overrides of the run:
# scripts/demo.sh train.max_steps=20
set -euo pipefail
cd "$(dirname "$0")/.."

folder=runs/demo run=runs/demo/star
prompts='prompts=["a large red [star] in the center on a white background",
  "a large blue [star] at the top left on a yellow background",
  "a small white [star] on the right on a purple background",
  "a large green circle at the bottom on a pink background"]'
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1

paint() {
  .venv/bin/python -m cascade_train.generate from="$1" "$prompts" count=4 out="$2" >/dev/null
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
