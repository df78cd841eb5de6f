"""Tasks: the official files of GLUE and SQuAD in small, and folders of one's own."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizerFast

from mnemic.data import TASKS, open_corpus, open_task
from mnemic.data.examples import rows_of
from mnemic.data.tasks import Answer, Example, Task, read_label
from mnemic.errors import UsageError
from tests.unit.tasks import questions, write_squad

# The official layouts, with what makes them hard to read: lone quotes, a mark, a byte order mark, DOS line ends.
FILES = {
    "glue/cola": (
        "CoLA",
        {"train": 'gj04\t1\t\tHe said "no.\ngj04\t0\t*\tSaid he so.\n', "test": "index\tsentence\n0\tHm.\n"},
    ),
    "glue/sst2": ("SST-2", {"train": "sentence\tlabel\nso good \t1\nbad\t0\n", "test": "index\tsentence\n0\tHm.\n"}),
    "glue/mrpc": (
        "MRPC",
        {"train": '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tA "b\tC\r\n0\t7\t8\tD\tE\r\n'},
    ),
    "glue/qqp": (
        "QQP",
        {
            "train": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
            "1\t2\t3\tA?\tB?\t1\n4\t5\tbroken\n4\t5\t6\tC?\tD?\t0\n"
        },
    ),
    "glue/stsb": (
        "STS-B",
        {
            "train": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
            "0\tg\tf\t2012\t1\tn\tn\tA\tB\t5.000\n1\tg\tf\t2012\t1\tn\tn\tC\tD\t3.800\n"
        },
    ),
    "glue/mnli": (
        "MNLI",
        {
            "train": "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"
            "0\tg\tA\tB\tneutral\tneutral\n1\tg\tC\tD\tx\tentailment\n",
            "dev_matched": "index\tgenre\tsentence1\tsentence2\tgold_label\n0\tg\tE\tF\tcontradiction\n",
            "dev_mismatched": "index\tgenre\tsentence1\tsentence2\tgold_label\n0\tg\tG\tH\tentailment\n",
        },
    ),
    "glue/qnli": (
        "QNLI",
        {"train": "index\tquestion\tsentence\tlabel\n0\tA?\tB\tentailment\n1\tC?\tD\tnot_entailment\n"},
    ),
    "glue/rte": (
        "RTE",
        {"train": "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tnot_entailment\n1\tC\tD\tentailment\n"},
    ),
    "glue/wnli": ("WNLI", {"train": "index\tsentence1\tsentence2\tlabel\n0\tA\tB\t1\n1\tC\tD\t0\n"}),
}
EXPECTED = {
    "glue/cola": [('He said "no.', None, 1), ("Said he so.", None, 0)],
    "glue/sst2": [("so good ", None, 1), ("bad", None, 0)],
    "glue/mrpc": [('A "b', "C", 1), ("D", "E", 0)],
    "glue/qqp": [("A?", "B?", 1), ("C?", "D?", 0)],
    "glue/stsb": [("A", "B", 5.0), ("C", "D", 3.8)],
    "glue/mnli": [("A", "B", 1), ("C", "D", 0)],
    "glue/qnli": [("A?", "B", 0), ("C?", "D", 1)],
    "glue/rte": [("A", "B", 1), ("C", "D", 0)],
    "glue/wnli": [("A", "B", 1), ("C", "D", 0)],
}
METRICS = {
    "glue/cola": ("matthews",),
    "glue/mrpc": ("accuracy", "f1"),
    "glue/qqp": ("accuracy", "f1"),
    "glue/stsb": ("pearson", "spearman"),
    "squad": ("exact_match", "f1"),
}


def write(root: Path, name: str, packed: bool) -> Path:
    folder, files = FILES[name]
    (root / "glue" / folder).mkdir(parents=True)
    for split, text in files.items():
        data = text.encode()
        path = root / "glue" / folder / f"{split}.tsv"
        (path.with_suffix(".tsv.xz") if packed else path).write_bytes(lzma.compress(data) if packed else data)
    return root / "glue" / folder


def told(task: Task, split: str = "train") -> list[tuple[Any, ...]]:
    return [(example.text, example.pair, example.label) for example in task.examples(split)]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("name", FILES)
def test_the_official_files_of_glue(name, packed, tmp_path, monkeypatch):
    folder = write(tmp_path, name, packed)
    monkeypatch.setenv("MNEMIC_DATA", str(tmp_path))
    for task in (open_task(name), open_corpus(name), open_task(name, str(folder)), open_task(name, str(folder.parent))):
        assert told(task) == EXPECTED[name]
        assert task.kind == "classification"
    if "test" in FILES[name][1]:
        assert told(task, "test") == [("Hm.", None, None)]


def test_the_registry_has_the_nine_tasks_and_squad_and_their_figures():
    assert set(TASKS) == {*FILES, "squad"}
    for name in TASKS:
        assert open_task(name).metrics == METRICS.get(name, ("accuracy",))


def test_rows_that_lack_columns_are_left_out_and_said_so(tmp_path, caplog):
    assert told(open_task("glue/qqp", str(write(tmp_path, "glue/qqp", False)))) == EXPECTED["glue/qqp"]
    assert "1 rows lack columns" in caplog.text


def test_mnli_has_two_parts_of_valid(tmp_path):
    task = open_task("glue/mnli", str(write(tmp_path, "glue/mnli", False)))
    assert task.splits == ("train", "valid")
    assert task.parts("dev") == {"": "valid", "mismatched": "valid_mismatched"}
    assert task.parts("train") == {"": "train"}
    assert [told(task, part) for part in task.parts("valid").values()] == [[("E", "F", 2)], [("G", "H", 0)]]


def test_squad_from_its_files(tmp_path, monkeypatch):
    made = questions()
    write_squad(tmp_path / "squad", made)
    monkeypatch.setenv("MNEMIC_DATA", str(tmp_path))
    task = open_task("squad")
    assert list(task.examples("train")) == list(made.examples("train"))
    assert task.kind == "spans"
    (tmp_path / "squad/dev-v1.1.json").write_text('{"data": [{"paragraphs": [{}]}]}')
    with pytest.raises(UsageError, match=r"dev-v1.1.json is not a file of SQuAD 1.1 \(KeyError: 'qas'\)"):
        list(task.examples("valid"))


def test_the_hub_where_there_are_no_files(monkeypatch):
    asked = []
    answers = {"answer_start": [3], "text": ["x"]}
    rows = {
        "cola": [{"sentence": "A", "label": 1, "idx": 0}, {"sentence": "B", "label": -1, "idx": 1}],
        "stsb": [
            {"sentence1": "A", "sentence2": "B", "label": 2.5},
            {"sentence1": "A", "sentence2": "B", "label": -1.0},
        ],
        "mnli": [{"premise": "A", "hypothesis": "B", "label": 2}],
        None: [{"id": "7", "title": "t", "context": "is x", "question": "What?", "answers": answers}],
    }

    def load_dataset(dataset: str, config: str | None = None, *, split: str, streaming: bool) -> Any:
        asked.append((dataset, config, split))
        return rows[config]

    monkeypatch.delenv("MNEMIC_DATA", raising=False)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert told(open_task("glue/cola"), "valid") == [("A", None, 1), ("B", None, None)]
    assert told(open_task("glue/stsb"), "valid") == [("A", "B", 2.5), ("A", "B", None)]
    assert [told(open_task("glue/mnli"), part) for part in ("train", "valid_mismatched")] == [[("A", "B", 2)]] * 2
    assert list(open_task("squad").examples("train")) == [Example("7", "What?", "is x", answers=(Answer(3, "x"),))]
    assert asked == [
        ("nyu-mll/glue", "cola", "validation"),
        ("nyu-mll/glue", "stsb", "validation"),
        ("nyu-mll/glue", "mnli", "train"),
        ("nyu-mll/glue", "mnli", "validation_mismatched"),
        ("rajpurkar/squad", None, "train"),
    ]


def own(folder: Path, **files: str) -> str:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return str(folder)


def test_a_folder_of_ones_own(tmp_path):
    path = own(tmp_path, train_tsv="text\tlabel\ngood\tyes\nbad\tno\n", dev_jsonl='{"text": "so", "label": "yes"}\n\n')
    task = open_corpus("task:" + path)
    assert isinstance(task, Task)
    assert (task.labels, task.metrics) == (("no", "yes"), ("accuracy",))
    assert told(task) == [("good", None, 1), ("bad", None, 0)]
    assert told(task, "valid") == [("so", None, 1)]
    assert [document.text for document in task.documents("train")] == ["good", "bad"]


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [(["0", "2"], ("0", "1", "2"), [0, 2]), (["0.5", "-1"], (), [0.5, -1.0]), (["b", "1"], ("1", "b"), [1, 0])],
)
def test_what_labels_of_ones_own_mean(tmp_path, labels, names, numbers):
    rows = "".join(f"x\ty\t{label}\n" for label in labels)
    task = open_task(own(tmp_path, train_tsv="text\ttext_pair\tlabel\n" + rows))
    assert task.labels == names
    assert told(task) == [("x", "y", number) for number in numbers]


@pytest.mark.parametrize(
    ("source", "files", "message"),
    [
        ("", {"notes_txt": "x"}, "is not a task: expected a folder with files such as train.tsv"),
        ("", {"train_tsv": "text\tlabel\nx\n"}, r"train.tsv, line 2 has 1 columns: expected 2"),
        ("", {"train_tsv": "sentence\tlabel\nx\t1\n"}, "line 2 has no text: expected the columns text, label"),
        ("", {"train_tsv": "text\nx\n"}, "has no labels"),
        ("", {"train_jsonl": "[1]\n"}, "line 1 is not a JSON object"),
        ("", {"train_jsonl": '{"text": \n'}, "line 1 is not JSON"),
        ("", {"train_jsonl": '{"text": "a\\ud800", "label": 1}'}, "lone surrogate"),
        ("/nowhere", {}, "no such file or folder"),
    ],
)
def test_a_folder_that_is_no_task(tmp_path, source, files, message):
    with pytest.raises(UsageError, match=message):
        list(open_task(own(tmp_path, **files) + source).examples("train"))


def test_what_is_not_there_is_said(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="unknown task 'glue/colla': did you mean 'glue/cola'"):
        open_corpus("glue/colla")
    with pytest.raises(UsageError, match="a path goes with the name of a task"):
        open_task("task:x", "y")
    folder = write(tmp_path, "glue/qnli", False)
    (folder / "train.tsv").rename(folder / "dev.tsv")
    monkeypatch.setenv("MNEMIC_DATA", str(tmp_path))
    with pytest.raises(UsageError, match="glue/qnli has no 'train' split: it has 'valid'"):
        open_task("glue/qnli").examples("train")
    (folder / "dev.tsv").write_text("index\tquestion\tlabel\n")
    with pytest.raises(UsageError, match="has the columns index, question, label: expected question, sentence"):
        open_task("glue/qnli").examples("valid")
    (folder / "dev.tsv").unlink()
    with pytest.raises(UsageError, match="has none of the files of glue/qnli"):
        open_task("glue/qnli")
    with pytest.raises(UsageError, match="has none of the files of squad"):
        open_task("squad", str(folder))


def test_a_label_outside_of_the_range_is_refused():
    for label in ("2", "-1", "0.5", "maybe", [1]):
        with pytest.raises(UsageError, match=r"line 3 has the label .* expected one of no, yes, or its number from 0"):
            read_label(label, ("no", "yes"), "line 3")
    for score in ("nan", "inf", "x"):
        with pytest.raises(UsageError, match="expected a number"):
            read_label(score, (), "line 3")
    assert [read_label(label, ("no", "yes"), "") for label in ("yes", "1", 1, None, "")] == [1, 1, 1, None, None]


# Rows


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("glue/cola", {"train": 8551, "valid": 1043}),
        ("glue/sst2", {"train": 67349, "valid": 872}),
        ("glue/mrpc", {"train": 3668, "valid": 408}),
        ("glue/stsb", {"train": 5749, "valid": 1500}),
        ("glue/qnli", {"valid": 5463}),
        ("glue/rte", {"train": 2490, "valid": 277}),
        ("glue/wnli", {"train": 635, "valid": 71}),
        ("squad", {"valid": 10570}),
    ],
)
def test_the_real_tasks_have_the_published_examples(shared_data, monkeypatch, name, counts):
    monkeypatch.setenv("MNEMIC_DATA", str(shared_data))
    task = open_task(name)
    for split, count in counts.items():
        examples = list(task.examples(split))
        assert len(examples) == count
        if task.labels:
            assert {example.label for example in examples} == set(range(len(task.labels)))
        elif task.kind == "classification":
            assert all(0 <= example.label <= 5 for example in examples)
        else:
            assert all(e.pair[a.start :].startswith(a.text) for e in examples for a in e.answers)


def test_squad_has_the_windows_that_bert_has(shared_data, monkeypatch):
    """10,833 for its uncased vocabulary, 384 tokens and a stride of 128, in BERT's run_squad.py."""
    monkeypatch.setenv("MNEMIC_DATA", str(shared_data))
    vocabulary = lzma.decompress((shared_data / "tokenizers/bert-base-uncased/vocab.txt.xz").read_bytes()).decode()
    numbered = {word: number for number, word in enumerate(vocabulary.splitlines())}
    task, tokenizer = open_task("squad"), BertTokenizerFast(vocab=numbered)
    examples = list(task.examples("valid"))
    rows = list(rows_of(examples, task, tokenizer, 384, 128))
    assert len(rows) == 10_833
    found = {row.example: row for row in rows if row.target != [0, 0]}
    assert len(found) == len(examples)
    exact = 0
    for number, row in found.items():
        first, last = (place - row.place for place in row.target)
        answer, text = examples[number].answers[0], examples[number].pair
        covered = text[row.borders[first, 0] : row.borders[last, 1]]
        assert answer.text.strip() in covered
        exact += covered == answer.text
    assert exact > 0.99 * len(examples)
