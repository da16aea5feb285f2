"""An optimizer that averages the weights: what is looked at and left behind is the average."""

import pytest
import torch
from safetensors.torch import load_file

from cascade_train.commands.export import ExportArgs, export
from cascade_train.engine.phase import BoundPhase
from cascade_train.engine.sampling import SampleGrid
from cascade_train.engine.validation import Validation
from tests.integration.runs import train

pytestmark = pytest.mark.slow

LORA = "lora/adapter_model.safetensors"
RUN = (
    *("task=lora", "task.rank=2", "optimizer=schedule_free", "optimizer.lr=1e-2", "train.max_steps=3"),
    *("checkpoint.every_steps=3", "train.global_batch_size=2", "sample.every_steps=3", "sample.steps=1"),
    *("sample.count=1", "validate.share=0.2", "validate.samples=2", "validate.every_steps=3", "validate.logsnr=[0]"),
)


def test_what_is_validated_sampled_and_exported_is_the_average(tmp_path, monkeypatch):
    seen = {}

    def look(owner, name, phase_of):
        original = getattr(owner, name)

        def looking(self, *arguments):
            result = original(self, *arguments)
            phase = phase_of(self)
            seen[name] = {key: p.detach().clone() for key, p in phase.parameters.items()}
            return result

        monkeypatch.setattr(owner, name, looking)

    look(Validation, "_means", lambda self: self.phases[0])
    look(SampleGrid, "_sample", lambda self: self.phases[0])
    look(BoundPhase, "update", lambda self: self)
    run = train(tmp_path / "run", *RUN)
    assert export(ExportArgs(source=str(run), step=3, out=str(tmp_path / "again"), format="peft")) == 0
    exported, again = load_file(run / "export" / LORA), load_file(tmp_path / "again" / LORA)
    assert exported.keys() == again.keys()
    assert len(exported) == len(seen["update"])
    for key, value in exported.items():
        plain = key.removeprefix("base_model.model.")
        (name,) = [each for each in seen["update"] if each.replace(".default", "").endswith(plain)]
        assert torch.equal(value, again[key])
        assert torch.equal(value, seen["_means"][name])
        assert torch.equal(value, seen["_sample"][name])
    assert any(not torch.equal(value, seen["_means"][name]) for name, value in seen["update"].items())
