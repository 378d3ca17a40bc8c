"""What makes a folder a run."""

import json
from pathlib import Path

import pytest
from tests.store.builders import LAYERS, new_run

from backstory.errors import FormatError, StoreError, UsageError
from backstory.store import RunStore


def test_config_says_what_the_run_is(tmp_path: Path) -> None:
    new_run(tmp_path / "a/b/run", encoding="int8").close()
    assert json.loads((tmp_path / "a/b/run/config.json").read_text()) == {
        "format": 1,
        "features": [],
        "layers": [{"name": "first", "offset": 0, "dims": 5}, {"name": "second", "offset": 5, "dims": 7}],
        "encoding": "int8",
        "groups": 2,
        "curvature_rows": 0,
        "split": False,
        "diagonal": False,
        "seed": 3,
    }
    store = RunStore.open(str(tmp_path / "a/b/run"))
    assert (store.dims, store.width, store.config["seed"]) == ([5, 7], 12, 3)


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 2).close()
    with pytest.raises(StoreError, match=r"already contains a run.*resume=True"):
        new_run(tmp_path / "run")
    assert RunStore.open(tmp_path / "run").n_steps() == 2


def test_a_half_created_run_is_made_again(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 2).close()
    (tmp_path / "run/config.json").rename(tmp_path / "run/config.json.tmp")
    with pytest.raises(StoreError, match=r"no config\.json"):
        RunStore.open(tmp_path / "run")
    with new_run(tmp_path / "run") as store:
        assert store.n_steps() == 0
        assert not (tmp_path / "run/config.json.tmp").exists()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match=r"do not belong to a run \(thesis\.tex\)"):
        new_run(tmp_path)
    with pytest.raises(StoreError, match="is a file"):
        new_run(tmp_path / "thesis.tex")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_runs_in_the_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "half/steps.lance").mkdir(parents=True)
    with pytest.raises(StoreError, match="Check the path"):
        RunStore.open(tmp_path)
    new_run(tmp_path / "b").close()
    with pytest.raises(StoreError, match=rf"is not a run \(it has no config.json\)\. Did you mean {tmp_path / 'b'}\?"):
        RunStore.open(tmp_path)
    new_run(tmp_path / "a").close()
    with pytest.raises(StoreError, match=rf"Did you mean {tmp_path / 'a'} or {tmp_path / 'b'}\?"):
        RunStore.open(tmp_path)


def test_a_missing_run_and_a_newer_format_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        RunStore.open(tmp_path / "run")
    new_run(tmp_path / "run").close()
    config = tmp_path / "run/config.json"
    written = config.read_text()
    config.write_text(written.replace('"format": 1', '"format": 5'))
    with pytest.raises(FormatError, match=r"format 5, but this version of Backstory reads format 1"):
        RunStore.open(tmp_path / "run")
    config.write_text(written.replace('"features": []', '"features": ["windows", "rings"]'))
    with pytest.raises(
        FormatError, match=r"uses rings, which this version .* cannot read \(it supports factors, windows, own\)"
    ):
        RunStore.open(tmp_path / "run")
    config.write_text(written.replace('"encoding": "float64"', '"encoding": "4 bits"'))
    with pytest.raises(
        FormatError, match=r"stores numbers as 4 bits, which this version .* \(it supports float16, int8"
    ):
        RunStore.open(tmp_path / "run")
    config.write_text('{"format": 1}')
    with pytest.raises(FormatError, match="is missing"):
        RunStore.open(tmp_path / "run")


def test_config_changes_but_not_what_the_tables_depend_on(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.update_config(seed=4, note="ä")
        with pytest.raises(UsageError, match="cannot be changed"):
            store.update_config(encoding="int8")
    reader = RunStore.open(tmp_path / "run")
    assert (reader.config["seed"], reader.config["note"], reader.config["encoding"]) == (4, "ä", "float64")
    with pytest.raises(UsageError, match="open read-only"):
        reader.update_config(seed=5)
    with pytest.raises(UsageError, match="closed"):
        store.update_config(seed=5)


def test_senseless_runs_are_refused(tmp_path: Path) -> None:
    def make(layers: list[tuple[str, int]], encoding: str, config: dict[str, int]) -> None:
        RunStore.create(tmp_path / "run", layers=layers, encoding=encoding, n_groups=1, config=config)

    with pytest.raises(UsageError, match="encoding must be one of"):
        make(LAYERS, "float8", {})
    with pytest.raises(UsageError, match="at least one layer"):
        make([], "int8", {})
    with pytest.raises(UsageError, match="Rename"):
        make(LAYERS, "int8", {"layers": 1})
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="curvature_rows must be at least 1"):
        RunStore.create(tmp_path / "run", layers=LAYERS, encoding="int8", n_groups=1, config={}, split=True)
    assert not (tmp_path / "run").exists()


def test_a_split_run_and_a_diagonal_are_named_in_the_config(tmp_path: Path) -> None:
    made = {"layers": LAYERS, "encoding": "int8", "n_groups": 1, "config": {}}
    RunStore.create(tmp_path / "run", **made, curvature_rows=4, split=True, diagonal=True).close()  # type: ignore[arg-type]
    config = RunStore.open(tmp_path / "run").config
    assert [config[key] for key in ("curvature_rows", "split", "diagonal")] == [4, True, True]
    with RunStore.open(tmp_path / "run", write=True) as store, pytest.raises(UsageError, match="cannot be changed"):
        store.update_config(split=False)
