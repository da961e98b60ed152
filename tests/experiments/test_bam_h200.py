"""The trained comparison: its text, its batches, its optimiser, what it asks, what it reports, and a run of it all."""

import argparse
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath import step
from bampath.config import get
from bampath.data import DataConfig, RetrievalOptions, tokenizer_of
from bampath.data.corpus import corpus_of
from bampath.data.loader import BatchSource
from bampath.data.tokenizer import HuggingFaceTokenizer
from bampath.evaluation.passkey import PasskeyTask, Prompts
from bampath.evaluation.reader import ModelReader
from experiments.bam_h200 import cells, kept, measure, optimizer, report, rows, run, schedule, text, training
from experiments.bam_h200.config import SIZES, Cell

SENTENCES = "The grass is green. The sky is blue. The sun is yellow. A pass key of 12345 is hidden there, he said. "


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE with GPT-2's layout: 256 bytes, then merges in order, then the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([SENTENCES, "hidden hiding greener yellowish skies"] * 20, trainer)
    data = json.loads(made.to_str())
    data["model"]["vocab"]["<|endoftext|>"] = len(data["model"]["vocab"])
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("size", [257, 280, 320])
def test_a_vocabulary_that_is_cut_gives_the_tokens_of_the_shorter_bpe(gpt2: Path, size: int, tmp_path: Path) -> None:
    whole = HuggingFaceTokenizer(gpt2)
    short = HuggingFaceTokenizer(text.tokenizer_file(gpt2, size, tmp_path / "tokenizer.json"))
    assert short.vocab_size == size
    assert short.eos_id == size - 1
    words = "The hidden sky is yellowish, green12. Ünder 7 skies he hid — there."
    ids = np.array([*whole.encode(words), whole.vocab_size - 1], np.uint16)
    got = text.cut(ids, text.pieces(gpt2, size))
    assert got[:-1].tolist() == short.encode(words)
    assert got[-1] == short.eos_id


def test_a_file_of_tokens_becomes_documents(gpt2: Path, tmp_path: Path) -> None:
    end = HuggingFaceTokenizer(gpt2).vocab_size - 1
    np.array([65, 66, end, 67, end], "<u2").tofile(tmp_path / "a.u16")
    found = text.corpus_of_file(tmp_path / "a.u16", gpt2, 300)
    assert [found.document(i).tolist() for i in range(found.documents)] == [[65, 66, 299], [67, 299]]
    np.array([65, 66], "<u2").tofile(tmp_path / "b.u16")
    with pytest.raises(ValueError, match=r"b\.u16 must be documents"):
        text.corpus_of_file(tmp_path / "b.u16", gpt2, 300)
    np.array([65, end + 1, end], "<u2").tofile(tmp_path / "c.u16")
    with pytest.raises(ValueError, match=rf"c\.u16 has the token {end + 1}, but the last one of .* is {end}"):
        text.corpus_of_file(tmp_path / "c.u16", gpt2, 300)
    with pytest.raises(ValueError, match="vocab_size=256 must be between 257 and 321"):
        text.tokenizer_file(gpt2, 256, tmp_path / "x.json")


def test_rows_in_memory_are_those_of_the_loader(tmp_path: Path) -> None:
    retrieval = RetrievalOptions(share=0.5, kind="brief", answer_weight=20.0)
    config = DataConfig(source="x", sequence_length=200, batch_size=4, retrieval=retrieval)
    random = np.random.default_rng(0)
    corpus = corpus_of([random.integers(0, 256, size=n).tolist() for n in (700, 90, 2000)])
    kept = rows.save_corpus(corpus, tmp_path / "text")
    folder = rows.make_rows(config, kept, 3, tmp_path / "rows", processes=1)
    source, done = BatchSource(config, corpus, tokenizer_of(config)), 0
    for end, block in rows.read_rows(folder, 0, 3, 2):
        for index in range(end - done):
            want = source[done + index]
            for name, array in block.items():
                np.testing.assert_array_equal(array[index], want[name], err_msg=name)
        done = end
    assert done == 3
    with pytest.raises(ValueError, match="another configuration"):
        rows.make_rows(config, kept, 4, tmp_path / "rows", processes=1)
    told: list[Path] = []
    wanted = [(replace(config, seed=seed), 3, tmp_path / name) for seed, name in ((0, "rows"), (0, "same"), (1, "new"))]
    rows.make_all(wanted, kept, processes=2, done=told.append)
    assert told == [tmp_path / "same", tmp_path / "new"]  # what is there is not made again
    tokens = [np.load(out / "tokens.npy") for _, _, out in wanted]
    np.testing.assert_array_equal(tokens[0], tokens[1])
    assert (tokens[0] != tokens[2]).any()
    uneven = DataConfig(source="x", retrieval=RetrievalOptions(share=0.5, answer_weight=1.5))
    with pytest.raises(ValueError, match="whole numbers"):
        rows.make_rows(uneven, kept, 1, tmp_path / "other", processes=1)


