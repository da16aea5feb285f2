"""Adapters on disk: the folders of peft and diffusers, and the one way in for every format."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import parsing, stored_mapping
from cascade_train.models.adapters.kind import Strength
from cascade_train.models.adapters.kinds import KINDS, by_module, is_adapter, kind_of, peft_alphas, peft_options
from cascade_train.models.family import Family, Shape
from cascade_train.models.formats.lora_files_keyed import foreign, read_keyed, with_one_rank
from cascade_train.models.formats.weights import check_fit, read_tensors, shapes_of, write_tensors
from cascade_train.models.formats.weights_source import find_part
from cascade_train.models.lora import (
    TEXT_ENCODERS,
    LoraSpec,
    StoredLora,
    TrainedTokens,
    adapted_layers,
    lora_spec,
    plain_name,
)

DEFAULT_FILTERS = (".attn",)
"""What the original's published configuration adapts."""

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
TOKENS_FILE = "tokens.safetensors"
TOKEN_ROWS = {"text_encoder": "token_rows", "text_encoder_2": "token_rows_2"}
"""Text encoder -> the tensor of its trained tokens, which the header describes with the same ending."""

_MISFIT = "its tensors are not those of the adapted modules"
DIFFUSERS_HEADER = "lora_adapter_metadata"
_BUNDLED = "bundle_emb."
_PEFT_PREFIX = "base_model.model."
_ALPHA, _RANK = "lora_alpha", "r"  # of every adapter of a peft folder, from its configuration
_log = logging.getLogger(__name__)


def write_peft_folder(folder: Path, lora: StoredLora) -> None:
    """Write adapters as `PeftModel.from_pretrained` reads them, into an existing folder.

    Adapters of text encoders become folders of the same form in it, trained tokens `TOKENS_FILE` beside them.
    """
    for tower, state in lora.by_root().items():
        (folder / tower).mkdir(exist_ok=True)
        _peft_config(state, lora.spec, tower, inference_mode=True).save_pretrained(str(folder / tower))
        write_tensors(folder / tower / ADAPTER_FILE, _peft_tensors(state, _PEFT_PREFIX), {"format": "pt"})
    rows, header = _tokens_of(lora)
    if rows:
        write_tensors(folder / TOKENS_FILE, rows, header)


def write_diffusers_file(folder: Path, lora: StoredLora, root: str) -> None:
    """Write adapters as `load_lora_weights` of diffusers' pipelines reads them; `root` is their name of the network.

    Rank and alpha lie in the header, as diffusers writes them; trained tokens have a file of their own, see
    `lora_files_keyed.write_embeddings`.
    """
    tensors, facts = dict[str, Tensor](), dict[str, object]()
    for tower, state in lora.by_root().items():
        prefix, plain = f"{tower or root}.", bool | int | float | str | list
        config = _peft_config(state, lora.spec, tower).to_dict()
        told = (k for k, v in config.items() if v is None or isinstance(v, plain) or (v and k.endswith("_pattern")))
        facts |= {f"{prefix}{key}": config[key] for key in told} if state else {}
        tensors |= _peft_tensors(state, prefix)
    header = {"format": "pt", DIFFUSERS_HEADER: json.dumps(facts, indent=2, sort_keys=True)}
    write_tensors(folder / DIFFUSERS_FILE, tensors, header)


def _peft_config(state: Mapping[str, Tensor], spec: LoraSpec, tower: str, **options: Any) -> Any:
    # endings that names have in every version of transformers
    prefix = f"{tower}." if tower else ""
    endings = {name.removeprefix("text_model."): f"{prefix}{name}" for name in by_module(state)}
    ranks, alphas = ({n: own[name] for n, name in endings.items() if name in own} for own in (spec.ranks, spec.alphas))
    config = KINDS[spec.kind].config(spec, rank_pattern=ranks, alpha_pattern=alphas, **options)
    config.target_modules = [*endings]  # peft would make a set, whose order is not fixed
    return config


