"""A bampath checkpoint as a model of lm-evaluation-harness (package lm_eval, an optional extra).

    results = lm_eval.simple_evaluate(model=HarnessModel(reader, answerer, tokenizer, …), tasks=["piqa"])

Conventions, all in this file:

- An empty context becomes the prefix token (BOS, else EOS). A BOS stands in front of every context if the model's
  documents had one.
- Spaces at the end of a context belong to the continuation. Context and continuation are tokenised together and cut
  at the number of tokens of the context alone, as the harness does for its own models; where a token reaches over the
  border, so that the cut is not clean, the request is counted in `counts["merged"]`.
- There is no maximum length unless one is given; then contexts lose their beginning, counted in `counts["cut"]`.
- Rolling log-likelihoods predict every token once, in windows of max_length or else the training length.
- Generation is greedy.
"""

from collections.abc import Sequence
from typing import Any

from bampath.data import Tokenizer
from bampath.evaluation.answers import Answerer
from bampath.evaluation.likelihood import Pair, likelihoods, losses_of
from bampath.evaluation.reader import Reader

try:
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the short suite runs lm-evaluation-harness: pip install 'lm_eval>=0.4.13,<0.5'"
    ) from error

NEW_TOKENS = 256  # where a task does not say


class HarnessModel(LM):
    """See the head of this file. window: tokens of a rolling window; max_length: of a row, 0 for any."""

    def __init__(
        self,
        reader: Reader,
        answerer: Answerer,
        tokenizer: Tokenizer,
        *,
        bos: bool,
        window: int,
        max_length: int = 0,
        batch_tokens: int = 32_768,
    ) -> None:
        super().__init__()
        prefix = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if prefix is None:
            raise ValueError(f"the tokenizer {tokenizer.name} has neither BOS nor EOS to start an empty context with")
        if max_length < 0 or window < 1 or batch_tokens < 1:
            raise ValueError(
                f"max_length={max_length} must be at least 0, window={window} and batch_tokens={batch_tokens} positive"
            )
        self._reader, self._answerer, self._codec = reader, answerer, tokenizer
        self._prefix, self._front = prefix, (prefix,) if bos else ()
        self._window, self._longest = max_length or window, max_length
        self._batch_tokens = batch_tokens
        self.counts = {"requests": 0, "merged": 0, "cut": 0}

    @property
    def tokenizer_name(self) -> str:
        """Part of the harness's key for cached requests."""
        return f"{self._codec.name}-{self._codec.fingerprint}"

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding gives it) of each (context, continuation)."""
        pairs = [self._pair(*request.args) for request in requests]
        found = likelihoods(self._reader, pairs, self._batch_tokens)
        return [(likelihood.log_probability, likelihood.greedy) for likelihood in found]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-probability of each whole text, documents apart."""
        pairs, owner = [], []
        for index, request in enumerate(requests):
            self.counts["requests"] += 1
            tokens = self._codec.encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self._prefix, self._window, 1):
                context, predicted = make_disjoint_window(window)
                pairs.append(Pair(tuple(context), tuple(predicted)))
                owner.append(index)
        totals = [0.0] * len(requests)
        for index, loss in zip(owner, losses_of(self._reader, pairs, self._batch_tokens), strict=True):
            totals[index] -= loss
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Greedy text after each context, up to the first of its `until` strings (which are left out)."""
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(_generation(request.args[1]), []).append(index)
        found = [""] * len(requests)
        for (new_tokens, until), members in groups.items():
            prompts = [self._prompt(requests[index].args[0], new_tokens) for index in members]
            done = lambda tokens, until=until: any(stop in self._codec.decode(tokens) for stop in until)
            answers = self._answerer.answer(prompts, new_tokens, done if until else None)
            for index, tokens in zip(members, answers, strict=True):
                found[index] = _before(self._codec.decode(tokens), until)
        return found

    def _pair(self, context: str, continuation: str) -> Pair:
        self.counts["requests"] += 1
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        if not bare:
            before, after = [self._prefix], self._codec.encode(continuation)
        else:
            own, whole = self._codec.encode(bare), self._codec.encode(bare + continuation)
            self.counts["merged"] += whole[: len(own)] != own
            before, after = [*self._front, *whole[: len(own)]], whole[len(own) :]
        if not after:
            raise ValueError(f"the continuation {continuation!r} has no token of its own behind {context[-40:]!r}")
        room = self._longest + 1 - len(after)
        if self._longest and len(before) > room:
            if room < 1:
                raise ValueError(f"max_length={self._longest} is too short for a continuation of {len(after)} tokens")
            self.counts["cut"] += 1
            before = before[-room:]
        return Pair(tuple(before), tuple(after))

    def _prompt(self, context: str, new_tokens: int) -> list[int]:
        self.counts["requests"] += 1
        tokens = [*self._front, *self._codec.encode(context)] or [self._prefix]
        room = self._longest - new_tokens
        if self._longest and len(tokens) > room:
            if room < 1:
                raise ValueError(f"max_length={self._longest} leaves no room for {new_tokens} new tokens")
            self.counts["cut"] += 1
            tokens = tokens[-room:]
        return tokens


def _generation(options: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """(new tokens, stop strings) of a request. ValueError where sampling is asked for."""
    if options.get("do_sample") or options.get("temperature"):
        raise ValueError("a task asks for sampling, but generation is greedy: set do_sample: false, temperature: 0")
    until = options.get("until") or []
    return int(options.get("max_gen_toks", NEW_TOKENS)), tuple([until] if isinstance(until, str) else until)


def _before(text: str, until: Sequence[str]) -> str:
    for stop in until:
        text = text.partition(stop)[0] if stop else text
    return text
