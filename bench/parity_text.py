"""Cases of text and image conditions and of trained tokens (conditions, retoken), run on our code."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextConfig

from bench.parity_case import NotCoveredError, Outcome, Variant, recorded
from bench.parity_training import RecordedBatch, build_objective, micro_of, recorded_batch
from cascade_train.models.cascade.convolutional import ConvolutionalPreviewer
from cascade_train.models.cascade.image_encoder import ImageEncoder
from cascade_train.models.cascade.semantic_compressor import SemanticCompressor
from cascade_train.models.cascade.stage_c import StageC
from cascade_train.models.cascade.unet_config import CascadeUNetConfig
from cascade_train.models.lora import TrainedTokens
from cascade_train.models.stage import Conditions, Tokens
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.models.tokens import TokenTable, is_new, train_tokens, trained_tokens
from cascade_train.tasks.finetune import Finetune

CPU = torch.device("cpu")
CONF = Path(__file__).resolve().parents[1] / "conf"
TINY = CONF / "model" / "c_tiny.yaml"

LEGACY_END = 2
"""An id of the end of text in old configurations that made transformers pool at the highest id."""

SET_ORDER = "the order of trained tokens is not compared: the original's is that of a Python set"
MATCHES_NOTHING = "expressions that match no token are refused: null stands in for a new token's, others are left out"


def text_encoder(args: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TextEncoder:
    """Build the text tower and the tokenizer that a case describes, from files as a user's."""
    sizes = args["clip_config"]
    node = OmegaConf.to_container(OmegaConf.load(TINY).text_encoder)
    options = {key: value for key, value in node.items() if key != "_target_"}  # type: ignore[union-attr]
    options |= {key: sizes[key] for key in options if key in sizes}
    with tempfile.TemporaryDirectory() as folder:
        _write_tokenizer(Path(folder), args)
        CLIPTextConfig(**sizes).save_pretrained(folder)
        save_file(dict(weights), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        options |= {"weights": folder, "tokenizer": folder, "max_tokens": args["model_max_length"]}
        encoder = TextEncoder(**options)
        encoder.build(device=CPU, dtype=torch.float32)
    return encoder


def _write_tokenizer(folder: Path, args: Mapping[str, Any]) -> None:
    start, end = "<|startoftext|>", "<|endoftext|>"
    special = {"bos_token": start, "eos_token": end, "pad_token": end, "unk_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer", **special}))
    (folder / "vocab.json").write_text(json.dumps(args["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in args["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))


class RecordedLatents(SemanticCompressor):
    """Recorded latents by the number that an image stands for; zeros where none are recorded."""

    stride = 1

    def __init__(self, channels: int, inputs: Mapping[str, Tensor]) -> None:
        self.latent_channels = channels  # type: ignore[misc]
        self.inputs = inputs

    def _make(self) -> tuple[nn.Module, float]:
        return nn.Identity(), 1.0

    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Return the recorded latents, (B, C, H, W)."""
        zeros = image_BCHW.new_zeros(len(image_BCHW), self.latent_channels, *image_BCHW.shape[2:])
        return self.inputs.get(f"mb.{micro_of(image_BCHW):02d}.latents", zeros)


class ProbedStage(StageC):
    """Stage C that keeps what it and its network are given, under recorded latents."""

    seen: list[tuple[Tensor, Tensor]]
    asked: list[Conditions]
    told: list[Tokens]

    def conditions(
        self,
        tokens: Tokens,
        image_BCHW: Tensor | None = None,
        keep_image_B: Tensor | None = None,
        drawn: Any = None,
    ) -> Conditions:
        """Encode the tokens and keep them."""
        self.told.append(tokens)
        return super().conditions(tokens, image_BCHW, keep_image_B, drawn)

    def predict(
        self, noised_BCHW: Tensor, timestep_ratio_B: Tensor, cond: Conditions, control: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Run the network, or predict zeros where there is none."""
        self.seen.append((noised_BCHW, timestep_ratio_B))
        self.asked.append(cond)
        if not list(self.network.children()):
            return torch.zeros_like(noised_BCHW)
        return super().predict(noised_BCHW, timestep_ratio_B, cond, control)


def probed_stage(
    config: CascadeUNetConfig,
    network: nn.Module,
    encoder: TextEncoder,
    images: ImageEncoder | None,
    inputs: Mapping[str, Tensor],
) -> ProbedStage:
    """Put Stage C together from built parts."""
    stage = ProbedStage(
        image_size=1,
        precision="fp32",
        seed=0,
        random_encoders=False,
        weights=None,
        network=config,
        text_encoder=encoder,
        image_encoder=images,
        semantic_compressor=RecordedLatents(config.in_channels, inputs),
        previewer=ConvolutionalPreviewer(weights=None),
    )
    stage.network, stage.seen, stage.asked, stage.told = network, [], [], []
    return stage


class PooledPixels(nn.Module):
    """The case's stub of the image tower: pixels averaged over a grid, whatever their number makes its width."""

    dtype = torch.float32

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        """Return `image_embeds`, (B, 3 * side * side)."""
        return SimpleNamespace(image_embeds=functional.adaptive_avg_pool2d(pixel_values, self.side).flatten(1))


def image_encoder(width: int) -> ImageEncoder:
    """Return our image encoder, its preprocessing included, around the case's stub."""
    tower = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    encoder = ImageEncoder(
        weights=None,
        subfolder=None,
        image_size_px=224,
        patch_size_px=224,
        projection_dim=width,
        hidden_act="gelu",
        **tower,
    )
    encoder.build(device=CPU, dtype=torch.float32)
    encoder.module = PooledPixels(round((width / 3) ** 0.5))
    return encoder


def shipped_drop(task: str) -> float:
    """Return the share of dropped captions that a task ships with."""
    return float(OmegaConf.load(CONF / "task" / f"{task}.yaml").cond_drop_prob)


def conditions(variant: Variant, cond_drop_prob: float | None = None) -> Outcome:
    """Run the Stage C variants of conditions: what a task makes of captions and images, in training and sampling.

    Args:
        variant: of the case.
        cond_drop_prob: share of dropped captions; None = the one that ships.
    """
    args, given, call = variant.args, variant.inputs, variant.args["call"]
    encoder, width = text_encoder(args, variant.weights), variant.outputs["clip_img"].shape[-1]
    config = _config(encoder, width)
    stage = probed_stage(config, nn.Module(), encoder, image_encoder(width), {})
    share = shipped_drop("finetune") if cond_drop_prob is None else cond_drop_prob
    task = Finetune(cond_drop_prob=share, image_keep_prob=None)
    task.attach(stage, build_objective(adaptive=False), CPU)
    captions = args["captions"]
    if not call.get("is_eval"):
        task.loss(task.prepare_batch(_training_batch(variant)))
        return Outcome(stage.asked[0])
    if call.get("eval_image_embeds"):
        return Outcome(stage.conditions(encoder.tokenize(captions), given["images"]))
    noised = torch.zeros(len(captions), config.in_channels, 1, 1)
    task.predictor(captions, None)(noised, torch.zeros(len(captions)))
    half = slice(len(captions), None) if call.get("is_unconditional") else slice(len(captions))
    return Outcome({name: value[half] for name, value in stage.asked[0].items()})


def _training_batch(variant: Variant) -> RecordedBatch:
    """Return the variant's images and captions; ours drop below a share, the original keeps above one."""
    images = variant.inputs["images"]
    captions_kept, images_kept = recorded(variant.inputs, "np_rand")
    samples, _, *size = images.shape
    draws = {
        "caption_drop": dropped_below(captions_kept),
        "image_keep": 1 - images_kept + 2**-54,  # rounds up: what the original draws as exactly 0.9 is not kept
        "timestep": torch.full((samples,), 0.5),
        "noise": torch.zeros(samples, 1, *size),
    }
    batch = recorded_batch(0, torch.zeros(samples, 1, *size), variant.args["captions"], draws)
    return RecordedBatch(**{**vars(batch), "image_BCHW": images * 255})


def dropped_below(kept_above_B: Tensor) -> Tensor:
    """Return numbers that are below a share exactly where the given ones are not above it."""
    return torch.nextafter(kept_above_B, torch.tensor(-1.0, dtype=kept_above_B.dtype))


def _config(encoder: TextEncoder, image_width: int) -> CascadeUNetConfig:
    node: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(TINY).network)  # type: ignore[assignment]
    widths = {
        "in_channels": 1,
        "clip_text_in_channels": encoder.hidden_size,
        "clip_text_pooled_in_channels": encoder.projection_dim,
        "clip_image_in_channels": image_width,
    }
    return CascadeUNetConfig(**{key: value for key, value in (node | widths).items() if key != "_target_"})


