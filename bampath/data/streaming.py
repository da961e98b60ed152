"""Text while it is being generated: tokens in, finished characters out."""

from collections.abc import Iterable, Iterator

from bampath.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_INCOMPLETE = 3  # bytes of a UTF-8 character that may be there before its last one
_WINDOW = 64


class StreamDecoder:
    """Decodes one token at a time and holds back what may still be the beginning of a character.

    The pieces joined together, `flush` included, are the text that decoding everything at once gives. Each step decodes
    a short window whose first tokens are already out, so a tokenizer that strips or adds a leading space does that
    once, at the beginning, and the cost per token does not grow with the text. (A run of more than 64 tokens without a
    complete character at its end is given out as it is.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is incomplete."""
        self._held.append(int(token))
        text = self._pending()
        stable = len(text) if len(self._held) > _WINDOW else len(text) - _broken_end(text)
        new, self._shown = text[self._shown : stable], max(self._shown, stable)
        if stable == len(text) and (text or len(self._held) > _WINDOW):
            self._advance()
        return new

    def flush(self) -> str:
        """What is still held back, as it is; call it once after the last token."""
        text = self._pending()[self._shown :]
        self._advance()
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._held])[len(before) :]

    def _advance(self) -> None:
        self._context, self._held, self._shown = self._held, [], 0


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The pieces of text of `tokens` as they become complete, empty ones left out."""
    decoder = StreamDecoder(tokenizer)
    for token in tokens:
        if text := decoder.push(token):
            yield text
    if text := decoder.flush():
        yield text


def _broken_end(text: str) -> int:
    """How many replacement characters at the end of `text` may still turn into one character."""
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _INCOMPLETE)