def _peft_tensors(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    short = ".lora_magnitude_vector"
    return {f"{prefix}{name.replace(f'{short}.weight', short)}": value for name, value in state.items()}


_OF_TOKENS = {"tokens": "strings", "token_ids": "ids", "token_is_new": "is_new"}


def _tokens_of(lora: StoredLora) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the rows of trained tokens, and the entries of a header that describe them."""
    tensors, header = dict[str, Tensor](), dict[str, str]()
    for tower, tokens in lora.tokens.items():
        tensors[TOKEN_ROWS[tower]] = tokens.rows
        ending = tower.removeprefix("text_encoder")
        header |= {f"{key}{ending}": json.dumps(getattr(tokens, field)) for key, field in _OF_TOKENS.items()}
    return tensors, header


def _stored_tokens(tower: str, header: Mapping[str, str], rows: Tensor) -> TrainedTokens:
    ending = tower.removeprefix("text_encoder")
    facts: dict[str, Any] = {field: tuple(json.loads(header[f"{key}{ending}"])) for key, field in _OF_TOKENS.items()}
    return TrainedTokens(rows=rows, **facts)


def read_lora(
    source: str,
    *,
    key: str,
    family: Family,
    modules: Mapping[str, Shape],
    module_filters: Sequence[str] | None = DEFAULT_FILTERS,
) -> StoredLora:
    """Read adapters of any known format that fit a network of these modules, see `module_shapes`.

    `source` is one file (ComfyUI's, kohya's, LyCORIS's, dotted names, or the original's), a peft folder, or a
    run.
    `module_filters` are the modules that a file of the original adapts; other formats name them.

    Raises:
        ConfigError: no such file, no adapters in a known format, or adapters of another model.
    """
    origin = f"{key}={source}"
    if not Path(source).expanduser().exists():
        raise ConfigError(f"{origin}: no such file or folder; give a run, its export/lora, or a .safetensors file")
    header, tensors = _read_adapters(source, key)
    if bundled := sorted({name.split(".")[1] for name in tensors if name.startswith(_BUNDLED)}):
        _log.warning("%s: embeddings that OneTrainer bundled are not read: %s", origin, ", ".join(bundled))
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_BUNDLED)}
    with parsing(f"{origin}:"):
        _check_size(family, tensors, header, modules, origin)
        numbered = family.read_numbered_lora(header, tensors, modules, module_filters, origin)
        lora = numbered or _read_by_name(family, header, tensors, modules, origin)
    _check_fit(lora, modules, origin)
    path = Path(source).expanduser()
    beside = [folder for name in (f"{path.stem}.embeddings", "embeddings") if (folder := path.with_name(name)).is_dir()]
    if path.is_file() and beside and not lora.tokens:
        _log.warning("%s: tokens in %s are not read; the run, or its export/lora, holds them too", origin, beside[0])
    if lora.spec.base_size is None:
        lora = replace(lora, spec=replace(lora.spec, base_size=_size_of(family, modules)))
    return lora


def _read_adapters(source: str, key: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return header and tensors of a file, or of a peft folder and the folders in it as if they were one file."""
    path = Path(source).expanduser()
    path = find_part(path, "lora", key) if path.is_dir() else path
    if path.name == ADAPTER_FILE and (path.parent / ADAPTER_CONFIG).is_file():
        path = path.parent  # alphas and ranks lie beside the file
    if not path.is_dir():
        return read_tensors(path, key, what="adapter file")
    header, tensors = _read_peft(path, key, prefix="")
    for tower in TEXT_ENCODERS:
        if (path / tower).is_dir():
            tensors |= _read_peft(path / tower, key, prefix=f"{tower}.")[1]
    if (path / TOKENS_FILE).is_file():
        of_tokens, rows = read_tensors(path / TOKENS_FILE, key, what="adapter file")
        header, tensors = header | of_tokens, tensors | rows
    return header, tensors


def _read_peft(folder: Path, key: str, *, prefix: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / ADAPTER_FILE).is_file():
        raise ConfigError(f"{key}={folder}: is no adapter folder, it lacks {ADAPTER_CONFIG} or {ADAPTER_FILE}")
    stored = read_tensors(folder / ADAPTER_FILE, key, what="adapter file")[1]
    tensors = {f"{prefix}{name.removeprefix(_PEFT_PREFIX)}": value for name, value in stored.items()}
    with parsing(f"{key}={folder / ADAPTER_CONFIG}:"):
        config = stored_mapping(folder / ADAPTER_CONFIG)
        options = peft_options(config)
        if options["kind"] not in KINDS:
            kinds = ", ".join(KINDS)
            raise ConfigError(f"{key}={folder}: peft_type={config['peft_type']!r} is not read; {kinds} are")
        if options["kind"] == "lokr" and (config.get("rank_pattern") or config.get("alpha_pattern")):
            raise ConfigError(
                f"{key}={folder}: its LoKr adapters have ranks or alphas of their own (rank_pattern, alpha_pattern of "
                f"{ADAPTER_CONFIG}), which only low-rank and LoHa adapters may have; train them anew with one"
            )
        header = {_ALPHA: str(options["alpha"]), _RANK: str(options["rank"])}
        return header, tensors | peft_alphas(tensors, config, prefix)


def _read_by_name(
    family: Family,
    header: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, Shape],
    origin: str,
) -> StoredLora:
    """Read peft's, ComfyUI's and kohya's adapters, which name their modules."""
    named = {name: value for name, value in tensors.items() if name not in TOKEN_ROWS.values()}
    if kind_of(named) is None:
        first = ", ".join(list(tensors)[:2]) or "nothing"
        raise ConfigError(
            f"{origin}: holds no adapters in a format that is read here, but {first}; see docs/weights.md"
        )
    facts = json.loads(header.get(DIFFUSERS_HEADER, "{}"))
    for prefix in (f"{family.lora_root}.", *(f"{tower}." for tower in TEXT_ENCODERS)) if facts else ():
        config = {name.removeprefix(prefix): fact for name, fact in facts.items() if name.startswith(prefix)}
        named |= peft_alphas(named, config, prefix)
    given = Strength(int(header[_RANK]), float(header[_ALPHA])) if _ALPHA in header else None
    lora = read_keyed(named, modules, origin, family=family, given=given)
    rows = {tower: tensors[name] for tower, name in TOKEN_ROWS.items() if name in tensors}
    return replace(lora, tokens={tower: _stored_tokens(tower, header, value) for tower, value in rows.items()})


