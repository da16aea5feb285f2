"""Precision, sharding, recomputation, averages and accumulation, each on as many ranks as it takes."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.runs import SMALL, exported_weights, once, read_metrics
from tests.unit.models.stages import untrained
from tests.warm.programs import warm_programs

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FORKED = Path(__file__).with_name("forked.py")
NARROW = (
    *("model.weights=null", "model.image_size=64", "model.text_encoder.num_hidden_layers=1"),
    *("model.network.block_out_channels=[32,32]", "model.network.num_attention_heads=[2,2]"),
    *("model.network.down_num_layers_per_block=[1,1]", "model.network.up_num_layers_per_block=[1,1]"),
)
"""Each kind of block of Stage C once, so that a step costs little beside what surrounds it."""

B_NARROW = (
    *("model.weights=null", "model.image_size=64", "model.text_encoder.num_hidden_layers=1"),
    *("model.network.block_out_channels=[32,32]", "model.network.num_attention_heads=[0,2]"),
    "model.network.patch_size=2",
    *("model.network.down_num_layers_per_block=[1,1]", "model.network.up_num_layers_per_block=[1,1]"),
    *("model.network.down_blocks_repeat_mappers=[1,1]", "model.network.up_blocks_repeat_mappers=[2,1]"),
    "model.network.block_types_per_layer=[[SDCascadeResBlock,SDCascadeTimestepBlock],"
    "[SDCascadeResBlock,SDCascadeTimestepBlock,SDCascadeAttnBlock]]",
    "model.network.dropout=[0.0,0.0]",
)
"""Each kind of block of Stage B once, levels with and without attention, and latents finer than the semantic ones."""

SHORT = (*NARROW, "train.max_steps=2", "checkpoint.every_steps=null")
AVERAGE = ("ema.decay=0.5", "ema.start_step=2", "ema.every_steps=2")
LOOKING = (
    *("validate.share=0.2", "validate.samples=4", "validate.logsnr=[0]"),
    *("sample.count=2", "sample.steps=2", "sample.guidance_scale=2"),
)
BASE = ("task=finetune", *NARROW, "train.max_steps=3", "checkpoint.every_steps=null", *AVERAGE, *LOOKING)
LORA = ("task=lora", *SHORT, "optimizer.lr=1e-2", "activation_checkpointing=true", "model.weights={base}")
DORA = (*LORA, "task.dora=true", "train.max_grad_norm=null")
CONTROL = (
    *("task=controlnet", "task.bottleneck=small", "optimizer.lr=1e-2", "activation_checkpointing=true"),
    *("task.control_drop_prob=0.3", "ema.decay=0.5", *SHORT, "model.weights={base}"),
)
TOKENS = (
    *("task=lora", "optimizer.lr=1e-2", "ema.decay=0.5", *SHORT, "model.weights={base}"),
    'task.train_tokens=[["[star]","^star</w>"],["^(red|green|blue|on|background)</w>",null]]',
    "task.text_encoder_filters=[.self_attn]",
)
B_TINY = ("model=b_tiny", "task=reconstruction", *SHORT, *B_NARROW, "ema.decay=0.5")
DDPM = (
    *("objective=ddpm", "train.max_steps=2", "checkpoint.every_steps=null", "ema.decay=0.5"),
    "activation_checkpointing=true",
)
XL_TINY = (
    *(*untrained("sdxl_tiny"), *DDPM, "task=finetune"),
    *(f"model.text_encoder{number}.{option}" for number in ("", "_2") for option in ("train=true", "lr=1e-6")),
)
SD_CONTROL = (
    *(*untrained("sd_tiny"), *DDPM, "task=controlnet", "optimizer=torch", "optimizer.lr=1"),
    *("optimizer.algorithm._target_=torch.optim.SGD", "optimizer.weight_decay=0"),
)
HYBRID = ("parallel=hsdp", "parallel.shard_size=2")
RUNS = {
    "base": (1, None, BASE),
    "looked": (1, None, (*BASE, "validate.every_steps=1", "sample.every_steps=2")),
    "hybrid": (4, "count_exchanges", (*BASE, *HYBRID, "train.micro_batch_size=1")),
    "averages": (2, "look_at_averages", (*BASE, "parallel=fsdp", "ema.device=cpu", "activation_checkpointing=true")),
    "kept_whole": (2, "look_at_averages", (*BASE, "parallel=fsdp", "parallel.reshard_after_forward=false")),
    "compiled": (2, "compile_eagerly", (*BASE, "parallel=fsdp", "compile=regional")),
    "at_once": (2, "gather_at_once count_exchanges", (*BASE, "parallel=fsdp", "train.micro_batch_size=2")),
    "at_once_looked": (2, "gather_at_once look_at_averages", (*BASE, "parallel=fsdp", "validate.every_steps=1")),
    "at_once_bf16": (2, "gather_at_once", (*BASE, "train.precision=bf16", "parallel=fsdp")),
    "bf16": (2, "look_at_dtypes", (*BASE, "train.precision=bf16", "parallel=fsdp", "activation_checkpointing=true")),
    "poisoned": (2, "poison_last_rank", (*BASE, "parallel=fsdp", "checkpoint.every_steps=1")),
    "continued@poisoned": (2, "gather_at_once", (*BASE, "parallel=fsdp", "checkpoint.every_steps=1")),
    "lora": (2, "look_at_dtypes", (*LORA, "train.precision=bf16", "parallel=fsdp")),
    "dora_alone": (1, None, DORA),
    "dora_ddp": (2, None, (*DORA, "parallel=ddp", "train.micro_batch_size=2")),
    "dora_fsdp": (4, "count_loading", (*DORA, "parallel=fsdp")),
    "lokr_alone": (1, None, (*LORA, "task.kind=lokr", "task.rank=2")),
    "lokr": (2, None, (*LORA, "task.kind=lokr", "task.rank=2", "parallel=fsdp", "train.micro_batch_size=2")),
    "loha_alone": (1, None, (*LORA, "task.kind=loha")),
    "loha": (2, None, (*LORA, "task.kind=loha", "parallel=fsdp")),
    "tokens_alone": (1, None, TOKENS),
    "tokens": (2, None, (*TOKENS, "parallel=fsdp", "train.micro_batch_size=2")),
    "control_alone": (1, None, CONTROL),
    "control": (2, "count_loading", (*CONTROL, "parallel=fsdp", "train.micro_batch_size=2")),
    "control_ddp": (2, None, (*CONTROL, "parallel=ddp")),
    "control_bf16": (2, "look_at_dtypes", (*CONTROL, "parallel=ddp", "train.precision=bf16")),
    "b_alone": (1, None, B_TINY),
    "b_fsdp": (2, "count_loading", (*B_TINY, "parallel=fsdp", "train.micro_batch_size=2")),
    "xl_alone": (1, None, XL_TINY),
    "xl_fsdp": (2, "count_loading", (*XL_TINY, "parallel=fsdp", "train.micro_batch_size=2")),
    "xl_ddp": (2, None, (*XL_TINY, "parallel=ddp")),
    "sd_control_alone": (1, None, SD_CONTROL),
    "sd_control": (2, None, (*SD_CONTROL, "parallel=fsdp", "train.micro_batch_size=2")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where all runs lie, each beside a folder of what its ranks noted."""
    return fork(tmp_path_factory.mktemp("modes"), RUNS, {"poisoned": 1})