def test_batches_belong_to_the_data_of_a_case(gpt2: Path, tmp_path: Path) -> None:
    """Cases with other data have batches of their own, cases with the same data share them, by names that say so."""
    whole = HuggingFaceTokenizer(gpt2)
    np.array([*whole.encode(SENTENCES * 200), whole.vocab_size - 1], "<u2").tofile(tmp_path / "books.u16")
    books = str(tmp_path / "books.u16")
    cases = ["bam+ssmax", "rope @ optim.lr=0.5", "rope @ data.batch_size=4", "nope @ data.retrieval.share=0.5"]
    cases += ["bam+ssmax @ data.batch_size=4 clamped"]
    options = ["model.vocab_size=300", "data.retrieval.kind=brief", "--text", books, "--held-out", books]
    options += ["--gpt2", str(gpt2), "--size", "tiny", "--seeds", "3", "--cases", *cases]
    asked = run.parse(options)
    found, out = run.cells_of(asked), tmp_path / "out"
    materials = cells.Materials(out, asked.text, tuple(asked.overrides))
    text.tokenizer_file(gpt2, 300, materials.tokenizer)
    run.prepare_batches(asked, found, materials, print)
    folders = [materials.rows(cell).name for cell in found]
    first, more, share = (f"tiny-retrieval-seed3-50{end}" for end in ("", ",batch_size=4", ",retrieval.share=0.5"))
    assert folders == [first, first, more, share, more]
    assert {path.name for path in (out / "rows").iterdir()} == {first, more, share}
    corpus = text.corpus_of_file(Path(books), gpt2, 300)
    for cell in found:
        config = materials.config(cell).data
        source = BatchSource(config, corpus, tokenizer_of(config))
        for done, block in rows.read_rows(materials.rows(cell), 0, 50, 25):
            want = [source[step] for step in range(done - 25, done)]
            for name, array in block.items():
                assert array.tobytes() == np.stack([batch[name] for batch in want]).tobytes(), (cell, name)


@pytest.mark.parametrize(
    "change", ["data.source=sotu", "data.single_digits=false", "model.vocab_size=9", "data.seed=1"]
)
def test_a_case_changes_no_text_that_all_cells_share(change: str) -> None:
    key = change.partition("=")[0]
    with pytest.raises(ValueError, match=f"case 'rope @ {change}' changes {key}, which is the same for all"):
        Cell(f"rope @ {change}", 0).config(Path("t.json"), "x")
    assert Cell("rope @ data.workers=1", 0).config(Path("t.json"), "x").data.workers == 1


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_stacked_muon_is_muon(dtype: str, error: float) -> None:
    changes = ("position=path+fox", "optim.lr=0.01", "optim.warmup_steps=0", f"optim.muon_dtype={dtype}")
    config = get("tiny", "optim.name=muon", *changes)
    declared = step.declare(step.build_model(config))
    plain, stacked = step.optimizer_of(config, declared), optimizer.optimizer_of(config, declared)
    random = np.random.default_rng(0)
    draw = lambda: jax.tree.map(lambda s: jnp.asarray(random.normal(size=s.shape), jnp.float32), declared.shapes)
    params = draw()
    states = [plain.init(params), stacked.init(params)]
    for _ in range(2):
        grads, found = draw(), []
        for index, one in enumerate((plain, stacked)):
            updates, states[index] = jax.jit(one.update)(grads, states[index], params)
            found.append(updates)
        for a, b in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_allclose(b, a, rtol=error, atol=error * float(jnp.abs(a).max()))


