"""Adapters of both modules and trained tokens learn on any number of ranks what they learn on one."""

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.runs import SMALL, read_metrics, torchrun, train

pytestmark = pytest.mark.distributed

LORA = (
    "task=lora",
    'task.train_tokens=[["[star]","^star</w>"],["^(red|green|blue|on|background)</w>",null]]',
    "task.text_encoder_filters=[.self_attn]",
    "optimizer.lr=1e-2",
    "ema.decay=0.5",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A prior whose last layer is not zero any more, so that gradients reach all that trains."""
    return train(tmp_path_factory.mktemp("base") / "run", "task=finetune", "optimizer.lr=3e-3")


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The run on one rank."""
    return train(tmp_path_factory.mktemp("alone") / "run", *LORA, f"model.weights={base}")


def test_two_ranks_train_adapters_and_tokens_as_one_does(base, alone, tmp_path):
    arguments = [*SMALL, *LORA, f"model.weights={base}", "run.dir=run", "parallel=fsdp"]
    done = torchrun(2, *arguments, "train.micro_batch_size=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    metrics = read_metrics(alone)
    assert all(row["grad_norm"] > 0 for row in metrics)
    for one, several in zip(metrics, read_metrics(tmp_path / "run"), strict=True):
        assert one == pytest.approx(several, rel=1e-4)
    expected, found = (load_file(each / "export/lora/lora.safetensors") for each in (alone, tmp_path / "run"))
    assert {name.partition(".")[0] for name in expected} == {"down_blocks", "up_blocks", "text_encoder", "token_rows"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)
