"""The target's answers: refilled batches write what each prompt gets alone, features included."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from eagle_jax import InputError, Sampling, generate
from eagle_jax.config import PLAIN
from eagle_jax.decode.generate import NO_DRAFTER, engine
from train.answers import Answered, Question, Shelf, write_answers
from train.data import Sample
from train.features import extract

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


def rows_of(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_answers_equal_those_of_each_prompt_alone(target, questions, written, eos):
    rows = {row["id"]: row for row in rows_of(written)}
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
    rows = rows_of(written)
    samples = [Sample(np.array(r["prompt"] + r["out"], np.int32), len(r["prompt"])) for r in rows]
    computed = extract(target.model, samples, tmp_path, TAPS)
    recorded = np.fromfile(written / "features.f16", np.float16).reshape(computed.shape)
    at = 0
    for sample in samples:
        end = at + len(sample.tokens)
        last = end - 1 if sample.tokens[-1] == eos else end
        np.testing.assert_allclose(recorded[at:last], computed[at:last], atol=2e-2)
        assert (recorded[last:end] == 0).all()
        at = end


def test_a_killed_run_goes_on_at_its_row(target, questions, written, tmp_path):
    lines = (written / "answers.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:9])
    data = (written / "features.f16").read_bytes()
    (tmp_path / "features.f16").write_bytes(data[:-7])
    width = (1 + len(TAPS)) * target.config.hidden_size
    shelf = Shelf(tmp_path, width)
    rows = [json.loads(line) for line in lines[:6]]
    assert shelf.done == {row["id"] for row in rows[:5]}
    start = 2 * width * sum(len(row["prompt"]) + len(row["out"]) for row in rows[:5])
    assert (tmp_path / "features.f16").stat().st_size == start
    row = rows[5]
    size = len(row["prompt"]) + len(row["out"])
    signals = np.frombuffer(data[start : start + 2 * size * width], np.float16).reshape(size, width)
    question = Question(row["id"], tuple(row["prompt"]), row["temp"], 0)
    shelf.add(Answered(question, [*row["out"], 7], signals), eos=())
    assert (tmp_path / "answers.jsonl").read_bytes() == b"".join(lines[:6])
    assert (tmp_path / "features.f16").read_bytes() == data[: start + 2 * size * width]


def test_rows_join_a_batch_only_where_they_fit(target):
    small = engine(target, NO_DRAFTER, PLAIN)
    with pytest.raises(InputError, match="cache slots"):
        small.start([[1] * 30], 60, Sampling(), [0], (), slots=64)
