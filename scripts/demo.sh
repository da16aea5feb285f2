#!/usr/bin/env bash
# The main job on the embedded default: trains a tiny Stage C, then a LoRA on the result. What `make demo` runs.
# On the CPU, offline, from tars that it writes first. A run that is finished is not trained again: remove
# runs/demo to start over. Further arguments are overrides of both runs: scripts/demo.sh train.max_steps=20
set -euo pipefail
cd "$(dirname "$0")/.."

folder=runs/demo
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1

train() {
  .venv/bin/torchrun --standalone --nproc_per_node 2 -m cascade_train "$@"
}

tell() {
  local run=$1
  printf '\n%s\n' "$run"
  printf '  metrics     %s\n' "$run/metrics.jsonl"
  printf '  loss curve  %s\n' "$(.venv/bin/python scripts/draw_curve.py "$run/metrics.jsonl" "$run/loss.png")"
  printf '  checkpoint  %s\n' "$(ls -d "$run"/checkpoints/step_* | sort -V | tail -n 1)"
  printf '  images      %s\n' "$(ls "$run"/samples/step_*/grid.png | sort -V | tail -n 1)"
  printf '  weights     %s\n' "$(ls -d "$run"/export/*/)"
}

if [[ ! -d $folder/shapes ]]; then
  rm -rf "$folder/shapes.part"
  .venv/bin/python -m cascade_train.shapes out="$folder/shapes.part" samples=2000
  mv "$folder/shapes.part" "$folder/shapes"
fi

data=(data=webdataset "data.urls=\"$folder/shapes/shapes-{000000..000003}.tar\"" data.num_workers=0)
train experiment=tiny_finetune "${data[@]}" run.dir="$folder/finetune" "$@"
train experiment=tiny_lora "${data[@]}" run.dir="$folder/lora" model.weights="$folder/finetune" "$@"

tell "$folder/finetune"
tell "$folder/lora"
