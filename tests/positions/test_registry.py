"""Specs: what they mean, what they are called, what is refused and how."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.positions import Geometry, parse
from bampath.positions.bam import BAM
from bampath.positions.registry import PARTS, Composition, Scheme
from bampath.positions.rope import RoPE
from bampath.positions.slots import Part
from tests.positions.matrix import SPECS, part_specs

GEOMETRY = Geometry(dim=16, heads=4, kv_heads=2, head_dim=8, train_length=32)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("nope", "nope"),
        ("ssmax", "nope+ssmax"),
        (" bam + ssmax ", "bam+ssmax"),
        ("ssmax+bam", "bam+ssmax"),
        ("bam(init=uniform, mu=frozen)", "bam"),
        ("bam(mu=trainable,init=laplace)", "bam(init=laplace,mu=trainable)"),
        ("rope(500000)", "rope"),
        ("rope(base=10000)", "rope(10000)"),
        ("rope(1e4,scaling=linear,factor=2.5)", "rope(10000,scaling=linear,factor=2.5)"),
        ("ssmax(init=1)+rope", "rope+ssmax"),
        ("fox+path", "path+fox"),
        ("window(512)+rope", "rope+window(512)"),
        ("3*rope+window(512), nope", "3*rope+window(512),nope"),
        ("rope,rope,nope,nope", "2*rope,2*nope"),
        ("4*rope", "rope"),
        ("rope,nope,rope,nope", "rope,nope"),
        ("learned(none)", "learned"),
    ],
)
def test_canonical_name(spec, name):
    assert parse(spec).name == name
    assert parse(name) == parse(spec)
    assert hash(parse(name)) == hash(parse(spec))


@pytest.mark.parametrize("spec", SPECS)
def test_name_reads_back(spec):
    scheme = parse(spec)
    assert parse(scheme.name) == scheme
    assert parse(scheme.name).name == scheme.name


@st.composite
def _specs(draw):
    """Random patterns of random compatible parts, in random order."""
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        chosen = draw(st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4, unique=True))
        terms = [draw(st.sampled_from(part_specs(PARTS[name]))).split("+") for name in chosen]
        spec = "+".join(dict.fromkeys(term for terms in terms for term in terms))
        layers.append(f"{draw(st.integers(1, 3))}*{spec}" if draw(st.booleans()) else spec)
    return ", ".join(layers)


@given(_specs())
@settings(max_examples=200, deadline=None)
def test_any_accepted_spec_reads_back(spec):
    try:
        scheme = parse(spec)
    except ValueError:
        return  # a contradiction; what matters here is that whatever is accepted survives
    assert parse(scheme.name) == scheme
    assert parse(scheme.name).name == scheme.name
    assert len({scheme, parse(spec)}) == 1


ERRORS = [
    ("rop", ["unknown part 'rop'", "did you mean 'rope'", *PARTS]),
    ("RoPE", ["did you mean 'rope'"]),
    ("bam+ssmx", ["did you mean 'ssmax'"]),
    ("bam(foo=1)", ["no option 'foo'", "init", "mu", "scope", "scale", "guard"]),
    ("bam(scop=global)", ["did you mean 'scope'"]),
    ("bam(init=foo)", ["init", "'foo'", "uniform, laplace, slopes, linear, sampled"]),
    ("bam(laplace)", ["takes no value without a name", "'laplace'"]),
    ("ssmax(inside=maybe)", ["inside", "'maybe'", "false, true"]),
    ("ssmax(init=often)", ["init", "'often'", "a number or mean_log"]),
    ("window", ["window needs size", "window(512)"]),
    ("window(0)", ["size is 0", "at least 1"]),
    ("window(2147483648)", ["size is 2147483648", "at most 2147483647"]),
    ("window(3.5)", ["'3.5'", "an integer"]),
    ("window(4,size=5)", ["size is given twice"]),
    ("rope(base=1)", ["base", "greater than 1"]),
    ("rope(base=nan)", ["base"]),
    ("rope(scaling=linear,factor=0.5)", ["factor is 0.5", "at least 1"]),
    ("rope(factor=2)", ["factor has no effect with scaling=none", "yarn"]),
    ("rope(scaling=linear,beta_fast=2)", ["beta_fast has no effect", "yarn"]),
    ("rope(fraction=2)", ["fraction", "between 0 and 1"]),
    ("rope+path", ["rope and path", "transport"]),
    ("nope+rope", ["nope and rope", "transport"]),
    ("nope+alibi", ["no positional information", "alibi"]),
    ("nope+sinusoidal", ["no positional information", "sinusoidal"]),
    ("bam+bam", ["bam is given twice"]),
    ("bam+bam(init=laplace)", ["bam is given twice"]),
    ("ssmax+logn", ["ssmax and logn", "sharpness"]),
    ("llama4+rope+ssmax", ["ssmax and llama4", "sharpness"]),
    ("window(3)+window(4)", ["window is given twice"]),
    ("path+window(4)", ["path and window(4)"]),
    ("path(scale_gates=true)", ["scale_gates", "add fox"]),
    ("path(silu=false,conv=0)", ["silu has no effect"]),
    ("path(beta_max=2.5)", ["beta_max is 2.5", "(0, 2]"]),
    ("path(rank=0)", ["rank is 0"]),
    ("path(rank=half)", ["rank", "'half'", "an integer or full"]),
    ("path(conv=-1)", ["conv is -1"]),
    ("path(eps=0)", ["eps"]),
    ("fox(fixed,bias=2)", ["bias has no effect"]),
    ("fox(decay_min=2.5)", ["decay_min has no effect"]),
    ("fox(fixed,decay_min=9,decay_max=3)", ["decay_min <= decay_max"]),
    ("t5(buckets=1)", ["buckets is 1"]),
    ("t5(buckets=7,bidirectional=true)", ["even"]),
    ("t5(max_distance=16)", ["max_distance is 16", "greater than 16"]),
    ("sandwich(3)", ["dim is 3", "even"]),
    ("sinusoidal(0.5)", ["base is 0.5"]),
    ("learned(0)", ["rows is 0"]),
    ("logn(1)", ["length is 1"]),
    ("llama4(floor=0)", ["floor is 0"]),
    ("llama4(scale=-1)", ["scale is -1"]),
    ("", ["'' is empty", "a spec is", *PARTS]),
    (" ", ["' ' is empty"]),
    ("rope+", ["missing around '+'"]),
    ("rope,,nope", ["missing around ','"]),
    ("rope((1))", ["parentheses"]),
    ("rope(1", ["parentheses"]),
    ("rope)", ["parentheses"]),
    ("rope nope", ["cannot read 'rope nope'"]),
    ("rope()", ["the parentheses of rope() are empty"]),
    ("rope(scaling=linear)", ["scaling=linear has no effect with factor 1", "factor=4"]),
    ("rope(factors=2)", ["factors has no effect with scaling=none", "longrope"]),
    ("rope(scaling=longrope,factor=2)", ["needs factors"]),
    ("rope(scaling=longrope,factors=1:0)", ["factors", "positive"]),
    ("rope(scaling=longrope,factors=1:x)", ["factors", "'1:x'", "numbers joined by `:`"]),
    ("rope(scaling=yarn,attention_factor=1)", ["scaling=yarn has no effect"]),
    ("nope+ssmax(inside=false)", ["ssmax(inside=false)", "no effect without one", "alibi"]),
    ("rope+logn(inside=true)", ["option inside", "no effect"]),
    ("alibi,rope+llama4(inside=true)", ["option inside", "no effect"]),
    ("bam(init=)", ["cannot read option 'init='"]),
    ("bam(init=laplace,sampled)", ["cannot read option 'sampled'", "name=value"]),
    ("0*rope", ["between 1 and 1000, not 0"]),
    ("99999999*rope", ["between 1 and 1000"]),
    ("sinusoidal,rope", ["sinusoidal", "every layer"]),
    ("t5,nope,t5(buckets=8)", ["share the parameters", "t5"]),
]


@pytest.mark.parametrize(("spec", "fragments"), ERRORS, ids=[spec for spec, _ in ERRORS])
def test_errors_say_what_is_right(spec, fragments):
    with pytest.raises(ValueError, match=r".") as caught:
        parse(spec)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_spec_must_be_text():
    with pytest.raises(TypeError, match="string"):
        parse(3)


def test_parts_check_their_options_when_built_directly():
    assert RoPE(base=10000) == RoPE(base=10000.0)
    with pytest.raises(ValueError, match="init is 'foo'"):
        BAM(init="foo")
    with pytest.raises(ValueError, match="base"):
        RoPE(base=True)
    with pytest.raises(ValueError, match="base"):
        RoPE(base=float("inf"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        BAM().init = "laplace"


def test_layers_repeat():
    scheme = parse("3*rope+window(512),nope")
    assert len(scheme.layers) == 4
    assert [scheme.at(i).name for i in range(8)] == (["rope+window(512)"] * 3 + ["nope"]) * 2
    assert scheme.at(3).window is None
    assert scheme.at(0).window == 512
    for ask in (lambda: scheme.parts, lambda: scheme.log_prior({}, jnp.arange(2), jnp.arange(2))):
        with pytest.raises(ValueError, match=r"\.at\(layer\)"):
            ask()
    with pytest.raises(ValueError, match=r"\.at\(layer\)"):
        scheme.init_params(jax.random.key(0), GEOMETRY)


def test_input_and_shared_parts():
    scheme = parse("sinusoidal+rope,sinusoidal+t5")
    assert [part.NAME for part in scheme.input_parts] == ["sinusoidal"]
    assert [part.NAME for part in scheme.shared_parts] == ["t5"]
    assert [part.NAME for part in scheme.at(1).layer_parts] == ["t5"]
    assert parse("bam+rope").shared_parts == ()
    with pytest.raises(ValueError, match="at least one layer"):
        Scheme(())


def test_facts_that_a_cache_needs():
    assert parse("path+fox").at(0).carries_keys
    assert parse("path+fox").at(0).has_gates
    assert not parse("rope+ssmax").at(0).has_gates
    assert set(parse("path+fox").at(0).init_carry(GEOMETRY, 3, jnp.float32)) == {"path"}
    assert parse("rope+bam+ssmax").at(0).init_carry(GEOMETRY, 3, jnp.float32) == {}


class TestLogPrior:
    """`log_prior(params, q_positions, k_positions)`."""

    params: ClassVar = {"theta_alpha": jnp.asarray([0.0, 0.3]), "theta_beta": jnp.asarray([1.0, -0.7])}

    def test_flat_and_nested_params(self):
        scheme = parse("bam+ssmax")
        flat = scheme.log_prior(self.params, jnp.arange(3), jnp.arange(5))
        nested = scheme.log_prior({"bam": self.params, "ssmax": {"scale": jnp.ones(2)}}, jnp.arange(3), jnp.arange(5))
        assert flat.shape == (2, 3, 5)
        assert flat.dtype == jnp.float32
        np.testing.assert_array_equal(flat, nested)
        np.testing.assert_allclose(flat[0, 1], [-1.00001, -0.00001, -1.00001, -2.00001, -3.00001], rtol=1e-5)

    def test_depends_on_differences_only(self):
        scheme = parse("bam")
        near = scheme.log_prior(self.params, jnp.arange(4), jnp.arange(4))
        far = scheme.log_prior(self.params, jnp.arange(4) + 10**6, jnp.arange(4) + 10**6)
        np.testing.assert_array_equal(near, far)

    def test_several_priors_add(self):
        params: ClassVar = {"bam": self.params, "kerple": {"log_r1": jnp.zeros(2), "log_r2": jnp.zeros(2)}}
        at = jnp.arange(4)
        total = parse("bam+kerple+alibi").log_prior(params, at, at)
        parts = [parse(name).log_prior(params, at, at, heads=2) for name in ("bam", "kerple", "alibi")]
        np.testing.assert_allclose(total, sum(parts), rtol=1e-6)

    def test_nope_is_zero(self):
        np.testing.assert_array_equal(parse("nope").log_prior({}, [0, 1], [0, 1, 2], heads=3), np.zeros((3, 2, 3)))

    def test_heads_are_needed_only_without_params(self):
        for spec in ("nope", "alibi", "sandwich"):
            with pytest.raises(ValueError, match="heads="):
                parse(spec).log_prior({}, jnp.arange(2), jnp.arange(2))
        with pytest.raises(ValueError, match=r"disagree on the number of heads: \[2, 3\]"):
            parse("bam").log_prior(self.params, jnp.arange(2), jnp.arange(2), heads=3)

    @pytest.mark.parametrize(
        ("spec", "params", "message"),
        [
            ("bam", {"theta_alpha": 0, "theta_beta": 1, "theta_muu": 2}, r"no parameter 'theta_muu'.*mean 'theta_mu'"),
            (
                "bam",
                {"bam": {"theta_alpha": 0, "theta_beta": 1, "thta_mu": 2}},
                r"bam has no parameter 'thta_mu'.*_mu'",
            ),
            ("bam", {"bam": {"theta_alpha": 0, "theta_beta": 1}, "kerpel": {}}, r"no part 'kerpel'.*'kerple'"),
            ("alibi", {"slope": 2}, r"alibi has no parameter 'slope'; there are: none"),
            ("bam+ssmax", {"theta_alpha": 0, "theta_beta": 1, "scales": 2}, r"no parameter 'scales'.*'scale'"),
        ],
    )
    def test_names_that_nothing_has_are_refused(self, spec, params, message):
        values = jax.tree.map(lambda value: jnp.full((2,), float(value)), params)
        with pytest.raises(ValueError, match=message):
            parse(spec).log_prior(values, jnp.arange(2), jnp.arange(2), heads=2)

    def test_what_may_be_given_beside_the_prior(self):
        at = jnp.arange(3)
        moved = parse("bam+ssmax").log_prior(
            {**self.params, "theta_mu": jnp.full((2,), 0.5), "scale": jnp.ones(2)}, at, at
        )
        assert float(jnp.abs(moved - parse("bam").log_prior(self.params, at, at)).max()) > 0.1

    def test_wrong_arguments(self):
        with pytest.raises(ValueError, match="missing: theta_beta"):
            parse("bam").log_prior({"theta_alpha": jnp.zeros(2)}, jnp.arange(2), jnp.arange(2))
        with pytest.raises(ValueError, match=r"bam needs the parameters.*part name"):
            parse("bam+kerple").log_prior(self.params, jnp.arange(2), jnp.arange(2))
        with pytest.raises(TypeError, match="integers"):
            parse("bam").log_prior(self.params, jnp.arange(2.0), jnp.arange(2))
        with pytest.raises(ValueError, match="one-dimensional"):
            parse("bam").log_prior(self.params, jnp.zeros((1, 2), jnp.int32), jnp.arange(2))
        with pytest.raises(TypeError, match="dict"):
            parse("bam").log_prior([1.0], jnp.arange(2), jnp.arange(2))


def test_equal_schemes_compile_once():
    """The static part of the prior is equal for separately built equal schemes (a recompile per call otherwise)."""
    traces = []

    @jax.jit
    def total(prior):
        traces.append(1)
        return prior.log_prior(jax.tree.map(lambda leaf: leaf[0], prior.params), jnp.arange(-3, 1)).sum()

    params: ClassVar = {"bam": {"theta_alpha": jnp.zeros(2), "theta_beta": jnp.ones(2)}}
    for _ in range(3):
        total(Composition((BAM(), PARTS["alibi"]())).distance_prior(params))
    assert len(traces) == 1
    total(Composition((BAM(guard="clip"), PARTS["alibi"]())).distance_prior(params))
    assert len(traces) == 2


def test_every_part_is_documented_and_named():
    for name, part in PARTS.items():
        assert name == part.NAME
        assert "arXiv" in part.__doc__ or "kexue" in part.__doc__ or "code" in part.__doc__, name
        assert issubclass(part, Part)
