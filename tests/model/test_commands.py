"""The commands on a checkpoint that stands alone: copied out of its run, whose folder and tokenizer are gone."""

import io
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import tokenizers

from bampath import checkpoint, generate
from bampath.data import load_tokenizer
from bampath.evaluation import passkey, perplexity
from bampath.load import load
from bampath.train import fit
from tests.train.small import small, text_file


def write_json(path: Path, texts: list[str], size: int = 320) -> None:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    model.save(str(path))


def write_model(path: Path, texts: list[str]) -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, vocab_size=300, byte_fallback=True, model_type="bpe",
        minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    path.write_bytes(written.getvalue())


@pytest.fixture(scope="module", params=["json", "model"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of two steps, alone in a folder."""
    home = tmp_path_factory.mktemp("alone")
    text = text_file(home)
    tokenizer = home / f"tiny.{request.param}"
    words = [path.read_text() for path in sorted(text.iterdir())]
    (write_json if request.param == "json" else write_model)(tokenizer, words)
    cfg = small(
        f"data.source={text}", f"data.cache_dir={home / 'cache'}", f"data.tokenizer={tokenizer}",
        "model.vocab_size=400", "train.steps=2",
    )  # fmt: skip
    fit(cfg, home / "run", out=io.StringIO())
    shutil.copytree(home / "run/checkpoints/00000002", home / "copy")
    shutil.rmtree(home / "run")
    tokenizer.rename(home / "moved" if request.param == "json" else home / "moved.model")
    return home / "copy"


def test_the_checkpoint_has_its_tokenizer(alone: Path) -> None:
    loaded = load(alone)
    assert loaded.step == 2
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the old bridge")) == "the old bridge"
    (name,) = [name for name in checkpoint.describe(alone).files if "tokenizer" in name]
    assert load_tokenizer(str(alone / name)).fingerprint == checkpoint.describe(alone).tokenizer


def test_another_tokenizer_is_refused(alone: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "other.json", ["other words"], 270)
    with pytest.raises(checkpoint.CheckpointError, match=r"was trained with the tokenizer of fingerprint .*other.json"):
        load(alone, str(tmp_path / "other.json"))


def test_text_is_continued_greedily_and_as_it_comes(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load(alone)
    prompt = generate.encode_prompt(loaded, "the sun")
    ids = loaded.tokenizer.vocab_size
    assert ids < 400
    want = generate.generate(loaded.model, loaded.params, [prompt], 6, stop_id=loaded.tokenizer.eos_id, vocab_size=ids)[
        0
    ]
    generate.main([str(alone), "--prompt", "the sun", "--max-new-tokens", "6"])
    assert capsys.readouterr().out == f"the sun{loaded.tokenizer.decode([*prompt, *want])[len('the sun') :]}\n"
    generate.main([str(alone), "--prompt", "the sun", "--prompt", "old", "--max-new-tokens", "3"])
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith(("the sun", "old"))] == [shown[0], shown[2]]
    with pytest.raises(ValueError, match="--max-new-tokens -1 must be at least 1"):
        generate.main([str(alone), "--prompt", "the sun", "--max-new-tokens", "-1"])
    assert capsys.readouterr().out == ""


def test_samples_repeat_with_their_seed(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        options = ["--temperature", "3", "--top-k", "300", "--top-p", "0.99", "--max-new-tokens", "9", "--seed", seed]
        generate.main([str(alone), "--prompt", "bell", *options])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("option", [["--top-k", "3"], ["--top-p", "0.5"], ["--seed", "4"]])
def test_options_of_drawing_need_a_temperature(option: list[str]) -> None:
    """Said before the checkpoint is looked for: there is none."""
    for cold in ([], ["--temperature", "0"]):
        with pytest.raises(ValueError, match=rf"{' '.join(option)} has no effect with --temperature 0.*give --temp"):
            generate.main(["nowhere", "--prompt", "bell", *cold, *option])
    neutral = ["--top-k", "0", "--top-p", "1", "--seed", "0"]
    for words in (neutral, [*option, "--temperature", "0.5"]):
        with pytest.raises(checkpoint.CheckpointError, match="nowhere does not exist"):
            generate.main(["nowhere", "--prompt", "bell", *words])


def test_both_evaluations_read_it(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passkey.main([str(alone), "--lengths", "300", "--samples", "2", "--out", str(tmp_path / "passkey.json")])
    row = json.loads((tmp_path / "passkey.json").read_text())["rows"][0]
    assert (row["length"], row["samples"]) == (300, 2)
    out = str(tmp_path / "perplexity.json")
    perplexity.main(
        [str(alone), "--source", str(alone.parent / "text"), "--length", "60", "--window", "20", "--out", out]
    )
    rows = json.loads(Path(out).read_text())["rows"]
    assert len(rows) == 3
    assert all(np.isfinite(row["perplexity"]) for row in rows)


def test_rows_below_the_training_length_have_one_window(alone: Path, tmp_path: Path) -> None:
    """The first places of longer rows are the same text, and a token does not see what comes after it."""
    trained = checkpoint.describe(alone).config["data"]["sequence_length"]
    short = trained // 2 - 3
    sums = []
    for words in (["--length", str(short)], ["--length", str(trained), "--window", str(short)]):
        out = tmp_path / "out.json"
        perplexity.main([str(alone), "--source", str(alone.parent / "text"), *words, "--rows", "1", "--out", str(out)])
        sums.append(json.loads(out.read_text())["rows"])
    assert [(row["start"], row["end"]) for row in sums[0]] == [(0, short)]
    assert sums[0][0]["loss"] == pytest.approx(sums[1][0]["loss"], rel=1e-4)
    command = [str(alone), "--source", str(alone.parent / "text"), "--length", "0.5x"]
    perplexity.main(command)
    with pytest.raises(ValueError, match=f"window={trained} must be between 1 and the rows' length {trained // 2}"):
        perplexity.main([*command, "--window", "1x"])


def test_another_scheme_of_the_same_parameters_can_be_asked_for(alone: Path, tmp_path: Path) -> None:
    losses = []
    for spec in ("bam+ssmax", "bam+ssmax(inside=false)"):
        out = tmp_path / "out.json"
        passkey.main([str(alone), "--position", spec, "--lengths", "300", "--samples", "1", "--out", str(out)])
        losses.append(json.loads(out.read_text())["rows"][0]["answer_loss"])
    assert losses[0] != losses[1]
    with pytest.raises(checkpoint.CheckpointError, match="bam/theta_alpha"):
        passkey.main([str(alone), "--position", "rope"])


def test_logits_that_are_not_finite_are_reported(alone: Path) -> None:
    loaded = load(alone)
    bad = loaded.params | {"head": loaded.params["head"].at[3, 5].set(jnp.nan)}
    with pytest.raises(FloatingPointError, match=r"row 0 at new token 0 are not finite: the parameter head is not"):
        generate.generate(loaded.model, bad, [[5, 6]], 4)
    huge = loaded.params | {"head": jnp.full_like(loaded.params["head"], 3e38)}
    with pytest.raises(FloatingPointError, match="all parameters are finite, so an activation overflowed"):
        generate.generate(loaded.model, huge, [[5, 6]], 4)
