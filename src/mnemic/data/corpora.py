"""Opening a corpus by name or path."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from mnemic.data.documents import Corpus
from mnemic.data.hub import hub_corpus
from mnemic.data.local import local_corpus, present
from mnemic.data.pairs import Languages, ParallelCorpus, parallel_corpus, read_direction
from mnemic.data.tasks import is_task, open_task
from mnemic.errors import UsageError
from mnemic.registry import Registry

CORPORA = Registry(
    "corpus",
    {
        "stdlib": "mnemic.data.stdlib:stdlib",
        "wikitext-2": "mnemic.data.wikipedia:wikitext_2",
        "wikitext-103": "mnemic.data.wikipedia:wikitext_103",
        "enwik8": "mnemic.data.wikipedia:enwik8",
        "pg19": "mnemic.data.papers:pg19",
        "arxiv-math": "mnemic.data.papers:arxiv_math",
        "github": "mnemic.data.papers:github",
        "isabelle": "mnemic.data.papers:isabelle",
        "c4": "mnemic.data.papers:c4",
        "multi30k": "mnemic.data.pairs:multi30k",
        "wmt14": "mnemic.data.pairs:wmt14",
        "iwslt14": "mnemic.data.pairs:iwslt14",
    },
)
"""Name -> function(path | None) -> Corpus; the first line of its docstring says what a document is."""


def open_corpus(source: str, path: str | None = None) -> Corpus:
    """Opens a corpus: a text file (also .xz, .gz), a folder, a .jsonl file, `hf:<dataset>[:<config>]`, or a name.

    A registered name is looked for at `path`, then in the folder that MNEMIC_DATA names, then on the hub. A file or
    folder that has the name of a corpus is opened with a slash in it: `./enwik8`. After a parallel corpus (a folder
    with files such as train.de and train.en) may stand from which language to which it goes: `multi30k:en-de`. The
    name of a task is one of a corpus too, and `task:<folder>` is a task of your own; see `open_task`.
    """
    if is_task(source) or (source.startswith("glue/") and not present(Path(source))):
        return open_task(source, path)
    name, languages = read_direction(source)
    if languages and present(Path(source).expanduser()):
        name, languages = source, None
    if name in CORPORA:
        return _between(CORPORA.load(name)(path), languages)
    if path is not None:
        raise UsageError(f"a path goes with the name of a corpus ({', '.join(CORPORA)}), not with {source!r}")
    if source.startswith("hf:"):
        return hub_corpus(source)
    if not source:
        raise UsageError("no corpus was named: give a file, a folder, hf:<dataset> or a name such as stdlib")
    location = Path(name).expanduser()
    if location.name == name and not present(location):
        raise _unknown(source)
    parallel = parallel_corpus(location, name, languages)
    return _between(parallel or local_corpus(location, name), languages)


def _between(corpus: Corpus, languages: Languages | None) -> Corpus:
    """A parallel corpus from and to these languages; any corpus if there are none."""
    if languages is None:
        return corpus
    if not isinstance(corpus, ParallelCorpus):
        raise UsageError(
            f"{corpus.name} has no files such as train.{languages[0]} and train.{languages[1]}: "
            f"open it without {':' + '-'.join(languages)!r}"
        )
    return corpus.between(*languages)


def _unknown(source: str) -> UsageError:
    """The error for what is neither a name nor a path: the nearest of both is suggested."""
    near = difflib.get_close_matches(source, [*CORPORA, *os.listdir()], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"no corpus, file or folder named {source!r}: {hint}named corpora are {', '.join(CORPORA)}")
