"""The command line on a tiny model folder: figures, JSON, exit codes, bench report."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from make_fixtures import FOLDER
from safetensors.numpy import load_file, save_file
from test_text import write_folder

from eagle_jax import load_target
from eagle_jax.cli import main
from eagle_jax.drafters.load import save_head
from eagle_jax.tiny import tiny_drafter

WORDS = 262  # size of the tokenizer that write_folder makes, rounded up


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model folder with a byte-level tokenizer, and a head for it."""
    root = tmp_path_factory.mktemp("cli")
    model = root / "model"
    shutil.copytree(FOLDER / "llama-tied", model)
    tensors = load_file(model / "model.safetensors")
    rng = np.random.default_rng(0)
    name = "model.embed_tokens.weight"
    tensors[name] = rng.normal(scale=0.5, size=(WORDS, 32)).astype(np.float32)
    save_file(tensors, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config |= {"vocab_size": WORDS, "max_position_embeddings": 256, "eos_token_id": 2}
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").unlink()
    write_folder(model)
    target = load_target(str(model))
    drafter = tiny_drafter(target)
    save_head(root / "head", drafter.module.head, None, {})
    return str(model), str(root / "head")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_streams_and_ends_with_figures(capsys, folders):
    model, head = folders
    options = ("--target", model, "--drafter", head, "--max-new-tokens", 12, "--nodes", 4)
    code, out, err = run(capsys, "generate", "hello", *options, "--compare")
    assert code == 0
    assert "12 tokens, tau" in err and "target passes" in err
    assert "identical" in err and "NOT" not in err
    code, plain, err = run(capsys, "generate", "hello", "--target", model, "--drafter", "none",
                           "--max-new-tokens", 12)  # fmt: skip
    assert code == 0 and plain == out
    assert "tau 1.00" in err


def test_what_the_model_suggests_is_said(capsys, folders, tmp_path):
    model = shutil.copytree(folders[0], tmp_path / "model")
    suggested = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.1}
    (model / "generation_config.json").write_text(json.dumps(suggested))
    options = ("--target", model, "--drafter", "none", "--max-new-tokens", 2, "--json")
    code, out, err = run(capsys, "generate", "hello", *options)
    assert code == 0 and len(json.loads(out)["tokens"]) == 2
    assert "suggests temperature=0.7, this run uses temperature=0.0" in err
    assert "repetition_penalty=1.1 is not supported" in err


def test_json_holds_the_same_run(capsys, folders):
    model, head = folders
    options = ("--target", model, "--drafter", head, "--max-new-tokens", 12, "--nodes", 4, "--json")
    sampled = ("--temperature", 0.9, "--top-k", 40, "--top-p", 0.9, "--seed", 3)
    code, out, err = run(capsys, "generate", "hello", *options, *sampled, "--compare")
    report = json.loads(out)
    assert code == 0 and err == ""
    assert report["identical"] is True
    assert len(report["tokens"]) == len(report["drafted"]) <= 12
    assert report["tau"] >= 1.0
    assert report["tree"] == {"nodes": 4, "depth": 3, "top_k": 1, "gate": 0.0}
    other = json.loads(run(capsys, "generate", "hello", *options, *sampled[:-1], 4)[1])
    assert other["tokens"] != report["tokens"]


def test_bench_report(capsys, folders, tmp_path):
    model, head = folders
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "category": "ab"[i % 2], "turns": [f"hello {i}"]} for i in range(3)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    report_path = tmp_path / "report.json"
    code, out, _ = run(
        capsys, "bench", "--prompts", prompts, "--target", model, "--drafter", head, "--nodes", 4,
        "--max-new-tokens", 16, "--runs", 2, "--json", report_path,
    )  # fmt: skip
    report = json.loads(report_path.read_text())
    assert code == 0 and "speedup" in out
    for field in ("tau", "plain_tokens_per_s", "speculative_tokens_per_s", "speedup", "compile_s"):
        assert report[field] > 0, field
    assert report["speedup_interval"][0] <= report["speedup"] <= report["speedup_interval"][1]
    assert list(report["cost_curve_ms"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert len(report["acceptance_by_depth"]) == 3
    assert {"draft_ms", "overhead_ms", "versions", "machine"} <= report.keys()
    assert set(report["categories"]) == {"a", "b"}
    assert len(report["prompts"]) == 3
    for found in report["divergences"]:
        assert found["margin"] < 1e-3
    assert report["identical"] is (not report["divergences"])
    # tau and acceptance tell the same story: 1 + accepted drafts a pass, less what the budget cut.
    assert report["tau"] <= 1 + sum(report["acceptance_by_depth"]) + 1e-9


BAD = [
    (["generate", "hi", "--temperature", "-1"], "temperature"),
    (["generate", "hi", "--top-p", "0"], "top_p"),
    (["generate", "hi", "--max-new-tokens", "0"], "at least 1"),
    (["generate", "hi", "--max-new-tokens", "400"], "context of 256"),
    (["generate", "hi", "--nodes", "3", "--depth", "7"], "levels deep"),
    (["generate", "hi", "--depth", "2"], "--nodes"),
    (["generate", "hi", "--gate", "0.3"], "--nodes"),
    (["generate", "hi", "--nodes", "4", "--gate", "1.5"], "between 0 and 1"),
    (["generate", " "], "empty"),
    (["generate", "hi", "--drafter", "nowhere"], "no drafter"),
    (["generate", "hi", "--target", "no-such-model"], "no-such-model"),
    (["bench", "--prompts", "missing.jsonl"], "no such prompt file"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda x: " ".join(x)[-24:])
def test_bad_input_ends_with_exit_code_2(capsys, folders, arguments, message):
    model, head = folders
    if "--target" not in arguments:
        arguments = [*arguments, "--target", model]
    if "--drafter" not in arguments:
        arguments = [*arguments, "--drafter", head]
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert message in err and "Traceback" not in err
    assert out == ""


def test_usage_errors_end_with_exit_code_2():
    with pytest.raises(SystemExit) as error:
        main(["generate"])
    assert error.value.code == 2
