"""`python -m train` on a tiny chat model: every stage, from nothing to a head that decodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.flax import load_file

from eagle_jax import InputError, TreeShape, generate, load_drafter, load_target
from eagle_jax.bench.prompts import read_prompts
from train.__main__ import main
from train.check import around_user
from train.corpus import Corpus
from train.data import Sample, pack
from train.datasets import turns_of, write_dataset_prompts
from train.evaluate import acceptance, simulated_tau
from train.metrics import read_metrics
from train.shelf import read_lines
from train.stages.text import context_of
from train.store import Joined, lay_out, open_shelf

FIXTURE = Path(__file__).parent / "fixtures" / "llama-tied"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of 61 words with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("target") / "model"
    shutil.copytree(FIXTURE, folder)
    words = ["<end>", "user", "assistant", *(f"w{i}" for i in range(58))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


OPTIONS = [
    *("--count", "10", "--max-new-tokens", "12", "--rows", "4", "--max-length", "40"),
    *("--draft-vocab", "48", "--epochs", "2", "--batch", "1", "--tau-prompts", "2"),
    *("--temperatures", "0", "0", "1", "--held-out", "0.25"),
]


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    prompts = out.parent / "prompts.jsonl"
    rng = np.random.default_rng(0)
    with prompts.open("w") as file:
        for i in range(24):
            turns = [
                " ".join(f"w{w}" for w in rng.integers(1, 58, 3)) for _ in range(1 + (i % 6 == 0))
            ]
            file.write(json.dumps({"id": f"p{i}", "turns": turns}) + "\n")
    options = ["--target", str(folder), "--out", str(out), "--prompts", str(prompts), *OPTIONS]
    assert main(options) == 0
    return out, options


def test_all_stages_leave_what_they_promise(trained, folder):
    out, _ = trained
    rows = read_lines(out / "answers")
    assert {row["id"] for row in rows} == {f"p{i}" for i in range(24)} | {
        f"p{i}+1" for i in range(0, 24, 6)
    }
    assert {row["temp"] for row in rows} == {0.0, 1.0}
    report = json.loads((out / "evaluation.json").read_text())
    rows = read_metrics(out / "fit" / "metrics.csv")
    assert rows[-1]["step"] == rows[-1]["steps"]
    assert (out / "fit" / "metrics.png").read_bytes()[:4] == b"\x89PNG"
    assert list((out / "fit" / "events").glob("events.out.tfevents.*"))
    assert report["simulated_tau"] == pytest.approx(report["real_tau"], rel=0.03)
    target = load_target(str(folder))
    drafter = load_drafter(str(out / "head"), target)
    assert drafter.method == "eagle3" and drafter.tau
    run = generate(target, drafter, "w5 w9", max_new_tokens=12, tree=TreeShape(4, 2, 2))
    assert run.tokens == generate(target, None, "w5 w9", max_new_tokens=12).tokens


def test_a_second_turn_follows_the_targets_own_first_answer(trained, folder):
    out, _ = trained
    rows = {row["id"]: row for row in read_lines(out / "answers")}
    target = load_target(str(folder))
    first, second = rows["p6"], rows["p6+1"]
    text = target.tokenizer.decode(first["out"])
    shown = target.tokenizer.decode(second["prompt"])
    assert text in shown and len(second["prompt"]) > len(first["prompt"])


def test_stages_are_restartable_and_add_nothing_the_second_time(trained):
    out, options = trained
    before = (out / "answers" / "answers-00000.jsonl").read_bytes()
    assert main(["answers", *options]) == 0
    assert (out / "answers" / "answers-00000.jsonl").read_bytes() == before
    weights = (out / "head" / "model.safetensors").read_bytes()
    assert main(["fit", *options]) == 0
    assert (out / "head" / "model.safetensors").read_bytes() == weights


def test_a_fit_killed_at_any_moment_ends_with_the_same_head(trained, tmp_path):
    """kill -9 once some steps are done; the next run ends with the very same weights."""
    out, options = trained
    later = tmp_path / "later"
    later.mkdir()
    (later / "answers").symlink_to(out / "answers")
    again = ["fit", *options, "--out", str(later), "--checkpoint-every", "2"]
    log = later / "fit" / "metrics.csv"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "train", *again]
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not log.is_file() or len(log.read_text().splitlines()) < 4:
        assert run.poll() is None and time.monotonic() < deadline, "the fit ended too early"
        time.sleep(0.01)
    run.kill()
    run.communicate()
    assert not (later / "head").exists()
    assert main(again) == 0
    rows = [row["step"] for row in read_metrics(log)]
    assert rows == sorted(set(rows)) and rows[-1] > 6
    weights = (later / "head" / "model.safetensors").read_bytes()
    assert weights == (out / "head" / "model.safetensors").read_bytes()


def test_a_fit_goes_on_from_a_head(trained, tmp_path, capsys):
    """With a rate of zero, the head that comes out is the one that went in."""
    out, options = trained
    later = tmp_path / "later"
    later.mkdir()
    (later / "answers").symlink_to(out / "answers")
    more = ["fit", *options, "--out", str(later), "--start", str(out / "head")]
    more += ["--max-length", "24"]
    assert main([*more, "--epochs", "1", "--learning-rate", "0"]) == 0
    assert "conversations are longer than --max-length 24 and were cut" in capsys.readouterr().out
    old, new = (load_file(folder / "head" / "model.safetensors") for folder in (out, later))
    assert old.keys() == new.keys()
    for name, array in old.items():
        scale = np.abs(array.astype(np.float32)).max()
        difference = np.abs(array.astype(np.float32) - new[name].astype(np.float32)).max()
        assert difference <= 0.01 * scale, name
    assert main([*more, "--method", "eagle"]) == 2


def test_the_checker_shows_the_span_and_refuses_shifted_or_empty_ones(folder, tmp_path, capsys):
    tokenizer = load_target(str(folder)).tokenizer
    conversation = [*tokenizer.encode_chat("w3 w4"), 8, 9, 7, 0]
    start = len(conversation) - 4
    assert around_user(tokenizer) == ([1], [0, 2])

    def check(*starts):
        path = tmp_path / "given.jsonl"
        rows = [{"prompt": conversation[:at], "out": conversation[at:]} for at in starts]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = ["--target", str(folder), "--out", str(tmp_path / "out"), "--answers", str(path)]
        return main(["check", *given]), capsys.readouterr()

    code, shown = check(start, start)
    assert code == 0
    assert ">>>w5 w6 w4 <end><<<" in shown.out and "2 of 2" in shown.out
    assert "WARNING" not in shown.out
    for shift, words in ((1, "1 token(s) after"), (-1, "1 token(s) before")):
        code, shown = check(start, start + shift)
        assert code == 2 and words in shown.err and "conversation 2 of 2" in shown.err
    code, shown = check(len(conversation))
    assert code == 2 and "empty answer" in shown.err
    conversation[start - 2 : start] = [9, 9]  # no header anywhere
    code, shown = check(start)
    assert code == 0 and "WARNING" in shown.out


def test_the_target_writes_prompts_for_itself(folder, tmp_path):
    options = ["prompts", "--target", str(folder), "--out", str(tmp_path), *OPTIONS]
    assert main(options) == 0
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len({row["turns"][0] for row in rows}) == 10
    assert all(len(row["turns"][0].split()) >= 3 for row in rows)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "prompts.jsonl").write_text("".join(lines[:4]) + lines[4][:10])  # killed
    assert main(options) == 0
    again = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    assert again[:4] == lines[:4] and len(again) == 10


@pytest.mark.parametrize(
    "change",
    [
        ["fit"],
        ["--epochs", "0"],
        ["--temperatures", "-1"],
        ["--prompts", "missing.jsonl"],
        ["--answers", "missing.jsonl"],
        ["--own-lm-head", "--method", "eagle"],
        ["--own-lm-head", "--start", "auto"],
    ],
    ids=" ".join,
)
def test_bad_input_is_refused(folder, tmp_path, change, capsys):
    assert main([*change, "--target", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"turns": ["a", " b "], "prompt": "x"}, ["a", "b"]),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
                       {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]},
         ["a", "b"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]},
         ["a"]),
        ({"instruction": "a", "input": "b", "output": "x"}, ["a\n\nb"]),
        ({"instruction": "a", "input": " "}, ["a"]),
        ({"question": "a", "answer": "x"}, ["a"]),
        ({"messages": [{"role": "user", "content": ["image"]}]}, []),
        ({"messages": [{"role": "user", "content": " "}]}, []),
        ({"text": "a"}, []),
    ],
)  # fmt: skip
def test_user_turns_are_found_in_the_columns_of_data_sets(row, turns):
    assert turns_of(row) == turns


def test_prompts_from_a_data_set(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a"}, {"other": "x"}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    assert write_dataset_prompts(iter(rows), path, 2) == 1
    assert [prompt.turns for prompt in read_prompts(path)] == [("a",), ("b",)]
    with pytest.raises(InputError, match="column"):
        write_dataset_prompts([{"other": "x"}], tmp_path / "none.jsonl", 2)
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_simulated_tau_walks_as_the_cycle_does():
    # One answer of 7 tokens after a prompt of 2: rows 1..6 draft tokens 3..8.
    samples = [Sample(np.arange(9, dtype=np.int32), 2)]
    store = lay_out(samples, np.zeros((9, 0), np.float16))
    data = Corpus(pack(store.samples, 12, 0.0, ()), store, 0)
    hits, weights = np.zeros((1, 12, 2), bool), np.zeros((1, 12, 2))
    weights[0, 1:7, 0] = weights[0, 1:6, 1] = 1
    hits[0, 1] = [True, True]  # from row 1: two drafts and a bonus, tokens 3, 4, 5
    hits[0, 4] = [False, True]  # from row 4: nothing but the target's own token 6
    hits[0, 5] = [True, True]  # from row 5: token 7, then 8 ends the answer
    assert simulated_tau(hits, weights, data) == pytest.approx(6 / 3)
    sure = np.full((1, 12), 0.75)
    found = acceptance(hits, weights, sure)
    assert found.conditional == pytest.approx([2 / 6, 2 / 2])
    assert found.cumulative == pytest.approx([2 / 6, 2 / 5])
    assert found.calibration_error == pytest.approx(0.75 - 2 / 6)


def test_joined_arrays_read_as_one():
    parts = [np.arange(6, dtype=np.float16).reshape(3, 2), np.full((2, 2), 9, np.float16)]
    whole = np.concatenate(parts)
    rows = np.array([[4, 0], [2, 3]])
    np.testing.assert_array_equal(Joined(parts)[rows], whole[rows])


def test_a_context_without_its_first_answer_is_left_out(folder):
    target = load_target(str(folder))

    class Two:
        id, turns = "x", ("w1", "w2")

    assert context_of(target, Two, 1, {}) is None
    assert context_of(target, Two, 1, {"x": [5]})[-1] == target.tokenizer.encode("assistant")[0]


def test_a_shelf_of_another_width_is_refused(trained):
    from eagle_jax import FormatError

    out, _ = trained
    with pytest.raises(FormatError, match="do not|--taps"):
        open_shelf(out / "answers", 61, 40, 32)


@pytest.mark.parametrize("features", ["live", "first-epoch"])
def test_features_during_the_fit_train_as_recorded_ones_do(
    trained, tmp_path, features, capsys, monkeypatch
):
    out, options = trained
    monkeypatch.setattr("train.stages.head.tau_by_tree", lambda *of: [])  # nine programs
    options = [*options, "--out", str(tmp_path / "out"), "--features", features]
    for stage in ("answers", "fit", "evaluate"):
        assert main([stage, *options]) == 0
    assert read_lines(tmp_path / "out" / "answers") == read_lines(out / "answers")
    files = (tmp_path / "out" / "answers").glob("*.f16")
    assert sum(file.stat().st_size for file in files) == 0
    assert (tmp_path / "out" / "features").exists() == (features == "first-epoch")
    here, there = (read_metrics(at / "fit" / "metrics.csv")[-1] for at in (tmp_path / "out", out))
    assert here["valid_token_loss_1"] == pytest.approx(there["valid_token_loss_1"], rel=0.02)
    # The folder's answers came without features, so a fit that reads them is refused, not misled.
    assert main(["answers", *options, "--features", "cached"]) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert read_lines(tmp_path / "out" / "answers") == read_lines(out / "answers")
