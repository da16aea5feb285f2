"""Files of data and weights that strangers broke readers with: each ends in a sentence, soon and in little memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import select
import signal
import struct
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from cascade_train.data.classification import Prompts
from cascade_train.data.index.cache import read_cache
from cascade_train.data.index.selection import read_quarantine
from cascade_train.data.prompts import read_prompts
from cascade_train.data.tar.files import Listings
from cascade_train.errors import ConfigError, RunError
from cascade_train.filters.parts.requirements import WeightsFile, read_tensors
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.formats.lora_files import holds_lora, module_shapes, read_lora
from cascade_train.models.formats.weights import open_weights
from cascade_train.models.formats.weights_source import find_pipeline
from cascade_train.models.image_quality import ClipScore
from cascade_train.models.stable_diffusion.formats.stored_pipeline import stored_pipeline
from tests.unit.data import tars
from tests.unit.data.test_folder import folder
from tests.unit.data.test_folder import write as put
from tests.unit.data.test_parquet import parquet, rows_of
from tests.unit.data.test_parquet import write as write_parquet
from tests.unit.data.test_table import table
from tests.unit.models.small_networks import empty_network
from tests.unit.models.test_image_quality import tiny_clip

GIB = 2**30
SECONDS = 60  # ends a hang alone
KNOWN = WeightsFile(key="filter.weights", what="a", usual_name="b", licence="c", found="d")
INTEGERS = torch.ones(2, dtype=torch.int8)
SPARSE = 20 * 10**9
"""Bytes of a file that takes no room on the disk."""

Call = Callable[[], Any]


def run(call: Call) -> None:
    """Run a call in a process of its own, and raise its error, if it is one of ours; else fail."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        before, kind, text = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "read", ""
        resource.setrlimit(resource.RLIMIT_DATA, (_private() + 3 * GIB,) * 2)
        try:
            call()
        except BaseException as error:
            kind = "sentence" if isinstance(error, ConfigError | RunError) else type(error).__name__
            text = str(error)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        kind = f"{grown >> 10} MiB" if grown << 10 > GIB else kind
        os.write(writes, json.dumps([kind, text[:2000]]).encode())
        os._exit(0)
    os.close(writes)
    try:
        assert select.select([reads], [], [], SECONDS)[0], f"more than {SECONDS} s"
        kind, text = json.loads(os.read(reads, 2**16))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
    if kind == "sentence":
        raise ConfigError(text)
    assert kind == "read", f"{kind}: {text}"


def _private() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def sparse(path: Path) -> Path:
    os.truncate(put(path, b""), SPARSE)
    return path


def fifo(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def headers(path: Path, *members: tuple[tarfile.TarInfo, bytes], kind: int = tarfile.PAX_FORMAT) -> Call:
    with tarfile.open(path, "w", format=kind) as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return tars.webdataset(path).open


def long_name(where: Path, kind: int) -> Call:
    name = f"{'a' * 400_000}"
    members = [(tarfile.TarInfo(f"{n:04d}.{end}"), b"x") for n in range(30) for end in ("jpg", "txt")]
    members += [(tarfile.TarInfo(f"z{name}.{end}"), b"x") for end in ("jpg", "txt")]
    return headers(where / "a.tar", *members, kind=kind)


def with_size(where: Path, field: bytes) -> Call:
    info = tarfile.TarInfo("a.jpg")
    content = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    content[124:136] = field
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content)
    put(where / "a.tar", bytes(content) + bytes(10240))
    return tars.webdataset(where / "a.tar").open


def parquet_rows(where: Path, rows: list[dict[str, Any]], **options: Any) -> Call:
    return parquet(write_parquet(where / "a.parquet", rows), **options).open


