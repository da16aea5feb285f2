import json
from pathlib import Path

import numpy as np
import pytest

from bench import laboratory
from bench.laboratory import (
    BASE,
    HIGHER,
    NEW_SEEDS,
    SEEDS,
    Notebook,
    against_itself,
    asked,
    cell,
    draw,
    equal_seconds,
    interval,
    main,
    measured,
    overrides,
    page,
    write_real,
)
from bench.laboratory_rows import BASELINE, LEFT_OUT, ROWS, STEPS
from cascade_train.models.adapters.kinds import KINDS

CONF = Path(laboratory.__file__).parents[1] / "conf"
GROUPS = ("objective", "distance", "times", "noise", "optimizer", "lr_scheduler")
METHOD = next(iter(ROWS))


def options():
    files = [f"{group}={file.stem}" for group in GROUPS for file in (CONF / group).glob("[!_]*.yaml")]
    return [*files, "ema.decay", "ema.post_hoc", *(f"task.kind={kind}" for kind in KINDS), "task.dora"]


@pytest.mark.parametrize("option", options())
def test_every_option_has_a_row_or_a_reason(option):
    written = {each for row in ROWS.values() for each in row.overrides}
    has_row = any(each == option or each.startswith(f"{option}=") for each in written)
    assert has_row != (option in LEFT_OUT)


def test_reasons_and_choices_are_of_options_that_exist():
    known = set(options())
    assert set(LEFT_OUT) <= known
    chosen = {each for row in ROWS.values() for each in row.overrides if each.split("=")[0] in GROUPS}
    assert chosen <= known


def test_an_arm_differs_from_the_baseline_in_its_method_alone():
    baseline, lion = overrides(None, 3, STEPS, None), overrides(ROWS["Lion"], 3, STEPS, 5e-4)
    assert set(baseline) - set(lion) == {"optimizer.lr=2e-3"}
    assert set(lion) - set(baseline) == {"optimizer=lion", "optimizer.lr=0.0005"}
    known = overrides(ROWS["half of the pictures known"], 3, STEPS, None)
    assert "data.source.seed=3" in known
    assert not any(each.startswith(("~", "data.only")) for each in known)
    assert len({each.split("=")[0] for each in known}) == len(known)


@pytest.mark.slow
def test_an_arm_is_trained_painted_with_and_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(laboratory, "ASKED_NEW", 2)
    monkeypatch.setattr(laboratory, "ASKED_KNOWN", 3)
    monkeypatch.setattr(laboratory, "REAL", 10)
    asked.cache_clear()
    try:
        assert [scene.position == "sides" for scene in asked()] == [True, True, False, False, False]
        real = tmp_path / "real"
        real.mkdir()
        write_real(real)
        assert len(list(real.iterdir())) == 10
        found = measured(None, 0, 1, None, real)
    finally:
        asked.cache_clear()
    assert found.keys() == HIGHER.keys()
    assert found["learned"] == 0.0  # one step teaches nothing
    assert found["kept"] == 1.0  # and harms nothing


def test_intervals_of_differences_hold_their_mean_in_95_of_100_cases():
    mean, low, high = interval(np.full(8, 0.25))
    assert mean == low == high == 0.25
    drawn = np.random.default_rng(3).normal(1.0, 2.0, size=(40_000, 8))
    covered = np.mean([low <= 1.0 <= high for _, low, high in map(interval, drawn)])
    assert covered == pytest.approx(0.95, abs=0.003)  # three standard deviations of such a share


def test_equal_seconds_are_fewer_steps_of_a_slower_method():
    assert equal_seconds(1.5) == round(STEPS / 1.5)
    assert equal_seconds(0.5) == 2 * STEPS
    assert equal_seconds(1.14) == STEPS


def test_a_cell_is_bold_where_its_interval_lies_on_one_side_of_zero():
    assert cell(np.tile([0.1, 0.2], 4), "kept").startswith("**+15.0 [+")
    assert cell(np.tile([0.1, -0.1, 0.2, -0.2], 2), "kept").startswith("+0.0 [-")


