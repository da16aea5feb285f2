"""Write the frozen set: small runs, a cache, exports, a sweep and an evaluation as commit a18770c leaves them.

    git checkout a18770c -- src conf docs && python tests/frozen/make.py && git checkout HEAD -- src conf docs

What each part is for, and how tests use it: README.md here.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests import conftest  # noqa: E402, F401 - before torch, the arithmetic of tests

# isort: split

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.checkpoint import filesystem  # noqa: E402

from cascade_train.__main__ import launch  # noqa: E402
from cascade_train.config.targets import import_target  # noqa: E402
from cascade_train.models.formats.weights_source import local_path  # noqa: E402
from tests.distributed.forked import be_rank, free_port  # noqa: E402
from tests.integration.runs import TIMING, tensor_digests  # noqa: E402
from tests.unit.data.tars import write  # noqa: E402

COMMIT = "a18770c"
ARCHIVE, TARGETS = HERE / f"{COMMIT}.tar.xz", HERE / f"{COMMIT}_targets.txt"
WORK = Path("/tmp/cascade_train_frozen")
"""Named in what the runs write, so the same wherever this is called."""
WRITTEN_AT = 1_700_000_000
STEP, STEPS = 2, 4


def tower(name: str, width: int, layers: int) -> str:
    """Return the overrides that make a text tower narrow."""
    sizes = ("hidden_size", "intermediate_size")
    keys = f"num_hidden_layers={layers} num_attention_heads=1 " + " ".join(f"{each}={width}" for each in sizes)
    return " ".join(f"model.{name}.{each}" for each in keys.split())


LEVELS = f"""model.image_size=32 model.network.block_out_channels=[8,8] model.network.num_attention_heads=[1,1]
  model.network.down_num_layers_per_block=[1,1] model.network.up_num_layers_per_block=[1,1]
  model.network.conditioning_dim=16 model.network.timestep_ratio_embedding_dim=8
  model.network.clip_text_pooled_in_channels=16 model.text_encoder.projection_dim=16
  {tower("text_encoder", 16, 1)} model.text_encoder.weights=null"""
C = f"""model=c_tiny {LEVELS} model.network.clip_text_in_channels=16 model.network.clip_image_in_channels=16"""
B = f"""model=b_tiny model.weights=null {LEVELS} model.network.patch_size=2 model.network.dropout=[0.0,0.0]
  model.network.down_blocks_repeat_mappers=[1,1] model.network.up_blocks_repeat_mappers=[2,1]
  model.network.block_types_per_layer=[[SDCascadeResBlock,SDCascadeTimestepBlock],\
[SDCascadeResBlock,SDCascadeTimestepBlock,SDCascadeAttnBlock]]"""
A = """model=a_tiny model.weights=null model.image_size=32 model.embed_dim=8 model.num_vq_embeddings=16
  model.bottleneck_blocks=1"""
VAE = "model=vae_tiny model.weights=null model.latent_channels=4 model.block_out_channels=[4,4,8]"
UNET = f"""model.network.block_out_channels=[4,8] model.network.norm_num_groups=2 model.network.attention_head_dim=[1,1]
  {tower("text_encoder", 8, 2)}"""
SD = f"model=sd_tiny {UNET} model.network.cross_attention_dim=8"
SDXL = f"""model=sdxl_tiny {UNET} {tower("text_encoder_2", 8, 2)} model.text_encoder_2.projection_dim=8
  model.network.cross_attention_dim=16 model.network.addition_time_embed_dim=2
  model.network.projection_class_embeddings_input_dim=20"""
NEW, ON_C = "model.weights=null", "model.weights=base/c"
NEW_SD = f"{NEW} model.text_encoder.train=true model.text_encoder.weights=null"
NEW_SDXL = f"{NEW_SD} model.text_encoder_2.train=true model.text_encoder_2.weights=null"
ON_SD = "model.weights=base/sd model.text_encoder.weights=base/sd/pipeline"
ON_SDXL = "model.weights=base/sdxl " + " ".join(
    f"model.text_encoder{each}.weights=base/sdxl/pipeline" for each in ("", "_2")
)
ADAPTERS = "task=lora task.rank=1"
LORA = f"{ADAPTERS} optimizer.lr=1e-2"
STAR, COLOURS = '["[star]","^star</w>"]', '["^(red|green|blue)</w>",null]'
TOWERS = "task.text_encoder_filters=[.self_attn]"
SGD = "optimizer=torch optimizer.algorithm._target_=torch.optim.SGD optimizer.lr=1"
ADAPTIVE = "objective=adaptive objective.loss_weight.buckets=8 optimizer.lr=1e-2"
OPPONENT = """task=reconstruction optimizer.lr=4e-3 objective.adversarial.start_step=2 objective.adversarial.channels=4
  objective.adversarial.layers=1"""
LOOK = f"validate.every_steps={STEPS} validate.share=0.3 validate.samples=12 validate.logsnr=[0]"
FEW = "data.samples=12"
FOLDER = "data=folder data.path=data/folder"
MIXTURE = """data=mixture +data@data.sources.a=webdataset data.sources.a.urls='data/{0..1}.tar'
  +data@data.sources.b=folder data.sources.b.path=data/folder +data@data.sources.c=csv
  data.sources.c.path=data/table.csv data.sources.c.caption_column=text data.shares={a:0.5,b:0.3,c:0.2}"""
COMMON = f"""checkpoint.every_steps={STEP} checkpoint.keep_last=null train.global_batch_size=4 sample.every_steps=null
  data.num_workers=0"""
PAIR = f"task=finetune {C} {NEW} {LOOK} {ADAPTIVE} ema.decay=0.8 parallel=fsdp data.samples=24"
RUNS = {
    "c_finetune": f"""task=finetune {C} {NEW} {LOOK} {ADAPTIVE} {MIXTURE} ema.decay=0.8 lr_scheduler=cosine
        lr_scheduler.warmup_steps=1 train.micro_batch_size=2 data.flip_prob=0.5""",
    "c_lora": f"""{LORA} {C} {ON_C} task.train_tokens=[{STAR},{COLOURS}] {TOWERS} task.dora=true task.dropout=0.3
        ema.decay=0.8 optimizer=prodigy optimizer.lr=1 optimizer.algorithm.d0=1e-2
        data=webdataset data.urls='data/{{0..1}}.tar' data.row_filters={{score:'>0'}}""",
    "c_plain_lora": f"""{LORA} {C} {ON_C} {FEW} task.joint_qkv=true train.precision=bf16
        optimizer=adamw_8bit optimizer.algorithm.block_size=4""",
    "c_controlnet": f"""task=controlnet {C} {ON_C} {FOLDER} model.image_size=64 data.aspect_ratios=[1/1,1/2]
        filter@task.filter=sr_effnet task.filter.scale_factor=1 task.bottleneck=simple task.control_drop_prob=0.3
        optimizer=lion optimizer.lr=1e-2""",
    "c_cached": f"{LORA} {C} {ON_C} data=cached data.path=cache",
    "c_stream": f"""{LORA} {C} {ON_C} data=webdataset data.urls=data/stream.tar.gz data.stream.buffer_samples=5
        rollback.enabled=true rollback.spike_factor=100""",
    "previewer": f"""task=reconstruction objective=preview model=c_tiny model.image_size=32 {FEW} optimizer.lr=3e-3
        model.previewer.weights=data/previewer.safetensors""",
    "b_reconstruction": f"""task=reconstruction {B} {FEW} optimizer=muon optimizer.lr=3e-3 train.micro_batch_size=1
        noise@objective.noise=pyramid""",
    "a_vqgan": f"{A} {OPPONENT} {LOOK} {FEW} ema.decay=0.8 objective.revive_after_steps=1",
    "autoencoder_kl": f"""{VAE} {OPPONENT} {LOOK} {FEW} validate.every_steps=2 checkpoint.keep_last=2
        checkpoint.keep_best=1 checkpoint.best_metric=validate/loss""",
    "sd_finetune": f"""task=finetune {SD} {NEW_SD} {FEW} {LOOK} model.text_encoder.lr=1e-3
        optimizer=schedule_free optimizer.lr=1e-2""",
    "sd_lora": f"{LORA} {SD} {ON_SD} {FEW} task.train_tokens=[{STAR},{COLOURS}] {TOWERS} optimizer=came",
    "sd_controlnet": f"task=controlnet {SD} {ON_SD} {FEW} {SGD}",
    "sdxl_finetune": f"task=finetune {SDXL} {NEW_SDXL} {FEW} optimizer=adafactor objective=edm_sdxl",
    "sdxl_lora": f"{LORA} {SDXL} {ON_SDXL} {FEW} task.train_tokens=[{STAR}] {TOWERS} objective=ddpm_min_snr",
    "sdxl_controlnet": f"task=controlnet {SDXL} {ON_SDXL} {FEW} {SGD}",
}
BASES = {"c_finetune": "c", "sd_finetune": "sd", "sdxl_finetune": "sdxl"}
"""Whose last exports other runs begin from."""

EXPORTS = {
    "c_finetune": "[diffusers,original]",
    "c_lora": "[peft,single,comfyui]",
    "c_plain_lora": "[peft,single,comfyui,original]",
    "c_controlnet": "null",
    "previewer": "null",
    "b_reconstruction": "[diffusers,original]",
    "a_vqgan": "null",
    "autoencoder_kl": "null",
    "sd_finetune": "[diffusers,single_file]",
    "sd_lora": "[peft,single]",
    "sd_controlnet": "null",
    "sdxl_finetune": "[diffusers,single_file]",
    "sdxl_lora": "[peft,single,kohya]",
    "sdxl_controlnet": "null",
    "pair": "[diffusers]",
}
CACHE = f"task=finetune {C} {NEW} {FOLDER} data.num_workers=0 out=cache unit_samples=5 batch_size=4"
SWEEP = f"{ADAPTERS} {C} {ON_C} {FEW} {COMMON} train.max_steps={STEP} run.name=rates optimizer.lr=1e-3,1e-2"
EVALUATION = f"""from=c_finetune checkpoint={STEP} prompts=[red,blue,green,circle] real=data/folder
  features=package:tiny steps=2 sampler=ddim batch_size=2"""
DROPPED = ("export", "loss.png", "report.html", "grid.png", "environment.json", ".cascade_train_index", f"step_{STEPS}")
"""What no later start needs of a run's folder."""