def test_a_clamp_moves_exponents_only() -> None:
    params = {"a": {"theta_beta": jnp.array([-1.0, 2.0]), "theta_alpha": jnp.array([-3.0])}}
    found = training.clamped(params, 0.0)
    assert found["a"]["theta_beta"].tolist() == [0.0, 2.0]
    assert found["a"]["theta_alpha"].tolist() == [-3.0]


@pytest.fixture(scope="module")
def small() -> Any:
    """(model, parameters) of one layer."""
    size = ("model.layers=1", "model.heads=2", "model.dim=16", "model.mlp_dim=16", "data.sequence_length=64")
    config = get("tiny", *size, "position=bam(init=linear)+ssmax")
    model = step.build_model(config)
    return model, step.init_state(config, model, step.optimizer_of(config, step.declare(model))).params


def test_compiled_programs_read_what_a_reader_reads(small: Any) -> None:
    model, params = small
    random = np.random.default_rng(0)
    tokens, targets = (random.integers(0, 256, size=(2, 40)).astype(np.int32) for _ in range(2))
    places = random.integers(0, 40, size=(2, 3)).astype(np.int32)
    with ThreadPoolExecutor() as pool:
        reader = measure.CompiledReader(model, params, 64, [40, 48], 40, 120, pool)
    plain = ModelReader(model, params)
    np.testing.assert_allclose(reader.logits_at(tokens, places), plain.logits_at(tokens, places), rtol=1e-5)
    for count in (1, 2):
        pair = tokens[:count], targets[:count]
        np.testing.assert_allclose(reader.losses(*pair), plain.losses(*pair), rtol=1e-5)


def test_attention_of_the_last_token_is_that_of_the_formula(small: Any) -> None:
    model, params = small
    tokens = np.random.default_rng(1).integers(0, 256, size=(1, 30)).astype(np.int32)
    got = np.asarray(measure.last_attention(model, params, jnp.asarray(tokens)))
    own = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    norm = lambda x, scale: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale
    x = norm(own["embedding"][tokens[0]], own["layer_0"]["attention_norm"]["scale"])
    layer = own["layer_0"]["attention"]
    q, k = (np.einsum("td,dhk->thk", x, layer[name]) for name in ("query", "key"))
    prior = layer["position"]["bam"]
    cost = lambda h, d: np.exp(prior["theta_alpha"][h]) * (d + 1e-5) ** prior["theta_beta"][h]
    for head in range(2):
        logits = k[:, head] @ q[-1, head] / np.sqrt(8) - cost(head, np.arange(29, -1, -1.0))
        weights = np.exp(np.log(30) * layer["position"]["ssmax"]["scale"][head] * (logits - logits.max()))
        np.testing.assert_allclose(got[0, head], weights / weights.sum(), rtol=2e-4, atol=1e-7)


def test_spans_keep_the_largest_weight() -> None:
    weights = np.arange(1000.0)
    assert measure._spans(weights, 4) == [249, 499, 749, 999]
    assert measure._spans(weights[:3], 4) == [0, 1, 2]


