#!/usr/bin/env bash
# The picture of docs/first-lora.md, first_lora.png: prompts before training, after training on stars alone, and with others mixed in.
# A few minutes on two CPU cores, offline. Arguments: a folder to work in, runs/first_lora if none is given, and overrides of both
# trainings: scripts/first_lora.sh /tmp/tried train.max_steps=2
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/runs/first_lora}
shift || true
mkdir -p "$folder"
cd "$folder"
export PATH="$root/.venv/bin:$PATH" OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1

prompts='prompts=["a large green star in the center on a black background",
  "a large red star at the top left on a blue background", "a large blue circle in the center on a white background"]'
common=(task=lora model=c_tiny data.num_workers=1 optimizer.lr=4e-3 task.rank=8 task.alpha=8 train.global_batch_size=16
  sample.every_steps=null)

paint() { cascade-train generate from="$1" decoder=package:tiny "$prompts" out="$2"; }

if [ ! -d stars ]; then
  cascade-train shapes out=drawn samples=700 samples_per_shard=700
  mkdir others stars
  tar -xf drawn/shapes-000000.tar -C others
  for caption in $(grep -l star others/*.txt); do mv "${caption%.txt}".* stars/; done
fi
cascade-train "${common[@]}" data=folder data.path=stars train.max_steps=300 run.name=stars "$@"
cascade-train "${common[@]}" data=regularised data@data.source=folder data.source.path=stars \
  data@data.regularisation=folder data.regularisation.path=others data.share=0.4 train.max_steps=800 run.name=kept "$@"
paint package:tiny before
paint runs/stars after
paint runs/kept kept
python - <<'PYTHON'
from PIL import Image, ImageDraw

columns, side, labels = ("before", "after", "kept"), 192, 150
rows = (
    "a large green star\nin the center\non a black background",
    "a large red star\nat the top left\non a blue background",
    "a large blue circle\nin the center\non a white background",
)
sheet = Image.new("RGB", (labels + 3 * (side + 8) - 8, 3 * (side + 8) + 12), "white")
draw = ImageDraw.Draw(sheet)
for y, prompt in enumerate(rows):
    draw.text((4, y * (side + 8) + 24), prompt, fill="black")
for x, (folder, title) in enumerate(zip(columns, ("before", "stars alone", "with other pictures"))):
    draw.text((labels + x * (side + 8) + 4, 4), title, fill="black")
    for y in range(3):
        picture = Image.open(f"{folder}/{y:02d}_00.png").resize((side, side), Image.Resampling.NEAREST)
        sheet.paste(picture, (labels + x * (side + 8), y * (side + 8) + 20))
sheet.save("first_lora.png")
PYTHON