def notebook(path, *, rows):
    book = Notebook(path)
    for name, learned, seeds in rows:
        for seed in seeds:
            found = dict.fromkeys(HIGHER, learned + 0.01 * seed)
            book.find_or(lambda found=found: found, row=name, seed=seed, steps=STEPS, rate=None)
    return book


def test_a_page_shows_what_was_measured_and_what_was_not(tmp_path):
    path = tmp_path / "book.jsonl"
    book = notebook(path, rows=[(BASE, 0.5, (*SEEDS, *NEW_SEEDS)), (METHOD, 0.75, SEEDS)])
    book.find_or(lambda: 1.0, row=METHOD, pace=True)
    lines = page(Notebook(path))
    (line,) = (each for each in lines if each.startswith(f"| {METHOD}, "))
    assert "| **+25.0 [+25.0, +25.0]** |" in line
    assert line.rstrip(" |").endswith("**+25.0 [+25.0, +25.0]**")
    assert sum("not measured" in each for each in lines) == len(ROWS) - 1
    assert not any(each.startswith("## Again") for each in lines)
    assert f"`{' '.join(BASELINE)}`" in "\n".join(lines)
    assert len(path.read_text().splitlines()) == 3 * len(SEEDS) + 1
    notebook(path, rows=[(METHOD, 0.25, NEW_SEEDS)])
    assert page(Notebook(path))[-1].startswith(f"| {METHOD} | **-25.0 [-25.0, -25.0]** |")
    panel = draw(Notebook(path)).axes[0]
    assert [text.get_text() for text in panel.get_yticklabels()][0] == METHOD
    assert [line.get_xdata().tolist() for line in panel.lines if len(line.get_xdata()) == 1] == [[25.0], [25.0]]


def test_what_was_measured_is_not_done_again(tmp_path):
    path = tmp_path / "book.jsonl"
    path.write_text(json.dumps({"row": BASE, "seed": 0, "steps": STEPS, "rate": None, "found": {}}) + "\n")
    book = Notebook(path)
    assert book.find_or(lambda: pytest.fail("done again"), row=BASE, seed=0, steps=STEPS, rate=None)["found"] == {}


def test_a_slower_method_trains_for_the_baselines_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(laboratory, "pace", lambda *_: 1.5)
    monkeypatch.setattr(
        laboratory, "measured", lambda _row, seed, steps, *_, real: dict.fromkeys(HIGHER, 0.01 * seed + steps)
    )
    book = notebook(tmp_path / "book.jsonl", rows=[(BASE, 0.5, range(2 * len(SEEDS))), (METHOD, 0.75, SEEDS)])
    for name in (BASE, METHOD, [*ROWS][1]):
        laboratory.run_pace(book, name)
    for name in (BASE, METHOD):
        laboratory.run_row(book, name, tmp_path, SEEDS)
    new = [row for row in book.rows if "pace" in row or row["steps"] != STEPS]
    assert [(row["row"], row.get("seed"), row.get("steps")) for row in new] == [
        (METHOD, None, None),
        *((METHOD, seed, round(STEPS / 1.5)) for seed in SEEDS),
    ]
    assert "| 1.50 | **" in "\n".join(page(book))


def test_the_baseline_against_itself_covers_zero_in_most_cells():
    seeds = np.random.default_rng(0).normal(size=(len(HIGHER), 2 * len(SEEDS)))
    covered, cells = against_itself(dict(zip(HIGHER, seeds, strict=True)))
    assert cells == 20 * len(HIGHER)
    assert covered / cells > 0.8


def test_the_command_writes_the_page(tmp_path, capsys):
    out = tmp_path / "page.md"
    assert main(["--book", str(tmp_path / "none.jsonl"), "--page", str(out)]) == 0
    assert "not measured yet" in out.read_text()
    assert out.with_suffix(".png").is_file()
    with pytest.raises(SystemExit):
        main(["--rows", "nonsense"])
    assert "nonsense" in capsys.readouterr().err
