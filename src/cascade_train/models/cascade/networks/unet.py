"""The denoising network of Stage B and C: diffusers' `StableCascadeUNet` with its own walk through the levels.

Same state-dict keys and config as the parent, so folders and pipelines of diffusers fit. Must not live here: weights
(initialize.py, formats/weights.py), and what the network is conditioned on (stage_c.py).

Shape legend: B batch, C channels, H W latent size, L tokens, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cascade_train.files.package import without_siblings
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.networks.block_network import draws_random_numbers, set_attention

with without_siblings("diffusers.models.unets"):
    from diffusers.models.unets.unet_stable_cascade import (
        SDCascadeResBlock,
        StableCascadeUNet,
        StableCascadeUNetOutput,
        UpDownBlock2d,
    )

__all__ = ["CascadeUNet", "SDCascadeResBlock", "StableCascadeUNet"]

VARIANTS = 16
"""Kinds of calls of a unit: training or not, with or without skip, a batch of 1, few or 16 and more, a side of 1."""


class CascadeUNet(StableCascadeUNet):
    """Stable Cascade's U-Net (Stage B and C), walked unit by unit.

    A unit is what lies between two residual blocks: (residual, timestep, attention), or (residual, timestep) in levels
    without attention. Every block is called as `block(...)`, so that hooks of FSDP2 and `block.compile()` act on it.
    `compile_units` compiles a whole unit as one function. A unit is recomputed from outside of what is compiled.

    Setting `gradient_checkpointing` recomputes a whole unit in backward. The dropout of the config acts inside the
    residual blocks and on the attention's output, or on its probabilities after `block_network.drop_probabilities`.
    """

    family = CASCADE
    _run_blocks: Callable[[list[nn.Module], list[Tensor | None], Tensor], Tensor] | None = None
    """The compiled function of a unit; None = not compiled, or block by block."""
    _is_compiled = False

    def compile_units(self, *, each_block: bool = False, **options: Any) -> int:
        """Compile each unit as one function for all sizes from the start; `options` are of `torch.compile`.

        `each_block`: each block by itself, as hooks on them, which cannot be compiled, need (FSDP2). Returns how often
        a function may be compiled: the kinds of calls, for each level.
        """
        self._is_compiled = True
        if each_block:
            for block in (block for unit in self.units() for block in unit):
                block.compile(dynamic=True, **options)
        else:
            self._run_blocks = torch.compile(_run_blocks, dynamic=True, **options)
        return VARIANTS * self.levels

    def units(self) -> list[list[nn.Module]]:
        """Return the modules of each unit, in order of first execution: down, then up."""
        down = [unit for level in range(self.levels) for unit in self._split(self.down_blocks[level], level)]
        up = [unit for i in range(self.levels) for unit in self._split(self.up_blocks[i], self.levels - 1 - i)]
        return down + up

    @property
    def levels(self) -> int:
        """Number of levels, each with its own width."""
        return len(self.config.block_out_channels)

    def _split(self, blocks: nn.ModuleList, level: int) -> list[list[nn.Module]]:
        size = len(self.config.block_types_per_layer[level])
        return [list(blocks[start : start + size]) for start in range(0, len(blocks), size)]

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel, see `block_network.set_attention`."""
        set_attention(self, name)

    def time_embedding(self, timestep_ratio: Tensor, sca: Tensor | None, crp: Tensor | None) -> Tensor:
        """Embed (B,) timestep ratios and their side conditions in fp32: (B, D * (1 + number of side conditions)).

        Absent side conditions are zeros. In bf16 the sines of 10000 r would be off by 0.5 rms.
        """
        ratio = timestep_ratio.float()
        given, absent = {"sca": sca, "crp": crp}, torch.zeros_like(ratio)
        sides = [given.get(name) for name in self.config.timestep_conditioning_type]
        values = [ratio, *(absent if side is None else side.float().expand_as(ratio) for side in sides)]
        # all at once: one by one they launch ten kernels each
        return self.get_timestep_ratio_embedding(torch.stack(values, dim=1).flatten()).view(len(ratio), -1)

    def get_clip_embeddings(
        self, clip_txt_pooled: Tensor, clip_txt: Tensor | None = None, clip_img: Tensor | None = None
    ) -> Tensor:
        """Map text, pooled text and image embeddings to condition tokens (B, L, D), layer-normalised.

        `clip_txt` (B, L, D) gives one token each; `clip_txt_pooled` and `clip_img`, (B, D) or (B, N, D), `clip_seq`
        tokens per vector. A ValueError where only one of `clip_txt` and `clip_img` is given.
        """
        if (clip_txt is None) != (clip_img is None):
            raise ValueError("clip_text and clip_img belong together: pass zeros (B, 1, D) as clip_img for no image")
        pooled = self._tokens(self.clip_txt_pooled_mapper, clip_txt_pooled)
        if clip_txt is None:
            return self.clip_norm(pooled)
        text = self.clip_txt_mapper(clip_txt.to(self.clip_txt_mapper.weight.dtype))
        return self.clip_norm(torch.cat([text, pooled, self._tokens(self.clip_img_mapper, clip_img)], dim=1))

    def _tokens(self, mapper: nn.Module, vectors: Tensor) -> Tensor:
        vectors_BND = vectors.unsqueeze(1) if vectors.dim() == 2 else vectors
        return mapper(vectors_BND.to(mapper.weight.dtype)).unflatten(-1, (self.config.clip_seq, -1)).flatten(1, 2)

    def _embed(self, sample: Tensor, effnet: Tensor | None, pixels: Tensor | None) -> Tensor:
        dtype = self.embedding[1].weight.dtype
        x = self.embedding(sample.to(dtype))
        if hasattr(self, "effnet_mapper") and effnet is not None:
            x = x + self.effnet_mapper(_resize(effnet.float(), x).to(dtype))
        if hasattr(self, "pixels_mapper"):
            if pixels is None:
                pixels = x.new_zeros(x.shape[0], self.config.pixel_mapper_in_channels, 8, 8)
            x = x + _resize(self.pixels_mapper(pixels.to(dtype)), x)
        return x

    def _run_unit(
        self,
        blocks: list[nn.Module],
        kinds: Sequence[str],
        x: Tensor,
        time: Tensor,
        clip: Tensor,
        skip: Tensor | None,
        control: Tensor | None,
    ) -> Tensor:
        if control is not None:
            x = x + _resize(control, x)
        side = {"SDCascadeResBlock": skip, "SDCascadeTimestepBlock": time, "SDCascadeAttnBlock": clip}
        return (self._run_blocks or _run_blocks)(blocks, [side[kind] for kind in kinds], x)

    def _recomputed(self, blocks: list[nn.Module], *arguments: Any) -> Tensor:
        keep_rng = draws_random_numbers(blocks)
        return checkpoint(self._run_unit, blocks, *arguments, use_reentrant=False, preserve_rng_state=keep_rng)

    def _run_level(
        self,
        blocks: nn.ModuleList,
        repeat_mappers: nn.ModuleList,
        level: int,
        x: Tensor,
        skip: Tensor | None,
        sides: tuple[Tensor, Tensor],
        controls: Iterator[Tensor | None],
    ) -> Tensor:
        kinds = self.config.block_types_per_layer[level]
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for repeat in range(len(repeat_mappers) + 1):
            if self._is_compiled:  # of one layout and no view of another, as between units: one graph serves for all
                x = x.clone(memory_format=torch.channels_last)
            for index, unit in enumerate(self._split(blocks, level)):
                unit_skip = skip if index == 0 else None
                if unit_skip is not None:
                    x = _resize(x, unit_skip)
                run = self._recomputed if recompute else self._run_unit
                x = run(unit, kinds, x, *sides, unit_skip, next(controls))
            if repeat < len(repeat_mappers):
                x = repeat_mappers[repeat](x)
        return x

    def forward(
        self,
        sample: Tensor,
        timestep_ratio: Tensor,
        clip_text_pooled: Tensor,
        clip_text: Tensor | None = None,
        clip_img: Tensor | None = None,
        effnet: Tensor | None = None,
        pixels: Tensor | None = None,
        sca: Tensor | None = None,
        crp: Tensor | None = None,
        return_dict: bool = True,
        control: dict[int, Tensor] | None = None,
    ) -> StableCascadeUNetOutput | tuple[Tensor]:
        """Predict the diffusion target, of the shape of `sample`, in the dtype of the weights.

        Args:
            sample: (B, C, H, W) noised latent, cast to the dtype of the weights.
            timestep_ratio: (B,), pass fp32.
            clip_text_pooled: (B, D) or (B, N, D).
            clip_text: (B, L, D), with `clip_img`.
            clip_img: (B, D) or (B, N, D), with `clip_text`; zeros = no image.
            effnet: (B, C', H', W') semantic latent (Stage B), resized to the embedded sample.
            pixels: (B, 3, H', W') (Stage B); None = zeros.
            sca: (B,), None = zeros.
            crp: (B,), None = zeros.
            return_dict: False = a tuple of one tensor.
            control: maps (B, C, H', W') by index of the executed residual block (down, then up, every repeat pass
                counts), added in front of the block, resized bilinearly; indices past the last block have no effect.
        """
        x = self._embed(sample, effnet, pixels)
        time = self.time_embedding(timestep_ratio, sca, crp).to(x.dtype)
        sides = time, self.get_clip_embeddings(clip_text_pooled, clip_text, clip_img)
        controls = map((control or {}).get, itertools.count())  # of the executed residual blocks
        outputs: list[Tensor] = []
        for level, scaler in enumerate(self.down_downscalers):
            x = _scale(scaler, x)
            modules = self.down_blocks[level], self.down_repeat_mappers[level]
            x = self._run_level(*modules, level, x, None, sides, controls)
            outputs.append(x)
        for i, scaler in enumerate(self.up_upscalers):
            level = self.levels - 1 - i
            skip = outputs[level] if i > 0 else None
            x = self._run_level(self.up_blocks[i], self.up_repeat_mappers[i], level, x, skip, sides, controls)
            x = _scale(scaler, x)
        pred = self.clf(x)
        return StableCascadeUNetOutput(sample=pred) if return_dict else (pred,)


def _run_blocks(blocks: list[nn.Module], sides: list[Tensor | None], x: Tensor) -> Tensor:
    """Run the blocks of a unit, each with what it takes beside the latent."""
    for block, side in zip(blocks, sides, strict=True):
        x = block(x, side)
    return x


def _resize(source: Tensor, like: Tensor) -> Tensor:
    """Resize to the height and width of `like` (bilinear, aligned corners, in fp32) and cast to its dtype."""
    if source.shape[-2:] != like.shape[-2:]:
        source = nn.functional.interpolate(source.float(), like.shape[-2:], mode="bilinear", align_corners=True)
    return source.to(like.dtype)


def _scale(scaler: nn.Module, x: Tensor) -> Tensor:
    """Go from one level to the next; bilinear scaling runs in fp32, as in the original."""
    if isinstance(scaler, nn.Identity):
        return x
    norm, mapping = scaler.children()
    x = norm(x)
    if not isinstance(mapping, UpDownBlock2d):
        return mapping(x)
    for block in mapping.blocks:
        x = block(x.float()).to(x.dtype) if isinstance(block, nn.Upsample) else block(x)
    return x
