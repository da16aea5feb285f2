"""Adapters of SDXL under kohya's names, which are the original's of its network: in, out, and into diffusers."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import load_file, save_file

from cascade_train.models.formats.export_lora import export_lora
from cascade_train.models.formats.lora_files import DIFFUSERS_FILE, holds_lora, module_shapes, read_lora
from cascade_train.models.lora import adapted_layers
from cascade_train.models.stable_diffusion.family import STABLE_DIFFUSION
from tests.unit.tasks.task_contract import attached, component

FILTERS = [".attn", "conv1", "conv2", "time_emb_proj", "proj_in", "samplers", "conv_shortcut"]


def test_kohyas_file_of_sdxl_is_read_as_it_was_written_and_by_diffusers(tmp_path: Path) -> None:
    ranks = [["conv1", 3, 3.0], ["attn2", 1]]  # alpha of attention alone: diffusers drops others in kohya's file
    options = {"module_filters": FILTERS, "rank": 2, "alpha": 4.0, "ranks": ranks}
    task = attached(component("task", "lora", **options), "sdxl_tiny", component("objective", "ddpm"))
    network, generator = task.stage.network, torch.Generator().manual_seed(0)
    for _, layer in adapted_layers(network):
        layer.lora_B["default"].weight.data.normal_(0.0, 0.1, generator=generator)
    written = task.exports()["lora"]
    written.write(written.module.state_dict(), tmp_path / "lora")
    modules = module_shapes(network)
    lora = read_lora(str(tmp_path / "lora"), key="from", family=STABLE_DIFFUSION, modules=modules)
    file = tmp_path / "kohya.safetensors"
    assert export_lora(lora, network, file, format="kohya") == 0.0
    stored = load_file(file)
    assert holds_lora(str(file))
    assert {name.split("_")[2] for name in stored} == {"input", "middle", "output"}
    assert "lora_unet_input_blocks_1_0_in_layers_2.lora_down.weight" in stored

    again = read_lora(str(file), key="from", family=STABLE_DIFFUSION, modules=modules)
    assert again.state.keys() == lora.state.keys()
    assert all(torch.equal(value, again.state[name]) for name, value in lora.state.items())
    ours, theirs = "_down_blocks_0_resnets_0_conv1", "_input_blocks_1_0_in_layers_2"
    save_file({name.replace(theirs, ours): value for name, value in stored.items()}, tmp_path / "mixed.safetensors")
    mixed = read_lora(str(tmp_path / "mixed.safetensors"), key="from", family=STABLE_DIFFUSION, modules=modules)
    assert all(torch.equal(value, mixed.state[name]) for name, value in lora.state.items())

    base = attached(component("task", "finetune"), "sdxl_tiny", component("objective", "ddpm"))
    export = base.exports()["pipeline"]
    export.write(export.module.state_dict(), tmp_path / "pipeline")
    cond = task.stage.conditions(task.stage.tokenize(["a red circle", ""]))
    latents, timestep = torch.randn(2, 4, 8, 8, generator=generator), torch.tensor([500.0, 10.0])
    added = {"text_embeds": cond["text_embeds"], "time_ids": torch.tensor([[32.0, 32, 0, 0, 32, 32]]).expand(2, 6)}
    with torch.no_grad():
        ours = task.stage.predict(latents, timestep, cond)
        plain = base.stage.predict(latents, timestep, cond)
    assert (ours - plain).abs().max() > 0.01
    for stored_file in (file, tmp_path / "lora" / DIFFUSERS_FILE):
        pipeline = StableDiffusionXLPipeline.from_pretrained(tmp_path / "pipeline")
        pipeline.load_lora_weights(stored_file.parent, weight_name=stored_file.name)
        with torch.no_grad():
            theirs = pipeline.unet(latents, timestep, cond["encoder_hidden_states"], added_cond_kwargs=added).sample
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-4)
