"""Low-rank adapters on a frozen stage, and textual inversion: tokens of its text encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cascade_train.diffusion.objective import Objective
from cascade_train.errors import ConfigError
from cascade_train.models.formats.export_lora import save_lora
from cascade_train.models.formats.lora_files import fill_adapters, refill_lora
from cascade_train.models.lora import (
    LoraSpec,
    StoredLora,
    TrainedTokens,
    adapted_layers,
    adapter_state,
    halves_are_shared,
    inject_lora,
    lora_spec,
    set_adapter_mode,
    tower_name,
)
from cascade_train.models.stage import Stage, below
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.models.tokens import put_tokens, train_tokens, trained_tokens
from cascade_train.options import File, check_above, check_least
from cascade_train.tasks.base import Export
from cascade_train.tasks.text_to_image import TextToImage


@dataclass(kw_only=True, eq=False)
class LoRA(TextToImage):
    """Trains adapters and named tokens, fp32 on a frozen base; the base's dropout is off.

    Args:
        rank: of every adapter, >= 1.
        alpha: the adapters' output is scaled by alpha / rank, > 0.
        init: initial values. kaiming: A uniform, B zero. original: A zero, B normal, which moves the adapted weights up
            to a hundred times as far in the same steps; use it with alpha=1.
        dropout: on the adapters' input, in [0, 1).
        module_filters: substrings (else regular expressions) of the names of the modules that get adapters, under
            diffusers' names or the original's; null = every linear and ungrouped convolution layer.
        dora: also train the magnitude of each adapted output (Liu et al. 2024).
        joint_qkv: q, k and v of each of the network's attentions share one A, as in the original.
        text_encoder_filters: the same for the text encoders' modules, e.g. `.self_attn`; null = no adapters there.
        train_tokens: textual inversion, as pairs. `['[fernando]', '^dog</w>']` adds a token, in `[ ]` or `< >`,
            initialised with the mean of the vocabulary's entries that the regular expression matches;
            `['^snail', null]` trains the matched entries. null = none.
        weights: adapters to start from: a run, its export, a peft folder or a file, with their tokens; null = new ones.
        seed: of the adapters' initial values.
    """

    fits = ("denoising",)
    trains_network = False

    rank: int
    alpha: float
    dropout: float
    module_filters: list[str] | None
    dora: bool
    text_encoder_filters: list[str] | None
    train_tokens: list[list[str | None]] | None
    weights: File[str | None]
    seed: int
    init: Literal["kaiming", "original"] = "kaiming"
    joint_qkv: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("rank", self.rank, 1, "an adapter needs at least one column")
        check_above("alpha", self.alpha, 0)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout}: is a probability on the adapters' input, give one in [0, 1)")
        if self.train_tokens == []:
            raise ValueError("train_tokens=[]: names no token; give pairs like ['[fernando]', '^dog</w>'], or null")
        self._spec: LoraSpec
        self._encoders: dict[str, TextEncoder]
        self._named: frozenset[str] = frozenset({"text_encoder"})

    def check_stage(self, stage: Stage) -> None:
        """Look up how many text encoders there are."""
        self._named = frozenset(stage.text_encoders())
        super().check_stage(stage)

    def trained_parts(self) -> frozenset[str]:
        """Return the text encoders where they get adapters or trained tokens."""
        trains = self.text_encoder_filters is not None or self.train_tokens is not None
        return self._named if trains else frozenset()

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage, freeze it, and add adapters and tokens."""
        super().attach(stage, objective, device)
        encoders = stage.text_encoders()
        self._encoders = {name: each for name, each in encoders.items() if name not in stage.left_out}
        self._inject(stage.network, self.module_filters, "task.module_filters")
        for encoder in self._encoders.values():
            if self.text_encoder_filters is not None:
                key, without = "task.text_encoder_filters", encoder.unreached()
                self._inject(encoder.module, self.text_encoder_filters, key, without)
            if self.train_tokens is not None:
                train_tokens(encoder, self.train_tokens)
        if self.weights is not None:
            self._load(self.weights, key="task.weights")
        self._spec = lora_spec(stage.network)
        self.trains_conditions = bool(self.trained_towers())

    def trained_towers(self) -> dict[str, TextEncoder]:
        """Return the text encoders in which something trains, by name."""
        encoders = self._encoders.items()
        return {name: each for name, each in encoders if any(p.requires_grad for p in each.module.parameters())}

    def _inject(self, module: nn.Module, filters: list[str] | None, key: str, without: Sequence[str] = ()) -> None:
        inject_lora(
            module,
            rank=self.rank,
            alpha=self.alpha,
            dropout=self.dropout,
            module_filters=filters,
            seed=self.seed,
            init=self.init,
            dora=self.dora,
            joint_qkv=self.joint_qkv,
            key=key,
            without=without,
        )
        set_adapter_mode(module)

    def summary(self) -> str:
        """Count the adapted layers and the trained tokens."""
        layers = sum(1 for root in self._roots().values() for _ in adapted_layers(root))
        tokens = f", {len(self.train_tokens)} entries of train_tokens" if self.train_tokens else ""
        return f"{layers} adapted layers of rank {self.rank}{tokens}"

    def exports(self) -> Mapping[str, Export]:
        """Return `lora`, a peft folder with a single file beside it; both hold the trained tokens' whole rows."""
        return {"lora": Export(module=nn.ModuleDict(self._roots()), write=self._write_lora)}

    def load_export(self, export: Path) -> None:
        """Load the adapters and tokens of a run's `export/lora`."""
        self._load(str(export), key="from")

    def _load(self, source: str, *, key: str) -> None:
        lora = refill_lora(self.stage.network, source, key=key, module_filters=self.module_filters)
        states = (lora.state, lora.text_encoder, lora.text_encoder_2)
        if self.joint_qkv and not all(map(halves_are_shared, states)):
            raise ConfigError(
                f"{key}={source}: its q, k and v begin with halves of their own; set task.joint_qkv=false"
            )
        for tower, (adapters, tokens) in lora.towers().items():
            self._load_tower(tower, adapters, tokens, f"{key}={source}")

    def _load_tower(self, name: str, state: Mapping[str, Tensor], tokens: TrainedTokens | None, origin: str) -> None:
        if name not in self.stage.text_encoders():
            raise ConfigError(f"{origin}: contains {name} weights, and {self.stage.name} has one text encoder")
        if state and self.text_encoder_filters is None:
            raise ConfigError(
                f"{origin}: holds adapters of the text encoder; set task.text_encoder_filters to the modules "
                "that they were trained on"
            )
        if state:
            fill_adapters(self._encoders[name].module, state, origin)
        if tokens is not None and name in self.stage.left_out:
            raise ConfigError(
                f"{origin}: holds tokens of the text encoder, and the cache holds what that made of captions"
                " without them; make the cache with captions=false"
            )
        if tokens is not None:
            put_tokens(self._encoders[name], tokens, origin=origin)

    def _write_lora(self, state: Mapping[str, Tensor], directory: Path) -> float:
        found: dict[str, Any] = {}
        for name, encoder in self._encoders.items():
            text, table, ending = below(name, state), trained_tokens(encoder), name.removeprefix("text_encoder")
            found[name] = {tower_name(key): value for key, value in adapter_state(text).items()}
            if table is not None:
                place = next(path for path, module in encoder.module.named_modules() if module is table)
                found[f"tokens{ending}"] = table.stored(below(place, text))
        lora = StoredLora(spec=self._spec, state=adapter_state(below("network", state)), **found)
        return save_lora(lora, self.stage.family, self.stage.network.config, directory, {})
