import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.errors import InstantiationException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from cascade_train.config.components import by_path
from cascade_train.config.error_messages import SECONDS_FOR_RANK_ZERO, exit_code, paragraph_of
from cascade_train.config.groups import did_you_mean, group_options, groups, option_targets
from cascade_train.errors import ConfigError, Interrupted, RankLostError, RunError

Start = Callable[..., tuple[int, str]]
TINY = ("model=c_tiny", "task=lora")

REFUSED = {
    "": r"^(model|task) is not chosen\. Choose one: (model=b_3b, .*model=c_tiny|task=controlnet, .*task=lora)",
    "task=lora": r"^model is not chosen\. Choose one: .*model=c_tiny",
    "model=c_tinny task=lora": r"^model=c_tinny is not an option of model\. Did you mean c_tiny\? Options: a, a_tiny",
    "model=c_tiny task=lora data=zzz": r"^data=zzz is not an option of data\. Options: .*shapes, webdataset\.$",
    "model=c_tiny task=lora parallel=hsbp": r"Did you mean hsdp\? Options: auto, ddp, fsdp, hsdp, single\.$",
    "model=c_tiny task=lora memory=24": r"^memory=24 is not an option of memory\. Did you mean 24gb\? Options: 16gb, 2",
    "model=c_tiny task=lora tracker=null": r"^tracker=null is not an option of tracker\.",
    "model=c_tiny task=controlnet filter@task.filter=3": r"^filter=3 is not an option of filter\. Options: canny",
    "model=c_tiny task=lora batch_size=4": r"^batch_size is unknown\. Did you mean train\.global_batch_size\? Samples",
    "model=c_tiny task=lora data.batch_size=4": r"Did you mean train\.global_batch_size\?",
    "model=c_tiny task=lora device=cuda": r"^device is unknown\. CUDA devices are used where .* CUDA_VISIBLE_DEVICES",
    "model=c_tiny task=lora epochs=3": r"^epochs is unknown\. Did you mean train\.max_epochs\? Passes over the data",
    "model=c_tiny task=lora seed=3": r"^seed is unknown\. Did you mean run\.seed\? ",
    "model=c_tiny task=lora trainer.max_epochs=3": r"^trainer\.max_epochs is .* Did you mean train\.max_epochs\?",
    "model=c_tiny task=lora --learning_rate 1e-4": r"^unrecognized arguments: --learning_rate.* mean optimizer\.lr\?",
    "model=c_tiny task=lora zzz=3": r"^zzz is unknown\. Known here: activation_checkpointing, attention, ch",
    "model=c_tiny task=finetune task.rank=8": r"^task\.rank is unknown\. It is a key of task=lora\.$",
    "model=c_tiny task=finetune +task.rank=8": r"^task\.rank is unknown: .*Finetune .* It is a key of task=lora\.$",
    "model=c_tiny task=finetune network_dim=8": r"^network_dim is .* mean task\.rank\? It is a key of task=lora\.$",
    "model=c_tiny task=lora hydra.run.dir=out": r"^hydra\.run\.dir=out has no effect on a run\. Write: run\.dir=out$",
    "model=c_tiny task=lora +hydra.job.name=a": r"^\+hydra\.job\.name=a has no effect on a run\. Write: run\.name=a$",
    "model=c_tiny task=lora modle=x": r"^modle is unknown\. Did you mean model\?$",
    "model=c_tiny task=lora models@model=c_3b": r"^models is not a group .*Did you mean model\?$",
    "model=c_tiny task=lora lr=1": r"^lr is unknown\. Did you mean optimizer\.lr\?$",
    "model=c_tiny task=lora trian.max_steps=3": r"^trian\.max_steps is unknown\. Did you mean train\.max_steps\?$",
    "model=c_tiny task=lora train.max_stepz=3": r"^train\.max_stepz is unknown\. Did you mean train\.max_steps\?$",
    "model=c_tiny task=lora task.rnk=3": r"^task\.rnk is unknown\. Did you mean task\.rank\?$",
    "model=c_tiny task=lora model.network.dropuot=3": r"^model\.network\.dropuot .*model\.network\.dropout\?$",
    "model=c_tiny task=lora model.network.dropuot.x=3": r"^model\.network\.dropuot\.x .*model\.network\.dropout\?$",
    "model=c_tiny task=lora model.previewer={scala:3}": r"^model\.previewer\.scala is unknown\.",
    "model=c_tiny task=lora +task.rnk=3": r"^task\.rnk is unknown: .*LoRA has no such argument\. .*task\.rank\?$",
    "model=c_tiny task=lora +train.max_stepz=3": r"^train\.max_stepz is unknown\. Did you mean train\.max_steps\?$",
    "model=c_tiny task=lora +foo=3": r"^foo is unknown\.",
    "model=c_tiny task=lora train.precision=fp16": r"^train\.precision=fp16 is refused: .*overflow.*bf16, or fp32",
    "model=c_tiny task=lora train.precision=int8": r"^train\.precision=int8 must be one of auto, bf16, fp32\.$",
    "model=c_tiny task=lora compile=true": r"^compile=True must be one of off, regional\. YAML reads a bare off",
    "model=c_tiny task=lora train.max_steps=x": r"^train\.max_steps=x has a wrong value: .*to Integer\.$",
    "model=c_tiny task=lora train.max_steps=1.5": r"^train\.max_steps=1\.5 has a wrong value",
    "model=c_tiny task=lora train.max_steps=null": r"^Nothing ends this run: set train\.max_steps, train\.max_epochs",
    "model=c_tiny task=lora train.max_steps=": r"^train\.max_steps has a wrong value",
    "model=c_tiny task=lora train=fast": r"^train=fast ",
    "model=c_tiny task=lora validate.urls=x.tar": r"^validate\.urls=x\.tar must be a list\. Write: 'validate.urls=\[x",
    "model=c_tiny task=lora run.name=${foo}": r"^run\.name refers to a key that is not there: .*'foo' not found\.$",
    "model=c_tiny task=lora task.rank=high": r"^task\.rank=high is of type str, but int is wanted there\.$",
    "model=c_tiny task=lora objective.loss_weight=p2": r"^objective\.loss_weight=p2 is not a component .*objective=gdf",
    "model=c_tiny task=lora optimizer.algorithm=adam": r"^optimizer\.algorithm=adam is not a component .*_target_",
    "model=c_tiny task=lora optimizer.algorithm.eps=a": r"^optimizer\.algorithm\.eps=a is of type str, but float",
    "model=c_tiny task=lora +optimizer.algorithm.x=1": r"^optimizer\.algorithm\.x is unknown: torch\.optim\.AdamW",
    "model=c_tiny task=lora optimizer=torch": r"^optimizer\.algorithm\._target_ is not set .*torch\.optim\.SGD",
    "model=c_tiny task=lora optimizer=torch optimizer.algorithm._target_=os.system": r"names the package 'os'",
    "model=c_tiny task=lora optimizer=torch optimizer.algorithm._target_=torch.optim.SGDD": r"torch\.optim\.SGD\?$",
    "model=c_tiny task=lora data=webdataset": r"^data\.urls is not set \(\?\?\?\): .* Set it: data\.urls=<value>\.$",
    "model=c_tiny task=lora tracker=wandb": r"^tracker\.project is not set .*Project that the run belongs to",
    "model=c_tiny task=lora ~task": r"^task is not chosen .* \(options: .*finetune, lora, reconstruction\)\.$",
    "model=c_tiny task=lora train": r"^'train' is a command and comes first: cascade-train train",
    "model=c_tiny task=lora --foo": r"^unrecognized arguments: --foo\. Overrides are key=value, without dashes",
    "model=c_tiny task=lora --cfg job --multirun": r"^Only one of --run, --multirun, --cfg",
    "model=c_tiny task=lora --resolve": r"^The --resolve flag can only be used",
    "model=c_tiny task=lora data.urls=[a-{0..5}.tar]": r"Write: 'data\.urls=\[\"a-\{0\.\.5\}\.tar\"\]'$",
    "model=c_tiny task=lora sample.prompts=a,b": r"write: 'sample\.prompts=\[a,b\]'; as one text, write: '.*=\"a,b",
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
        ("train:\n  max_stepz: 3\n", r"^.*train\.max_stepz is unknown\. Did you mean train\.max_steps\?"),
        ("train:\n  max_steps: many\n", r"train\.max_steps has a wrong value: Value 'many'"),
        ("compile: off\n", r"compile=False must be one of off, regional\. YAML reads a bare off"),
        ("train:\n  precision: fp16\n", r"train\.precision=fp16 is refused"),
        ("optimizer:\n  lrr: 3\n", r"optimizer\.lrr is unknown: .*Did you mean optimizer\.lr\?"),
    ],
)
def test_wrong_experiment_is_refused_by_key(start: Start, tmp_path: Path, content: str, message: str):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text(f"# @package _global_\n{content}")
    code, text = start("--config-dir", str(tmp_path), *TINY, "experiment=bad")
    assert code == 2
    assert re.search(message, text), text


