"""Training of a previewer: the contract, what is scored, and what is not built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import avg_pool2d

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor, ConvolutionalPreviewer
from cascade_train.models.cascade.previewer import ConvolutionPreviewer
from cascade_train.tasks.pictures import RoundTrip
from cascade_train.tasks.preview import Preview
from tests.unit.models.stages import make_stage
from tests.unit.tasks.task_contract import CPU, component, left, make_batch
from tests.unit.tasks.test_vqgan import DenoisesNothing

SMALL = "cascade_train.models.cascade.convolutional.ConvolutionalPreviewer"
ORIGINAL = "cascade_train.models.cascade.previewer.ConvolutionPreviewer"


COMPRESSOR = "cascade_train.models.cascade.convolutional.ConvolutionalCompressor"


def previewing(target: str = SMALL, *, train_compressor: bool = False, **changed: Any) -> Any:
    """Return the task on a stage of which it has built what it needs."""
    objective = component("objective", "preview", **changed)
    task = component("task", "reconstruction", train_compressor=train_compressor).for_objective(objective)
    parts = {"previewer": {"_target_": target, "weights": None}}
    if train_compressor:
        parts["semantic_compressor"] = {"_target_": COMPRESSOR, "weights": None}
    stage = make_stage("c_tiny", {"weights": "nobody/nothing", **parts})
    stage.left_out = task.unbuilt_parts()
    stage.build(device=CPU, network_dtype=torch.float32, frozen_dtype=torch.float32)
    task.attach(stage, objective, CPU)
    return task


@pytest.fixture(scope="module")
def task() -> Any:
    return previewing()


class OfPreviewers(DenoisesNothing):
    model, objective, lr = "c_tiny", "preview", 1e-3


class TestPreviewingOfTheOriginal(OfPreviewers):
    """Previews of a quarter of the size, by the network with batch norm."""

    @classmethod
    def make(cls) -> Any:
        return previewing(ORIGINAL)

    def test_norms_keep_their_statistics(self, prepared: Any) -> None:
        task = self.make()
        before = {name: value.clone() for name, value in task.stage.previewer.module.named_buffers()}
        task.stage.previewer.module.train()
        task.loss(prepared)
        assert before
        assert all(torch.equal(value, before[name]) for name, value in task.stage.previewer.module.named_buffers())


class TestAutoencoding(OfPreviewers):
    """The compressor trains along."""

    @classmethod
    def make(cls) -> Any:
        return previewing(train_compressor=True)

    def test_both_move_and_are_left_behind(self, prepared: Any, tmp_path: Path) -> None:
        task = self.make()
        assert task.trained_parts() == {"previewer", "semantic_compressor"}
        (phase,) = task.phases()
        phase.loss(prepared).loss_B.mean().backward()
        for module in phase.modules.values():
            assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())
        for name in task.exports():
            left(task, name, tmp_path / "export")
        for kind, module in ((ConvolutionalPreviewer, "previewer"), (ConvolutionalCompressor, "semantic_compressor")):
            again = kind(weights=str(tmp_path))
            again.build(device=CPU)
            assert all(map(torch.equal, again.module.parameters(), phase.modules[module].parameters()))


def test_noise_on_the_latents_is_each_samples_own_and_measured_without() -> None:
    quiet, noisy = previewing(), previewing(latent_noise=0.5)
    batch = make_batch(0, 1)
    prepared, plain = noisy.prepare_batch(batch), quiet.prepare_batch(batch)
    latent = noisy.stage.encode(prepared.image_BCHW) + 0.5 * batch.normal("latent_noise", (16, 3, 3))
    made = noisy.stage.previewer.decode(latent)
    torch.testing.assert_close(noisy.loss(prepared).loss_B, (made - prepared.image_BCHW).abs().mean(dim=(1, 2, 3)))
    assert not torch.equal(noisy.loss(prepared).loss_B, quiet.loss(plain).loss_B)
    assert torch.equal(noisy.measures(prepared, [])["psnr"], quiet.measures(plain, [])["psnr"])
    with pytest.raises(ValueError, match="latent_noise=-0.1 must be at least 0.0: it is a standard deviation"):
        Preview(pixel="l1", latent_noise=-0.1)


def test_what_it_has_no_use_for_is_not_built(task: Any) -> None:
    assert task.stage.frozen_modules().keys() == {"semantic_compressor", "previewer"}
    assert not hasattr(task.stage, "network")


def test_pictures_are_compared_at_the_size_of_their_previews() -> None:
    task = previewing(ORIGINAL)
    prepared = task.prepare_batch(make_batch(0, 1))
    made = task.stage.previewer.decode(task.stage.encode(prepared.image_BCHW))
    original = avg_pool2d(prepared.image_BCHW, 4)
    assert made.shape == original.shape == (2, 3, 24, 24)
    torch.testing.assert_close(task.loss(prepared).loss_B, (made - original).abs().mean(dim=(1, 2, 3)))
    measured = task.measures(prepared, [])
    assert measured.keys() == {"psnr", "ssim"}
    error = (made.clamp(0, 1) - original).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(measured["psnr"], -10 * error.log10())


def test_pixels_are_compared_by_their_squares_where_asked_for(task: Any) -> None:
    prepared = task.prepare_batch(make_batch(0))
    squared = previewing(pixel="l2")
    made = task.stage.previewer.decode(task.stage.encode(prepared.image_BCHW))
    expected = (made - prepared.image_BCHW).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(squared.loss(prepared).loss_B, expected)
    with pytest.raises(ConfigError, match="pixel=l3 is unknown; choose one of l1, l2"):
        Preview(pixel="l3")  # type: ignore[arg-type]


def test_places_that_a_mask_leaves_out_do_not_count() -> None:
    task = previewing(ORIGINAL)
    batch, mask = make_batch(0, 1), torch.zeros(2, 1, 96, 96, dtype=torch.uint8)
    mask[0, :, :, :48] = 255
    prepared = task.prepare_batch(replace(batch, tensors={"mask": mask}))
    made = task.stage.previewer.decode(task.stage.encode(prepared.image_BCHW))
    kept = (made - avg_pool2d(prepared.image_BCHW, 4)).abs()[0, :, :, :12].mean()
    torch.testing.assert_close(task.loss(prepared).loss_B, torch.stack([kept, torch.zeros(())]))


def test_weights_of_samples_count() -> None:
    task = previewing()
    batch = make_batch(0, 1)
    plain = task.loss(task.prepare_batch(batch))
    output = task.loss(task.prepare_batch(replace(batch, weight_B=torch.tensor([0.5, 0.0]))))
    torch.testing.assert_close(output.loss_B, plain.loss_B * torch.tensor([0.5, 0.0]))
    torch.testing.assert_close(output.report["loss_raw"], plain.report["loss_raw"])


@pytest.mark.parametrize(("target", "kind"), [(SMALL, ConvolutionalPreviewer), (ORIGINAL, ConvolutionPreviewer)])
def test_what_is_left_behind_is_read_as_weights(target: str, kind: Any, tmp_path: Path) -> None:
    module = previewing(target).stage.previewer.module
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1
    ((name, export),) = previewing(target).exports().items()
    assert export.write(module.state_dict(), tmp_path / "export" / name) == 0.0
    again = kind(weights=str(tmp_path))
    again.build(device=CPU)
    assert all(torch.equal(value, again.module.state_dict()[key]) for key, value in module.state_dict().items())


def test_a_distance_is_a_number_for_each_picture() -> None:
    image, original = torch.zeros(2, 3, 4, 6), torch.stack([torch.full((3, 4, 6), value) for value in (0.5, -2.0)])
    absolute, squared = (component("objective", "preview", pixel=pixel).pixels for pixel in ("l1", "l2"))
    assert absolute(image, original).tolist() == [0.5, 2.0]
    assert squared(image, original).tolist() == [0.25, 4.0]
    mask = torch.ones(2, 1, 4, 6)
    mask[1] = 0.0
    assert squared(image, original, mask).tolist() == [0.25, 0.0]


def test_pictures_become_fractions_and_must_be_there() -> None:
    task = component("task", "reconstruction").for_objective(component("objective", "preview"))
    task.device, batch = CPU, make_batch(0)
    picture = task.prepare_batch(batch).image_BCHW
    assert picture.dtype == torch.float32
    assert torch.equal((picture * 255).round().to(torch.uint8), batch.image_BCHW)
    object.__setattr__(batch, "image_BCHW", None)
    with pytest.raises(AssertionError, match="a cache is no data for a task"):
        task.prepare_batch(batch)
    with pytest.raises(AssertionError, match="pictures of prompts alone are refused before"):
        RoundTrip(None, "reconstruction").sample(["a circle"], None, lambda _: [])
