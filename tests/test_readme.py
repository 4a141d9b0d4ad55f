"""Every command of the README is run, on the default target and the head that ships."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from make_fixtures import FOLDER

from eagle_jax.target.families import FAMILIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.strip().splitlines()
]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


def call(folder, line):
    words = shlex.split(line)
    if words[0] == "eagle-jax":
        words[:1] = [sys.executable, "-m", "eagle_jax.cli"]
    if words[0] == "python":
        words[0] = sys.executable
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=1500)


def test_the_first_screen_holds_the_two_commands():
    first = "\n".join(README.splitlines()[:20])
    assert 'pip install -e . && eagle-jax generate "' in first
    assert 'pip install -e ".[test]" && pytest' in first


def test_every_command_is_known():
    """Installation is run by .ci/run, everything else below."""
    for line in COMMANDS:
        assert line.startswith(("pip install -e ", "eagle-jax ", "python -m train ")), line
    assert len(COMMANDS) >= 9 and len(PYTHON) == 1


def test_every_family_has_a_row_and_its_fixture():
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \|.*transformers \|$", README, re.M)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(FAMILIES)
    fixtures = {json.loads(path.read_text())["model_type"] for path in FOLDER.glob("*/config.json")}
    # The text part of a gemma3 is a gemma3_text.
    assert fixtures == set(FAMILIES) - {"gemma3"}


@pytest.mark.slow
def test_inspect_command(tmp_path):
    line = next(line for line in COMMANDS if line.startswith("eagle-jax inspect"))
    done = call(tmp_path, line)
    assert done.returncode == 0, done.stderr
    assert "134,515,008" in done.stdout and "target and head fit together" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        line.split("&& ")[-1]
        for line in COMMANDS
        if "eagle-jax generate" in line and "run/head" not in line
    ],
)
def test_generate_commands(tmp_path, line):
    done = call(tmp_path, line)
    assert done.returncode == 0, done.stderr
    if "--json" in line:
        assert json.loads(done.stdout)["text"].strip()
    else:
        assert len(done.stdout.split()) > 10
        assert "target passes" in done.stderr
    if "--compare" in line:
        assert "the tokens are identical" in done.stderr


@pytest.mark.slow
def test_python_block(tmp_path):
    script = tmp_path / "block.py"
    script.write_text(PYTHON[0])
    done = call(tmp_path, f"python {script}")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 20


@pytest.mark.slow
def test_bench_command(tmp_path):
    example = re.search(r'`(\{"id": "1".*?\})`', README)[1]
    (tmp_path / "prompts.jsonl").write_text(example + "\n")
    line = next(line for line in COMMANDS if line.startswith("eagle-jax bench"))
    done = call(tmp_path, line)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tau"] > 1.2 or report["tree"]["nodes"] == 1
    assert all(found["margin"] < 1e-3 for found in report["divergences"])


@pytest.mark.slow
def test_train_commands(tmp_path):
    """Two short conversations are enough to run every stage; the head must load and decode."""
    train, use = (line for line in COMMANDS if "run" in shlex.split(line)[-1] or "run/head" in line)
    rows = [{"prompt": [1, 4093, 198], "out": list(range(300, 340))}] * 2
    rows += [{"prompt": [1, 520, 9531, 198], "out": list(range(500, 540))}] * 2
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = call(tmp_path, train + " --draft-vocab 256 --tau-prompts 1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "head" / "model.safetensors").stat().st_size < 16e6
    done = call(tmp_path, use + " --max-new-tokens 24")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_export_command(tmp_path):
    """What is written decodes as the head itself does."""
    line = next(line for line in COMMANDS if line.startswith("eagle-jax export"))
    done = call(tmp_path, line)
    assert done.returncode == 0, done.stderr
    ask = 'eagle-jax generate "What is rain?" --json --max-new-tokens 24 --nodes 4 --depth 2'
    own, written = (call(tmp_path, ask + more) for more in ("", " --drafter exported"))
    assert written.returncode == 0, written.stderr
    assert json.loads(own.stdout)["tokens"] == json.loads(written.stdout)["tokens"]
    assert json.loads(own.stdout)["tau"] == json.loads(written.stdout)["tau"]
