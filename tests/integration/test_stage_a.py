"""Stage A through the real entry point: trains, resumes, is measured and shown, and Stage B uses what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from PIL import Image
from safetensors.torch import load_file

from tests.integration.runs import read_metrics, train

pytestmark = pytest.mark.slow

NARROW = ("weights=null", "embed_dim=16", "bottleneck_blocks=1", "num_vq_embeddings=32")
STAGE_A = (
    *("model=a_tiny", "task=reconstruction", "model.image_size=32"),
    *(f"model.{each}" for each in NARROW),
    *("train.global_batch_size=4", "ema.decay=0.9", "optimizer.lr=4e-3", "objective.revive_after_steps=1"),
    *("objective.adversarial.start_step=3", "objective.adversarial.channels=8", "objective.adversarial.layers=2"),
    *("validate.share=0.05", "validate.samples=8"),
)
FOLDER = Path("export", "vqgan")
WEIGHTS = FOLDER / "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that looks at itself once, at its end, where its one checkpoint is."""
    looks = ("sample.every_steps=4", "sample.count=2", "validate.every_steps=4", "checkpoint.every_steps=null")
    return train(tmp_path_factory.mktemp("a") / "run", *STAGE_A, *looks)


def test_the_opponent_begins_at_its_step_and_the_autoencoder_is_measured(run: Path) -> None:
    rows = read_metrics(run)
    assert ["discriminator/loss" in row for row in rows] == [False, False, True, True]
    assert ["adaptive_weight" in row for row in rows] == [False, False, True, True]
    assert all({"loss", "loss_raw", "grad_norm", "lr", "codes_used"} <= row.keys() for row in rows)
    measured = {"loss", "psnr", "ssim", "psnr_quantised", "latent_rms"}
    assert {f"{name}/{each}" for name in ("validate", "validate_ema") for each in measured} <= rows[-1].keys()


def test_the_grid_shows_originals_and_reconstructions(run: Path) -> None:
    pictures = {path.name for path in (run / "samples" / "step_4").iterdir()}
    assert pictures == {"grid.png", *(f"0{i}_{kind}reconstruction.png" for i in (0, 1) for kind in ("", "ema_"))}
    with Image.open(run / "samples" / "step_4" / "00_reconstruction.png") as picture:
        assert picture.size == (32, 32)


def test_resume_before_the_opponent_began_repeats_the_run(run: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", *STAGE_A, "checkpoint.every_steps=1", "train.max_steps=2")
    train(tmp_path / "run", *STAGE_A, "checkpoint.every_steps=1", "train.max_steps=4")
    keys = ("loss", "grad_norm", "codes_used", "discriminator/loss", "discriminator/grad_norm")
    whole, resumed = (
        [[row.get(key) for key in keys] for row in read_metrics(each)] for each in (run, tmp_path / "run")
    )
    assert resumed == whole
    first, second = (load_file(folder / WEIGHTS) for folder in (run, tmp_path / "run"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_diffusers_the_originals_layout_and_stage_b_take_what_it_leaves(run: Path, tmp_path: Path) -> None:
    state = PaellaVQModel.from_pretrained(run / FOLDER).state_dict()
    original = load_file(run / "export" / "stage_a" / "stage_a.safetensors")
    assert torch.equal(original["vquantizer.codebook.weight"], state["vquantizer.embedding.weight"])
    short = ("train.max_steps=1", "train.global_batch_size=2")
    again = train(tmp_path / "again", *STAGE_A, f"model.weights={run}", *short, "optimizer.lr=1e-9", "ema.decay=null")
    for name, value in load_file(again / WEIGHTS).items():
        if name != "vquantizer.embedding.weight":  # where dead codes were revived
            torch.testing.assert_close(value, state[name], rtol=0, atol=1e-6)
    stage_a = (*(f"model.stage_a.{each}" for each in NARROW), f"model.stage_a.weights={run}")
    decoder = train(tmp_path / "b", "model=b_tiny", "task=reconstruction", *stage_a, *short)
    assert (decoder / "export" / "decoder").is_dir()


def test_a_short_training_brings_reconstructions_nearer(tmp_path: Path) -> None:
    more = ("objective.adversarial.start_step=null", "train.max_steps=60", "validate.every_steps=20")
    rows = read_metrics(train(tmp_path / "run", *STAGE_A, *more, "checkpoint.every_steps=null", "log.every_steps=60"))
    psnr = [row["validate/psnr"] for row in rows if "validate/psnr" in row]
    assert len(psnr) == 3
    assert psnr[-1] > psnr[0] + 2.0