def write_data(folder: Path) -> None:
    """Write the pictures that runs train on: two tars, one of them compressed too, a folder and a table."""
    (folder / "folder").mkdir(parents=True)
    words = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "star", "box")]

    def sample(number: int) -> dict[str, bytes]:
        blocks = np.random.default_rng(number).integers(0, 255, (4, 8 if number % 3 else 4, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((8 * blocks.shape[1], 32), Image.Resampling.NEAREST).save(
            file := io.BytesIO(), "png"
        )
        text, data = words[number % len(words)], {"score": number % 5}
        return {"png": file.getvalue(), "txt": text.encode(), "json": json.dumps(data).encode()}

    def members(first: int, end: int) -> list[tuple[str, bytes]]:
        return [(f"{i:02d}.{kind}", data) for i in range(first, end) for kind, data in sample(i).items()]

    write(folder / "0.tar", members(0, 6))
    write(folder / "1.tar", members(6, 12))
    with gzip.GzipFile(folder / "stream.tar.gz", "wb", mtime=0) as file:
        file.write(write(folder / "stream.tar", members(0, 11)).read_bytes())
    (folder / "stream.tar").unlink()
    for i in range(20, 29):
        for kind, data in sample(i).items():
            (folder / "folder" / f"{i}.{kind}").write_bytes(data)
    rows = [f"folder/{i}.png,{words[i % 9]} on black" for i in range(20, 26)]
    (folder / "table.csv").write_text("\n".join(["image,text", *rows, ""]))
    weights = load_file(local_path("package:tiny/previewer") / "model.safetensors")
    *inner, last = [name for name in weights if name.endswith("weight")]
    for name in inner:  # all channels but four are zero and stay so, which compresses
        weights[name][4:] = 0
        weights[name][:, 4:] = 0
        weights[name.replace("weight", "bias")][4:] = 0
    weights[last][:, 4:] = 0
    save_file(weights, folder / "previewer.safetensors")
    for path in folder.rglob("*"):
        os.utime(path, (WRITTEN_AT, WRITTEN_AT))


def run(*arguments: str) -> None:
    """Run a command of the library in this process."""
    if launch(list(arguments)) != 0:
        raise SystemExit(f"failed: {arguments}")


def train_pair(arguments: list[str]) -> None:
    """Train on two ranks, forks of this process."""
    port, ranks = free_port(), []
    for rank in range(2):
        if (child := os.fork()) == 0:
            code = be_rank(rank, port, {"out": ".", "ranks": 2, "hook": "gather_at_once", "argv": arguments})
            os._exit(code)
        ranks.append(child)
    if sum(os.waitpid(child, 0)[1] for child in ranks):
        raise SystemExit(Path("said_0").read_text())


def targets_below(*folders: Path) -> set[str]:
    """Return every name that follows `_target_` in the configurations and pages below folders."""
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".yaml", ".md")]
    found = {name for path in files for name in re.findall(r"_target_[:=] *([\w.]*\w)", path.read_text())}
    ours = {name for name in found if name.partition(".")[0] in ("cascade_train", "torch")}
    return {name for name in ours if callable(import_target(name))}


