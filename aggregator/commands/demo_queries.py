"""The demo's own queries: a few thousand short texts with the lengths that search traffic has.

Deterministic: one seed, one list. The lengths are those of web search (a median of six to seven
words, a long thin tail), which is what claiming by token count is for; a unit test checks them.
Knows nothing of Kafka, models or tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from aggregator.commands.demo_foreign import FOREIGN
from aggregator.commands.demo_topics import OPENINGS, TOPICS, Topic

QUERIES_COUNT = 4_000
QUERIES_COUNT_MAX = 6_000
"""Beyond it the short ones run out and lengths are no longer those of searches."""
_SEED = 20_261_130
_TOPICS = tuple(TOPICS.values())
_FOREIGN = tuple(FOREIGN.values())

Rng = random.Random


def demo_queries(count: int = QUERIES_COUNT, *, seed: int = _SEED) -> list[str]:
    """Give `count` distinct queries in an order that mixes topics and lengths.

    Raises:
        ValueError: more than `QUERIES_COUNT_MAX`.
    """
    if count > QUERIES_COUNT_MAX:
        raise ValueError(f"the demo has at most {QUERIES_COUNT_MAX} queries of its own")
    rng = random.Random(seed)
    forms, weights = zip(*_FORMS, strict=True)
    found: dict[str, None] = {}
    while len(found) < count:
        form = rng.choices(forms, weights)[0]
        found.setdefault(form(rng))
    return list(found)


def read_queries(path: Path) -> list[str]:
    """Read one query a line (UTF-8), or `id TAB text`, leaving out blank lines.

    Raises:
        ValueError: there is none, or the file is not UTF-8.
        OSError: the file can't be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    texts = [line.rpartition("\t")[2].strip() for line in lines]
    texts = [text for text in texts if text]
    if not texts:
        raise ValueError(f"{path} holds no queries: one a line is expected, or id TAB text")
    return texts


def _keywords(rng: Rng) -> str:
    topic = rng.choice(_TOPICS)
    # In short searches people leave the article out.
    subject = rng.choice(topic.subjects)
    for article in ("a ", "an ", "the "):
        subject = subject.removeprefix(article)
    return rng.choice(topic.keywords).format(s=subject)


def _question(rng: Rng) -> str:
    return _ask(rng, rng.choice(_TOPICS))


def _narrowed(rng: Rng) -> str:
    topic = rng.choice(_TOPICS)
    return f"{_ask(rng, topic)} {rng.choice(topic.endings)}"


def _story(rng: Rng) -> str:
    topic = rng.choice(_TOPICS)
    story, question = rng.choice(topic.stories), f"{_ask(rng, topic)} {rng.choice(topic.endings)}"
    parts = [story, question]
    if rng.random() < 0.4:
        parts.insert(0, rng.choice(OPENINGS))
    return ", ".join(parts) + "?"


def _foreign(rng: Rng) -> str:
    subjects, patterns = rng.choice(_FOREIGN)
    return rng.choice(patterns).format(s=rng.choice(subjects))


def _ask(rng: Rng, topic: Topic) -> str:
    return rng.choice(topic.questions).format(s=rng.choice(topic.subjects))


_FORMS: tuple[tuple[Callable[[Rng], str], float], ...] = (
    (_keywords, 0.45),
    (_question, 0.36),
    (_narrowed, 0.10),
    (_story, 0.02),
    (_foreign, 0.07),
)
"""Ways to phrase a query, and their shares."""
