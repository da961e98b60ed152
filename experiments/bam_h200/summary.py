"""The short tables of the repository's front page and of the study's README, from results.json and speed.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.tables import accuracy, by, replace_between, table

Row = dict[str, Any]
FRONT, HERE = Path(__file__).parents[2] / "README.md", Path(__file__).parent
KEYS = ("<!-- keys on one H200 -->", "<!-- end of keys -->")
RATES = ("<!-- train steps on one H200 -->", "<!-- end of train steps -->")
SIZES = {"small": "32M", "120m": "96M"}  # by parameters, as the texts call them
TIMES = (4, 32, 64)  # the training length
CASES = (
    *("bam+ssmax(init=0.2)", "bam+ssmax", "bam", "nope+ssmax(init=0.2)", "nope", "path+bam+ssmax", "path+ssmax"),
    *("rope+ssmax(init=0.2)", "rope", "alibi+ssmax(init=0.2)", "alibi"),
)
NAMES = {"rope": "RoPE", "bam+ssmax": "BAM+SSMax", "path+fox": "PaTH-FoX"}


def key_table(rows: Sequence[Row], mix: str = "retrieval") -> str:
    """Share of keys found, means over seeds, and how many seeds: a row per case of CASES, side by side the sizes.
    ValueError if there is none."""
    head, columns = ["scheme"], list[dict[str, list[str]]]()
    for size, name in SIZES.items():
        own = [row for row in rows if row["size"] == size and row["mix"] == mix and row["case"] in CASES]
        trained = [row for row in own if row["benchmark"] == "training"]
        asked = by([row for row in own if row["benchmark"] == "passkey"], "case")
        if trained and asked:
            head += [f"{name}: seeds", *(f"{times}×" for times in TIMES)]
            columns.append({case: _shares(group, trained[0]["train_length"]) for case, group in asked.items()})
    if not columns:
        raise ValueError(f"there are no passkeys of the sizes {' and '.join(SIZES)}, mix {mix}, for the table of keys")
    shown = [case for case in CASES if any(case in column for column in columns)]
    empty = [""] * (1 + len(TIMES))
    return table(head, [[f"`{case}`", *(x for column in columns for x in column.get(case, empty))] for case in shown])


def _shares(rows: Sequence[Row], trained: int) -> list[str]:
    """Of one case: how many seeds, and the share of keys that they found at TIMES."""
    at = [[row for row in rows if row["length"] == times * trained] for times in TIMES]
    return [str(len({row["seed"] for row in rows})), *(f"{accuracy(own):.2f}" if own else "" for own in at)]


def rate_table(speed: dict[str, Any]) -> str:
    """Tokens per second over PyTorch's and MFU, a row per shape; last PaTH-FoX over RoPE."""
    body = []
    for shape, rows in by(speed["rows"], "shape").items():
        own = {row["case"]: row for row in rows if "failed" not in row}
        told = [_rate(own[case]) if case in own else "" for case in NAMES]
        ratio = own["path+fox"]["ratio"].get("rope") if "path+fox" in own else None
        last = f"{ratio:.2f}" if ratio else ""
        body.append([f"{shape}, {rows[0]['B']} × {rows[0]['T']:,}", *told, last])
    return table(["shape", *NAMES.values(), "PaTH-FoX over our RoPE"], body)


def _rate(row: Row) -> str:
    """Over PyTorch's, if that was measured, and MFU, if the device's peak is known."""
    ratio, mfu = row["ratio"].get("torch"), row["mfu"]
    return " ".join([*([f"{ratio:.2f}"] if ratio else []), *([f"({mfu:.1%})"] if mfu else [])])


def write(
    rows: Sequence[Row], speed: dict[str, Any] | None, front: Path = FRONT, readme: Path = HERE / "README.md"
) -> None:
    """Put the tables between their marks in both pages."""
    replace_between(front, *KEYS, key_table(rows))
    if speed is not None:
        for page in (front, readme):
            replace_between(page, *RATES, rate_table(speed))
