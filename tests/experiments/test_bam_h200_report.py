"""What becomes of the trained comparison's rows: cells of several calls, tables, marks, figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import tables
from experiments.bam_h200 import kept, marks, merge, report, summary
from experiments.bam_h200.repeats import repeat_table


def _row(case: str, seed: int, length: int, share: float) -> dict[str, Any]:
    right = round(20 * share)
    depths = [{"depth": i / 19, "correct": i < right} for i in range(20)]
    where = {"case": case, "seed": seed, "mix": "retrieval", "size": "small", "benchmark": "passkey"}
    return {**where, "length": length, "samples": 20, "correct": right, "accuracy": share, "depths": depths}


def _part(shares: dict[str, dict[int, tuple[float, ...]]]) -> dict[str, Any]:
    """A part of the report with passkey rows: case -> length -> share of each seed."""
    made = [
        _row(case, seed, length, share)
        for case, lengths in shares.items()
        for length, own in lengths.items()
        for seed, share in enumerate(own)
    ]
    return {"study": {"train_length": 512}, "rows": made}


def test_what_cases_change_of_the_data_or_the_heads_is_a_part_of_its_own() -> None:
    training_row = lambda case, length, tokens: {
        **_row(case, 0, 512, 1.0),
        "benchmark": "training",
        "train_length": length,
        "steps": 50,
        "tokens": tokens,
    }
    own = "data.sequence_length=1024"
    made = [
        training_row(f"bam+ssmax @ {own}", 1024, 9),
        training_row("rope @ optim.lr=0.1", 512, 5),
        training_row(f"rope @ optim.lr=0.1 {own}", 1024, 10),
        training_row("alibi @ train.steps=9", 512, 7),
        {**training_row("rope", 512, 5), "seed": 1},
        training_row("rope", 512, 5),
        training_row("rope @ model.heads=16 optim.lr=0.1", 512, 5),
        training_row("nope @ model.heads=16", 512, 5),
    ]
    parts = report.parts_of(made)
    plain, other, heads = (("small", "retrieval", recipe) for recipe in ("", own, "model.heads=16"))
    assert set(parts) == {plain, other, heads}
    assert next(iter(parts)) == plain  # the study's own recipe comes first
    assert sorted(row["case"] for row in parts[heads]["rows"]) == ["nope", "rope @ optim.lr=0.1"]
    assert [parts[key]["study"]["train_length"] for key in (plain, other)] == [512, 1024]
    assert [row["case"] for row in parts[other]["rows"]] == ["bam+ssmax", "rope @ optim.lr=0.1"]
    assert report.budgets(parts[plain]["rows"]) == "50 steps, 5 tokens or 50 steps, 7 tokens"
    told = "2 seeds of `rope`, 1 seed of `alibi @ train.steps=9`, `rope @ optim.lr=0.1`"
    assert report.seeds_told(parts[plain]["rows"]) == told
    assert report.stem(plain) == "small-retrieval"
    assert report.stem(other) == "small-retrieval-data-sequence-length-1024"
    assert made[0]["case"] == f"bam+ssmax @ {own}"  # the rows that were given stay as they were


def test_the_report_says_whether_the_marks_are_reached_and_by_whom() -> None:
    part = _part(
        {
            "bam+ssmax": {2048: (1.0, 0.9, 0.95), 16384: (0.9, 0.5, 0.7)},
            "rope": {2048: (0.0, 0.1, 0.0)},
            "fox": {2048: (0.9,), 16384: (0.65,)},
            "path+bam+ssmax": {2048: (1.0, 1.0), 16384: (0.75, 0.8)},
            "nope": {2048: (0.85, 0.9)},
        }
    )
    near, others_near, far, others_far = marks.marks(part)
    assert near == (
        "4× the training length: `bam+ssmax` 0.95 (seeds 1.00, 0.90, 0.95), mark 0.9: reached. "
        "`rope` 0.03 (seeds 0.00, 0.10, 0.00)."
    )
    assert others_near == "4×, others that reach 0.9: `path+bam+ssmax` 1.00 (seeds 1.00, 1.00); `fox` 0.90 (one seed)."
    assert far == "32× the training length: `bam+ssmax` 0.70 (seeds 0.90, 0.50, 0.70), mark 0.7: reached."
    assert others_far == "32×, others that reach 0.7: `path+bam+ssmax` 0.78 (seeds 0.75, 0.80)."
    alone, *_ = marks.marks({**part, "rows": [row for row in part["rows"] if row["seed"] == 1]})
    assert "`bam+ssmax` 0.90 (one seed), mark 0.9: reached. `rope` 0.10 (one seed)." in alone
    assert marks.marks({**part, "rows": [row for row in part["rows"] if row["case"] == "rope"]}) == []


def test_seeds_that_the_recipe_was_chosen_on_stand_beside_fresh_ones() -> None:
    part = _part({"bam+ssmax": {16384: (1.0, 0.35, 0.95, 0.35, 0.5, 0.7)}})
    line, others = marks.marks(part)
    assert line == (
        "32× the training length: `bam+ssmax` 0.64 (seeds 1.00, 0.35, 0.95, 0.35, 0.50, 0.70), mark 0.7: not reached; "
        "seeds 0, 1, 2 alone 0.77: reached; seeds 3, 4, 5 alone 0.52: not reached."
    )
    assert others == "32×, others that reach 0.7: none."
    larger = {**part, "rows": [row | {"size": "120m"} for row in part["rows"]]}
    assert "; seed 0 alone 1.00: reached; seeds 1, 2, 3, 4, 5 alone 0.57: not reached." in marks.marks(larger)[0]
    other_heads = {**larger, "study": {**part["study"], "recipe": "model.heads=16"}}  # nothing was chosen there
    assert "alone" not in marks.marks(other_heads)[0]


def test_the_best_recipe_stands_first_with_the_others_in_the_same_recipe() -> None:
    shares = {"rope": 0.1, "bam+ssmax": 0.5, "rope+ssmax(init=0.2)": 0.95, "bam+ssmax(init=0.2)": 1.0}
    shares["alibi+ssmax(init=0.2)"] = 0.3
    best, plain, others = marks.marks(_part({case: {2048: (share,)} for case, share in shares.items()}))
    assert best == (
        "4× the training length: `bam+ssmax(init=0.2)` 1.00 (one seed), mark 0.9: reached. "
        "`rope+ssmax(init=0.2)` 0.95 (one seed); `alibi+ssmax(init=0.2)` 0.30 (one seed); `rope` 0.10 (one seed)."
    )
    assert plain.startswith("4× the training length: `bam+ssmax` 0.50 (one seed), mark 0.9: not reached. `rope` 0.10")
    assert others == "4×, others that reach 0.9: `rope+ssmax(init=0.2)` 0.95 (one seed)."


def test_the_short_table_has_the_sizes_side_by_side() -> None:
    part = _part({"rope": {2048: (0.5, 0.1), 16384: (0.0, 0.05)}, "alibi": {2048: (1.0,)}, "fox": {2048: (1.0,)}})
    asked = [*part["rows"], _row("alibi", 0, 32768, 0.25) | {"size": "120m"}]
    trained = [row | {"benchmark": "training", "train_length": 512} for row in asked]
    assert summary.key_table([*asked, *trained]).splitlines() == [
        "| scheme | 32M: seeds | 4× | 32× | 64× | 96M: seeds | 4× | 32× | 64× |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| `rope` | 2 | 0.30 | 0.03 |  |  |  |  |  |",
        "| `alibi` | 1 | 1.00 |  |  | 1 |  |  | 0.25 |",
    ]


def test_the_short_table_of_rates_leaves_out_what_failed_or_was_not_measured() -> None:
    row = lambda case, **more: SPEED_ROW | {"case": case, "ratio": {}} | more
    speed = {
        "rows": [row("rope", ratio={"torch": 1.25}), row("bam+ssmax", failed="no room"), row("path+fox", mfu=None)]
    }
    assert summary.rate_table(speed).splitlines()[2:] == ["| 432m, 16 × 2,048 | 1.25 (50.0%) |  |  |  |"]


def test_the_report_says_who_was_asked_far_lengths() -> None:
    part = _part({"bam+ssmax": {32768: (1.0, 0.5), 131_072: (0.5,)}, "rope": {32768: (0.0,)}})
    assert report.far_note(part) == [
        "At 128k only seed 0 of `bam+ssmax` had the question, 20 keys per seed and length. Where no key is found, no "
        "longer prompt is asked."
    ]
    assert report.far_note({**part, "rows": part["rows"][:2]}) == []


def test_what_is_drawn_of_a_part() -> None:
    """A case alone in a later group is drawn, a group whose cases are all drawn is not, and nothing without a key."""
    names = lambda shares: [name for name, _ in report.figures_of(_part(shares))]
    assert names({"nope+ssmax": {512: (1.0,)}}) == ["passkey-starts", "passkey-depth"]
    assert names({"bam+ssmax": {512: (1.0,)}, "rope": {512: (0.5,)}}) == ["passkey", "passkey-depth"]
    assert names({"bam+ssmax": {512: (1.0,)}, "bam+ssmax @ clamped": {512: (0.5,)}})[1] == "passkey-ablations"
    assert names({"rope": {512: (0.0,)}}) == []


SPEED_ROW = {"shape": "432m", "B": 16, "T": 2048, "case": "rope", "mfu": 0.5, "ratio": {"torch": 1.25, "rope": 1.0}}
TRAINED = {"steps": 50, "tokens": 9, "train_length": 256, "loss": 1.0, "parameters": 1, "positional_parameters": 0}
TRAINED |= {"training_seconds": 1.0, "evaluation_seconds": 1.0, "tokens_per_second": 9.0}
ENV = {"date": "2026-01-01", "device": "cpu", "platform": "Linux", "jax": "1", "commit": None}


def _study(folder: Path, **changes: Any) -> tuple[Path, Path, Path]:
    """A study's folder, where it is to be published, and the front page."""
    study, here, front = folder / "study", folder / "here", folder / "README.md"
    (here / "figures").mkdir(parents=True)
    (here / "figures" / "old.png").touch()
    marks = "\n".join([*summary.KEYS, *summary.RATES])
    (here / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n{marks}\n", encoding="utf-8")
    front.write_text(marks, encoding="utf-8")
    study.mkdir()
    asked = _row("nope", 0, 1024, 0.0) | {"token_accuracy": 0.0}
    made = [row | changes for row in (asked | {"benchmark": "training"} | TRAINED, asked)]
    (study / "results.json").write_text(json.dumps({"env": ENV, "rows": made}), encoding="utf-8")
    timed = SPEED_ROW | {"tokens_per_second": 9.0, "memory_bytes": None}
    (folder / "speed.json").write_text(json.dumps({"rows": [timed]}), encoding="utf-8")
    return study, here, front


def test_a_study_without_figures_is_published(tmp_path: Path) -> None:
    """It takes the place of one that had some."""
    study, here, front = _study(tmp_path)
    path = report.write_report(study, tmp_path / "speed.json")
    report.publish(study, tmp_path / "speed.json", here=here, front=front)
    assert list((here / "figures").iterdir()) == []
    assert "| `nope` | 0.00 [0.00, 0.16] |" in (here / "README.md").read_text(encoding="utf-8")
    assert "| `nope` | 1 | 0.00 |  |  |" in front.read_text(encoding="utf-8")
    for page in (here / "README.md", front):
        assert "| 432m, 16 × 2,048 | 1.25 (50.0%) |" in page.read_text(encoding="utf-8")
    rate = "| 432m | 16 × 2,048 | `rope` | 9 | 50.0% |  | 1.25 | 1.00 |"
    assert rate in path.read_text(encoding="utf-8") == (here / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["here/README.md", "README.md"])
def test_nothing_is_published_where_a_page_has_no_place(tmp_path: Path, page: str) -> None:
    study, here, front = _study(tmp_path)
    report.write_report(study)
    text = (tmp_path / page).read_text(encoding="utf-8")
    (tmp_path / page).write_text(text.replace(summary.RATES[1], ""), encoding="utf-8")
    before = {path: path.read_bytes() for path in (here / "README.md", front)}
    with pytest.raises(ValueError, match=r"README\.md has no '<!-- train steps on one H200 -->'"):
        report.publish(study, here=here, front=front)
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in here.rglob("*.*")) == ["README.md", "old.png"]