def test_value_error_of_a_component_is_explained_and_others_are_defects():
    refused = InstantiationException("wrapped")
    refused.__cause__ = ValueError("lr must be positive")
    assert paragraph_of(refused) == "lr must be positive"
    defect = InstantiationException("wrapped")
    defect.__cause__ = TypeError("a defect")
    assert paragraph_of(defect) is None
    assert paragraph_of(KeyError("x")) is None


def test_closed_output_is_no_defect(capsys: pytest.CaptureFixture[str]):
    def write() -> None:
        raise BrokenPipeError

    assert exit_code(write) == 1
    assert capsys.readouterr().err == "Whoever read the output has closed it.\n"


def test_a_full_disk_is_no_defect(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a" / "b.png"))

    assert exit_code(write) == 1
    said = capsys.readouterr().err
    assert re.search(r"b.png could not be written: .*No space left on device.* \(\d+.\d+ GiB are free there\)", said)
    assert "Traceback" not in said


def test_what_is_said_has_no_control_characters_and_an_end(capsys: pytest.CaptureFixture[str]):
    def refuse() -> None:
        raise ConfigError("the key a\x1b[2J\ud800\nis " + "x" * 10**6)

    assert exit_code(refuse) == 2
    said = capsys.readouterr().err
    assert said.startswith("the key a\\x1b[2J\\ud800\nis xxx")
    assert len(said) < 21_000


def test_none_is_success():
    assert exit_code(lambda: None) == 0


def test_configuration_error_is_a_refusal(capsys: pytest.CaptureFixture[str]):
    def refuse() -> None:
        raise ConfigError("no.")

    assert exit_code(refuse) == 2
    assert capsys.readouterr().err == "no.\n"


def test_silent_ranks_under_torchrun_let_rank_zero_speak_first(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise ConfigError("no.")

    waited: list[float] = []
    monkeypatch.setattr("cascade_train.config.error_messages.time.sleep", waited.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        assert exit_code(refuse) == 2
    assert waited == [SECONDS_FOR_RANK_ZERO] * 2


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (lambda: raise_(ConfigError("no.")), "no."),
        (lambda: raise_(Interrupted("Stopped by SIGTERM.", code=75)), "Stopped by SIGTERM. Start again."),
        (lambda: raise_(KeyError("defect")), "KeyError('defect')"),
        (lambda: 75, "Stopped as asked, and saved. The same command continues."),
        (lambda: 0, None),
    ],
    ids=["refused", "stopped early", "a defect", "stopped", "ended"],
)
def test_torchrun_is_told_what_happened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, action: Callable[[], int | None], told: str | None
):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    exit_code(action, remedy="Start again.")
    if told is None:
        assert not file.exists()
        return
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert f"traceback : {told}\n" in str(ChildFailedError("cascade_train", {0: failure}))


