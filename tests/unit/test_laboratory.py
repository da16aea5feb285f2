import numpy as np
import pytest

from bench import laboratory
from bench.laboratory import (
    HIGHER,
    asked,
    interval,
    main,
    measured,
    overrides,
    write_real,
)
from bench.laboratory_rows import ROWS, STEPS


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


def test_the_command_writes_the_page(tmp_path, capsys):
    out = tmp_path / "page.md"
    assert main(["--book", str(tmp_path / "none.jsonl"), "--page", str(out)]) == 0
    assert "not measured yet" in out.read_text()
    assert out.with_suffix(".png").is_file()
    with pytest.raises(SystemExit):
        main(["--rows", "nonsense"])
    assert "nonsense" in capsys.readouterr().err