def holds_lora(source: str) -> bool:
    """Return whether a local file or folder holds adapters rather than a network's weights."""
    path = Path(source).expanduser()
    if path.is_dir():
        lora = [folder for folder in (path / "export" / "lora", path / "lora", path) if folder.is_dir()]
        return any((folder / ADAPTER_CONFIG).is_file() for folder in lora)
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    with parsing(f"{path}:", "cannot be read as safetensors"), safe_open(path, framework="pt") as file:
        names = list(file.keys())
    return kind_of(names) is not None or any(map(is_adapter, names))


def adapter_size(families: Iterable[Family], source: str, *, key: str) -> str | None:
    """Return the option of `model=` of the base of stored adapters, from header or widths; None = no published size."""
    header, tensors = _read_adapters(source, key)
    found = (family.adapter_size(_network_shapes(tensors))[0] for family in families)
    return header.get("base_size") or next((size for size in found if size is not None), None)


def _network_shapes(tensors: Mapping[str, Tensor]) -> list[Shape]:
    """Return the shapes of adapters of the network that show its widths, without the text encoders' and tokens."""
    others = _BUNDLED, *(f"{tower}." for tower in TEXT_ENCODERS)
    shapes = [(name, shape) for name, shape in shapes_of(tensors).items() if ".lokr_" not in name]
    return [shape for name, shape in shapes if not name.startswith(others) and name not in TOKEN_ROWS.values()]


def module_shapes(network: nn.Module) -> dict[str, Shape]:
    """Return the shapes of the weights of a network's own modules by name, adapters left out, in its order."""
    shapes: dict[str, Shape] = {}
    adapted = dict(adapted_layers(network))
    for name, module in network.named_modules():
        inner = adapted[name].get_base_layer() if name in adapted else module
        weight = getattr(inner, "weight", None)
        if isinstance(weight, nn.Parameter) and not is_adapter(name) and not name.endswith(".base_layer"):
            shapes[name] = tuple(weight.shape)
    return shapes