@pytest.mark.parametrize("rank", ["0", "1", "2"])
def test_a_rank_that_ended_the_run_gives_its_code_to_the_others(monkeypatch: pytest.MonkeyPatch, rank: str):
    monkeypatch.setenv("RANK", rank)
    assert exit_code(lambda: raise_(RankLostError("Rank 1 on a ended the run: no.", code=2))) == 2
    assert exit_code(lambda: raise_(RankLostError("Ranks are lost: rank 1."))) == 1


def test_nearest_name_or_all_names_are_told():
    assert did_you_mean("max_stepz", ["max_steps", "lr"], "train.") == " Did you mean train.max_steps?"
    assert did_you_mean("zzz", ["max_steps", "lr"]) == " Known here: max_steps, lr."
    assert did_you_mean("zzz", []) == ""


def test_groups_and_options_are_read_from_the_folder():
    assert {"model", "task", "optimizer", "experiment"} <= set(groups())
    assert group_options("optimizer") == [
        *("adafactor", "adamw", "adamw_8bit", "came", "lion", "muon", "prodigy", "schedule_free", "torch"),
    ]
    assert "_base" not in group_options("data")
    assert group_options("nothing") == []
    assert option_targets("lr_scheduler")["cosine"].endswith("CosineDecaySchedule")


