"""Specs that between them hold every part and every option, generated from the registry.

`SPECS` is for tests of anything that a scheme might break; `FEW` (one spec per part and a few compositions) for tests
that are too slow for all of them. A new part or option is in both without anyone remembering it; an option whose values
cannot be enumerated must name examples, or `test_matrix.py` fails.
"""

import dataclasses

from bampath.positions import options
from bampath.positions.registry import PARTS
from bampath.positions.slots import Part

COMPOSITIONS = [
    "nope+ssmax",
    "rope+ssmax",
    "rope+window(5)",
    "sinusoidal+ssmax",
    "learned+alibi",
    "bam+ssmax",
    "bam(init=slopes)+ssmax(inside=false)",
    "alibi+bam(mu=trainable)+kerple",
    "rope+fox",
    "rope+lsh(3)",
    "fox+ssmax",
    "path+fox",
    "path(scale_gates=true)+fox+bam(init=laplace)+ssmax",
    "path+bam+ssmax",
    "path+bam(init=slopes)+ssmax(inside=false)",
    "3*rope+window(5),nope+llama4(floor=8)",
    "rope+window(5),bam(scope=global)+ssmax",
]


def _example_options(part: type[Part], field: "dataclasses.Field[object]") -> list[str]:
    examples = [text for other in dataclasses.fields(part) for text in other.metadata["examples"]]
    shown = {item for text in examples for item in text.split(",")}
    enumerated = [
        f"{field.name}={options.format_value(value)}"
        for value in options.choices(options.hints(part)[field.name])
        if value != field.default
    ]  # a value that an example shows may need the example's other options to have any effect
    return [text for text in enumerated if text not in shown] + list(field.metadata["examples"])


def _accompanied(part: type[Part], inner: str) -> str:
    """The part in the smallest composition in which its options can be seen to work."""
    spec = f"{part.NAME}({inner})" if inner else part.NAME
    if part.SLOT == "sharpness":
        return f"bam(init=slopes)+{spec}"  # inside and outside differ only beside a prior
    return f"{spec}+fox" if "scale_gates" in inner else spec


def part_specs(part: type[Part]) -> list[str]:
    """The part with its defaults, then once per other value of each option."""
    fields = dataclasses.fields(part)
    required = [field for field in fields if field.default is dataclasses.MISSING]
    plain = [""] if not required else []
    return [_accompanied(part, inner) for inner in plain + [o for f in fields for o in _example_options(part, f)]]


SPECS: list[str] = list(dict.fromkeys([spec for part in PARTS.values() for spec in part_specs(part)] + COMPOSITIONS))
FEW: list[str] = list(
    dict.fromkeys(
        [part_specs(part)[0] for part in PARTS.values()] + ["bam+ssmax", "path+fox", "path+bam+ssmax", COMPOSITIONS[-1]]
    )
)
