"""What a batch holds beside pictures and captions, and workers as processes."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cascade_train.batch import Batch, sample_seed
from cascade_train.data.loading import worker as worker_module
from cascade_train.data.loading.feed import Loader
from cascade_train.errors import RunError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import content, loading


def drawn_and_mean(image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
    """Return a draw of the sample's own and what shows that the picture was there; workers find it by its name."""
    assert image.dtype == np.uint8
    return {
        "drawn": torch.rand(2, generator=generator).numpy(),
        "mean": np.float32(image.mean()),
        "size": np.array(image.shape[1:], dtype=np.int16),
    }


def samples_of(loader: Loader, steps: int) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """Return the transform's tensors by (row, epoch)."""
    found = {}
    for batch in (batch for _ in range(steps) for batch in next(loader)):
        for place, key in enumerate(zip(batch.index_B.tolist(), batch.epoch_B.tolist(), strict=True)):
            found[key] = {name: tensor[place] for name, tensor in batch.tensors.items()}
    return found


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return tars.write(tmp_path / "a.tar", tars.samples(range(40), damaged=[8]))


@pytest.mark.parametrize(("num_workers", "micro_batch_size"), [(0, 2), (2, 4)])
def test_what_a_task_makes_of_pictures_is_the_samples_own(tar: Path, num_workers: int, micro_batch_size: int) -> None:
    source = tars.webdataset(tar, num_workers=num_workers)
    with loading(source, transform=drawn_and_mean, micro_batch_size=micro_batch_size) as loader:
        found = samples_of(loader, 6)
    assert len(found) >= 46  # 2 of 48 may be the stand-in itself
    kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in next(iter(found.values())).items()}
    assert kinds == {"drawn": ((2,), torch.float32), "mean": ((), torch.float32), "size": ((2,), torch.int16)}
    for (row, epoch), tensors in found.items():
        generator = torch.Generator().manual_seed(sample_seed(3, epoch, row, "transform"))
        assert torch.equal(tensors["drawn"], torch.rand(2, generator=generator)), (row, epoch)
        assert tensors["size"].tolist() == [16, 16]
        assert float(tensors["mean"]) > 0
    assert 8 not in {row for row, _ in found}  # damaged: its stand-in comes with its own draws
    assert {epoch for _, epoch in found} == {0, 1}


def test_a_transform_that_fails_names_the_sample(tar: Path) -> None:
    def fail(image: np.ndarray, generator: torch.Generator) -> Mapping[str, np.ndarray]:
        raise KeyError("edges")

    source = tars.webdataset(tar)
    with loading(source, transform=fail) as loader, pytest.raises(RunError, match="sample a.tar:.*edges"):
        next(loader)


def test_sizes_and_crops_are_in_pixels_of_the_whole_upright_picture(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (900, 600)).save(file, "JPEG", exif=exif)  # seen as 600 x 900, decoded at an eighth
    path = tars.write(tmp_path / "a.tar", [("a.jpg", file.getvalue()), ("a.txt", b"tall")])
    with loading(tars.webdataset(path)) as loader:
        batch = next(loader)[0]
    assert batch.original_size_B2 is not None
    assert batch.crop_B4 is not None
    assert batch.original_size_B2.tolist() == [[900, 600]] * 2
    assert batch.crop_B4.tolist() == [[150, 0, 600, 600]] * 2
    assert batch.flipped_B is not None
    assert not batch.flipped_B.any()


def test_mirroring_is_drawn_anew_each_epoch_and_repeats_in_a_resume(tmp_path: Path) -> None:
    files = [("a.png", tars.picture(16, 16)), ("a.txt", b"one")]
    path = tars.write(tmp_path / "a.tar", files)

    def steps(position: int, count: int) -> list[list[Batch]]:
        with loading(tars.webdataset(path, flip_prob=0.5), position=position, global_batch_size=4) as loader:
            return [next(loader) for _ in range(count)]

    whole = steps(0, 6)
    images = torch.cat([batch.image_BCHW for step in whole for batch in step])
    kinds = images.unique(dim=0)
    assert len(kinds) == 2
    assert torch.equal(kinds[0], kinds[1].flip(-1))
    assert 4 <= (images == kinds[0]).all(dim=(1, 2, 3)).sum() <= 20
    flipped = torch.cat([batch.flipped_B for step in whole for batch in step if batch.flipped_B is not None])
    mirrored, upright = images[flipped].unique(dim=0), images[~flipped].unique(dim=0)
    assert len(mirrored) == len(upright) == 1
    assert torch.equal(mirrored, upright.flip(-1))
    assert [content(step) for step in steps(4, 2)] == [content(step) for step in whole[4:]]


def test_a_mask_lies_in_its_batch_and_the_others_count_everywhere(tmp_path: Path) -> None:
    files = [*tars.samples(range(8)), ("0000.mask.png", tars.mask())]
    path = tars.write(tmp_path / "a.tar", sorted(files))
    with loading(tars.webdataset(path, num_workers=1), micro_batch_size=8) as loader:
        batch = next(loader)[0]
    shown = batch.tensors["mask"]
    assert (tuple(shown.shape), shown.dtype) == ((8, 1, 16, 16), torch.uint8)
    means = dict(zip(batch.index_B.tolist(), shown.float().mean(dim=(1, 2, 3)).tolist(), strict=True))
    assert means == {0: 0.0, **dict.fromkeys(range(1, 8), 255.0)}


def wait_deaf(ready):
    worker_module.begin_worker(0)
    assert gc.get_freeze_count() > 0, "what the run made is not collected here"
    ready.set()
    time.sleep(60)


@pytest.fixture
def worker():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=wait_deaf, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(60)
    yield worker
    worker.kill()


def test_a_worker_survives_what_asks_its_run_to_stop_and_not_the_end_of_its_process(worker, monkeypatch):
    at_exit = []
    monkeypatch.setattr(worker_module.atexit, "register", at_exit.append)
    worker_module.end_workers_with_this_process.__wrapped__()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(worker.pid, number)
    worker.join(0.2)
    assert worker.is_alive()
    for call in at_exit:
        call()
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL


def test_workers_pass_tensors_where_tmpdir_is_too_long_for_their_sockets(tmp_path: Path):
    program = """
import multiprocessing, torch
from cascade_train.data.loading.worker import shorten_socket_paths
shorten_socket_paths()
def send(queue):
    queue.put(torch.ones(3))
    queue.join()
queue = torch.multiprocessing.get_context("fork").JoinableQueue()
worker = torch.multiprocessing.get_context("fork").Process(target=send, args=(queue,))
worker.start()
print(queue.get(timeout=60).sum().item())
queue.task_done()
worker.join()
"""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    command, environment = [sys.executable, "-c", program], {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "3.0\n", done.stderr
