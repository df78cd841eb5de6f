"""Find the contexts in a store that are nearest to a text, and show what followed there.

The text is read by the model that made the store. The word that followed each context stands in the middle, marked;
where it is from stands before it. A newline shows as ⏎, and … where the text goes on or rows are missing. For a model
that translates, the text is a source, or "source ||| beginning of its translation".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from mnemic.cli.store.opening import add_model, add_store, model_of
from mnemic.errors import UsageError

if TYPE_CHECKING:
    from mnemic.stores.context import Context

EXAMPLE = """  mnemic store search python.store "def __init__(self"
  mnemic store search wiki.store "The treaty was signed in" --k 20 --namespace history
  echo "import os" | mnemic store search python.store - --json"""

NARROWEST, USUAL = 72, 118

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    add_store(parser)
    parser.add_argument("text", help="what to look for; - reads it from stdin")
    parser.add_argument("--k", type=int, default=10, metavar="N", help="how many contexts (default: 10)")
    parser.add_argument("--namespace", action="append", metavar="TEXT", help="only in this one; may be given again")
    parser.add_argument("--document", action="append", metavar="NAME", help="only in this one; may be given again")
    parser.add_argument("--recall", type=float, metavar="X", help="share of the true nearest to find; unset: its own")
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Searches, and prints the contexts."""
    from mnemic.cli.generate import read_prompt
    from mnemic.stores import Where, open_store
    from mnemic.stores.config import Origin
    from mnemic.stores.context import contexts
    from mnemic.stores.encode import Encoder, encode_text

    text = read_prompt().rstrip("\n") if arguments.text == "-" else arguments.text
    if not text:
        raise UsageError("no text to look for was given")
    chosen = (None if names is None else frozenset(names) for names in (arguments.namespace, arguments.document))
    with open_store(arguments.store) as store:
        model, tokenizer = model_of(store, arguments)
        origin = Origin.from_dict(dict(store.config.origin))
        encoder = Encoder(model, tokenizer, origin.layer or "ffn")
        key = encode_text(encoder, tokenizer, text, origin.context)
        found = store.search(key, arguments.k, Where(*chosen), arguments.recall)
        scores = found.scores[found.mask].tolist()
        places = contexts(store, found.ids[found.mask], tokenizer)
        rows, metric = len(store), store.config.metric
    if arguments.json:
        print(json.dumps({"text": text, "rows": rows, "metric": metric, "found": as_dicts(places, scores)}))
    else:
        print(in_words(text, rows, metric, places, scores))
    return 0


def as_dicts(places: list[Context], scores: list[float]) -> list[dict[str, Any]]:
    """What was found as plain values, the nearest first."""
    return [
        {
            "id": place.id,
            "score": score,
            "document": place.source.document,
            "namespace": place.source.namespace,
            "position": place.position,
            "before": place.before,
            "word": place.word,
            "after": place.after,
        }
        for place, score in zip(places, scores, strict=True)
    ]


def distance(metric: str, score: float) -> float:
    """A score as it is shown: the distance itself, where the score is minus its square."""
    return max(0.0, -score) ** 0.5 if metric == "l2" else score


def in_words(text: str, rows: int, metric: str, places: list[Context], scores: list[float]) -> str:
    """A concordance: one context a line, the words that followed one below the other."""
    if not places:
        return f"nothing was found among {rows:,} rows"
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = max(NARROWEST, shutil.get_terminal_size((USUAL, 24)).columns) if sys.stdout.isatty() else USUAL
    tally = Counter(visible(place.word).strip(" ") for place in places)
    followed = ", ".join(f"{_marked(word, colours)} {count}" for word, count in tally.most_common(5))
    heads = ("distance" if metric == "l2" else "score"), "document:token"
    names = [shortened(f"{one_line(place.source.document)}:{place.position}", width // 5) for place in places]
    figures = [f"{distance(metric, score):.2f}" for score in scores]
    first, second = (max(map(len, (head, *cells))) for head, cells in zip(heads, (figures, names), strict=True))
    lines = [
        f"{figure:>{first}}  {_dim(f'{name:{second}}', colours)}  {_line(place, width - first - second - 4, colours)}"
        for place, name, figure in zip(places, names, figures, strict=True)
    ]
    head = f"{len(places)} nearest of {rows:,} rows to {_quoted(text)}, followed by {followed}"
    columns = f"{heads[0]:>{first}}  {heads[1]:{second}}  context, and what followed"
    return "\n".join([head, "", _dim(columns, colours), *lines])


def _line(place: Context, room: int, colours: bool) -> str:
    word = visible(place.word)
    before = one_line(place.before) + " " * (len(word) - len(word.lstrip(" ")))
    word, after = word.lstrip(" "), one_line(place.after)
    left = room * 11 // 20
    right = max(0, room - left - len(word) - 2)
    before = before if len(before) <= left else "…" + before[len(before) - left + 1 :].lstrip("…")
    after = after if len(after) <= right else after[: max(0, right - 1)].rstrip("…") + "…"
    return f"{before:>{left}}{_marked(word, colours)}{after}"


def one_line(text: str) -> str:
    """A text on one line: line ends marked, white space drawn together, nothing left that steers a terminal."""
    return _CONTROL.sub("\ufffd", re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "⏎", text)))


def visible(word: str) -> str:
    """A word of which nothing is invisible."""
    if word and not word.strip(" \t\n\r"):
        return word.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣").replace("\r", "␍")
    return one_line(word)


def shortened(name: str, most: int) -> str:
    """A name of at most so many characters; the end says more than the beginning."""
    return name if len(name) <= most else "…" + name[len(name) - most + 1 :]


def _quoted(text: str) -> str:
    return f'"{shortened(one_line(text), 40)}"'


def _marked(word: str, colours: bool) -> str:
    return f"\033[1;7m{word}\033[0m" if colours else f"»{word}«"


def _dim(text: str, colours: bool) -> str:
    return f"\033[2m{text}\033[0m" if colours else text
