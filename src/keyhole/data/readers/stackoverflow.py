"""What all files of Stack Overflow have in common: text that is tokenised already."""

from __future__ import annotations

from keyhole.data.source import Post

__all__ = ["FACTS", "to_post"]

FACTS = {
    "source": "Stack Overflow of TensorFlow Federated, sentences of questions and answers by user",
    "licence": "CC BY-SA 3.0",
}


def to_post(tokens: str, title: str, tags: str) -> Post:
    """Returns one sentence as a post.

    Args:
        tokens: words, separated by spaces.
        title: of the question, the same.
        tags: of the question, separated by bars.

    >>> to_post("use a dict", "Which map ?", "python|hash").title
    ['which', 'map', '?']
    """
    words = tokens.lower().split()
    named = [tag for tag in tags.split("|") if tag]
    return Post(words, [len(words)] if words else [], title.lower().split(), named)
