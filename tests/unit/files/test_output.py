"""An output replaces what its command wrote, else only by `overwrite=true`, and touches nothing beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cascade_train.errors import ConfigError
from cascade_train.files.output import MARK, RECORD, check_output, generator, remove_written, replaced_file
from cascade_train.files.output import replaced_folder as replaced


def write(
    folder: Path, names: str = "config.json model.safetensors", command: str = "merge", text: str = "ours"
) -> None:
    with replaced(folder, command) as place:
        for name in names.split():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(text)


def test_a_folder_of_the_command_is_written_again_and_other_files_in_it_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "config.json model.safetensors part/old.bin")
    (out / "mine.safetensors").write_text("mine")
    check_output(out, "merge", is_folder=True)
    write(out, text="again")
    there = {path.name: path.read_text() for path in out.rglob("*") if path.name != RECORD}
    assert there == {"config.json": "again", "model.safetensors": "again", "mine.safetensors": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing is left beside it"


@pytest.mark.parametrize("how", ["foreign", "changed", "of another command", "a record that lies"])
def test_a_folder_that_the_command_did_not_leave_like_that_is_refused(tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    write(out, command="export" if how == "of another command" else "merge")
    if how == "foreign":
        (out / RECORD).unlink()
    elif how == "changed":
        (out / "config.json").write_text("mine")
    elif how == "a record that lies":
        (out / RECORD).write_text(json.dumps({"command": "merge", "files": {"../precious": 1}}))
    before = {path: path.read_text() for path in out.iterdir()}
    with pytest.raises(ConfigError, match=r"out=.* exists, and is not as .*merge left it.*overwrite=true"):
        check_output(out, "merge", is_folder=True)
    check_output(out, "merge", is_folder=True, overwrite=True)
    assert before == {path: path.read_text() for path in out.iterdir()}


def test_a_file_is_known_by_its_header_or_its_head(tmp_path: Path) -> None:
    ours, other, page, picture = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "c.html", "d.png"))
    save_file({"x": torch.zeros(1)}, ours, metadata={MARK: "merge"})
    save_file({"x": torch.zeros(1)}, other)
    page.write_text(f"<html><head>{generator('report')}")
    picture.write_bytes(b"\x89PNG")
    check_output(ours, "merge")
    check_output(page, "report")
    for path, command in ((ours, "export"), (other, "merge"), (page, "inspect"), (picture, "report")):
        with pytest.raises(ConfigError, match="overwrite=true"):
            check_output(path, command)


def test_what_is_read_is_never_replaced(tmp_path: Path) -> None:
    base, link, lora = tmp_path / "base", tmp_path / "link", tmp_path / "out" / "model.safetensors"
    write(base, "config.json prior/model.safetensors")
    write(lora.parent)
    link.symlink_to(base)
    refused = [(base, [base]), (link, [base]), (base, [link]), (base / "prior", [base]), (lora.parent, [lora])]
    for out, inputs in refused:
        with pytest.raises(ConfigError, match=r"would replace .* which is read\. Name another out="):
            check_output(
                out, "merge", is_folder=True, overwrite=True, inputs=[*map(str, inputs)], names=["model*.safetensors"]
            )
    check_output(base / "new", "merge", is_folder=True, inputs=[str(base)])


@pytest.mark.parametrize(("kind", "is_folder"), [("folder", False), ("file", True), ("below a file", True)])
def test_a_file_is_no_folder_and_a_folder_no_file(tmp_path: Path, kind: str, is_folder: bool) -> None:
    out = tmp_path / "out"
    out.mkdir() if kind == "folder" else out.write_text("mine")
    out = out / "new" if kind == "below a file" else out
    with pytest.raises(ConfigError, match="Name another out="):
        check_output(out, "merge", is_folder=is_folder, overwrite=True)


def test_links_are_refused_or_replaced_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine.safetensors", tmp_path / "link.safetensors"
    mine.write_text("mine")
    link.symlink_to(mine)
    with pytest.raises(ConfigError, match="overwrite=true"):
        check_output(link, "merge")
    with replaced_file(link) as place:
        place.write_text("merged")
    assert (mine.read_text(), link.read_text(), link.is_symlink()) == ("mine", "merged", False)
    broken = tmp_path / "broken"
    broken.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="overwrite=true"):
        check_output(broken, "merge", is_folder=False)


def test_a_failure_leaves_what_was_there_and_a_file_of_another_process_stays(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "file"
    write(out)
    with pytest.raises(ZeroDivisionError), replaced(out, "merge") as place:
        (place / "config.json").write_text(f"{1 / 0}")
    assert (out / "config.json").read_text() == "ours"
    with pytest.raises(FileExistsError), replaced_file(file):
        file.write_text("another's")
    assert file.read_text() == "another's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_two_writers_of_a_folder_leave_one_of_the_two(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replaced(out, "merge") as one, replaced(out, "merge") as two:
        for place, text in ((one, "one"), (two, "two")):
            (place / "config.json").write_text(text)
            (place / "model.safetensors").write_text(text)
    assert {path.read_text() for path in out.iterdir() if path.name != RECORD} == {"one"}
    check_output(out, "merge", is_folder=True)


def test_the_work_of_a_command_is_removed_without_the_files_of_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, command="export")
    (out / "notes.txt").write_text("mine")
    remove_written(out, "merge")
    assert len([*out.iterdir()]) == 4, "it is not of that command"
    remove_written(out, "export")
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_refused_before_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="read-only"):
        check_output(tmp_path / "out", "merge")
    tmp_path.chmod(0o700)
