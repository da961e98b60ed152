"""The doctor tells a broken kernel from one that is not for this machine, and its exit status says so."""

import jax
import jax.numpy as jnp
import pytest

from bampath import doctor
from bampath.doctor import Case, Check


def toy(broken_run):
    """A case of an op f(q, k) = q·k with three backends: the reference, a good one, and `broken_run`."""
    good = lambda x: x["q"] * x["k"]
    runs = {"reference": good, "good": good, "broken": broken_run}
    inputs = {"q": jnp.arange(1.0, 5.0), "k": jnp.arange(2.0, 6.0)}
    return Case("toy", "case", dict.fromkeys(runs, ""), inputs, lambda x, backend: runs[backend](x))


def test_a_kernel_that_agrees_is_well():
    assert doctor.kernel_check(toy(None), "good").status == "ok"


@jax.custom_vjp
def wrong_gradient(q, k):
    return q * k


wrong_gradient.defvjp(lambda q, k: (q * k, (q, k)), lambda saved, g: (g * saved[1], 1.1 * g * saved[0]))


def refuse(x):
    raise ValueError("implementation='broken' cannot serve this call: needs a GPU")


def missing(x):
    raise ImportError("no module named triton")


@pytest.mark.parametrize(
    ("run", "status", "detail"),
    [
        (lambda x: x["q"] * x["k"] * 1.01, "FAILED", "relative error 0.01 of output"),
        (lambda x: wrong_gradient(x["q"], x["k"]), "FAILED", "relative error 0.1 of gradient of k"),
        (lambda x: x["q"] / (x["k"] - x["k"]), "FAILED", "relative error inf"),
        (lambda x: x["nothing"], "FAILED", "KeyError"),
        (refuse, "skipped", "needs a GPU"),
        (missing, "skipped", "cannot be imported here: no module named triton"),
    ],
)
def test_what_is_broken_fails_and_what_is_not_for_this_machine_is_skipped(run, status, detail):
    check = doctor.kernel_check(toy(run), "broken")
    assert check.status == status
    assert detail in check.detail


@pytest.mark.parametrize("case", [*doctor.attention_cases(), *doctor.path_cases()], ids=lambda case: case.name)
def test_every_case_is_a_legal_call_of_its_op(case):
    for backend in case.backends:
        if doctor._refusal(case, case.inputs, backend) is None:
            out = jax.eval_shape(lambda x, backend=backend: case.run(x, backend), case.inputs)
            assert out.shape == case.inputs["q"].shape
    assert doctor._refusal(case, case.inputs, "reference") is None


def test_on_a_cpu_only_what_a_cpu_chooses_is_checked():
    found = [check for check in doctor.checks() if ":" in check.name]
    assert [check.name for check in found] == [
        "attention xla: bam+ssmax, packed",
        "path xla: path+fox+bam+ssmax, packed",
    ]
    assert all(check.status == "ok" and "bfloat16" not in check.detail for check in found)


def test_a_whole_model_is_well_with_what_this_machine_chooses():
    check = doctor.model_check("bam+ssmax", length=96)
    assert check.status == "ok", check.detail


@pytest.mark.parametrize(
    ("parameter", "factor", "status"),
    [
        ("value", 1.1, "FAILED"),
        ("value", float("nan"), "FAILED"),
        ("theta_beta", 1.1, "ok"),
        ("theta_beta", -1, "FAILED"),
    ],
)
def test_a_model_whose_kernels_are_off_fails(monkeypatch, parameter, factor, status):
    """A tenth off is beyond rounding, but not in a sum of two numbers that nearly cancels."""
    grads = {
        "loss": jnp.float32(3.0),
        "gradient of value": jnp.arange(1.0, 65.0),
        "gradient of theta_beta": jnp.ones(2),
    }
    name = f"gradient of {parameter}"
    run = lambda spec, dim, length, dtype, backend: grads | ({} if backend else {name: factor * grads[name]})
    monkeypatch.setattr(doctor, "_model_gradients", run)
    check = doctor.model_check("bam")
    assert (check.status, check.name) == (status, "model: bam")
    assert status == "ok" or (name in check.detail and "1 of 3 are off" in check.detail)


def test_models_whose_kernels_cannot_run_fail_with_the_reason(monkeypatch):
    monkeypatch.setattr(doctor, "_model_gradients", lambda *_: refuse(None))
    assert "needs a GPU" in doctor.model_check("rope").detail
    assert doctor.model_check("rope").status == "FAILED"


def test_versions_outside_the_tested_ones_warn_and_missing_packages_fail():
    assert doctor.version_check("jax", "0.10.2").status == "ok"
    assert doctor.version_check("jax", "0.12.0.1").status == "ok"
    assert doctor.version_check("jax", "0.9.2").status == "warning"
    newer = doctor.version_check("jax", "0.13.0")
    assert (newer.status, newer.detail) == ("warning", "0.13.0; tested are >= 0.10.2, < 0.13")
    assert doctor.version_check("grain", None).status == "FAILED"


def test_the_exit_status(monkeypatch, capsys):
    assert doctor.main(["--no-kernels"]) == 0
    assert "all is well" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "checks", lambda kernels, everything: iter([Check("kernel", "FAILED", "wrong")]))
    assert doctor.main([]) == 1
    assert "1 check(s) failed" in capsys.readouterr().out


def test_precision_is_measured():
    with jax.default_matmul_precision("highest"):
        check = doctor.precision_check()
    assert check.status == "ok"
    assert ": float32;" in check.detail
