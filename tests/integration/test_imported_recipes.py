"""What other trainers' files become trains: small twins of them, on pictures in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cascade_train.__main__ import launch
from tests.unit.data import tars
from tests.unit.data.test_folder import write

pytestmark = pytest.mark.slow

KOHYA: dict[str, Any] = {
    "network_module": "networks.lora", "network_dim": 2, "unet_lr": 1e-4, "train_data_dir": "data", "resolution": 96,
    "max_train_steps": 2, "train_batch_size": 2, "gradient_accumulation_steps": 2, "min_snr_gamma": 5,
    "shuffle_caption": True, "keep_tokens": 1, "flip_aug": True, "mixed_precision": "no", "output_dir": "kohya",
}  # fmt: skip
EVERYDREAM: dict[str, Any] = {
    "data_root": "data", "max_epochs": 1, "batch_size": 3, "resolution": 96, "resume_ckpt": "sd", "flip_p": 0.5,
    "zero_frequency_noise_ratio": 0.02, "pyramid_noise_discount": 0.3, "run_name": "everydream",
}  # fmt: skip
OF_STABLE_DIFFUSION: dict[str, Any] = {
    "train_data_dir": "data", "resolution": 32, "max_train_steps": 2, "train_batch_size": 2, "mixed_precision": "no",
    "max_token_length": 225,
}  # fmt: skip
ADAPTERS = {"network_module": "networks.lora", "network_dim": 4, "unet_lr": 1e-4, "text_encoder_lr": [5e-5, 2e-5]}
WHOLE = {"train_text_encoder": True, "learning_rate": 1e-5, "learning_rate_te": 5e-6}


@pytest.mark.parametrize(
    ("given", "run", "steps"),
    [(KOHYA, "kohya", 2), (EVERYDREAM, "runs/everydream", 2)],
)
def test_a_small_twin_of_its_file_trains(
    given: dict[str, Any], run: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = trained(given, "model=c_tiny", run)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("given", "model", "rates"),
    [
        (ADAPTERS, "sdxl_tiny", {"lr": 1e-4, "lr_text_encoder": 5e-5, "lr_text_encoder_2": 2e-5}),
        (WHOLE, "sd_tiny", {"lr": 1e-5, "lr_text_encoder": 5e-6}),
    ],
)
def test_text_towers_of_a_file_train_at_its_rates(
    given: dict[str, Any], model: str, rates: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = trained({**OF_STABLE_DIFFUSION, **given, "output_dir": "out"}, f"model={model}", "out")
    assert {key: value for key, value in lines[-1].items() if key.startswith("lr")} == pytest.approx(rates)


def trained(given: dict[str, Any], model: str, run: str) -> list[dict[str, Any]]:
    """Import a file beside a few pictures, train what it says, and return the metrics of the run in a folder."""
    for number, folder in enumerate(["1_cats", "1_cats", "2_dogs", "2_dogs", "2_dogs", "2_dogs"]):
        write(Path(f"data/{folder}/{number}.png"), tars.picture(96, 96, tint=40 * number))
        write(Path(f"data/{folder}/{number}.txt"), f"a cat, {number}, red")
    Path("given.json").write_text(json.dumps(given))
    assert launch(["recipe", "import", "given.json", "out=conf/experiment/mine.yaml", model]) == 0
    small = ["data.num_workers=0", "sample.every_steps=null", "checkpoint.every_steps=null"]
    assert launch(["--config-dir", "conf", "experiment=mine", *small]) == 0
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
