"""Tokenizers: round trips, special tokens, fingerprints, errors, and text while it is generated."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.data.streaming import StreamDecoder, stream_text
from bampath.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

SAMPLE = [
    "The pass key is 12345. Remember it.",
    "Ein Öl-Gemälde für fünf Euro — déjà vu, naïve café.",
    "日本語のテキスト と 😀 emoji 👩‍👩‍👧 and\nnew lines\n\n  spaces",
    "def f(x):\n\treturn x ** 2  # tabs",
]


@pytest.fixture(scope="module")
def json_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|odd|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(SAMPLE, trainer)
    model.enable_truncation(8)
    model.enable_padding(length=64)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE * 3),
        model_writer=written,
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("spm") / "tiny.model"
    path.write_bytes(written.getvalue())
    return path


@pytest.fixture(scope="module", params=["bytes", "json", "model"])
def tokenizer(request: pytest.FixtureRequest, json_path: Path, model_path: Path) -> Tokenizer:
    return load_tokenizer({"bytes": "bytes", "json": str(json_path), "model": str(model_path)}[request.param])


def test_protocol_and_round_trip(tokenizer: Tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    for text, batched in zip(SAMPLE, tokenizer.encode_batch(SAMPLE), strict=True):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert batched.tolist() == ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids), "no special tokens in plain text"
    assert tokenizer.encode("") == []
    assert 0 <= tokenizer.pad_id < tokenizer.vocab_size
    assert tokenizer.eos_id is not None


def test_special_tokens_spelled_out_stay_text(tokenizer: Tokenizer):
    text = "a <|endoftext|> b <s> c </s> d"
    ids = tokenizer.encode(text)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.decode(ids) == text


def test_long_text_is_neither_truncated_nor_padded(tokenizer: Tokenizer):
    text = "word " * 200
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(data=st.binary(max_size=60))
def test_bytes_that_are_not_utf8_survive(data: bytes):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(data.decode("utf-8", "surrogateescape"))
    assert ids == list(data)
    assert tokenizer.decode_bytes([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == data
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_byte_ids_out_of_range():
    with pytest.raises(ValueError, match="token id 259 is outside the byte vocabulary of 259"):
        ByteTokenizer().decode([65, 259])


@given(text=st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_streaming_gives_the_same_text_and_never_half_a_character(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    pieces = list(stream_text(tokenizer, ids))
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_streaming_of_arbitrary_tokens(tokenizer: Tokenizer, data: st.DataObject):
    """What an untrained model emits: broken characters and special tokens included."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    decoder = StreamDecoder(tokenizer)
    text = "".join([*(decoder.push(i) for i in ids), decoder.flush()])
    assert text == tokenizer.decode(ids)


def test_streaming_holds_an_incomplete_character_back():
    decoder = StreamDecoder(ByteTokenizer())
    assert [decoder.push(b) for b in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert [decoder.push(b) for b in b"\xe2\x82"] == ["", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_special_token_names(json_path: Path):
    found = load_tokenizer(str(json_path))
    assert found.bos_id == found.eos_id == found.pad_id == 0
    named = load_tokenizer(str(json_path), bos_token="<|odd|>")
    assert (named.bos_id, named.eos_id) == (1, 0)
    assert named.fingerprint != found.fingerprint
    with pytest.raises(
        ValueError, match=r"eos_token='</q>' is not in .*; its added tokens are <\|endoftext\|>, <\|odd\|>"
    ):
        load_tokenizer(str(json_path), eos_token="</q>")
    with pytest.raises(ValueError, match=r"are for tokenizer\.json files"):
        load_tokenizer("bytes", bos_token="<s>")


def test_single_digits(json_path: Path, model_path: Path):
    plain, split = load_tokenizer(str(json_path)), load_tokenizer(str(json_path), single_digits=True)
    assert len(plain.encode("12345")) < 5
    assert [split.decode([i]) for i in split.encode(" 12345.")] == [" ", *"12345", "."]
    assert all(split.decode(split.encode(text)) == text for text in SAMPLE)
    assert split.fingerprint != plain.fingerprint
    assert load_tokenizer("bytes", single_digits=True).encode("12") == [49, 50]
    with pytest.raises(ValueError, match=r"single_digits=true is for tokenizer\.json files"):
        load_tokenizer(str(model_path), single_digits=True)


def test_single_digits_that_do_not_work_are_refused(json_path: Path, tmp_path: Path):
    prefixed = json.loads(json_path.read_text("utf-8"))
    prefixed["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "prefixed.json").write_text(json.dumps(prefixed), "utf-8")
    with pytest.raises(ValueError, match=r"single_digits=true does not work with .*prefixed\.json"):
        load_tokenizer(str(tmp_path / "prefixed.json"), single_digits=True)


def test_sentencepiece_ids_come_from_the_model(model_path: Path):
    tokenizer = load_tokenizer(str(model_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    assert tokenizer.vocab_size == 360


def test_fingerprints_follow_the_file(json_path: Path, tmp_path: Path):
    copy = tmp_path / "copy.json"
    copy.write_bytes(json_path.read_bytes())
    assert load_tokenizer(str(copy)).fingerprint == load_tokenizer(str(json_path)).fingerprint
    assert load_tokenizer(str(json_path.parent)).fingerprint == load_tokenizer(str(json_path)).fingerprint
    changed = json.loads(json_path.read_text("utf-8"))
    changed["pre_tokenizer"]["add_prefix_space"] = True
    copy.write_text(json.dumps(changed), "utf-8")
    assert load_tokenizer(str(copy)).fingerprint != load_tokenizer(str(json_path)).fingerprint


def test_errors_name_the_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"cannot read the tokenizer\.json .*nowhere\.json"):
        load_tokenizer(str(tmp_path / "nowhere.json"))
    with pytest.raises(FileNotFoundError, match=r"cannot read the SentencePiece model .*nowhere\.model"):
        load_tokenizer(str(tmp_path / "nowhere.model"))
    for name, message in (("bad.json", "is not a tokenizer.json"), ("bad.model", "is not a SentencePiece model")):
        (tmp_path / name).write_bytes(b"not a model")
        with pytest.raises(ValueError, match=message):
            load_tokenizer(str(tmp_path / name))
    with pytest.raises(ValueError, match="tokenizer='gpt2' is unknown: use 'bytes'"):
        load_tokenizer("gpt2")


def test_kept_bytes_are_refused_by_other_tokenizers(json_path: Path):
    with pytest.raises(ValueError, match="only tokenizer='bytes' can encode them"):
        load_tokenizer(str(json_path)).encode(b"\xff".decode("utf-8", "surrogateescape"))
