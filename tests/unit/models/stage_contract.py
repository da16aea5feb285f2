"""What every stage must do; a new stage subclasses this and names itself."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cascade_train.models.initialize import Fill, fill_
from cascade_train.models.stage import Stage
from tests.unit.models.stages import build_stage, make_stage


class NoSync(TorchDispatchMode):
    """Refuses every operation that would make the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default):
            raise AssertionError(f"{func} makes the host wait")
        return func(*args, **(kwargs or {}))


class StageContract:
    """Subclass with `model`, the file in conf/model; its parts must be small and need no download."""

    model: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls) -> Any:
        stage = build_stage(cls.model)
        # A fresh network predicts zeros whatever it is given, which would prove nothing below.
        for name, parameter in stage.network.named_parameters():
            fill_(parameter, Fill(kind="normal", scale=0.1), 0, name)
        return stage

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls, stage: Stage) -> torch.Tensor:
        size = stage.image_size
        return torch.rand(2, 3, size, size + stage.image_multiple, generator=torch.Generator().manual_seed(0))

    @pytest.fixture(scope="class")
    @classmethod
    def cond(cls, stage: Stage, images: torch.Tensor) -> Any:
        return stage.conditions(stage.tokenize(["a small red circle", ""]), images, torch.tensor([True, False]))

    def test_construction_makes_no_module(self) -> None:
        assert not hasattr(make_stage(self.model), "network")

    def test_latent_shape_is_what_encode_returns(self, stage: Stage, images: torch.Tensor) -> None:
        latent = stage.encode(images)
        assert tuple(latent.shape[1:]) == stage.latent_shape(*images.shape[-2:])
        assert latent.dtype == torch.float32
        assert not latent.requires_grad

    def test_prediction_has_the_shape_of_the_latent(self, stage: Stage, images: torch.Tensor, cond: Any) -> None:
        latent = stage.encode(images)
        pred = stage.predict(latent, torch.tensor([0.2, 0.8]), cond)
        assert pred.shape == latent.shape
        assert pred.abs().max() > 0.01

    def test_decoded_images_lie_between_zero_and_one(self, stage: Stage) -> None:
        latent = 50 * torch.randn(2, *stage.latent_shape(stage.image_size, stage.image_size))
        image = stage.decode(latent)
        assert image.shape[:2] == (2, 3)
        assert image.dtype == torch.float32
        assert not image.requires_grad
        assert 0 <= image.min() < image.max() <= 1

    def test_frozen_modules_never_train(self, stage: Stage) -> None:
        frozen = stage.frozen_modules()
        assert "network" not in frozen
        assert frozen
        assert not any(module.training for module in frozen.values())
        assert not any(p.requires_grad for module in frozen.values() for p in module.parameters())

    def test_network_trains(self, stage: Stage) -> None:
        assert all(p.requires_grad for p in stage.network.parameters())

    def test_tokens_are_integers_of_one_length(self, stage: Stage) -> None:
        tokens = stage.tokenize(["a small red circle at the top", ""])
        towers = [name for name in stage.frozen_modules() if name.startswith("text_encoder")]
        assert {key: value.dtype for key, value in tokens.items()} == {
            f"{key}{tower.removeprefix('text_encoder')}": torch.int64
            for key in ("input_ids", "attention_mask")
            for tower in towers
        }
        assert len({value.shape for value in tokens.values()}) == 1

    def test_units_are_modules_of_the_network_once_each(self, stage: Stage) -> None:
        inside = {id(module) for module in stage.network.modules()}
        flat = [id(module) for unit in stage.units() for module in unit]
        assert len(flat) == len(set(flat)) > 0
        assert set(flat) <= inside

    def test_units_run_in_their_order(self, stage: Stage, images: torch.Tensor, cond: Any) -> None:
        seen: list[int] = []
        first = {id(unit[0]): i for i, unit in enumerate(stage.units())}
        hooks = [
            unit[0].register_forward_pre_hook(lambda module, _: seen.append(first[id(module)]))
            for unit in stage.units()
        ]
        stage.predict(stage.encode(images), torch.tensor([0.2, 0.8]), cond)
        for hook in hooks:
            hook.remove()
        assert list(dict.fromkeys(seen)) == list(range(len(stage.units())))

    def test_activation_checkpointing_does_not_change_gradients(
        self, stage: Stage, images: torch.Tensor, cond: Any
    ) -> None:
        gradients = []
        for enabled in (False, True):
            stage.set_activation_checkpointing(enabled)
            latent = stage.encode(images)
            loss = (stage.predict(latent, torch.tensor([0.2, 0.8]), cond) - latent).square().mean()
            gradients.append(torch.autograd.grad(loss, list(stage.network.parameters()), allow_unused=True))
        stage.set_activation_checkpointing(False)
        pairs = [(a, b) for a, b in zip(*gradients, strict=True) if a is not None]
        assert sum(bool(a.any()) for a, _ in pairs) > 0.9 * len(pairs) > 10
        assert all(torch.equal(a, b) for a, b in pairs)

    def test_encoding_and_prediction_never_wait_for_the_device(self, stage: Stage, images: torch.Tensor) -> None:
        tokens = stage.tokenize(["a small red circle", ""])
        keep = torch.tensor([True, False])
        with NoSync():
            latent = stage.encode(images)
            stage.predict(latent, torch.tensor([0.2, 0.8]), stage.conditions(tokens, images, keep))

    def test_every_offline_attention_kernel_can_be_chosen(self, stage: Stage, images: torch.Tensor, cond: Any) -> None:
        latent = stage.encode(images)
        preds = []
        for name in ("math", "sdpa"):
            stage.set_attention(name)
            preds.append(stage.predict(latent, torch.tensor([0.2, 0.8]), cond))
        torch.testing.assert_close(*preds, atol=1e-5, rtol=1e-4)

    def test_building_twice_gives_equal_weights(self) -> None:
        stage, again = build_stage(self.model), build_stage(self.model)
        pairs = [(stage.network, again.network)]
        pairs += [(module, again.frozen_modules()[name]) for name, module in stage.frozen_modules().items()]
        for left, right in pairs:
            for name, value in left.state_dict().items():
                assert torch.equal(value, right.state_dict()[name]), name