def fork(directory, runs, expected=None):
    """Make the runs, check their exit codes, and return where they lie; `name@other` runs in the folder of `other`.

    A run without overrides is what its hook does, no more.
    """
    listed = [
        {
            "ranks": ranks,
            "hook": hook,
            "out": str(directory / f"{name}_notes"),
            "argv": None
            if overrides is None
            else once(
                *SMALL,
                f"run.dir={directory / name.rpartition('@')[2]}",
                *(override.format(base=directory / "base") for override in overrides),
            ),
        }
        for name, (ranks, hook, overrides) in runs.items()
    ]
    file = directory / "runs.json"
    file.write_text(json.dumps(listed))
    command = [str(warm_programs() / "python"), str(FORKED), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    for (name, (ranks, _, _)), codes in zip(runs.items(), json.loads(done.stdout.splitlines()[-1]), strict=True):
        wanted = (expected or {}).get(name, 0)
        each = wanted if isinstance(wanted, list) else [wanted] * ranks
        fits = [code in want if isinstance(want, set) else code == want for code, want in zip(codes, each, strict=True)]
        assert all(fits), (name, codes, said(directory, name))
    return directory


def said(directory, name):
    """Return what the ranks of a run said."""
    return "\n".join(file.read_text() for file in sorted((directory / f"{name}_notes").glob("said_[0-9]")))


def notes(directory, name):
    """Return what a hook noted, rank by rank."""
    files = sorted(f for f in (directory / f"{name}_notes").iterdir() if not f.name.startswith("said_"))
    return [json.loads(file.read_text()) for file in files]


def without_measures(directory):
    return [{k: v for k, v in row.items() if not k.startswith("validate")} for row in read_metrics(directory)]


def test_looking_at_a_run_changes_nothing_in_it(runs):
    assert without_measures(runs / "looked") == read_metrics(runs / "base")
    assert "validate_ema/loss" in read_metrics(runs / "looked")[0]
    weights = exported_weights(runs / "looked")
    assert all(torch.equal(value, weights[name]) for name, value in exported_weights(runs / "base").items())


ALONE = {
    **dict.fromkeys(("hybrid", "averages", "kept_whole", "compiled", "poisoned", "at_once"), "base"),
    "at_once_looked": "looked",
    **dict.fromkeys(("dora_ddp", "dora_fsdp"), "dora_alone"),
    **{"lokr": "lokr_alone", "loha": "loha_alone"},
    "tokens": "tokens_alone",
    **dict.fromkeys(("control", "control_ddp"), "control_alone"),
    "b_fsdp": "b_alone",
    **dict.fromkeys(("xl_fsdp", "xl_ddp"), "xl_alone"),
    "sd_control": "sd_control_alone",
}
"""Runs on several ranks, and the same on one: every mode and task on 2 or 4; moves: test_checkpoint_ranks.py."""

EXPORTED = {
    **dict.fromkeys(("base", "looked"), "prior/prior/diffusion_pytorch_model.safetensors"),
    **dict.fromkeys(("dora_alone", "lokr_alone", "loha_alone"), "lora/adapter_model.safetensors"),
    "tokens_alone": "lora",
    "control_alone": "controlnet/controlnet.safetensors",
    "b_alone": "decoder/decoder/diffusion_pytorch_model.safetensors",
    "xl_alone": "pipeline/unet/diffusion_pytorch_model.safetensors",
    "sd_control_alone": "controlnet/diffusion_pytorch_model.safetensors",
}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a file, or of all files below a folder, by file and name."""
    if path.is_file():
        return load_file(path)
    files = sorted(path.rglob("*.safetensors"))
    return {f"{file.relative_to(path)}:{name}": value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", ALONE)
def test_losses_and_the_global_gradient_norm_are_those_of_one_rank(runs, name):
    rows = read_metrics(runs / ALONE[name])
    assert all(row["grad_norm"] > 0 for row in rows)
    for one, several in zip(rows, read_metrics(runs / name), strict=True):
        assert one == pytest.approx(several, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in ALONE if name != "poisoned"])
def test_what_is_left_behind_is_what_one_rank_leaves(runs, name):
    """Of runs with an average that is the average, wherever it was kept."""
    file = EXPORTED[ALONE[name]]
    found, expected = (tensors_of(runs / run / "export" / file) for run in (name, ALONE[name]))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-5, msg=key)


def test_adapters_of_both_modules_and_tokens_are_left_behind(runs):
    files = {name.partition(":")[0] for name in tensors_of(runs / "tokens" / "export" / EXPORTED["tokens_alone"])}
    assert files == {"adapter_model.safetensors", "text_encoder/adapter_model.safetensors", "tokens.safetensors"}


@pytest.mark.parametrize(("name", "shards"), [("dora_fsdp", 4), ("b_fsdp", 2), ("control", 2), ("xl_fsdp", 2)])
def test_no_rank_has_memory_for_more_than_its_share_of_the_network(runs, name, shards):
    ranks = notes(runs, name)
    assert len(ranks) == shards
    (whole,) = {rank["whole"] for rank in ranks}
    assert sum(rank["after"] for rank in ranks) == whole
    for rank in ranks:
        assert rank["before"] < whole / 10, "the network had memory before it was sharded"
        assert rank["after"] <= whole / shards + rank["one_row_each"]
        assert max(rank["reads"], default=0) <= rank["largest"]


def test_no_rank_reads_more_than_its_share_of_the_network(runs):
    for rank in notes(runs, "control"):
        assert sum(rank["reads"]) == rank["after"]
    assert all(rank["reads"] == [] for rank in notes(runs, "b_fsdp")), "a network from scratch is drawn"


def test_gradients_are_scattered_with_each_micro_batch_and_cross_the_replicas_once_a_step(runs):
    units, micro_batches = 4, 2
    for rank in notes(runs, "hybrid"):
        assert rank["scattered"] == micro_batches * (units + 1)
        assert rank["all_reduce"] == units + 1


def test_gradients_of_a_single_replica_are_added_over_no_replicas(runs):
    for rank in notes(runs, "at_once"):
        assert rank["scattered"] > 0
        assert "all_reduce" not in rank


@pytest.mark.parametrize(("name", "units", "roots"), [("hybrid", 4, 1), ("at_once", 0, 1)])
def test_units_are_gathered_twice_a_micro_batch_and_what_is_needed_throughout_once(runs, name, units, roots):
    for rank in notes(runs, name):
        assert rank["gathered"] == 2 * (2 * units + roots)
        assert rank["scattered"] == 2 * (units + roots)


def test_gathering_at_once_computes_in_bf16_what_units_do(runs):
    assert read_metrics(runs / "at_once_bf16") == read_metrics(runs / "bf16")


@pytest.mark.parametrize("name", ["averages", "kept_whole", "at_once_looked"])
def test_a_forward_sees_the_average_while_it_is_swapped_in_and_the_weights_after(runs, name):
    for rank in notes(runs, name):
        weights, average, weights_again, average_again = rank["seen"]
        assert weights != average
        assert (weights, average) == (weights_again, average_again)


def test_bf16_trains_fp32_masters(runs):
    for rank in notes(runs, "bf16"):
        assert {kind: rank[kind] for kind in ("trained", "gradients", "state")} == dict.fromkeys(
            ("trained", "gradients", "state"), ["torch.float32"]
        )
    rows, exact = read_metrics(runs / "bf16"), read_metrics(runs / "base")
    assert rows[0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-2)
    assert rows[0]["grad_norm"] != exact[0]["grad_norm"], "compute was fp32"
    assert rows[-1]["grad_norm"] == pytest.approx(exact[-1]["grad_norm"], rel=2e-2)
    first = exported_weights(runs / "base")
    changed = [name for name, value in exported_weights(runs / "bf16").items() if not torch.equal(value, first[name])]
    assert len(changed) > len(first) / 2


def test_lora_in_bf16_trains_fp32_adapters_on_a_bf16_base_without_gradients(runs):
    trains = dict.fromkeys(("trained", "gradients", "state"), ["torch.float32"])
    for rank in notes(runs, "lora"):
        assert rank == {**trains, "frozen": ["torch.bfloat16"], "frozen_with_gradients": []}
    adapters = load_file(runs / "lora" / "export" / "lora" / "adapter_model.safetensors")
    assert all(value.abs().max() > 0 for name, value in adapters.items() if "lora_B" in name)
    assert {value.dtype for value in adapters.values()} == {torch.float32}


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_is_named_once(runs):
    heard = said(runs, "poisoned")
    assert heard.count("the loss of 1 of 8 samples is not finite (rank 1: shapes-") == 1
    assert heard.count("Step 3, phase train") == 1
    assert "Traceback" not in heard


def test_the_next_start_continues_from_the_last_good_step_gathering_at_once(runs):
    heard = said(runs, "continued@poisoned")
    assert "Continuing at step 2" in heard
    assert [row["step"] for row in read_metrics(runs / "poisoned")] == [1, 2, 3]


def test_a_control_network_trains_fp32_masters_beside_a_frozen_bf16_network_without_gradients(runs):
    for rank in notes(runs, "control_bf16"):
        assert rank == {
            "trained": ["torch.float32"],
            "gradients": ["torch.float32"],
            "state": ["torch.float32"],
            "frozen": ["torch.bfloat16"],
            "frozen_with_gradients": [],
        }
