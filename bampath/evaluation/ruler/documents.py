"""Questions over documents: SQuAD v2.0 and HotpotQA from local copies of their development files."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bampath.evaluation.questions import Question

TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {query} Answer:"
)


@dataclass(frozen=True)
class Asked:
    """A question, its answers, and the documents (indices) that belong to it: its own, and others of its article."""

    query: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Library:
    """Every document and every question of a file. label: its name, for results."""

    label: str
    documents: tuple[str, ...]
    questions: tuple[Asked, ...]


def read(path: str | Path) -> Library:
    """A SQuAD v2.0 file ({"data": [{"paragraphs": …}]}) or a HotpotQA file ([{"question", "answer", "context"}, …]).

    ValueError if it is neither or holds no question that has an answer.
    """
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        documents, questions = _squad(data["data"]) if isinstance(data, dict) else _hotpot(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is neither a SQuAD nor a HotpotQA file ({error!r} is missing or wrong)") from None
    if not questions:
        raise ValueError(f"{path} holds no question that has an answer")
    return Library(Path(path).name, documents, questions)


def _squad(articles: Sequence[Any]) -> tuple[tuple[str, ...], tuple[Asked, ...]]:
    documents = tuple(sorted({p["context"] for article in articles for p in article["paragraphs"]}))
    index = {text: i for i, text in enumerate(documents)}
    found = []
    for article in articles:
        together = [index[p["context"]] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = index[paragraph["context"]]
            related = tuple(i for i in together if i != own)
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in qa["answers"])
                    found.append(Asked(qa["question"], answers, (own,), related))
    return documents, tuple(found)


def _hotpot(entries: Sequence[Any]) -> tuple[tuple[str, ...], tuple[Asked, ...]]:
    joined = lambda title, paragraph: f"{title}\n{''.join(paragraph)}"
    documents = tuple(sorted({joined(t, p) for entry in entries for t, p in entry["context"]}))
    index = {text: i for i, text in enumerate(documents)}
    found = [
        Asked(
            entry["question"],
            (entry["answer"],),
            tuple(dict.fromkeys(index[joined(t, p)] for t, p in entry["context"])),
        )
        for entry in entries
    ]
    return documents, tuple(found)


def make(library: Library, number: int, size: int, draw: random.Random) -> Question:
    """Question `number` with `size` documents at least its own: related ones first, then others, shuffled as published.

    A size above the number of documents repeats all of them.
    """
    asked = library.questions[number % len(library.questions)]
    total = len(library.documents)
    wanted = max(size, len(asked.own))
    if wanted >= total:
        chosen = (list(range(total)) * -(-wanted // total))[:wanted]
    elif wanted - len(asked.own) > len(asked.related):
        known = {*asked.own, *asked.related}
        others = [i for i in range(total) if i not in known]
        chosen = [*asked.own, *asked.related, *draw.sample(others, wanted - len(asked.own) - len(asked.related))]
    else:
        chosen = [*asked.own, *draw.sample(asked.related, wanted - len(asked.own))]
    texts = [library.documents[i] for i in chosen]
    random.Random(42).shuffle(texts)
    gold = texts.index(library.documents[asked.own[0]])
    context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(texts, 1))
    return Question(TEMPLATE.format(context=context, query=asked.query), asked.answers, gold / max(1, len(texts) - 1))