class _Perfect:
    """A reader that knows the answers at lengths below `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def logits_at(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        logits = np.zeros((*places.shape, 259), np.float32)
        for row, own in enumerate(places):
            count = int(own[-1]) + 1  # of the tokens but the last
            digits = tokens[row, :count]
            key = bytes(digits[digits < 256].astype(np.uint8)).split(b"pass key is ")[1][:5]
            for place, digit in enumerate(key):
                logits[row, place, digit if count < self.limit else 0] = 1
        return logits

    def losses(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.zeros(tokens.shape, np.float32)


def test_passkeys_of_a_group_are_read_together_and_far_ones_until_no_key_is_found() -> None:
    asked = SIZES["tiny"].asked
    tokenizer = tokenizer_of(DataConfig())
    asked = replace(asked, passkey=((600, 1200), (2400,)), far=(4800, 9600), samples=3, far_samples=2)
    found = measure.passkey(_Perfect(3000), tokenizer, asked, 16_384)
    assert [(row["length"], row["samples"], row["accuracy"]) for row in found] == [
        (600, 3, 1.0),
        (1200, 3, 1.0),
        (2400, 3, 1.0),
    ]
    beyond = measure.far(_Perfect(3000), tokenizer, asked, 16_384)
    assert [(row["length"], row["samples"], row["accuracy"]) for row in beyond] == [(4800, 2, 0.0)]
    keys = [prompt.key for prompt in Prompts(PasskeyTask(samples=3), tokenizer).make(1200)]
    assert [sample["key"] for sample in found[1]["depths"]] == keys


def test_cells_are_configurations_and_refuse_what_is_wrong() -> None:
    options = run.parse(["--text", "a.u16", "--held-out", "b", "--gpt2", "c", "--seeds", "0", "1"])
    found = run.cells_of(options)
    assert [cell.seed for cell in found] == [0] * 14 + [1] * 14
    assert len({cell.slug for cell in found}) == 28
    assert len({cell.program for cell in found}) == 14
    config = Cell("bam+ssmax @ clamped optim.lr=0.5", 2, "text").config(Path("t.json"), "x", ("train.steps=100",))
    assert (config.model.position, config.train.seed, config.data.seed) == ("bam+ssmax", 2, 2)
    assert config.data.retrieval.share == 0
    assert config.optim.lr == 0.5
    with pytest.raises(ValueError, match="mix='books' is not one of retrieval, text"):
        Cell("rope", 0, "books").config(Path("t.json"), "x")
    with pytest.raises(ValueError, match="ropee"):
        Cell("ropee", 0).config(Path("t.json"), "x")
    with pytest.raises(ValueError, match=r"train\.steps=70 must be a multiple of 50"):
        training.Trainer(get("tiny", "train.steps=70"), ThreadPoolExecutor())


def test_a_cell_that_fails_is_named_and_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One says that it failed, one dies when it is to begin its second cell, the third has no time left, which is no
    failure."""
    found = [Cell(case, 0) for case in ("rope", "alibi", "nope")]
    second = Cell("alibi", 1)
    ends = {
        "rope": (("failed", found[0], "not finite"), ("end",)),
        "alibi": (("want", second, False),),
        "nope": (("end",),),
    }

    def start(board: Any, cells_: list[Cell], gpu: str | None) -> Any:
        mine, theirs = multiprocessing.Pipe()
        for message in ends[cells_[0].case]:
            theirs.send(message)
        theirs.close()
        process = argparse.Namespace(join=lambda: None, exitcode=-9 if cells_[0].case == "alibi" else 0)
        return schedule._Process(cells_, process, mine, gpu)

    monkeypatch.setattr(schedule, "_start", start)
    options = argparse.Namespace(processes=3, gpus=None, minutes=1.0, together=1, far=False)
    with pytest.raises(SystemExit) as ended:
        schedule.run_cells([*found, second], cells.Materials(tmp_path, "x"), [], options)
    told = str(ended.value)
    assert told.startswith("error: failed: ")
    assert [cell.slug in told for cell in (*found, second)] == [True, False, False, True]
    out = capsys.readouterr().out
    assert f"{found[0].slug}: not finite" in out
    assert f"{second.slug}: killed" in out
    assert f"0 of 4 cells; missing: {', '.join(cell.slug for cell in (*found, second))}" in out