def test_a_study_of_other_sizes_is_not_published(tmp_path: Path) -> None:
    study, here, front = _study(tmp_path, size="tiny")
    report.write_report(study)
    with pytest.raises(ValueError, match="no passkeys of the sizes small and 120m, mix retrieval"):
        report.publish(study, here=here, front=front)
    assert not (here / "results.json").exists()


def test_rows_without_training_are_refused_while_older_figures_are_there(tmp_path: Path) -> None:
    study, *_ = _study(tmp_path, benchmark="passkey")
    rows = [row for row in json.loads((study / "results.json").read_text())["rows"] if "steps" not in row]
    (study / "results.json").write_text(json.dumps({"env": ENV, "rows": rows}), encoding="utf-8")
    (study / "figures").mkdir()
    (study / "figures" / "old.png").touch()
    with pytest.raises(ValueError, match="Size small, mix retrieval: there are rows of what was asked and none of"):
        report.write_report(study)
    assert (study / "figures" / "old.png").exists()


def test_a_folder_without_results_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no results\.json: no cell is finished"):
        report.write_report(tmp_path)


def test_speeds_named_by_hand_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"--speed .*nowhere\.json: there is no such file"):
        report.main([str(tmp_path), "--speed", str(tmp_path / "nowhere.json")])


def test_the_largest_weight_of_any_head_is_told() -> None:
    head = {"case": "bam", "seed": 0, "size": "small", "benchmark": "attention", "length": 512}
    made = [head | {"layer": 1, "head": index, "needle": weight} for index, weight in enumerate((0.25, 0.75, 0.5))]
    assert "| `bam` | 0.75 (layer.head 1.1) |" in report.attention_table({"rows": made})


