"""Text to token ids and back: bytes, a Hugging Face `tokenizer.json`, or a SentencePiece model.

All of them encode plain text without special tokens, so that text alone can never produce a BOS, EOS or padding id;
who wants those ids adds them. `load_tokenizer` reads a spec: "bytes", or the path of a `.json` or `.model` file.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

BOS_NAMES = ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|endoftext|>")
EOS_NAMES = ("</s>", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>")
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")


@runtime_checkable
class Tokenizer(Protocol):
    """What the library needs of a tokenizer.

    bos_id and eos_id are None where the vocabulary has no such token. pad_id is always a legal id (padding carries no
    loss and is seen by nobody, so it may be any). fingerprint changes exactly when the mapping from text to ids can.
    file: (name, content) of the file that it was read from, for a copy that `load_tokenizer` reads as well; None if
    there is no file.
    """

    name: str
    file: tuple[str, bytes] | None
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """The 256 bytes of UTF-8 as ids 0…255, then BOS 256, EOS 257 and padding 258.

    Bytes that are not UTF-8 survive: text read with `surrogateescape` (invalid_utf8="keep") encodes to the bytes of the
    file, and `decode_bytes` gives them back; `decode` shows them as U+FFFD.
    """

    name = "bytes"
    file: tuple[str, bytes] | None = None
    vocab_size = 259
    bos_id: int | None = 256
    eos_id: int | None = 257
    pad_id = 258
    fingerprint = "bytes-259-v1"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.uint32) for text in texts]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of `ids`; special ids have none. ValueError for ids outside the vocabulary."""
        values = [int(i) for i in ids]
        wrong = [i for i in values if not 0 <= i < self.vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is outside the byte vocabulary of {self.vocab_size}")
        return bytes(i for i in values if i < 256)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, through the `tokenizers` package.

    Special tokens written out in a text are encoded as the text that they are; the file's own truncation and padding
    are switched off. BOS, EOS and padding are found by their usual names, or given by name. single_digits makes every
    decimal digit a token of its own, as many newer tokenizers do by themselves (GPT-2's does not).
    """

    def __init__(
        self,
        path: str | Path,
        bos: str | None = None,
        eos: str | None = None,
        pad: str | None = None,
        single_digits: bool = False,
    ) -> None:
        import tokenizers

        data = _read(path, "tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the package raises bare Exception for every malformed file
            raise ValueError(f"{path} is not a tokenizer.json that `tokenizers` can read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        if single_digits:
            self._split_digits(path)
        self.name = f"huggingface:{Path(path).name}"
        self.file: tuple[str, bytes] | None = ("tokenizer.json", data)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._special(path, "bos_token", bos, BOS_NAMES)
        self.eos_id = self._special(path, "eos_token", eos, EOS_NAMES)
        self.pad_id = _first(self._special(path, "pad_token", pad, PAD_NAMES), self.eos_id, 0)
        self.fingerprint = _fingerprint("huggingface", data, self.bos_id, self.eos_id, single_digits)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(_no_surrogates(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast([_no_surrogates(t) for t in texts], add_special_tokens=False)
        return [np.asarray(e.ids, np.uint32) for e in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def _split_digits(self, path: str | Path) -> None:
        from tokenizers.pre_tokenizers import Digits, Sequence

        before = self._tokenizer.pre_tokenizer
        digits = Digits(individual_digits=True)
        self._tokenizer.pre_tokenizer = digits if before is None else Sequence([digits, before])
        probe = "at 10:59, 2468 of 37"
        tokens = self.encode(probe)
        if self.decode(tokens) != probe or sum(self.decode([t]).strip().isdecimal() for t in tokens) != 10:
            raise ValueError(f"single_digits=true does not work with {path}: {probe!r} becomes {self.decode(tokens)!r}")

    def _special(self, path: str | Path, option: str, name: str | None, usual: Sequence[str]) -> int | None:
        if name is None:
            return next((i for i in map(self._tokenizer.token_to_id, usual) if i is not None), None)
        found = self._tokenizer.token_to_id(name)
        if found is None:
            added = sorted(token.content for token in self._tokenizer.get_added_tokens_decoder().values())
            raise ValueError(
                f"{option}={name!r} is not in {path}; its added tokens are {', '.join(added[:20]) or 'none'}"
            )
        return found


class SentencePieceTokenizer:
    """A SentencePiece `.model` file; BOS, EOS and padding are the ids that the model itself declares.

    The model's own normalisation applies (many turn newlines into spaces and put one space in front).
    """

    def __init__(self, path: str | Path) -> None:
        import sentencepiece

        data = _read(path, "SentencePiece model")
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
        self.name = f"sentencepiece:{Path(path).name}"
        self.file: tuple[str, bytes] | None = ("tokenizer.model", data)
        self.vocab_size = self._model.get_piece_size()
        self.bos_id = _declared(self._model.bos_id())
        self.eos_id = _declared(self._model.eos_id())
        self.pad_id = _first(_declared(self._model.pad_id()), self.eos_id, 0)
        self.fingerprint = _fingerprint("sentencepiece", data, self.bos_id, self.eos_id)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(_no_surrogates(text), out_type=int)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._model.encode([_no_surrogates(t) for t in texts], out_type=int)
        return [np.asarray(ids, np.uint32) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


def load_tokenizer(
    spec: str,
    bos_token: str | None = None,
    eos_token: str | None = None,
    pad_token: str | None = None,
    single_digits: bool = False,
) -> Tokenizer:
    """The tokenizer of a spec: "bytes", "….json" (or a folder that holds tokenizer.json), or "….model".

    The three names are for `.json` files whose special tokens have unusual names; single_digits, for the same files,
    makes each digit one token (bytes do so anyway). FileNotFoundError for a missing file,
    ValueError for another kind of file, a broken file, or a name that the vocabulary does not have.
    """
    path = Path(spec).expanduser()
    if path.is_dir() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path, bos_token, eos_token, pad_token, single_digits)
    if bos_token or eos_token or pad_token:
        raise ValueError(
            f"bos_token, eos_token and pad_token are for tokenizer.json files; tokenizer={spec!r} has its own"
        )
    if spec == "bytes":
        return ByteTokenizer()
    if path.suffix == ".model":
        if single_digits:
            raise ValueError(f"single_digits=true is for tokenizer.json files; the model {spec} has a rule of its own")
        return SentencePieceTokenizer(path)
    raise ValueError(
        f"tokenizer={spec!r} is unknown: use 'bytes', the path of a tokenizer.json, or of a SentencePiece .model file"
    )


def _read(path: str | Path, kind: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileNotFoundError(f"cannot read the {kind} {path}: {error.strerror}") from error


def _fingerprint(kind: str, data: bytes, *specials: int | None) -> str:
    return hashlib.blake2b(repr((kind, specials)).encode() + data, digest_size=16).hexdigest()


def _declared(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None


def _first(*ids: int | None) -> int:
    return next(i for i in ids if i is not None)


def _no_surrogates(text: str) -> str:
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(
            "the text holds bytes that are not UTF-8 (invalid_utf8='keep'): only tokenizer='bytes' can encode them"
        )
    return text
