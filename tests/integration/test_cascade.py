"""Stage C, B and A paint together: sizes, noise, pictures in, and stages that do not belong together."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from cascade_train.batch import sample_seed
from cascade_train.commands.generate import GenerateArgs, generate
from cascade_train.errors import ConfigError
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor, ConvolutionalPreviewer
from cascade_train.results.sampling import Fingerprint
from cascade_train.tasks.text_to_image import DiffusionImageSampler
from tests.distributed.test_modes import B_NARROW, NARROW
from tests.integration.runs import train
from tests.integration.test_stage_a import NARROW as A_NARROW

pytestmark = pytest.mark.slow

ONE_STEP = ("train.max_steps=1", "train.global_batch_size=2", "checkpoint.every_steps=null")
VQGAN = ("model=b_tiny", *(f"model.stage_a.{each}" for each in A_NARROW))
IMAGE_ENCODER = (
    "model.image_encoder={_target_: cascade_train.models.cascade.image_encoder.ImageEncoder, weights: null, "
    "subfolder: null, image_size_px: 28, patch_size_px: 14, hidden_size: 32, intermediate_size: 32, "
    "num_hidden_layers: 1, num_attention_heads: 2, projection_dim: 128, hidden_act: gelu}"
)

OTHER = "semantic_compressor.EfficientNetCompressor"


def disturb(run: Path, part: str) -> Path:
    """Add noise to the weights that a run exported, so that what it makes depends on all that it is given."""
    file = run / "export" / part / part / "diffusion_pytorch_model.safetensors"
    generator = torch.Generator().manual_seed(5)
    stored = {n: v + 0.05 * torch.randn(v.shape, generator=generator) for n, v in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    return run


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Stage C that sees images."""
    folder = tmp_path_factory.mktemp("cascade") / "c"
    return disturb(train(folder, "task=finetune", *NARROW, IMAGE_ENCODER, *ONE_STEP), "prior")


@pytest.fixture(scope="module")
def decoder(prior: Path) -> Path:
    """A Stage B on a VQGAN."""
    folder = prior.with_name("b")
    chosen = ("task=reconstruction", *B_NARROW, *VQGAN, "objective=gdf")
    return disturb(train(folder, *chosen, *ONE_STEP), "decoder")


@pytest.fixture(scope="module")
def picture(prior: Path) -> str:
    """A picture of a user's: dark above, bright below."""
    pixels = np.full((80, 60, 3), (20, 40, 160), dtype=np.uint8)
    pixels[40:] = (240, 200, 120)
    Image.fromarray(pixels).save(prior.with_name("picture.png"))
    return str(prior.with_name("picture.png"))


def painted(source: Path, out: Path, **given: Any) -> dict[str, np.ndarray]:
    """Return the pictures that the verb paints, without the grid, by name."""
    settings = {"prompts": ["a red circle"], "steps": 2} | given
    assert generate(GenerateArgs(source=str(source), out=str(out), **settings)) == 0
    return {path.name: np.asarray(Image.open(path)).astype(int) for path in sorted(out.glob("0*.png"))}


def apart(left: np.ndarray, right: np.ndarray) -> float:
    """Return the mean difference of two pictures' values, in [0, 255]."""
    return float(np.abs(left - right).mean())


def test_pictures_do_not_depend_on_the_batch_and_may_be_of_any_shape(
    prior: Path, decoder: Path, tmp_path: Path
) -> None:
    size = {"height": 64, "width": 104, "decoder": str(decoder), "decoder_steps": 2}
    prompts = ["a red circle", "a blue star"]
    together = painted(prior, tmp_path / "together", prompts=prompts, count=2, **size)
    assert list(together) == ["00_00.png", "00_01.png", "01_00.png", "01_01.png"]
    assert {each.shape for each in together.values()} == {(64, 104, 3)}
    alone = painted(prior, tmp_path / "alone", prompts=prompts[1:], count=2, batch_size=1, **size)
    for number in (0, 1):
        assert np.abs(alone[f"00_0{number}.png"] - together[f"01_0{number}.png"]).max() <= 1
    assert apart(together["00_00.png"], together["01_00.png"]) > 1
    preview = painted(prior, tmp_path / "preview", height=64, width=104)["00_00.png"]
    assert preview.shape == (64, 128, 3), "the previewer shows whole positions of Stage C's latents"


