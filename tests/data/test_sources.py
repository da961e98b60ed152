"""Sources: every format, the default corpus's split, and messages that name the place of what is wrong."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from bampath.data import DataConfig, load_corpus
from bampath.data.formats import Document, ReadOptions
from bampath.data.sources import HELD_OUT_YEARS, open_source, split_rule

TEXTS = ["First text, with an é.", "Zweiter Text\nüber zwei Zeilen.", "三つ目 😀"]
FINEWEB = ("text", "id", "dump", "url", "date", "file_path", "language", "language_score", "token_count")


def texts(spec: object, **options: object) -> list[str]:
    return [document.text for document in open_source(str(spec), ReadOptions(**options)).read()]


def write_jsonl(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def write_parquet(path: Path, columns: dict[str, list[object]], rows_per_group: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)
    return path


def fineweb_columns(values: list[str]) -> dict[str, list[object]]:
    rest: dict[str, list[object]] = {name: ["x"] * len(values) for name in FINEWEB[2:7]}
    ids: list[object] = [f"<urn:uuid:{i}>" for i in range(len(values))]
    scores: dict[str, list[object]] = {"language_score": [0.9] * len(values), "token_count": [7] * len(values)}
    return {"text": list(values), "id": ids, **rest, **scores}


# -- txt -----------------------------------------------------------------------------------------------------------


def test_txt_is_one_document_per_file_or_per_block(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\nstill one\n\n\ntwo\r\n \r\nthree\n")
    assert texts(path) == ["one\nstill one\n\n\ntwo\r\n \r\nthree\n"]
    blocks = list(open_source(str(path), ReadOptions(documents="blocks")).read())
    assert blocks == [Document("one\nstill one", "a:1"), Document("two", "a:5"), Document("three", "a:7")]
    path.write_bytes(b"\n\n\none\n\n  \n\xff")
    assert texts(path, documents="blocks", invalid_utf8="replace") == ["one", "\ufffd"]
    with pytest.raises(ValueError, match=r"a\.txt, block that starts in line 7: byte 0 \(0xff\) is not UTF-8"):
        texts(path, documents="blocks")


@pytest.mark.parametrize(
    ("policy", "expected"), [("replace", "ab\ufffdc"), ("keep", b"ab\xffc".decode("utf-8", "surrogateescape"))]
)
def test_invalid_utf8_policies(tmp_path: Path, policy: str, expected: str):
    path = tmp_path / "broken.txt"
    path.write_bytes(b"ab\xffc")
    assert texts(path, invalid_utf8=policy) == [expected]
    with pytest.raises(ValueError, match=r"broken\.txt: byte 2 \(0xff\) is not UTF-8; set invalid_utf8"):
        texts(path)


# -- jsonl ---------------------------------------------------------------------------------------------------------


def test_jsonl_reads_one_field_per_line(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": t, "n": 1}) for t in TEXTS), "", '{"text": "end"}')
    assert texts(path) == [*TEXTS, "end"]
    other = write_jsonl(tmp_path / "b.jsonl", '{"body": "x", "text": 3}')
    assert texts(other, text_field="body") == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"bad\.jsonl line 2 is not JSON: .* at column 2"),
        ("[1, 2]", r"bad\.jsonl line 2 must be a JSON object with a field 'text', not a list"),
        ('{"body": "x"}', r"bad\.jsonl line 2 has no field 'text'; it has 'body'"),
        ('{"text": 3}', r"bad\.jsonl line 2: field 'text' is a int, not a string"),
        (r'{"text": "\ud800"}', r"bad\.jsonl line 2: the text holds a lone surrogate"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path: Path, line: str, message: str):
    path = write_jsonl(tmp_path / "bad.jsonl", '{"text": "fine"}', line)
    with pytest.raises(ValueError, match=message):
        texts(path)


def test_jsonl_with_broken_bytes_and_broken_escapes(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a\xffb\\ud800"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl line 1: byte 11 \(0xff\) is not UTF-8"):
        texts(path)
    assert texts(path, invalid_utf8="replace") == ["a\ufffdb\ufffd"]
    assert texts(path, invalid_utf8="keep") == [b"a\xffb".decode("utf-8", "surrogateescape") + "\ufffd"]


# -- parquet and FineWeb -------------------------------------------------------------------------------------------


def test_parquet_streams_row_groups(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"text": [*TEXTS * 3, None], "n": list(range(10))})
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 5
    assert texts(path) == [*TEXTS * 3, ""]
    named = write_parquet(tmp_path / "b.parquet", {"body": TEXTS})
    assert texts(named, text_field="body") == TEXTS


def test_parquet_errors(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"body": TEXTS, "n": [1, 2, 3]})
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'text'; it has 'body', 'n'"):
        texts(path)
    with pytest.raises(ValueError, match="column 'n' holds int64, not text"):
        texts(path, text_field="n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is not parquet PAR1")
    with pytest.raises(ValueError, match=r"bad\.parquet is not a readable parquet file"):
        texts(tmp_path / "bad.parquet")
    whole = path.read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.parquet is not a readable parquet file"):
        texts(tmp_path / "cut.parquet")


def test_parquet_with_damage_inside(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"text": [f"{i} " * 500 for i in range(64)]}, 8)
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"a\.parquet is damaged after row 0"):
        texts(path)


def test_parquet_with_bytes_that_are_not_utf8(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"text": [b"fine", b"a\xff"]})
    with pytest.raises(ValueError, match=r"a\.parquet row 1: byte 1 \(0xff\) is not UTF-8"):
        texts(path)
    assert texts(path, invalid_utf8="replace") == ["fine", "a\ufffd"]


@pytest.mark.parametrize("kind", ["fineweb", "fineweb-edu"])
def test_fineweb_folders_in_the_published_layout(tmp_path: Path, kind: str):
    folder = tmp_path / "sample" / "10BT"
    extra: dict[str, list[object]] = {"score": [3.5] * 2, "int_score": [4] * 2} if kind == "fineweb-edu" else {}
    write_parquet(folder / "000_00000.parquet", {**fineweb_columns(TEXTS[:2]), **extra})
    write_parquet(folder / "001_00000.parquet", fineweb_columns(TEXTS[2:]))
    assert texts(f"{kind}:{tmp_path}") == TEXTS
    assert texts(f"{kind}:{folder}/001*.parquet") == TEXTS[2:]
    source = open_source(f"{kind}:{tmp_path}", ReadOptions())
    assert source.licence.startswith("ODC-By 1.0")
    write_parquet(folder / "002_00000.parquet", {"text": ["no id"]})
    with pytest.raises(ValueError, match=r"002_00000\.parquet has no column 'id'; it has 'text'"):
        texts(f"{kind}:{tmp_path}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"the folder .* holds no \.parquet file"):
        open_source(f"{kind}:{tmp_path / 'empty'}")


# -- paths ---------------------------------------------------------------------------------------------------------


def test_folders_and_globs_are_read_in_a_fixed_order(tmp_path: Path):
    for name in ("b", "a", "sub/c"):
        (tmp_path / f"{name}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(name, "utf-8")
    write_jsonl(tmp_path / "z.jsonl", '{"text": "z"}')
    (tmp_path / "notes.md").write_text("ignored", "utf-8")
    assert texts(tmp_path) == ["a", "b", "sub/c", "z"]
    assert texts(f"{tmp_path}/*.txt") == ["a", "b"]
    assert texts(f"{tmp_path}/**/*.txt") == ["a", "b", "sub/c"]


def test_missing_files_and_unknown_specs(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"source='stou' is no file, folder or glob \(did you mean sotu\?\)"):
        open_source("stou")
    with pytest.raises(
        FileNotFoundError, match=r"named sources are sotu, fineweb:PATH, fineweb-edu:PATH, shards:FOLDER, tfds:NAME"
    ):
        open_source(str(tmp_path / "missing.txt"))
    with pytest.raises(FileNotFoundError, match=r"the glob .*\*\.txt matches no"):
        open_source(f"{tmp_path}/*.txt")
    with pytest.raises(FileNotFoundError, match=r"the folder .* holds no \.txt, \.jsonl, \.parquet file"):
        open_source(str(tmp_path))
    (tmp_path / "a.md").write_text("x", "utf-8")
    with pytest.raises(ValueError, match=r"suffix '\.md'; readable are \.txt, \.jsonl, \.parquet"):
        open_source(str(tmp_path / "a.md"))


def test_wrong_paths_of_a_kind_keep_it(tmp_path: Path):
    (tmp_path / "a.jsonl").touch()
    for path, message in (
        ("nowhere", "nowhere is no file, folder or glob"),
        ("a.jsonl", r"a.jsonl has the suffix '\.jsonl'; readable are \.parquet"),
        ("", r"the folder .* holds no \.parquet file"),
        ("*.parquet", r"the glob .* matches no \.parquet file$"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=f"^source='fineweb-edu:{tmp_path}/.*': .*{message}"):
            open_source(f"fineweb-edu:{tmp_path}/{path}")


def test_a_glob_may_begin_with_a_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("9a", "9b", "8"):
        Path(f"{name}.txt").write_text(name, "utf-8")
    config = DataConfig(source="9*.txt", split="none", cache_dir=str(tmp_path))
    assert load_corpus(config).info["first_names"] == ["9a", "9b"]
    with pytest.raises(FileNotFoundError, match=r"the glob 1\*sotu matches no .* file; a mixture is .* at least two"):
        load_corpus(replace(config, source="1*sotu"))


def test_identity_follows_content_names_and_options(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("one", "utf-8")
    before = open_source(str(path)).identity
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / "a.txt"
    copy.write_text("one", "utf-8")
    assert open_source(str(copy)).identity == before
    assert open_source(str(path), ReadOptions(documents="blocks")).identity != before
    path.write_text("two", "utf-8")
    assert open_source(str(path)).identity != before


# -- splits --------------------------------------------------------------------------------------------------------


def test_the_default_corpus_is_split_by_year():
    source = open_source("sotu")
    documents = list(source.read())
    held_out = split_rule(source, "auto", 0.05)
    validation = [d for d in documents if held_out(d)]
    train = [d for d in documents if not held_out(d)]
    assert len(documents) == 249
    assert [d.name[:4] for d in validation] == list(HELD_OUT_YEARS)
    assert not {d.text for d in validation} & {d.text for d in train}
    assert [d.name[:4] for d in documents] == sorted(d.name[:4] for d in documents)


def test_hash_split_is_stable_and_keeps_copies_together():
    source = open_source("sotu")
    rule = split_rule(source, "hash", 0.2)
    documents = [Document(f"text number {i}", f"{i}") for i in range(2000)]
    sides = [rule(d) for d in documents]
    assert 330 < sum(sides) < 470
    assert sides == [rule(Document(d.text, "another name")) for d in documents]
    assert not any(map(split_rule(source, "none", 0.2), documents))
    assert not any(map(split_rule(source, "hash", 0.0), documents))


def test_the_year_split_needs_years(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x", "utf-8")
    with pytest.raises(ValueError, match="split='years' needs documents that are named by year"):
        split_rule(open_source(str(tmp_path)), "years", 0.1)


# -- tensorflow-datasets -------------------------------------------------------------------------------------------

has_tfds = importlib.util.find_spec("tensorflow_datasets") is not None


@pytest.mark.skipif(has_tfds, reason="tensorflow-datasets is installed")
def test_tfds_missing_says_what_to_install():
    with pytest.raises(ImportError, match="pip install tensorflow-datasets array_record"):
        open_source("tfds:wiki40b/en")


@pytest.mark.skipif(not has_tfds, reason="needs tensorflow-datasets, which requirements.txt leaves out")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tfds_array_record(tmp_path: Path):
    import tensorflow_datasets as tfds

    class MiniWeb(tfds.core.GeneratorBasedBuilder):
        """FineWeb's columns text and id."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "id": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i, text in enumerate(TEXTS):
                yield i, {"text": text, "id": str(i)}

    builder = MiniWeb(data_dir=tmp_path, file_format="array_record")
    with pytest.raises(ValueError, match="is not prepared"):
        open_source(f"tfds:mini_web@{tmp_path}")
    builder.download_and_prepare()
    for spec in (f"tfds:{builder.data_path}", f"tfds:mini_web@{tmp_path}"):
        assert sorted(texts(spec)) == sorted(TEXTS)
    with pytest.raises(ValueError, match=r"has no feature 'body'; it has '(text|id)', '(text|id)'"):
        texts(f"tfds:{builder.data_path}", text_field="body")
    with pytest.raises(ValueError, match="tfds:no_such_data_set cannot be opened"):
        open_source("tfds:no_such_data_set")
