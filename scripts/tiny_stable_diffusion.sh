#!/usr/bin/env bash
# A tiny Stable Diffusion and a tiny SDXL from nothing on two CPU cores, offline, in about an hour: the autoencoder that both
# have, its decoder once more, latents that are made before, and then both networks with their text towers side by side,
# one core each. What they paint is judged at the end (exit code 1 where a target is missed), and
# scripts/pack_tiny_weights.py puts it into the package. The same command goes on where it was stopped; remove
# runs/tiny_sd to start over. Further arguments are overrides of all runs, so none of data, which differs:
# scripts/tiny_stable_diffusion.sh train.max_steps=2
set -euo pipefail
cd "$(dirname "$0")/.."

folder=runs/tiny_sd
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1
mkdir -p $folder

# A signal, or the failure of one command, stops what runs beside it, and a training saves first.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill $(jobs -rp) 2>/dev/null || true; wait' EXIT

both() {
  .venv/bin/torchrun --standalone --nproc_per_node 2 -m cascade_train "$@" &
  wait $!
}
both experiment=tiny_vae run.dir=$folder/vae "$@"
both experiment=tiny_decoder run.dir=$folder/decoder model.weights=$folder/vae "$@"

vae=model.vae.weights=$folder/decoder
cache() {
  .venv/bin/cascade-train cache experiment=tiny_sd $vae captions=false out=$folder/latents task_count=2 "$@" &
}
network() {
  .venv/bin/python -m cascade_train experiment=tiny_"$1" run.dir=$folder/"$1" $vae data=cached \
    data.path=$folder/latents data.num_workers=0 ~data.samples ~data.only ~data.background_weight "${@:2}" &
}
cache task_index=0 "$@"
cache task_index=1 "$@"
wait -n
wait -n

echo "SDXL trains beside Stable Diffusion; what it says lies in $folder/sdxl.log"
network sdxl "$@" >$folder/sdxl.log 2>&1
network sd "$@"
wait -n
wait -n

.venv/bin/python bench/tiny_stable_diffusion.py --sd $folder/sd --sdxl $folder/sdxl --out $folder/judged.md &
wait $!