def test_what_stage_c_paints_reaches_the_picture_and_so_does_another_codec(
    prior: Path, decoder: Path, tmp_path: Path
) -> None:
    given = {"decoder": str(decoder), "decoder_steps": 2}
    first = painted(prior, tmp_path / "first", **given)["00_00.png"]
    assert first.shape == (64, 64, 3)
    other = painted(prior, tmp_path / "other", guidance_scale=1.0, **given)["00_00.png"]
    assert apart(first, other) > 0.5, "Stage B's caption and noise are the same"
    vqgan = tmp_path / "vqgan"
    (decoder / "export" / "decoder" / "vqgan").rename(vqgan)
    try:
        file = vqgan / "diffusion_pytorch_model.safetensors"
        save_file({name: value * 0.5 for name, value in load_file(file).items()}, vqgan / "half.safetensors")
        codec = painted(prior, tmp_path / "codec", codec=str(vqgan / "half.safetensors"), **given)["00_00.png"]
    finally:
        vqgan.rename(decoder / "export" / "decoder" / "vqgan")
    assert apart(first, codec) > 0.5


def test_sampling_starts_from_a_picture(prior: Path, picture: str, tmp_path: Path) -> None:
    pixels = np.asarray(ImageOps.fit(Image.open(picture), (64, 64)))
    image_BCHW = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 255
    compressor, previewer = (kind(weights="package:tiny") for kind in (ConvolutionalCompressor, ConvolutionalPreviewer))
    for part in (compressor, previewer):
        part.build(device=torch.device("cpu"))
    wanted = 255 * previewer.decode(compressor.encode(image_BCHW)).clamp(0, 1)[0].permute(1, 2, 0).numpy()
    near, far = (
        painted(prior, tmp_path / name, prompts=[], start_image=picture, start_strength=strength, steps=4)["00_00.png"]
        for name, strength in (("near", 0.02), ("far", 1.0))
    )
    assert apart(near, wanted) < 10 < apart(far, wanted)


def test_a_variation_is_a_condition_of_stage_c(prior: Path, picture: str, tmp_path: Path) -> None:
    with_it = painted(prior, tmp_path / "with", prompts=[""], variation=picture)["00_00.png"]
    alone = painted(prior, tmp_path / "alone", prompts=[], variation=picture)["00_00.png"]
    without = painted(prior, tmp_path / "without", prompts=[""])["00_00.png"]
    assert np.array_equal(with_it, alone), "no prompt is the empty one"
    assert apart(with_it, without) > 0.5


