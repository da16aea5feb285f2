import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.errors import InstantiationException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from cascade_train.config.components import by_path
from cascade_train.config.error_messages import SECONDS_FOR_RANK_ZERO, exit_code, paragraph_of
from cascade_train.errors import ConfigError, Interrupted, RunError

Start = Callable[..., tuple[int, str]]
TINY = ("model=c_tiny", "task=lora")

REFUSED = {
    "": r"^(model|task) is not chosen\. Choose one: (model=b_3b, .*model=c_tiny|task=controlnet, .*task=lora)",
    "model=c_tinny task=lora": r"^model=c_tinny is not an option of model\. Did you mean c_tiny\? Options: a, a_tiny",
    "model=c_tiny task=lora ema=0.9": r"^ema takes no value: there are keys below it, ema\.decay, ema\.start_",
    "model=c_tiny task=lora batch_size=4": r"^batch_size is unknown\. Did you mean train\.global_batch_size\? Samples",
    "model=c_tiny task=finetune task.rank=8": r"^task\.rank is unknown\. It is a key of task=lora\.$",
    "model=c_tiny task=lora train.precision=fp16": r"^train\.precision=fp16 is refused: .*overflow.*bf16, or fp32",
    "model=c_tiny task=lora train.max_steps=x": r"^train\.max_steps=x .* whole .* train\.max_steps=1000\.$",
    "model=c_tiny task=lora train.max_steps=null": r"^Nothing ends this run: set train\.max_steps, train\.max_epochs",
    "model=c_tiny task=lora task.rank=high": r"^task\.rank=high is of type str, but int is wanted there\.$",
    "model=c_tiny task=lora optimizer=torch optimizer.algorithm._target_=os.system": r"names the package 'os'",
    "model=c_tiny task=lora data=webdataset": r"^data\.urls is not set \(\?\?\?\): a local path.* Set it: data\.urls=<",
    "model=c_tiny task=lora --foo": r"^unrecognized arguments: --foo\. Overrides are key=value, without dashes",
    "model=c_tiny task=lora data.urls=[a-{0..5}.tar]": r"Write: 'data\.urls=\[\"a-\{0\.\.5\}\.tar\"\]'$",
    "model=c_tiny task=lora train.global_batch_size=9 train.micro_batch_size=2": r"sizes that fit: 1, 3, 9;",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_command_line_is_answered_in_one_paragraph(start: Start, line: str, tmp_path: Path):
    code, text = start(*line.split())
    said = text.removeprefix("data.urls is given and no data= is chosen: data=webdataset.\n").rstrip("\n")
    assert code == 2
    assert re.search(REFUSED[line], said), said
    assert "\n" not in said
    assert list(tmp_path.iterdir()) == []


def test_prompts_with_blanks_may_hold_commas_when_quoted(start: Start):
    assert start(*TINY, 'sample.prompts=["a red circle, large",b]') == (0, "")


def test_broken_yaml_of_the_user_is_a_refusal(start: Start, tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text("# @package _global_\ntrain: [1\n")
    code, text = start("--config-dir", str(tmp_path), *TINY, "experiment=bad")
    assert code == 2
    assert text.startswith("A configuration file is not valid YAML: while parsing a flow sequence")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train:\n  max_stepz: 3\n", r"train\.max_stepz is unknown\. Did you mean train\.max_steps\?"),
        ("train.max_steps: 3\n", r"train\.max_steps is one key in YAML"),
        ("task: lora\n", r"In a file, its defaults choose it: - override /task: lora\."),
        ("ema: 0.9\n", r"ema takes no value"),
        ("compile: off\n", r"compile=False must be one of off, regional"),
    ],
)
def test_wrong_experiment_is_refused_by_key(start: Start, tmp_path: Path, content: str, message: str):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text(f"# @package _global_\n{content}")
    code, text = start("--config-dir", str(tmp_path), *TINY, "experiment=bad")
    assert code == 2
    assert re.search(message, text), text