def test_figures_join_windows_to_half_octaves() -> None:
    window = lambda place, loss: {
        "case": "rope",
        "seed": 0,
        "start": 512 * place,
        "end": 512 * (place + 1),
        "loss": loss,
    }
    made = report._half_octaves([window(place, float(place)) for place in range(12)], 512)
    assert [(row["start"] // 512, row["end"] // 512, row["loss"]) for row in made] == [
        *((0, 1, 0.0), (1, 2, 1.0), (2, 3, 2.0), (3, 4, 3.0)),
        *((4, 6, 4.5), (6, 8, 6.5), (8, 12, 9.5)),
    ]


def test_a_scheme_that_was_not_asked_as_far_has_an_empty_cell() -> None:
    loss = lambda case, end: {"case": case, "seed": 0, "benchmark": "perplexity", "start": 0, "end": end, "loss": 0.0}
    made = {"study": {"train_length": 512}, "rows": [loss("rope", 512), loss("rope", 1024), loss("path", 512)]}
    assert tables.perplexity_table(made).splitlines()[2:] == ["| `rope` | 1.00 | 1.00 |", "| `path` | 1.00 |  |"]


def test_results_of_several_calls_become_one() -> None:
    train = lambda case, seed, steps: {
        **_row(case, seed, 512, 1.0),
        "benchmark": "training",
        "steps": steps,
        "tokens": 9,
    }
    first = {"env": {"date": "a"}, "rows": [train("rope", 0, 50), _row("rope", 0, 512, 0.5), train("bam", 0, 50)]}
    second = {"env": {"date": "b"}, "rows": [train("rope", 0, 50), _row("rope", 0, 512, 1.0)]}
    made = merge.merge([first, second])
    assert [(row["case"], row["benchmark"], row["accuracy"]) for row in made["rows"]] == [
        ("rope", "training", 1.0),
        ("rope", "passkey", 1.0),
        ("bam", "training", 1.0),
    ]
    assert made["runs"] == [{"date": "a"}, {"date": "b"}]
    with pytest.raises(ValueError, match=r"had \(steps, tokens\) \(99, 9\), others \(50, 9\)"):
        merge.merge([first, {"env": {}, "rows": [train("alibi", 0, 99)]}])


def test_what_was_trained_twice_is_told_twice() -> None:
    def run(seed: int, loss: float, *shares: float) -> list[dict[str, Any]]:
        training = {**_row("rope", seed, 512, 1.0), "benchmark": "training", "steps": 50, "tokens": 9, "loss": loss}
        keys = [_row("rope", seed, 512 << place, share) for place, share in enumerate(shares)]
        return [{**training, "curve": [{"step": 1}]}, *keys]

    files = [{"env": {}, "rows": rows} for rows in (run(0, 2.0, 0.5, 0.2), run(1, 3.0, 0.7), run(0, 2.125, 0.75))]
    made = merge.merge(files)
    assert [row["benchmark"] for row in made["repeats"]] == ["training", "passkey", "passkey"]
    assert not any(name in row for row in made["repeats"] for name in ("curve", "depths"))
    again = merge.merge([made, files[2]])  # the same run once more is no other run
    assert again["repeats"] == made["repeats"]
    assert [row["accuracy"] for row in again["rows"] if row["benchmark"] == "passkey"] == [0.75, 0.7]
    assert repeat_table(made["repeats"], made["rows"]).splitlines()[2:] == [
        "| `rope` | 0 | 2.000 | 0.50 | 0.20 |",
        "| `rope` | 0 | 2.125 | 0.75 |  |",
    ]
    assert repeat_table([], made["rows"]) == ""


def test_results_in_lines_are_the_same_results() -> None:
    results = {"env": {"jax": "1"}, "runs": [{}], "rows": [{"a": [1, 2]}, {"b": None}]}
    text_ = kept.in_lines(results)
    assert json.loads(text_) == results
    assert '{"a": [1, 2]},\n{"b": null}' in text_


def test_finders_are_the_heads_with_weight_on_the_key_at_the_longest_prompt() -> None:
    where = {"case": "bam+ssmax", "seed": 0, "layer": 1}
    look = lambda head, length, needle: {
        **where,
        "benchmark": "attention",
        "head": head,
        "length": length,
        "needle": needle,
    }
    learned = lambda head, beta: {
        **where,
        "benchmark": "prior",
        "head": head,
        "parameters": {"bam/theta_beta": beta, "bam/theta_alpha": 0.5, "ssmax/scale": 0.25},
    }
    made = [look(0, 512, 1.0), look(0, 8192, 0.1), look(1, 8192, 0.9), learned(0, 0.3), learned(1, -0.2)]
    lines = report.finder_table({"rows": made}).splitlines()
    assert lines[2:] == ["| `bam+ssmax` | 0 | 1.1 | 0.90 | -0.20 | 0.50 | 0.25 | 1 of 2 |"]
    assert report.finder_table({"rows": made[:1]}) == ""
