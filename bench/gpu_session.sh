#!/usr/bin/env bash
# What only a GPU can show, in about ten minutes: the gpu tests, then steps of real sizes, most wanted first.
#   bench/gpu_session.sh [FOLDER]        FOLDER, by default bench/results/gpu, gets gpu.md, steps.jsonl and tests.log.
#   MINUTES=30 PYTHON=python3 PEER=../StableCascade bench/gpu_session.sh        PEER: a checkout of the original beside it
# Weights are random, pictures are drawn: nothing is downloaded. A case that fails stands on the page with its last line.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-bench/results/gpu}
python=${PYTHON:-.venv/bin/python}
deadline=$((SECONDS + 60 * ${MINUTES:-10}))
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
mkdir -p "$out"
: >"$out/steps.jsonl"
page=$out/gpu.md
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "gpu_session: torch sees no GPU" >&2; exit 1; }

{
  printf '# On a GPU\n\n    bench/gpu_session.sh\n\n%s, torch %s, commit %s, %s. Weights are random, the data of four steps repeats.\n\n' \
    "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)" "$("$python" -c 'import torch; print(torch.__version__)')" \
    "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" "$(date -u +%F)"
} >"$page"

timeout 240 "$python" -m pytest --gpu --dist load -n 4 -q -p no:cacheprovider >"$out/tests.log" 2>&1
printf '`make gpu`: %s\n\n' "$(tail -n 1 "$out/tests.log")" >>"$page"

head=written_once
measure() {  # the options of bench/train.py, --, the overrides
  local left=$((deadline - SECONDS)) log code
  if [ "$left" -lt 45 ]; then
    printf '\nNot measured, time was up: `%s`\n' "$*" >>"$page"
    return
  fi
  log=$(mktemp)
  timeout "$left" "$python" bench/train.py --out "$log.json" "$@" data=shapes debug=random_weights >"$log" 2>&1
  code=$?
  if [ -s "$log.json" ]; then
    cat "$log.json" >>"$out/steps.jsonl"
    grep '^| ' "$log" | { [ -n "$head" ] && cat || tail -n 1; } >>"$page"
    head=
  else
    printf '\nEnded with %s (124: time was up): `%s`: %s\n' "$code" "$*" "$(grep -v '^ ' "$log" | tail -n 1 | cut -c 1-300)" >>"$page"
  fi
  rm -f "$log" "$log.json"
}

peer=()
[ -z "${PEER:-}" ] || peer=(--peer "$PEER")
c_1b="model=c_1b train.global_batch_size"
c_3b="model=c_3b train.global_batch_size"
b_3b="task=reconstruction model=b_3b activation_checkpointing=true train.global_batch_size"
sd="task=finetune model=sd21_base activation_checkpointing=true ema.decay=0.9999 train.precision=bf16"  # as open-diffusion states: 38 and 12 images/s on an A100
measure -- task=finetune $c_3b=16 activation_checkpointing=true model.kernels=fused
measure -- $sd model.image_size=512 train.global_batch_size=64
measure -- task=controlnet filter=canny $c_3b=8
measure "${peer[@]}" -- task=finetune $c_1b=16
measure -- $b_3b=16 model.kernels=fused
measure -- task=lora $c_3b=16 compile=regional
measure -- $sd model.image_size=256 train.global_batch_size=256
measure -- task=finetune $c_1b=16 parallel=fsdp
measure -- task=lora model=sdxl train.global_batch_size=16
measure -- task=reconstruction objective=vqgan model=a train.global_batch_size=4
measure -- $sd model.image_size=512 train.global_batch_size=64 compile=regional
measure -- task=finetune $c_3b=16 activation_checkpointing=true compile=regional
measure -- $b_3b=16 compile=regional
measure --steps 2 -- task=lora $c_1b=8
cat "$page"