def test_an_interrupt_is_one_line_on_rank_zero(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert exit_code(interrupted, remedy="Start again.") == 130
    assert capsys.readouterr().err == "Interrupted. Start again.\n"
    assert exit_code(interrupted) == 130
    assert capsys.readouterr().err == "Interrupted.\n"
    assert exit_code(lambda: raise_(KeyboardInterrupt("The jobs go on.")), remedy="Start again.") == 130
    assert capsys.readouterr().err == "The jobs go on.\n"
    monkeypatch.setenv("RANK", "1")
    assert exit_code(interrupted) == 130
    assert capsys.readouterr().err == ""


def test_an_interrupt_says_its_own_reason_and_exit_code(capsys: pytest.CaptureFixture[str]):
    def ended() -> None:
        raise Interrupted("Stopped by SIGTERM before the first step.", code=75)

    assert exit_code(ended, remedy="Start again.") == 75
    assert capsys.readouterr().err == "Stopped by SIGTERM before the first step. Start again.\n"


def test_an_interrupt_that_a_library_made_an_error_of_is_still_one(capsys: pytest.CaptureFixture[str]):
    def swallowed() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise RunError("a checkpoint could not be written") from interrupt

    assert exit_code(swallowed) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_ranks_whose_peer_ended_say_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def lost() -> None:
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:40879. This is typically caused by")

    assert exit_code(lost) == 1
    assert capsys.readouterr().err.startswith("The connection to another rank was lost")
    monkeypatch.setenv("RANK", "1")
    assert exit_code(lost) == 1
    assert capsys.readouterr().err == ""


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


def test_memory_that_runs_out_is_explained_with_what_needs_less(capsys: pytest.CaptureFixture[str]):
    def in_the_first_forward() -> None:
        raise type("OutOfMemoryError", (RuntimeError,), {})(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1 GiB is "
            "free. Of the allocated memory 20 GiB is allocated by PyTorch. If reserved but unallocated memory is large"
        )

    assert exit_code(in_the_first_forward) == 1
    said = capsys.readouterr().err
    assert said.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "Needs less memory: train.micro_batch_size=auto (gradient accumulation), activation_ch" in said
    assert "Of the allocated" not in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tr"
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        MemoryError("Unable to allocate 3.00 TiB for an array with shape (1, 2) and data type float32"),
    ],
)
def test_memory_that_runs_out_elsewhere_is_explained_too(error: Exception, capsys: pytest.CaptureFixture[str]):
    def fail() -> None:
        raise error

    assert exit_code(fail) == 1
    assert "Needs less memory: train.micro_batch_size=auto" in capsys.readouterr().err