def test_rows_that_cannot_be_written_end_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is not taken for the death of the process that sent them."""
    mine, theirs = multiprocessing.Pipe()
    found = [Cell("rope", 0)]
    theirs.send(("rows", found[0], []))
    process: Any = argparse.Namespace(exitcode=None)  # it lives
    monkeypatch.setattr(schedule, "_start", lambda board, cells_, gpu: schedule._Process(cells_, process, mine, gpu))
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(schedule, "write_json", Mock(side_effect=full))
    options = argparse.Namespace(processes=1, gpus=None, minutes=1.0, together=1, far=False)
    with pytest.raises(OSError, match="No space left"):
        schedule.run_cells(found, cells.Materials(tmp_path, "x"), [], options)


def test_the_next_seed_goes_on_where_one_was_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, sent = list[Cell](), list[tuple[str, ...]]()

    class Failing:
        def __init__(self, *_: Any) -> None:
            pass

        def run(self, cell: Cell, keep: bool) -> bool:
            asked.append(cell)
            if cell.seed == 0:
                raise FloatingPointError("not finite")
            return True

        def ask_far(self) -> None:
            pass

    monkeypatch.setattr(cells, "Worker", Failing)
    parent: Any = argparse.Namespace(send=sent.append)
    found = [Cell("rope", seed) for seed in range(3)]
    cells.work(found, cells.Materials(Path(), "x"), False, parent)
    assert asked == found
    assert sent == [("failed", found[0], "not finite"), ("end",)]


def test_cells_take_turns_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time on each of two GPUs, first in the list first; what asks for the far lengths comes last."""
    found = [Cell("rope", seed) for seed in range(6)]
    board = schedule.Board(found, cells.Materials(Path(), "x"), (), 1.0, 2, 9, far=True, gpus=("0", "3"))
    pipe: Any = None
    one = lambda seed, gpu, **more: schedule._Process([found[seed]], None, pipe, gpu, **more)
    board.open = [
        one(5, "0", wants=found[5]),
        one(0, "0", wants=found[0], last=True),
        one(1, "0", wants=found[1]),
        one(2, "3", busy=True),
        one(4, "3", wants=found[4]),
        one(3, "3", wants=found[3]),
    ]
    assert [p.cells[0].seed for p in schedule.turns(board)] == [1, 5, 3]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert schedule.gpus_of(None) == (None,)
    assert schedule.gpus_of(2) == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert schedule.gpus_of(1) == ("2",)
    with pytest.raises(ValueError, match="--gpus 3 is more than CUDA_VISIBLE_DEVICES=2, 3 has"):
        schedule.gpus_of(3)


@pytest.mark.slow
def test_the_study_runs_and_resumes(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = HuggingFaceTokenizer(gpt2)
    book = [*whole.encode(SENTENCES * 80), whole.vocab_size - 1]
    np.array(book * 3, "<u2").tofile(tmp_path / "books.u16")
    for kind in ("noun", "adjective", "verb"):
        (tmp_path / f"{kind}list.txt").write_text("\n".join(f"{kind}{c}" for c in "abcdef"))
    common = ["model.layers=1", "model.dim=16", "model.heads=2", "model.mlp_dim=16", "data.retrieval.kind=brief"]
    common += ["--text", str(tmp_path / "books.u16"), "--held-out", str(tmp_path / "books.u16"), "--gpt2", str(gpt2)]
    common += ["--words", str(tmp_path), "--size", "tiny", "--out", str(tmp_path / "out"), "--processes", "1"]
    common += ["model.vocab_size=300"]
    run.main([*common, "--cases", "bam+ssmax", "--seeds", "0", "--far"])
    assert "1 of 1 cells" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--resume"):
        run.main([*common, "--cases", "bam+ssmax", "--seeds", "0"])
    run.main([*common, "--resume", "--cases", "bam+ssmax", "bam+ssmax @ data.batch_size=4", "--seeds", "0"])
    assert "2 of 2 cells" in capsys.readouterr().out
    trained = kept.read(tmp_path / "out" / "results.json")["rows"]
    tokens = {row["case"]: row["tokens"] for row in trained if row["benchmark"] == "training"}
    assert tokens["bam+ssmax @ data.batch_size=4"] == 2 * tokens["bam+ssmax"]
    run.main([*common, "--resume", "--cases", "bam+ssmax", "--seeds", "0", "1", "--minutes", "0"])
    told = capsys.readouterr().out
    assert "missing: tiny-retrieval-bam-ssmax-seed1; 0 minutes are over, --resume goes on" in told
    found = kept.read(tmp_path / "out" / "results.json")["rows"]
    kinds = {row["benchmark"] for row in found}
    assert kinds == {"training", "passkey", "niah", "perplexity", "prior", "attention"}
    looked_at = {row["case"] for row in found if row["benchmark"] == "attention"}
    assert looked_at == {"bam+ssmax", "bam+ssmax @ data.batch_size=4"}  # in every recipe
    page = report.write_report(tmp_path / "out").read_text()
    assert "| `bam+ssmax` |" in page
    assert "## Size tiny, mix retrieval, another recipe: `data.batch_size=4`" in page
    assert all((tmp_path / "out" / "figures" / n).exists() for n in ("tiny-retrieval-perplexity.png",))