def test_an_experiment_without_its_package_is_refused_with_the_line_that_it_lacks(start: Start, tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text("train:\n  max_steps: 3\n")
    code, text = start("--config-dir", str(tmp_path), *TINY, "experiment=bad")
    assert (code, text) == (2, "experiment/bad.yaml sets keys of the whole configuration: begin the file with "
                            "# @package _global_\n")  # fmt: skip


def test_value_error_of_a_component_is_explained_and_others_are_defects():
    refused = InstantiationException("wrapped")
    refused.__cause__ = ValueError("lr must be positive")
    assert paragraph_of(refused) == "lr must be positive"
    defect = InstantiationException("wrapped")
    defect.__cause__ = TypeError("a defect")
    assert paragraph_of(defect) is None
    assert paragraph_of(KeyError("x")) is None


def raise_(error: BaseException) -> None:
    raise error


OUT_OF_MEMORY = type("OutOfMemoryError", (RuntimeError,), {})(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1 GiB is "
    "free. Of the allocated memory 20 GiB is allocated by PyTorch. If reserved but unallocated memory is large"
)
NEEDS_LESS = r"Needs less memory: train\.micro_batch_size=auto .*\n"
REPORTED: list[tuple[BaseException, int, str]] = [
    (BrokenPipeError(), 1, r"The output was closed\.\n"),
    (
        OSError(errno.ENOSPC, "No space left on device", "/nowhere/b.png"),
        1,
        r"/nowhere/b.png could not be written: .*No space left on device.* \(\d+.\d+ GiB are free there\)\. .*\n",
    ),
    (
        OSError(errno.EROFS, "Read-only file system", "mine"),
        1,
        r"mine: Read-only file system\. Choose another folder\.\n",
    ),
    (OSError(errno.EACCES, "no", "mine"), 2, r"mine: no\. Choose another folder, or change its permissions\.\n"),
    (OSError(errno.ENOSPC, "full"), 1, r"A file could not be written: .*full\. Free space there, or give another .*\n"),
    (ConfigError("no."), 2, r"no\.\n"),
    (
        ConfigError("a\x1b[2J\ud800\nis " + "x" * 10**6),
        2,
        r"a\\x1b\[2J\\ud800\nis x+\[\.\.\. \d+ characters \.\.\.\]x+\n",
    ),
    (KeyboardInterrupt(), 130, r"Interrupted\. Start again\.\n"),
    (KeyboardInterrupt("The jobs go on."), 130, r"The jobs go on\.\n"),
    (Interrupted("Stopped by SIGTERM.", code=75), 75, r"Stopped by SIGTERM\. Start again\.\n"),
    (RuntimeError("[pair.cc:553] Connection closed by peer [1.0.0.1]:4."), 1, "The connection to another rank was.*\n"),
    (OUT_OF_MEMORY, 1, rf"CUDA out of memory\. Tried to allocate 2\.00 GiB\. .* 1 GiB is free\. {NEEDS_LESS}"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tr"), 1, f".*{NEEDS_LESS}"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 1, f".*{NEEDS_LESS}"),
    (RuntimeError("CUDA error: out of memory"), 1, f".*{NEEDS_LESS}"),
    (MemoryError("Unable to allocate 3.00 TiB for an array with shape (1, 2)"), 1, f".*{NEEDS_LESS}"),
]


@pytest.mark.parametrize(("error", "code", "said"), REPORTED, ids=range(len(REPORTED)))
def test_an_error_is_one_paragraph_and_an_exit_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert exit_code(lambda: raise_(error), remedy="Start again.") == code
    assert re.fullmatch(said, capsys.readouterr().err)
    monkeypatch.setenv("RANK", "1")
    assert exit_code(lambda: raise_(error)) == code
    is_of_one_rank = "Needs less memory" in said or "connection to another" in said
    assert bool(capsys.readouterr().err) is is_of_one_rank


def test_ranks_under_torchrun_let_rank_zero_speak_first_and_report_what_is_theirs_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    waited: list[float] = []
    monkeypatch.setattr("cascade_train.config.error_messages.time.sleep", waited.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        assert exit_code(lambda: raise_(ConfigError("no."))) == 2
    assert waited == [SECONDS_FOR_RANK_ZERO] * 2
    assert capsys.readouterr().err == "no.\n[rank 1] no.\n[rank 2] no.\n"


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (lambda: raise_(ConfigError("no.")), "no."),
        (lambda: raise_(Interrupted("Stopped by SIGTERM.", code=75)), "Stopped by SIGTERM. Start again."),
        (lambda: raise_(KeyError("defect")), "KeyError('defect')"),
        (lambda: 75, "Stopped as asked, and saved. The same command continues."),
        (lambda: None, None),
    ],
    ids=["refused", "stopped early", "a defect", "stopped", "ended"],
)
def test_torchrun_is_told_what_happened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, action: Callable[[], int | None], told: str | None
):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    code = exit_code(action, remedy="Start again.")
    if told is None:
        assert (code, file.exists()) == (0, False)
        return
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert f"traceback : {told}\n" in str(ChildFailedError("cascade_train", {0: failure}))


def test_an_interrupt_that_a_library_made_an_error_of_is_still_one(capsys: pytest.CaptureFixture[str]):
    def swallowed() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise RunError("a checkpoint could not be written") from interrupt

    assert exit_code(swallowed) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize(
    ("refused", "place", "said"),
    [
        ("rank=0: too small", "task", "task.rank=0: too small"),
        ("k=0: too small", "objective.loss_weight", "objective.loss_weight.k=0: too small"),
        ("network.dropout=[2]: too much", "model.network", "model.network.dropout=[2]: too much"),
        ("network.types[1]=x: unknown", "model.network", "model.network.types[1]=x: unknown"),
        ("data.urls=[]: names nothing", "data", "data.urls=[]: names nothing"),
        ("model.network.a and b belong together", "model", "model.network.a and b belong together"),
        ("clip_text and clip_img belong together", "model", "model: clip_text and clip_img belong together"),
        ("too small", "task", "task: too small"),
    ],
)
def test_a_refused_argument_is_named_by_its_whole_path(refused: str, place: str, said: str):
    assert by_path(refused, place) == said
