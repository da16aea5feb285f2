#!/usr/bin/env bash
# A whole tiny cascade from nothing on two CPU cores, offline, in about four hours: Stage A, and its decoder once more;
# the semantic compressor and its previewer; then Stage B, from latents that are made before, and Stage C side by side,
# one core each. What it paints is judged at the end (exit code 1 where a target is missed), and
# scripts/pack_tiny_weights.py puts it into the package. The same command goes on where it was stopped; remove
# runs/tiny to start over. Further arguments are overrides of all runs, so none of data, which differs:
# scripts/tiny_cascade.sh train.max_steps=2
set -euo pipefail
cd "$(dirname "$0")/.."

folder=runs/tiny
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1

# A signal, or the failure of one command, stops what runs beside it, and a training saves first.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill $(jobs -rp) 2>/dev/null || true; wait' EXIT

both() {
  .venv/bin/torchrun --standalone --nproc_per_node 2 -m cascade_train "$@" &
  wait $!
}
one() {
  .venv/bin/python -m cascade_train "$@" &
}

both experiment=tiny_a run.dir=$folder/codec "$@"
both experiment=tiny_a_decoder run.dir=$folder/a model.weights=$folder/codec "$@"
both experiment=tiny_compressor run.dir=$folder/compressor "$@"

compressor=model.semantic_compressor.weights=$folder/compressor
encoders="$compressor model.stage_a.weights=$folder/a"
cache() {
  .venv/bin/cascade-train cache experiment=tiny_b $encoders out=$folder/latents task_count=2 "$@" &
}
cache task_index=0 "$@"
cache task_index=1 "$@"
wait -n
wait -n

echo "Stage C trains beside Stage B; what it says lies in $folder/c.log"
one experiment=tiny_c run.dir=$folder/c $compressor model.previewer.weights=$folder/compressor "$@" >$folder/c.log 2>&1
cached="data=cached data.path=$folder/latents data.num_workers=0 ~data.samples ~data.background_weight"
one experiment=tiny_b run.dir=$folder/b $encoders $cached sample.every_steps=null validate.reconstructions=0 "$@"
wait -n
wait -n

.venv/bin/python bench/tiny_cascade.py --prior $folder/c --decoder $folder/b --out $folder/judged.md &
wait $!