def refill_lora(
    network: nn.Module,
    source: str,
    *,
    key: str = "from",
    module_filters: Sequence[str] | None = DEFAULT_FILTERS,
    encoders: Mapping[str, nn.Module] = MappingProxyType({}),
) -> StoredLora:
    """Load stored values into a whole network's adapters, and return them; errors also where ranks or alphas differ.

    `encoders` are adapted text encoders, by name. Of a network with one rank and alpha the stored ones become one.
    """
    modules = module_shapes(network)
    lora = read_lora(source, key=key, family=network.family, modules=modules, module_filters=module_filters)
    carried = lora_spec(network, encoders)
    if lora.spec.kind != carried.kind:
        raise ConfigError(f"{key}={source}: its adapters are of another kind; set task.kind={lora.spec.kind}")
    lora = lora if carried.ranks or carried.alphas else with_one_rank(lora)
    for name in by_module(lora.state):
        (rank, alpha), (wanted, scaled) = lora.spec.of(name), carried.of(name)
        if (rank, alpha) != (wanted, scaled):
            keys = f"task.rank={wanted} task.alpha={scaled:g}; set both as they were trained"
            if carried.ranks or carried.alphas:
                keys = f"rank {wanted} and alpha {scaled:g} in {name}; set task.ranks as they were trained"
            raise ConfigError(
                f"{key}={source}: its adapters have rank {rank} and alpha {alpha:g}, the task asks for {keys}"
            )
    fill_adapters(network, lora.by_root()[""], f"{key}={source}")
    return lora


def fill_adapters(network: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Set the values of a network's adapters, by plain names or `tower_name`; a ConfigError if they are others."""
    if not hasattr(network, "text_model"):
        state = {name.removeprefix("text_model."): value for name, value in state.items()}
    wanted = {
        plain_name(name): (name, parameter)
        for name, parameter in network.named_parameters(remove_duplicate=False)  # q, k and v may share one
        if is_adapter(name)
    }
    of_task = "set task.module_filters, task.text_encoder_filters and task.dora as they were trained, or its model="
    check_fit(
        shapes_of({plain: p for plain, (_, p) in wanted.items()}),
        shapes_of(state),
        origin,
        what=_MISFIT,
        remedy=of_task,
    )
    for plain, (name, parameter) in wanted.items():
        if parameter.is_meta:  # a magnitude whose base has no values yet
            network.load_state_dict({name: state[plain].float().clone()}, strict=False, assign=True)
        else:
            parameter.data.copy_(state[plain])


def _check_size(
    family: Family,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, str],
    modules: Mapping[str, Shape],
    origin: str,
) -> None:
    """Refuse adapters of another published size than the network's, which the header or the widths tell."""
    wanted = _size_of(family, modules)
    widths = {each for shape in modules.values() for each in shape[:2]}
    size, width = family.adapter_size(_network_shapes(tensors))
    stored = header.get("base_size") or (size if width not in widths else None)
    family.check_size(stored, wanted, f"{origin}: the adapter belongs to")


def _size_of(family: Family, modules: Mapping[str, Shape]) -> str | None:
    return family.size_of({f"{name}.weight": shape for name, shape in modules.items()})


def _check_fit(lora: StoredLora, modules: Mapping[str, Shape], origin: str) -> None:
    spec = lora.spec
    if (least := min([spec.rank, *spec.ranks.values()])) < 1:
        raise ConfigError(f"{origin}: its adapters have rank {least}, at least 1 is needed; copy the file again")
    absent = [name for name in spec.targets if name not in modules]
    if absent:
        raise ConfigError(foreign(origin, absent[0]))
    kind = KINDS[spec.kind]
    shapes = {name: kind.shapes(spec, spec.of(name).rank, modules[name]) for name in spec.targets}
    wanted = {f"{name}.{part}": shape for name, parts in shapes.items() for part, shape in parts.items()}
    remedy = "choose the model= the adapter was trained on"
    check_fit(wanted, shapes_of(lora.by_root()[""]), origin, what=_MISFIT, remedy=remedy)
    broken = [name for name, value in lora.state.items() if not value.isfinite().all()]
    if broken:
        raise ConfigError(f"{origin}: {broken[0]} holds NaN or infinity; copy the file again, or train it anew")
