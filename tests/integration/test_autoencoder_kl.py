"""Stable Diffusion's autoencoder from the command line: trains, resumes, and serves diffusers and Stable Diffusion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file

from tests.integration.runs import cut_back, read_metrics, train
from tests.unit.models.stages import untrained

pytestmark = pytest.mark.slow

TINY = (*untrained("vae_tiny"), "task=reconstruction")
VAE = (
    *(*TINY, "data.samples=12", "data.num_workers=0", "train.global_batch_size=4"),
    *("objective.adversarial.start_step=3", "objective.adversarial.channels=8", "objective.adversarial.layers=2"),
    *("ema.decay=0.9", "checkpoint.every_steps=2", "checkpoint.keep_last=null"),
)
WEIGHTS = Path("export/vae/diffusion_pytorch_model.safetensors")
SHORT = ("data.samples=12", "data.num_workers=0", "train.global_batch_size=2", "train.max_steps=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that looks at itself at its end."""
    looks = ("sample.every_steps=4", "sample.count=2", "validate.every_steps=4", "validate.share=0.3")
    return train(tmp_path_factory.mktemp("vae") / "run", *VAE, *looks)


def test_the_opponent_begins_at_its_step_and_the_autoencoder_is_measured(run: Path) -> None:
    rows = read_metrics(run)
    assert ["discriminator/loss" in row for row in rows] == [False, False, True, True]
    assert ["adaptive_weight" in row for row in rows] == [False, False, True, True]
    assert all({"loss", "loss_raw", "grad_norm", "kl"} <= row.keys() for row in rows)
    assert {f"validate/{each}" for each in ("loss", "psnr", "ssim", "kl", "latent_rms")} <= rows[-1].keys()
    assert (run / "samples" / "step_4" / "grid.png").is_file()
    assert "AutoencoderKL.from_pretrained" in (run / "export" / "README.md").read_text()


def test_a_stopped_run_goes_on_as_if_it_had_not(run: Path, tmp_path: Path) -> None:
    again = train(cut_back(run, tmp_path / "run", 2), *VAE, "validate.share=0.3")
    keys = ("loss", "kl", "grad_norm", "discriminator/loss", "discriminator/grad_norm")
    whole, resumed = ([[row.get(key) for key in keys] for row in read_metrics(each)] for each in (run, again))
    assert resumed == whole
    first, second = (load_file(folder / WEIGHTS) for folder in (run, again))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_stable_diffusion_and_a_training_of_the_decoder_alone_take_what_it_leaves(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = AutoencoderKL.from_pretrained(run / "export" / "vae").state_dict()
    decoder = train(
        tmp_path / "decoder", *TINY, *SHORT, f"model.weights={run}", "objective.train_encoder=false",
        "model.scaling_factor=0.7",
    )  # fmt: skip
    alone = AutoencoderKL.from_pretrained(decoder / "export" / "vae")
    assert alone.config.scaling_factor == 0.7
    moved = {name for name, value in alone.state_dict().items() if not torch.equal(value, first[name])}
    assert {name.partition(".")[0] for name in moved} == {"decoder", "post_quant_conv"}
    tiny = (*untrained("sd_tiny"), "task=finetune", *SHORT)
    tower = train(tmp_path / "tower", *tiny) / "export" / "pipeline"
    parts = (f"model.text_encoder.weights={tower}", "model.text_encoder.subfolder=text_encoder")
    sd = train(tmp_path / "sd", *tiny, "model.random_encoders=false", *parts, f"model.vae.weights={decoder}")
    assert "was made for model.vae.scaling_factor=0.7, and 1 counts here" in caplog.text
    inside = AutoencoderKL.from_pretrained(sd / "export" / "pipeline" / "vae").state_dict()
    assert all(torch.equal(value, inside[name]) for name, value in alone.state_dict().items())