def pack(folder: Path, archive: Path) -> None:
    """Write what later starts need of a folder as one file, the same whenever it is written."""
    clocks = re.compile(rf'"({"|".join((*TIMING, "time"))})": [^,}}\n]*')
    sweep = folder / "multirun" / "rates" / "multirun.yaml"
    sweep.write_text(sweep.read_text().replace(str(ROOT), "/checkout"))
    for path in sorted(folder.rglob("*.json*")):
        path.write_text(re.sub(r'"call": "\w+"', f'"call": "{COMMIT}"', clocks.sub(r'"\1": 1.0', path.read_text())))

    def kept(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.mtime, info.uid, info.gid, info.uname, info.gname = WRITTEN_AT, 0, 0, "", ""
        return None if Path(info.name).name in DROPPED else info

    with lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name, filter=kept)


def main() -> None:
    """Make everything in one folder, and write the archive and the list of targets beside this file."""
    compared = ["git", "diff", "--quiet", COMMIT, "--", "src", "conf", "docs"]
    if subprocess.run(compared, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"src, conf and docs are not those of {COMMIT}: git checkout {COMMIT} -- src conf docs")
    filesystem._generate_uuid = lambda: COMMIT
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    os.chdir(WORK)
    write_data(Path("data"))
    runs = {name: f"{COMMON} train.max_steps={STEPS} run.dir={name} {RUNS.get(name, PAIR)}" for name in ("pair", *RUNS)}
    commands = {name: text.split() for name, text in runs.items()}
    cache, sweep = ["cache", *CACHE.split()], ["--multirun", *SWEEP.split()]
    evaluation = ["evaluate", *EVALUATION.split()]
    train_pair(commands["pair"])
    run(*cache)
    for name in RUNS:
        run(*commands[name])
        if name in BASES:
            shutil.copytree(f"{name}/export", f"base/{BASES[name]}", ignore=shutil.ignore_patterns("vae"))
    exports = {}
    for name, formats in EXPORTS.items():
        run("export", f"from={name}", f"step={STEP}", f"format={formats}", f"out=exports/{name}")
        exports[name] = {"format": formats, "tensors": tensor_digests(Path("exports", name))}
    run(*sweep)
    run("report", "multirun/rates", "promote=exports/best")
    run("checkpoints", "promote", "c_finetune", f"step_{STEP}", "name=kept")
    run(*evaluation)
    made = {"cache": cache, "sweep": sweep, "evaluation": evaluation, "best": tensor_digests(Path("exports/best"))}
    Path("frozen.json").write_text(json.dumps({"runs": commands, "exports": exports, **made}))
    TARGETS.write_text("".join(f"{name}\n" for name in sorted(targets_below(ROOT / "conf", ROOT / "docs", WORK))))
    for path in (*Path().glob("said_*"), Path("exports")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    pack(WORK, ARCHIVE)


if __name__ == "__main__":
    main()