def parquet_damaged(where: Path, begin: int, end: int) -> Call:
    path = write_parquet(where / "a.parquet", rows_of(range(8)))
    content = bytearray(path.read_bytes())
    content[begin:end] = b"\xff" * len(content[begin:end])
    return parquet(put(path, bytes(content))).open


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def checkpoint(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def damaged_directory() -> bytes:
    content = checkpoint({"a": torch.ones(4)})
    place = content.rindex(b"PK\x01\x02")
    return content[:place] + b"\xff" * 40 + content[place + 40 :]


def zip_bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as content:
        content.writestr("a/data.pkl", b"\0" * 10**9)
    return file.getvalue()


def lora_read(path: Path) -> Call:
    return lambda: read_lora(str(path), key="from", family=CASCADE, modules=module_shapes(empty_network()))


def halves(rank: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    name, shape = next((n, s) for n, s in module_shapes(empty_network()).items() if n.endswith("to_q"))
    found = {f"{name}.lora_A.weight": torch.ones(rank, shape[1]), f"{name}.lora_B.weight": torch.ones(shape[0], rank)}
    return found | {f"{name}.{key}": value for key, value in more.items()}


def peft_folder(where: Path) -> Call:
    put(where / "adapter_model.safetensors", save(halves(2)))
    return lora_read(where)


def pipeline(where: Path, name: str) -> Call:
    """Write the rest of a pipeline around one of its files."""
    for each in {"scheduler/scheduler_config.json", "unet/config.json", "vae/config.json"} - {name}:
        put(where / each, b"{}")
    return lambda: stored_pipeline(where, "sd15")


def quantized_clip(where: Path) -> Call:
    tiny_clip(where)
    state = load_file(where / "model.safetensors")
    state = {name: value.to(torch.int8) for name, value in state.items()}
    put(where / "model.safetensors", save(state, {"format": "pt"}))
    return lambda: ClipScore(str(where), device=torch.device("cpu"), key="clip")


def multiplied(where: Path, make: Callable[[Path], Any]) -> Call:
    put(where / "a.png", tars.picture())
    make(where / "multiply.txt")
    return folder(where).open


def npz(header: str) -> bytes:
    """Return an archive of one array, whose header says what it likes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as content:
        text = header.encode().ljust(118, b" ")
        content.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    return file.getvalue()


def reading(read: Callable[..., Any], form: str = "{}") -> Callable[[Path], Call]:
    """Return what reads a file whose path stands in a text of this form."""
    return lambda path: partial(read, form.format(path))


quarantined, cached = partial(partial, read_quarantine), partial(partial, read_cache)
prompted, classes, looked_at = reading(read_prompts, "@{}"), reading(Prompts.load), reading(holds_lora)
indexed, sharded = reading(find_pipeline, "{0.parent}"), reading(open_weights, "{0.parent}")


def listed(path: Path) -> Call:
    return Listings(path)._read


def filtered(path: Path) -> Call:
    return partial(read_tensors, path, KNOWN)


def opened(path: Path) -> Call:
    def read() -> None:
        with open_weights(str(path)) as tensors:
            for name in tensors.shapes():
                tensors.read(name)

    return read


def of_file(name: str, write: Callable[[Path], Path], read: Callable[[Path], Call]) -> Callable[[Path], Call]:
    return lambda where: read(write(where / name))


def given(content: bytes | str) -> Callable[[Path], Path]:
    return lambda path: put(path, content)


def with_lora(tensors: dict[str, torch.Tensor], header: dict[str, str] | None = None) -> Callable[[Path], Call]:
    return of_file("a.safetensors", given(save(tensors, header)), lora_read)


def parts(name: str) -> Callable[[Path], Call]:
    """Return what reads a part's configuration in the folder of a whole pipeline."""
    return lambda path: pipeline(path.parents[1], name)


IMAGE_COLUMN, SIDES, LORA = "data.image_column holds", "data.width_column", "a.safetensors: (cannot|its)"
LONG = "b" * 300_000
MANY_NAMES = [{"image": f"{number}.png", "text": "a"} for number in range(5000)]
MANY_ROWS = "image,caption\n" + "a.png,b\n" * 20_000 + "b" * 100_000 + ",b\n"
HUGE_ARRAY = npz("{'descr': '<i8', 'fortran_order': False, 'shape': (100000000000,), }\n")
JSON_READERS = {
    "model_index.json": indexed,
    "model.safetensors.index.json": sharded,
    "unet/config.json": parts("unet/config.json"),
    "adapter_config.json": lambda path: peft_folder(path.parent),
}
"""Files that hold one mapping, and what reads them."""

LINE, IS_LONG, TAR = "has a line of more than", "has more than", "is not a readable tar file|cut short"
ROWS = {
    "tar: pax name of 400,000": (partial(long_name, kind=tarfile.PAX_FORMAT), "a name of 400005 characters"),
    "tar: base-256 size": (partial(with_size, field=b"\x80" + b"\x7f" * 11), TAR),
    "tar: 20 GB": (lambda at: tars.webdataset(sparse(at / "a.tar")).open, "empty tar|goes on after"),
    "parquet: long path": (partial(parquet_rows, rows=[*MANY_NAMES, {"image": LONG, "text": "a"}]), "no row with"),
    "parquet: path 3": (partial(parquet_rows, rows=[{"image": {"bytes": b"", "path": 3}, "text": "a"}]), IMAGE_COLUMN),
    "parquet: footer": (partial(parquet_damaged, begin=-300, end=-8), "a.parquet is no parquet file"),
    "parquet: FIFO": (lambda at: (fifo(at / "a.parquet"), parquet(at).open)[1], "data.path.*is no parquet file"),
    "table: 20 GB": (lambda at: table(sparse(at / "a.csv")).open, "has a line of more than"),
    "table: long path": (lambda at: table(put(at / "a.csv", MANY_ROWS)).open, "none of 20000 pictures is there"),
    "prompts: FIFO": (of_file("a.txt", fifo, prompted), "no such file"),
    "prompts of classes: FIFO": (of_file("a.json", fifo, classes), "idx_to_prompt=.* as json .a pipe, a device"),
    "quarantine: nested": (of_file("a.jsonl", given("[" * 100_000 + "\n\n"), quarantined), "line 1 of"),
    "listing: null": (of_file("l.json", given('{"a": null}'), listed), "data.listing=.* is damaged"),
    "cache: 800 GB": (of_file("a.npz", given(HUGE_ARRAY), cached), None),
    "cache: FIFO": (of_file("a.npz", fifo, cached), None),
    "multiply.txt: 1e9": (partial(multiplied, make=given("1e9")), "multiply.txt is no factor"),
    "multiply.txt: FIFO": (partial(multiplied, make=fifo), "multiply.txt is no factor"),
    **{name: (of_file(name, given("[1]"), read), "json is damaged") for name, read in JSON_READERS.items()},
    "safetensors: length of 2^62": (of_file("a.safetensors", given(header(b"{}", 2**62)), opened), "as safetensors"),
    "ckpt: directory": (of_file("a.ckpt", given(damaged_directory()), opened), "cannot be read as weights alone"),
    "ckpt: pickle": (of_file("a.ckpt", given(pickle.dumps({"a": 1})), opened), "weights alone"),
    "ckpt: bomb": (of_file("a.ckpt", given(zip_bomb()), opened), "cannot be read as weights alone"),
    "LoRA: rank 0": (with_lora(halves(0)), "its adapters have rank 0, at least 1 is needed"),
    "LoRA: alpha is NaN": (with_lora(halves(2, alpha=torch.tensor(float("nan")))), "is scaled by nan"),
    "LoRA: NaN": (with_lora({name: value * torch.nan for name, value in halves(2).items()}), "holds NaN or infinity"),
    "LoRA: position of 10^12": (
        with_lora({f"weights.{place}": torch.ones(1, 1) for place in ("1000000000000.lora_down", "0.lora_up")}),
        "adapts 1000000000001 modules",
    ),
    "filter: integers": (of_file("a.safetensors", given(save({"a": INTEGERS})), filtered), "is stored as int8"),
    "CLIP: integers": (quantized_clip, "is stored as int8"),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_was_seen_ends_in_a_sentence(tmp_path: Path, row: str) -> None:
    make, sentence = ROWS[row]
    call = make(tmp_path)
    if sentence is None:
        run(call)
        return
    with pytest.raises(ConfigError, match=sentence):
        run(call)
