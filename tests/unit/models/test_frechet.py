"""The distance of two sets of pictures is torch-fidelity's, from a file that is read without running what is in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_features_to_statistics, fid_statistics_to_metric

from cascade_train.errors import ConfigError
from cascade_train.models.frechet import frechet_distance, load_inception
from tests.unit.models.inception import untrained_inception


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_features_are_those_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    theirs, file = untrained_inception(monkeypatch), tmp_path / f"inception.{ending}"
    (torch.save if ending == "pth" else save_file)(theirs.state_dict(), file)
    features = load_inception(str(file), device=torch.device("cpu"), key="validate.rfid")
    image = torch.rand(2, 3, 40, 48, generator=torch.Generator().manual_seed(0))
    found = features(image * 1.5 - 0.25)
    assert found.shape == (2, 2048)
    assert (found[0] - found[1]).abs().max() > 0
    pixels = ((image * 1.5 - 0.25).clamp(0, 1) * 255).round().byte()
    assert torch.equal(found, theirs(pixels)[0])


def test_another_network_is_refused_and_so_is_a_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="validate.rfid=.*is not FID's Inception V3"):
        load_inception(str(tmp_path / "other.safetensors"), device=torch.device("cpu"), key="validate.rfid")
    monkeypatch.setattr("cascade_train.models.frechet.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"torch-fidelity, which is not installed.*--editable '\.\[metrics\]'"):
        load_inception(str(tmp_path / "other.safetensors"), device=torch.device("cpu"), key="validate.rfid")


@pytest.mark.parametrize("count", [8, 200])
def test_the_distance_is_that_of_the_library(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sets = [torch.randn(count, 12, generator=generator, dtype=torch.float64) * scale + scale for scale in (1.0, 1.3)]
    wanted = fid_statistics_to_metric(*map(fid_features_to_statistics, sets), verbose=False)[KEY_METRIC_FID]
    moments = [moment for each in sets for moment in (each.mean(dim=0), each.T.cov())]
    assert frechet_distance(*moments).item() == pytest.approx(wanted, rel=1e-6)
    assert wanted > 0.5
    assert frechet_distance(*moments[:2], *moments[:2]).item() == pytest.approx(0.0, abs=1e-6)


def test_the_distance_of_shifted_normals_is_the_square_of_the_shift() -> None:
    mean, covariance = torch.zeros(3, dtype=torch.float64), torch.diag(torch.tensor([1.0, 4.0, 0.0])).double()
    assert frechet_distance(mean, covariance, mean + 2, covariance).item() == pytest.approx(12.0)
    assert frechet_distance(mean, covariance, mean, 4 * covariance).item() == pytest.approx(1.0 + 4.0)
