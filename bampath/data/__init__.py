"""Text to batches: sources, tokenizers, a token cache, packing, retrieval documents and the loader. Needs no JAX."""

from bampath.data.config import DataConfig
from bampath.data.corpus import TokenCorpus, corpus_of, load_corpus, tokenizer_of
from bampath.data.describe import card, describe
from bampath.data.loader import BatchSource, Loader, make_loader, validation_batches
from bampath.data.packing import Batch
from bampath.data.retrieval import WORDINGS, RetrievalOptions
from bampath.data.streaming import StreamDecoder, stream_text
from bampath.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "WORDINGS",
    "Batch",
    "BatchSource",
    "ByteTokenizer",
    "DataConfig",
    "Loader",
    "RetrievalOptions",
    "StreamDecoder",
    "TokenCorpus",
    "Tokenizer",
    "card",
    "corpus_of",
    "describe",
    "load_corpus",
    "load_tokenizer",
    "make_loader",
    "stream_text",
    "tokenizer_of",
    "validation_batches",
]