def retoken(variant: Variant) -> Outcome:
    """Run retoken: a bare table with trained rows, or tokens chosen by expressions in a text tower."""
    return _bare_table(variant) if variant.args["mode"] == "table" else _tower(variant)


def _bare_table(variant: Variant) -> Outcome:
    given, ids = variant.inputs, tuple(variant.args["indices"])
    names, base = tuple(str(i) for i in ids), nn.Embedding.from_pretrained(given["table"])
    rows = TrainedTokens(strings=names, ids=ids, is_new=(False,) * len(ids), rows=given["table"][list(ids)])
    table, every = TokenTable(base, rows), torch.arange(len(given["table"]))[None]
    got = {"fresh_weight": table(every)[0].detach()}
    table.shift.data.copy_(given["embeddings"])
    lookup = table(given["ids"])
    (lookup * given["g"]).sum().backward()
    got |= {"weight": table(every)[0], "lookup": lookup, "lookup.disabled": table.base(given["ids"])}
    return Outcome(got | {"grad.embeddings": table.shift.grad})


def _tower(variant: Variant) -> Outcome:
    args, given = variant.args, variant.inputs
    encoder = text_encoder(args, variant.weights)
    entries, notes = expressible(encoder, args["train_tokens"])
    table, wanted = train_tokens(encoder, entries), variant.outputs["indices"].tolist()
    got = {"indices": in_order(table, wanted), "table_after_selection": whole_table(table)}
    place = [table.ids.index(i) for i in wanted]
    table.shift.data[place] = given["embeddings"]
    tokens = encoder.tokenize(args["captions"])
    text_BLD, pooled_B1D = encoder.encode(tokens)
    got |= {**tokens, "hidden_last": text_BLD, "text_embeds": pooled_B1D[:, 0], "weight": whole_table(table)}
    ((text_BLD * given["g1"]).sum() + (got["text_embeds"] * given["g2"]).sum()).backward()
    got["grad.embeddings"] = table.shift.grad[place]  # type: ignore[index]
    outcome = Outcome(got, notes=[SET_ORDER, *notes])
    if args["clip_config"]["eos_token_id"] == LEGACY_END:
        reason = (
            "we pool at the end of text; with the legacy end id 2 transformers pools at the highest id, a new token"
        )
        outcome.left_out = {"text_embeds": reason, "grad.embeddings": reason}
        outcome.got = {name: value for name, value in got.items() if name not in outcome.left_out}
    return outcome


