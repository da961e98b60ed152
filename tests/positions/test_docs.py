"""docs/schemes.md says what the code does: parts, options, parameter counts, formulas, test files."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from bampath.positions import Geometry, Slots, Tokens, options, parse
from bampath.positions.registry import PARTS
from bampath.positions.theory import belief, regime_of_exponent
from tests.positions import oracles

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "schemes.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))
GEOMETRY = Geometry(dim=20, heads=6, kv_heads=3, head_dim=8, train_length=48)
NAMES = {"dim": 20, "H": 6, "Hkv": 3, "D": 8, "L": 48}


def option_table(part) -> str:
    """The table that a part's section must hold."""
    rows = ["| option | accepts | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(part):
        default = "required" if field.default is dataclasses.MISSING else f"`{options.format_value(field.default)}`"
        accepts = options.describe(options.hints(part)[field.name])
        rows.append(f"| `{field.name}` | {accepts} | {default} | {field.metadata['doc']} |")
    return "\n".join(rows)


def test_every_part_has_its_section_in_registry_order():
    wanted = f"docs/schemes.md needs the sections {' '.join(PARTS)}, in this order"
    assert list(SECTIONS) == list(PARTS), wanted


@pytest.mark.parametrize("name", list(PARTS))
def test_options(name):
    if dataclasses.fields(PARTS[name]):
        assert option_table(PARTS[name]) in SECTIONS[name], f"put this in docs/schemes.md:\n{option_table(PARTS[name])}"
    else:
        assert "No options." in SECTIONS[name]
    if PARTS[name].MAIN:
        example = re.search(rf"The first value may stand without a name: `({name}\(.*?\))`", SECTIONS[name])
        assert example is not None
        assert parse(example[1]).name.endswith(example[1])


@pytest.mark.parametrize("name", list(PARTS))
def test_facts(name):
    section = SECTIONS[name]
    for fact in ("Parameters", "Cost", "Source", "Test"):
        assert f"\n- {fact}: " in section, f"the section {name} of docs/schemes.md has no line '- {fact}: …'"
    spec = f"{name}(512)" if name == "window" else name
    part = next(part for part in parse(spec).at(0).parts if name == part.NAME)
    count = sum(int(np.prod(p.shape)) for p in part.parameters(GEOMETRY).values())
    documented = re.search(r"\n- Parameters: `(.*?)`", section)[1]
    assert eval(documented, {"__builtins__": {}}, NAMES) == count
    for path in re.findall(r"`(tests/\S+\.py)`", section):
        assert (ROOT / path).exists(), f"docs/schemes.md, {name}: there is no {path}"
        assert name in (ROOT / path).read_text().lower(), f"docs/schemes.md, {name}: {path} does not mention it"


def test_slot_table_names_every_part():
    table = TEXT[: TEXT.index("Order does not matter")]
    for name, part in PARTS.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| {part.SLOT}"))
        assert f"`{name}`" in row, f"put `{name}` into docs/schemes.md's table of slots, row {part.SLOT}"


def test_every_spec_in_backticks_parses():
    specs = set(re.findall(r"^\| `([^`]+)` \| ", TEXT[: TEXT.index("Notation:")], re.MULTILINE))
    assert len(specs) > 5
    for spec in specs:
        parse(spec)


def _formulas(name):
    return re.findall(r"```python\n(?:log_prior|r) = (.*?)\n```", SECTIONS[name], re.DOTALL)


FUNCTIONS = {"abs": np.abs, "exp": np.exp, "log": np.log, "cos": np.cos, "floor": np.floor, "sum": sum, "range": range}
PRIORS = [
    ("alibi(trainable=true)", 0, lambda p: {"slope": np.exp(p["log_slopes"])}),
    ("bam(mu=trainable)", 0, lambda p: p | {"mu": 2 * np.sinh(p["theta_mu"])}),
    ("kerple", 0, lambda p: {"r1": np.exp(p["log_r1"]), "r2": np.exp(p["log_r2"])}),
    ("kerple(power)", 1, lambda p: {"r1": np.exp(p["log_r1"]), "p": 2 / (1 + np.exp(-p["logit_p"]))}),
    ("sandwich", 0, lambda p: {"m": 128}),
]


@pytest.mark.parametrize(("spec", "index", "values"), PRIORS, ids=[spec for spec, _, _ in PRIORS])
def test_documented_priors_are_the_code(spec, index, values):
    part = parse(spec).at(0).parts[-1]
    params = oracles.random_params([part], GEOMETRY, spread=0.5).get(part.NAME, {})
    at = np.arange(-200, 3, 13)
    got = parse(spec).log_prior(params, np.zeros(1, np.int32), at, heads=6)[:, 0]
    for head in range(6):
        own = {name: np.float64(value[head]) for name, value in params.items()}
        names = FUNCTIONS | values(own) | {"d": at.astype(np.float64), "H": 6, "h": head + 1}
        np.testing.assert_allclose(got[head], eval(_formulas(part.NAME)[index], names), rtol=3e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["ssmax", "logn", "llama4"])
def test_documented_sharpness_is_the_code(name):
    part = parse(name).at(0).parts[-1]
    positions = np.asarray([[0, 4, 99, 8191, 50_000]], np.int32)
    tokens = Tokens(np.zeros((1, 5, 20)), positions, positions + 1, np.zeros_like(positions))
    params = oracles.random_params([part], GEOMETRY).get(name, {})
    slots, _ = part.fill(params, GEOMETRY, Slots(positions, positions), tokens, None)
    for head in range(6):
        names = FUNCTIONS | {key: value[head] for key, value in params.items()} | {"L": 48, "p": positions[0]}
        want = eval(_formulas(name)[0], names | {"n": positions[0] + 1.0})
        np.testing.assert_allclose(slots.sharpness[0, :, head], want, rtol=1e-5, atol=1e-6)


def test_numbers_of_the_theory_page():
    text = (ROOT / "docs" / "theory.md").read_text()
    rows = re.findall(
        r"^\| (−?[\d.]+) \| (\S+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE
    )
    assert len(rows) == 8
    betas = np.asarray([float(row[0].replace("−", "-")) for row in rows], np.float32)
    found = belief(parse("bam").at(0), {"theta_alpha": np.zeros_like(betas), "theta_beta": betas}, 512)
    for i, row in enumerate(rows):
        assert row[1] == regime_of_exponent(round(float(betas[i]), 3))
        got = [found.p[i, -1], found.p[i, -2], found.mean_distance[i], found.effective_keys[i]]
        np.testing.assert_allclose([float(cell) for cell in row[2:]], got, rtol=6e-3, atol=5e-6)
    alibi = re.findall(r"^\| (\d+) \| ([\d. ]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(alibi) == 3
    for keys, means, uniform in alibi:
        found = belief(parse("alibi").at(0), {}, int(keys), heads=8)
        np.testing.assert_allclose(found.mean_distance, [float(mean) for mean in means.split()], atol=0.006)
        assert float(uniform) == (int(keys) - 1) / 2
    assert found.effective_window.max() == 767
