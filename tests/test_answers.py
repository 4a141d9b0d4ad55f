"""The target's answers: refilled batches write what each prompt gets alone, features included."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from eagle_jax import InputError, Sampling, generate
from eagle_jax.config import PLAIN
from eagle_jax.decode.generate import NO_DRAFTER, engine
from train.answers import Question, write_answers
from train.data import Sample
from train.features import extract
from train.shelf import Shelf, read_lines, shards
from train.store import open_shelf

TAPS = (0, 1)
BUDGET = 14


@pytest.fixture(scope="module")
def eos(target):
    """A token that some answers hold early, so that rows finish at different times."""
    return generate(target, None, [[3]], max_new_tokens=6).tokens[0][4]


@pytest.fixture(scope="module")
def questions():
    rng = np.random.default_rng(0)
    return [
        Question(f"q{i}", tuple(rng.integers(1, 61, rng.integers(1, 24)).tolist()), t, seed=i)
        for i, t in enumerate([0.0] * 11 + [1.0] * 6)
    ]


@pytest.fixture(scope="module")
def written(target, questions, eos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    ending = dataclasses.replace(target, eos=(eos,), engines={})
    write_answers(ending, questions, folder, TAPS, BUDGET, rows=4, refill=2)
    return folder


def test_answers_equal_those_of_each_prompt_alone(target, questions, written, eos):
    rows = {row["id"]: row for row in read_lines(written)}
    assert rows.keys() == {q.id for q in questions}
    ended = 0
    for question in questions:
        alone = generate(
            target,
            None,
            list(question.prompt),
            max_new_tokens=BUDGET,
            sampling=Sampling(question.temperature),
            seed=question.seed,
            stop_tokens=(eos,),
        ).tokens[0]
        expected = alone if alone[-1] == eos else alone[:-1]
        ended += alone[-1] == eos
        assert rows[question.id]["out"] == expected
        assert rows[question.id]["prompt"] == list(question.prompt)
    assert 0 < ended < len(questions)


def test_recorded_features_equal_computed_ones(target, written, eos, tmp_path):
    rows = read_lines(written)
    samples = [Sample(np.array(r["prompt"] + r["out"], np.int32), len(r["prompt"])) for r in rows]
    computed = extract(target.model, samples, tmp_path, TAPS)
    recorded = np.fromfile(written / "features-00000.f16", np.float16).reshape(computed.shape)
    at = 0
    for sample in samples:
        end = at + len(sample.tokens)
        last = end - 1 if sample.tokens[-1] == eos else end
        np.testing.assert_allclose(recorded[at:last], computed[at:last], atol=2e-2)
        assert (recorded[last:end] == 0).all()
        at = end


def test_a_killed_run_goes_on_at_its_row(target, questions, written, tmp_path):
    lines = (written / "answers-00000.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "answers-00000.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:9])
    data = (written / "features-00000.f16").read_bytes()
    (tmp_path / "features-00000.f16").write_bytes(data[:-7])
    width = (1 + len(TAPS)) * target.config.hidden_size
    shelf = Shelf(tmp_path, width)
    rows = [json.loads(line) for line in lines[:6]]
    assert shelf.done == {row["id"] for row in rows[:5]}
    start = 2 * width * sum(len(row["prompt"]) + len(row["out"]) for row in rows[:5])
    assert (tmp_path / "features-00000.f16").stat().st_size == start
    row = rows[5]
    size = len(row["prompt"]) + len(row["out"])
    signals = np.frombuffer(data[start : start + 2 * size * width], np.float16).reshape(size, width)
    shelf.add(row, signals)
    assert (tmp_path / "answers-00000.jsonl").read_bytes() == b"".join(lines[:6])
    assert (tmp_path / "features-00000.f16").read_bytes() == data[: start + 2 * size * width]


def test_shards_are_one_shelf(target, written, tmp_path):
    """Rows and features written in shards, with a kill between them, read as those of one file."""
    width = (1 + len(TAPS)) * target.config.hidden_size
    rows, [(_, data)] = read_lines(written), shards(written)
    signals = np.fromfile(data, np.float16).reshape(-1, width)
    at = 0
    for number, row in enumerate(rows):
        if number % 4 == 0:
            shelf = Shelf(tmp_path, width, shard=60)
        size = len(row["prompt"]) + len(row["out"])
        shelf.add(row, signals[at : at + size])
        at += size
    assert shelf.tokens == at and shelf.done == {row["id"] for row in rows}
    assert len(shards(tmp_path)) > 3
    assert read_lines(tmp_path) == rows
    one, many = (open_shelf(folder, 61, 40, width) for folder in (written, tmp_path))
    assert [s.start for s in many.samples] == [s.start for s in one.samples]
    np.testing.assert_array_equal(many.tokens, one.tokens)
    every = np.arange(at)
    np.testing.assert_array_equal(many.features[every], one.features[every])


def test_rows_join_a_batch_only_where_they_fit(target):
    small = engine(target, NO_DRAFTER, PLAIN)
    with pytest.raises(InputError, match="cache slots"):
        small.start([[1] * 30], 60, Sampling(), [0], (), slots=64)
