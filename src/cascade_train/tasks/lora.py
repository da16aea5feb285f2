"""Adapters on a frozen stage, and textual inversion: tokens of its text encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cascade_train.batch import Batch
from cascade_train.diffusion.objective import Diffused, Objective
from cascade_train.errors import ConfigError
from cascade_train.models.adapters.kinds import KINDS
from cascade_train.models.formats.export_lora import save_lora
from cascade_train.models.formats.lora_files import fill_adapters, refill_lora
from cascade_train.models.lora import (
    ADAPTER,
    TEXT_ENCODERS,
    LoraSpec,
    StoredLora,
    TrainedTokens,
    adapted_layers,
    adapter_state,
    full_name,
    halves_are_shared,
    inject_lora,
    lora_spec,
    original_name,
    set_adapter_mode,
    tower_name,
    without_adapters,
)
from cascade_train.models.stage import Stage, below
from cascade_train.models.text_encoder import TextEncoder
from cascade_train.models.tokens import is_new, put_tokens, train_tokens, trained_tokens
from cascade_train.options import File, Positive, check_found, check_least, check_pattern
from cascade_train.tasks.base import Export
from cascade_train.tasks.text_to_image import PreparedBatch, TextToImage

_OF_SOME_KINDS = {"dropout": 0.0, "init": "kaiming", "dora": False, "joint_qkv": False, "factor": None, "ranks": None}
"""Options that not every kind of adapters takes, and the values that ask for nothing."""


@dataclass(kw_only=True, eq=False)
class LoRA(TextToImage):
    """Trains adapters and named tokens, fp32 on a frozen base; the base's dropout is off.

    Args:
        kind: of adapters. lora: low-rank (Hu et al. 2021). lokr, loha: LyCORIS' Kronecker and Hadamard products
            (Yeh et al. 2024).
        factor: of kind=lokr, the size of the first matrix; null = the divisor nearest to the square root of the width.
        rank: of every adapter, >= 1.
        alpha: the adapters' output is scaled by alpha / rank, > 0.
        ranks: modules with a rank of their own, `[[attention, 16], ["down_blocks.0", 8, 4.0]]`: the first regular
            expression that is found in a module's name, such as `network.down_blocks.0.1.attention.to_q`, gives its
            rank and, where there is a third number, its alpha, else `alpha`. null = `rank` for all.
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
        preserve: pairs of words, `[[fernando, dog]]`: under captions with the second for the first, what the base
            predicts without adapters is trained too, so that dogs stay as they are. null = none.
        preserve_weight: of that loss beside the objective's, > 0.
        seed: of the adapters' initial values.
    """

    fits = ("denoising",)
    trains_network = False

    rank: int
    alpha: Positive[float]
    dropout: float
    module_filters: list[str] | None
    dora: bool
    text_encoder_filters: list[str] | None
    train_tokens: list[list[str | None]] | None
    weights: File[str | None]
    seed: int
    init: Literal["kaiming", "original"] = "kaiming"
    joint_qkv: bool = False
    ranks: list[Any] | None = None
    preserve: list[list[str]] | None = None
    preserve_weight: Positive[float] = 1.0
    kind: Literal["lora", "lokr", "loha"] = "lora"
    factor: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("rank", self.rank, 1, "an adapter needs at least one column")
        self._check_kind()
        self._check_ranks()
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout}: is a probability on the adapters' input, give one in [0, 1)")
        if self.train_tokens == []:
            raise ValueError("train_tokens=[]: names no token; give pairs like ['[fernando]', '^dog</w>'], or null")
        if self.preserve is not None and not all(len(pair) == 2 and pair[0] for pair in self.preserve or [[]]):
            raise ValueError(f"preserve={self.preserve}: give pairs of words, such as [[fernando, dog]], or null")
        self._preserved = 0  # samples whose captions had the words
        self._unread = {str(name) for name, *_ in self.train_tokens or () if is_new(str(name))}  # in no caption so far
        self._epochs = set[int]()  # that samples were of since this start; two are kept
        self._reported = False  # what is in no caption of the first of them
        self._spec: LoraSpec
        self._encoders: dict[str, TextEncoder]
        self._named: frozenset[str] = frozenset({"text_encoder"})

    def _check_kind(self) -> None:
        if self.factor is not None:
            check_least("factor", self.factor, 1, "it is the size of a matrix; null = near the square root")
        kind = KINDS[self.kind]
        for name, unused in _OF_SOME_KINDS.items():
            value = getattr(self, name)
            if value != unused and name not in kind.options:
                takers = " or ".join(f"kind={kind.name}" for kind in KINDS.values() if name in kind.options)
                raise ValueError(f"{name}={value}: is for {takers}, not for kind={self.kind}; leave it out")

    def _check_ranks(self) -> None:
        for entry in self.ranks or ():
            pattern, *numbers = entry if isinstance(entry, list) and entry else [None]
            positive = all(isinstance(number, int | float) and number > 0 for number in numbers)
            if not (isinstance(pattern, str) and 1 <= len(numbers) <= 2 and type(numbers[0]) is int and positive):
                raise ValueError(
                    f"ranks={entry}: give an expression and a rank of at least 1, such as [attention, 16], or with an"
                    " alpha above 0, [attention, 16, 8.0]"
                )
            check_pattern("ranks", pattern)

    def check_stage(self, stage: Stage) -> None:
        """Look up how many text encoders there are."""
        self._named = frozenset(stage.text_encoders())
        super().check_stage(stage)

    def trained_parts(self) -> frozenset[str]:
        """Text encoders where they get adapters or trained tokens."""
        trains = self.text_encoder_filters is not None or self.train_tokens is not None
        return self._named if trains else frozenset()

    def attach(self, stage: Stage, objective: Objective, device: torch.device) -> None:
        """Take the built stage, freeze it, and add adapters and tokens."""
        super().attach(stage, objective, device)
        encoders = stage.text_encoders()
        self._encoders = {name: encoder for name, encoder in encoders.items() if name not in stage.left_out}
        self._inject("network", stage.network, "task.module_filters")
        for name, encoder in self._encoders.items():
            if self.text_encoder_filters is not None:
                self._inject(name, encoder.module, "task.text_encoder_filters", encoder.unreached())
            if self.train_tokens is not None:
                train_tokens(encoder, self.train_tokens)
        if self.ranks is not None:
            named = {root: [name for name, _ in adapted_layers(m)] for root, m in self._roots().items()}
            names = [f"{full_name(root, n)}\n{original_name(n)}" for root, layers in named.items() for n in layers]
            check_found("task.ranks", [pattern for pattern, *_ in self.ranks], names, "modules that are adapted")
        if self.weights is not None:
            self._load(self.weights, key="task.weights")
        if self.preserve is not None and self._named & stage.left_out:
            raise ConfigError(
                "task.preserve: the cache holds what the text encoder made of captions, and not of those with other"
                " words; make the cache with captions=false"
            )
        self._spec = lora_spec(stage.network, self._adapted())
        self.trains_conditions = bool(self.trained_towers())

    def prepare_batch(self, batch: Batch) -> PreparedBatch:
        """See `TextToImage`; the captions with other words too, where these are preserved."""
        prepared, captions = super().prepare_batch(batch), list(batch.captions)
        read = "\n".join(captions).lower()  # as by the tokenizer
        self._unread = {token for token in self._unread if token.lower() not in read}
        if len(self._epochs) < 2:
            self._epochs |= set(batch.epoch_B.tolist())
        if self.preserve is None:
            return prepared
        for words, others in self.preserve:
            captions = [caption.replace(words, others) for caption in captions]
        self._preserved += sum(one != other for one, other in zip(captions, batch.captions, strict=True))
        return replace(prepared, other_tokens=self._tokens(captions))

    def further_losses(self, prepared: PreparedBatch, diffused: Diffused) -> Mapping[str, Tensor]:
        """`loss_preserve`, how far the adapters move what the base predicts under the other captions.

        0 where a caption stays the same or is dropped. After ai-toolkit's differential output preservation; the target
        is the base's own prediction at the noise of the sample, in the objective's loss.
        """
        if prepared.other_tokens is None:
            return {}
        with torch.no_grad(), without_adapters(self._roots().values()):
            images = prepared.images
            cond = self._conditions(prepared, prepared.other_tokens, images)
            target_BCHW = self._predict(diffused.noised, diffused.timestep_ratio_B, cond, None).float()
        with torch.set_grad_enabled(self.trains_conditions):
            cond = self._conditions(prepared, prepared.other_tokens, images)
        pred_BCHW = self._predict(diffused.noised, diffused.timestep_ratio_B, cond, None)
        loss_B, _ = self.objective.loss(pred_BCHW, replace(diffused, target=target_BCHW), prepared.mask_B1HW)
        differs = [
            (prepared.tokens[name] != tokens).flatten(1).any(1) for name, tokens in prepared.other_tokens.items()
        ]
        differs_B = torch.stack(differs).any(0) & ~prepared.drop_caption_B
        return {"loss_preserve": self.preserve_weight * loss_B * differs_B}

    def notices(self, *, last: bool = False) -> list[str]:
        """See `TextToImage`; after an epoch and at last, also new tokens and preserved words that no caption had."""
        texts = super().notices(last=last)
        is_due = last or (len(self._epochs) > 1 and not self._reported)
        self._reported |= is_due
        preserved = [] if self._preserved else [pair[0] for pair in self.preserve or ()]
        for key, words in (("task.preserve", preserved), ("task.train_tokens", sorted(self._unread))):
            if is_due and words:
                texts.append(f"no caption on rank 0 since this start had the words of {key}: {', '.join(words)}")
        return texts

    def trained_towers(self) -> dict[str, TextEncoder]:
        """Text encoders in which something trains, by name."""
        encoders = self._encoders.items()
        return {
            name: encoder for name, encoder in encoders if any(p.requires_grad for p in encoder.module.parameters())
        }

    def _adapted(self) -> dict[str, nn.Module]:
        return {name: encoder.module for name, encoder in self._encoders.items()}

    def _inject(self, root: str, module: nn.Module, key: str, without: Sequence[str] = ()) -> None:
        constructor_keys = ("rank", "alpha", "seed", *_OF_SOME_KINDS, "kind")
        options = {name: getattr(self, name) for name in constructor_keys}
        filters = getattr(self, key.removeprefix("task."))
        inject_lora(module, module_filters=filters, key=key, without=without, root=root, **options)
        set_adapter_mode(module)

    def summary(self) -> str:
        """Count the adapted layers and the trained tokens."""
        ranks = [layer.r[ADAPTER] for root in self._roots().values() for _, layer in adapted_layers(root)]
        shown = f"{min(ranks)}" if len({*ranks}) == 1 else f"{min(ranks)} to {max(ranks)}"
        tokens = f", {len(self.train_tokens)} entries of train_tokens" if self.train_tokens else ""
        kind = "" if self.kind == "lora" else f" ({KINDS[self.kind].title})"
        return f"{len(ranks)} adapted layers of rank {shown}{kind}{tokens}"

    def exports(self) -> Mapping[str, Export]:
        """`lora`, a peft folder with a single file beside it; both hold the trained tokens' whole rows."""
        return {"lora": Export(module=nn.ModuleDict(self._roots()), write=self._write_lora)}

    def load_export(self, export: Path) -> None:
        """Load the adapters and tokens of a run's `export/lora`."""
        self._load(str(export), key="from")

    def _load(self, source: str, *, key: str) -> None:
        lora = refill_lora(
            self.stage.network, source, key=key, module_filters=self.module_filters, encoders=self._adapted()
        )
        if self.joint_qkv and not halves_are_shared(lora.state):
            raise ConfigError(
                f"{key}={source}: its q, k and v begin with halves of their own; set task.joint_qkv=false"
            )
        of_towers = lora.by_root()
        for tower in TEXT_ENCODERS:
            if tower in of_towers or tower in lora.tokens:
                self._load_tower(tower, of_towers.get(tower, {}), lora.tokens.get(tower), f"{key}={source}")

    def _load_tower(self, name: str, state: Mapping[str, Tensor], tokens: TrainedTokens | None, origin: str) -> None:
        if name not in self.stage.text_encoders():
            raise ConfigError(f"{origin}: contains {name} weights, and {self.stage.name} has one text encoder")
        if state and self.text_encoder_filters is None:
            raise ConfigError(
                f"{origin}: holds adapters of the text encoder; set task.text_encoder_filters to the modules "
                "that they were trained on"
            )
        if state:
            unused = tuple(f"{tower_name(path)}." for path in self._encoders[name].unreached())
            used = {key: value for key, value in state.items() if not key.startswith(unused)}
            fill_adapters(self._encoders[name].module, used, origin)
        if tokens is not None and name in self.stage.left_out:
            raise ConfigError(
                f"{origin}: holds tokens of the text encoder, and the cache holds what that made of captions"
                " without them; make the cache with captions=false"
            )
        if tokens is not None:
            put_tokens(self._encoders[name], tokens, origin=origin)

    def _write_lora(self, state: Mapping[str, Tensor], directory: Path) -> float:
        adapters, tokens = adapter_state(below("network", state)), {}
        for name, encoder in self._encoders.items():
            text, table = below(name, state), trained_tokens(encoder)
            adapters |= {full_name(name, key): value for key, value in adapter_state(text).items()}
            if table is not None:
                place = next(path for path, module in encoder.module.named_modules() if module is table)
                tokens[name] = table.stored(below(place, text))
        lora = StoredLora(spec=self._spec, state=adapters, tokens=tokens)
        return save_lora(lora, self.stage.family, self.stage.network.config, directory)
