#!/usr/bin/env bash
# A whole tiny cascade from nothing on two CPU cores, offline: Stage A, Stage B with the semantic compressor, a previewer
# of its latents, Stage C; then what it paints is judged. The same command goes on where it was stopped; remove
# runs/tiny to start over. Further arguments are overrides of all four runs: scripts/tiny_cascade.sh train.max_steps=2
set -euo pipefail
cd "$(dirname "$0")/.."

folder=runs/tiny
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1

train() {
  .venv/bin/torchrun --standalone --nproc_per_node 2 -m cascade_train "$@"
}

train experiment=tiny_a run.dir=$folder/a "$@"
train experiment=tiny_b run.dir=$folder/b model.stage_a.weights=$folder/a "$@"
train experiment=tiny_c run.dir=$folder/previewer model.semantic_compressor.weights=$folder/b \
  task=reconstruction objective=preview train.max_steps=1000 data.background_weight=0.1 "$@"
train experiment=tiny_c run.dir=$folder/c model.semantic_compressor.weights=$folder/b \
  model.previewer.weights=$folder/previewer "$@"

.venv/bin/python bench/tiny_cascade.py --prior $folder/c --decoder $folder/b --out $folder/judged.md