def expressible(
    encoder: TextEncoder, entries: Sequence[Sequence[str | None]]
) -> tuple[list[tuple[str | None, ...]], list[str]]:
    """Return the entries of `train_tokens` as ours take them, and what was changed."""
    keys, changed, notes = encoder.tokenizer.get_vocab(), [], []
    for token, begin in entries:
        expression = begin if is_new(str(token)) else token
        missing = expression is not None and not any(re.search(expression, key) for key in keys)
        if is_new(str(token)) or not missing:
            changed.append((token, None if missing else begin))
        notes += [MATCHES_NOTHING] if missing else []
    if not changed:
        raise NotCoveredError("no entry of train_tokens matches a token, which we refuse")
    return changed, notes


def in_order(table: TokenTable, wanted: Sequence[int]) -> Tensor:
    """Return the trained ids in the order of `wanted` where they are the same, else in their own."""
    same = sorted(table.ids) == sorted(wanted)
    return torch.tensor(list(wanted) if same else list(table.ids))


def whole_table(table: TokenTable) -> Tensor:
    """Return every row that a token has, (V, D), without gradient."""
    return table(torch.arange(len(table.place))[None])[0].detach().clone()


def trained_table(encoder: TextEncoder) -> TokenTable:
    """Return the table whose rows train."""
    table = trained_tokens(encoder)
    assert table is not None, "no token trains"
    return table
