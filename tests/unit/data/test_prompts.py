"""Prompts from files: where they are found, and what is said of a file without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cascade_train.assembly.samples import read_sample_prompts
from cascade_train.commands.generate import GenerateArgs
from cascade_train.commands.parts.command_line import parse
from cascade_train.data.prompts import read_prompts
from cascade_train.errors import ConfigError
from tests.unit.config.composing import checked

CAPTIONS = ["a red circle, small", 'the "blue" star\non two lines', "ein grüner Kreis"]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return f"@{path}"


def parquet(path: Path, **columns: list[object]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return f"@{path}"


def test_a_text_has_a_prompt_in_each_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "\ufeff one circle \r\n\n  two\n")
    assert read_prompts(file) == ["one circle", "two"]
    assert read_prompts([file, "three", "@@nasa"]) == ["one circle", "two", "three", "@nasa"]
    assert read_prompts(None) == []
    assert read_prompts("one, two") == ["one, two"]


def test_every_kind_of_table_gives_the_same_prompts(tmp_path: Path) -> None:
    quoted = [caption.replace('"', '""') for caption in CAPTIONS]
    files = [
        write(tmp_path / "a.csv", "image,Caption\n" + "".join(f'{n}.png,"{text}"\n' for n, text in enumerate(quoted))),
        write(tmp_path / "a.tsv", 'TEXT\n"' + '"\n"'.join(quoted) + '"\n'),
        write(tmp_path / "a.jsonl", "".join(json.dumps({"id": 1, "prompt": each}) + "\n" for each in CAPTIONS)),
        write(tmp_path / "b.jsonl", "".join(json.dumps({"caption": [each, "?"]}) + "\n" for each in CAPTIONS)),
        write(tmp_path / "c.csv", 'a,b\n1,"' + '"\n1,"'.join(quoted) + '"\n') + ":b",
        parquet(tmp_path / "a.parquet", key=[1, 2, 3], caption=list(CAPTIONS)),
        parquet(tmp_path / "b:c.parquet", only=list(CAPTIONS)),
    ]
    assert [read_prompts(file) for file in files] == [CAPTIONS] * len(files)


def test_the_command_line_reads_files(tmp_path: Path) -> None:
    file = write(tmp_path / "a b.txt", "one\ntwo\n")
    assert parse(GenerateArgs, ["from=run", f"prompts={file}"]).prompts == ["one", "two"]
    assert parse(GenerateArgs, ["from=run", f'prompts=["{file}",three]']).prompts == ["one", "two", "three"]
    with pytest.raises(ConfigError, match="prompts=@none.csv: there is no such file; paths are relative to .* @@none"):
        parse(GenerateArgs, ["from=run", "prompts=@none.csv"])
    with pytest.raises(ConfigError, match="there is no such file.* @@word"):
        read_prompts("@" + 80 * "word ")


def test_the_prompts_of_a_run_are_read_from_a_file_when_it_begins(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "n,words\n1,one\n2,two\n")
    cfg = checked("task=lora", "model=c_tiny", f"sample.prompts={file}:words")
    read_sample_prompts(cfg)
    assert cfg.sample.prompts == ["one", "two"]
    cfg = checked("task=lora", "model=c_tiny")
    read_sample_prompts(cfg)
    assert cfg.sample.prompts is None
    with pytest.raises(ConfigError, match="sample.prompts={'a': 1} must be a list of texts, or @file"):
        checked("task=lora", "model=c_tiny", "sample.prompts={a: 1}")
    with pytest.raises(ConfigError, match="sample.prompts=@none.txt: there is no such file"):
        read_sample_prompts(checked("task=lora", "model=c_tiny", "sample.prompts=@none.txt"))


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.txt", "\n \n", "", "a.txt: holds no prompt. Write one in each line"),
        ("a.txt", b"one\n\xff\xfe\n", "", "a.txt, line 2: is not UTF-8 .*invalid start byte.; save the file as UTF-8"),
        ("a.csv", "caption,n\none,1\n,2\n", "", "a.csv, line 3: caption holds no prompt: ''. Mend or remove the row"),
        ("a.csv", "x,y\n1,2\n", "", "a.csv: which column holds the prompts. It has x, y. Name one: .*a.csv:<name>"),
        ("a.csv", "id;caption\n1;a\n", "", "a.csv: its one column is 'id;caption'; .* separated by commas"),
        ("a.csv", "caption\na cat, asleep\n", "", "a.csv, line 2 has 2 cells, .* names 1 columns; a cell with a"),
        ("a.parquet", "one", "", "prompts=@.*a.parquet: .*a.parquet is no parquet file that can be read"),
    ],
)
def test_a_file_without_prompts_is_named_with_line_and_remedy(tmp_path, name, content, column, message):
    file = write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(f"{file}{column}")