def test_stage_b_alone_reconstructs_a_picture(decoder: Path, picture: str, tmp_path: Path) -> None:
    seen = painted(decoder, tmp_path / "a", prompts=[], image=picture, height=96, width=64)["00_00.png"]
    assert seen.shape == (96, 64, 3)
    Image.new("RGB", (64, 96), "white").save(tmp_path / "white.png")
    white = painted(decoder, tmp_path / "b", image=str(tmp_path / "white.png"), height=96, width=64, prompts=[])
    assert apart(seen, white["00_00.png"]) > 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decoder": "{b}", "height": 100}, "height=100: must be a multiple of 8 pixels.*e.g. 96 or 104"),
        ({"decoder": "{b}", "width": 8}, "width=8: .*and at least 16; e.g. 16 or 24"),
        ({"source": "{b}", "image": "{picture}", "width": 40}, "width=40: must be a multiple of 32 pixels"),
        ({"decoder": "{c}"}, "decoder=.*/c: is stage_c; after Stage C comes a Stage B"),
        ({"source": "{b}", "decoder": "{b}"}, "decoder=.*/b: comes after Stage C, and from=.*/b is stage_b"),
        ({"source": "{b}", "compression": 32.0}, "compression: comes after Stage C"),
        ({"codec": "a"}, "codec=a: Stage A under a Stage B, and from=.*/c is no Stage B"),
        ({"decoder": "/nowhere"}, "decoder=/nowhere: no such folder"),
        ({"decoder": "{c}/export/prior/tokenizer"}, "no weights in this folder"),
        ({"source": "{b}", "variation": "{picture}"}, "variation=.*: from=.*/b has no image encoder"),
        ({"start_image": __file__}, "start_image=.*: no picture that can be read"),
        ({"source": "{b}", "start_image": "{picture}"}, "stage_b reconstructs images and cannot sample from prompts"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    prior: Path, decoder: Path, picture: str, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    places = {"b": decoder, "c": prior, "picture": picture}
    filled = {key: value.format(**places) if isinstance(value, str) else value for key, value in given.items()}
    with pytest.raises(ConfigError, match=message):
        painted(Path(filled.pop("source", str(prior))), tmp_path / "out", **filled)


def test_latents_of_another_compressor_are_refused(
    prior: Path, decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = (decoder / "export" / "config.yaml").read_text().replace("convolutional.ConvolutionalCompressor", OTHER)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").write_text(other)
    words = (
        "decodes the semantic latents of EfficientNetCompressor, and from=.*/c samples those of ConvolutionalCompressor"
    )
    with pytest.raises(ConfigError, match=words):
        painted(prior, tmp_path / "out", decoder=str(tmp_path / "b"))
    assert not (tmp_path / "out").exists(), "refused before anything is built"

    of = Fingerprint.of

    def differently(stage: Any) -> Fingerprint:
        module = stage.semantic_compressor.module
        if stage.name == "stage_b":
            next(chain(module.parameters(), module.buffers())).data.mul_(1.01)
        return of(stage)

    monkeypatch.setattr(Fingerprint, "of", differently)
    kind = r"ConvolutionalCompressor \(weights=package:tiny, \w{8}\)"
    words = rf"latents of {kind}, and from=.*/c samples those of {kind}"
    with pytest.raises(ConfigError, match=words):
        painted(prior, tmp_path / "out", decoder=str(decoder), decoder_steps=1)


def of_image(number: int, stream: str) -> list[torch.Generator]:
    """Return the generator that the chain draws an image's noise from, with seed 0."""
    return [torch.Generator().manual_seed(sample_seed(0, 0, number, stream))]


def as_in_training(_module: Any, args: Any, given: dict[str, Any]) -> Any:
    """Tell a network the noise level as training does: at most 0.9936, where diffusers begins with 1."""
    return args, given | {"timestep_ratio": given["timestep_ratio"].clamp(max=0.99358326)}


def test_diffusers_paints_our_picture_from_the_exports(
    prior: Path, decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import StableCascadeDecoderPipeline, StableCascadePriorPipeline

    of_prior = StableCascadePriorPipeline.from_pretrained(prior / "export" / "prior")
    of_decoder = StableCascadeDecoderPipeline.from_pretrained(decoder / "export" / "decoder", latent_dim_scale=10.67)
    of_prior.register_to_config(resolution_multiple=42.67)
    for network in (of_prior.prior, of_decoder.decoder):
        network.register_forward_pre_hook(as_in_training, with_kwargs=True)
    settings = {"prompt": "a red circle", "guidance_scale": 0.0}
    first, second = ({"num_inference_steps": steps, **settings} for steps in (3, 2))
    semantic = of_prior(**first, height=128, width=128, generator=of_image(0, "generate")).image_embeddings
    theirs = of_decoder(semantic, **second, generator=of_image(0, "decode"), output_type="latent").images
    picture = of_decoder.vqgan.decode(of_decoder.vqgan.config.scale_factor * theirs).sample[0].clamp(0, 1)

    ours: list[torch.Tensor] = []
    latents = DiffusionImageSampler.latents
    monkeypatch.setattr(DiffusionImageSampler, "latents", lambda *given: ours.append(latents(*given)) or ours[-1])
    unguided = {"guidance_scale": 1.0, "decoder_guidance_scale": 1.0, "steps": 3, "decoder_steps": 2}
    same_size = {"compression": 42.67, "height": 128, "width": 128}
    seen = painted(prior, tmp_path / "ours", decoder=str(decoder), **unguided, **same_size)["00_00.png"]
    assert [tuple(each.shape) for each in ours] == [(1, 16, 3, 3), (1, 4, 32, 32)]
    for own, other in zip(ours, (semantic, theirs), strict=True):
        assert own.std() > 1
        assert float((own - other).norm() / own.norm()) < 1e-3
    pixels = (picture.permute(1, 2, 0).detach().numpy() * 255).round().astype(int)
    assert apart(seen, pixels) < 0.1
