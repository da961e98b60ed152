"""The shared matrix leaves no part and no option value out."""

import dataclasses

import pytest

from bampath.positions import options, parse
from bampath.positions.registry import PARTS
from tests.positions.matrix import FEW, SPECS


def _parts(specs):
    return [part for spec in specs for layer in parse(spec).layers for part in layer.parts]


@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_option_value_is_in_the_matrix(name):
    kind = PARTS[name]
    present = [part for part in _parts(SPECS) if isinstance(part, kind)]
    assert present
    for field in dataclasses.fields(kind):
        annotation = options.hints(kind)[field.name]
        seen = {options.format_value(getattr(part, field.name)) for part in present}
        assert seen >= {options.format_value(value) for value in options.choices(annotation)}, field.name
        if {int, float} & set(options.alternatives(annotation)):
            assert field.metadata["examples"], f"{name}: option {field.name} needs examples"
        assert len(seen) > 1 or field.default is dataclasses.MISSING, f"{name}: {field.name} never leaves its default"
        assert field.metadata["doc"]


def test_the_short_list_has_every_part():
    assert {type(part) for part in _parts(FEW)} == set(PARTS.values())
    assert set(FEW) <= set(SPECS)
