"""Tokenizers, chat templates, and decoding token by token."""

import json
import random
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle_jax.errors import FormatError, InputError
from eagle_jax.text import eos_token_ids, load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CHATML = (
    "{% for message in messages %}\n"
    "    {% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_folder(folder, template=CHATML, **config):
    """A byte-level tokenizer: three special tokens, 256 bytes, and three merges."""
    merges = [("h", "e"), ("l", "l"), ("Ġ", "he")]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, "he", "ll", "Ġhe"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in tokens[:3]])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
    } | config
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(folder)


def test_plain_text(tokenizer):
    ids = tokenizer.encode("hello héllo 😀")
    assert all(type(index) is int for index in ids)
    assert tokenizer.decode(ids) == "hello héllo 😀"
    assert tokenizer.decode([1, *ids, 2]) == "hello héllo 😀"


def test_chat(tokenizer):
    expected = "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat("he") == expected
    ids = tokenizer.encode_chat("he")
    assert ids == tokenizer.encode_chat([{"role": "user", "content": "he"}])
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == expected
    assert ids.count(1) == 2


def test_a_tokenizer_without_a_template(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path / "base", template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match="no chat template"):
        tokenizer.encode_chat("hello")


@pytest.mark.parametrize("bad", [[{"role": "user"}], ["text"], [{"role": "user", "content": 3}]])
def test_malformed_messages(tokenizer, bad):
    with pytest.raises(InputError, match="'role' and 'content'"):
        tokenizer.encode_chat(bad)


def test_a_template_may_refuse(tokenizer):
    with pytest.raises(InputError, match="no tools here"):
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])


def test_broken_and_hostile_templates(tmp_path):
    for template in ("{% for %}", "{{ messages.__class__.__mro__[1].__subclasses__() }}"):
        tokenizer = load_tokenizer(write_folder(tmp_path / "m", template=template))
        with pytest.raises(InputError, match="template"):
            tokenizer.encode_chat("hello")


def test_where_templates_are_found(tmp_path):
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    folder = write_folder(tmp_path / "m", template=several)
    assert load_tokenizer(folder).render_chat("x") == "b"
    (folder / "chat_template.jinja").write_text("{% generation %}c{% endgeneration %}")
    assert load_tokenizer(folder).render_chat("x") == "c"


TEMPLATES = [
    CHATML,
    "{{ bos_token }}{% for m in messages %}{% if loop.first %}A{% endif %}[{{ m.role | upper }}]"
    "{{ m['content'] | trim }}{% if not loop.last %}{% continue %}{% endif %}!{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }} {{ messages | tojson }} {{ messages | tojson(indent=2) }}",
    "{% if tools is not none and tools %}T{% endif %}{% generation %}\n  x\n{% endgeneration %}"
    "{{ messages[-1]['content'].split('</think>')[-1].lstrip('\n') }}{{ dict(a=1) }}",
    "{%- macro say(m) -%}\n <{{ m.content }}>\n{%- endmacro -%}{{ say(messages[0]) }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path / "m", template=template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [
        {"role": "user", "content": " he <b> 'é' 😀\n"},
        {"role": "assistant", "content": "<think>hm</think>\n\nll"},
        {"role": "user", "content": "he said"},
    ]
    ours = load_tokenizer(folder)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == expected
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert ours.encode_chat(messages) == expected


def stream(tokenizer, ids):
    decoder = tokenizer.stream_decoder()
    return [*(decoder.push(index) for index in ids), decoder.flush()]


def test_stream_holds_back_parts_of_a_character(tokenizer):
    ids = tokenizer.encode("a😀é!")
    assert len(ids) == 1 + 4 + 2 + 1
    assert stream(tokenizer, ids) == ["a", "", "", "", "😀", "", "é", "!", ""]


def test_stream_of_an_incomplete_character(tokenizer):
    ids = tokenizer.encode("a😀")[:-1]
    pieces = stream(tokenizer, ids)
    assert pieces == ["a", "", "", "", "\ufffd"]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_stream_shows_what_stands_before_an_incomplete_character(tokenizer):
    start, *_ = tokenizer.encode("😀")
    assert stream(tokenizer, [*tokenizer.encode("he"), start, *tokenizer.encode("ll")]) == [
        "he",
        "",
        "\ufffdll",
        "",
    ]


def test_stream_skips_special_tokens(tokenizer):
    assert stream(tokenizer, [1, *tokenizer.encode("he"), 2]) == ["", "he", "", ""]


@pytest.mark.parametrize("seed", range(5))
def test_stream_of_arbitrary_tokens_is_decode(tokenizer, seed):
    rng = random.Random(seed)
    text = tokenizer.encode("naïve 日本語 😀👩‍👩‍👧 \ufffd he ll")
    for _ in range(100):
        ids = [rng.randrange(262) if rng.random() < 0.5 else rng.choice(text) for _ in range(30)]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_stream_with_sentence_piece_like_decoding(tmp_path):
    """A leading space is dropped at the start of the text only, and bytes spell a character."""
    folder = write_folder(tmp_path / "m")
    tokens = ["<s>", "▁he", "ll", "▁", "<0xC3>", "<0xA9>"]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    ids = [0, 3, 1, 2, 0, 1, 4, 5, 3, 3, 1, 4]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == " hell heé   he\ufffd"
    assert pieces[6:8] == ["", "é"]


def test_ids_that_end_an_answer(folder):
    assert eos_token_ids(folder) == (2,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert eos_token_ids(folder) == (0,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert eos_token_ids(folder) == (2, 0)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "two"}))
    with pytest.raises(FormatError, match="eos_token_id"):
        eos_token_ids(folder)


def test_no_ids_that_end_an_answer(tmp_path):
    assert eos_token_ids(tmp_path) == ()


def test_missing_and_broken_files(tmp_path, folder):
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(FormatError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


def test_limits_of_the_training_do_not_cut_a_prompt(folder):
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("x" * 50)) == 50
    assert len(tokenizer.encode("x")) == 1


def test_special_tokens_that_only_the_configuration_names(tmp_path):
    folder = write_folder(tmp_path / "m", eos_token="he")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("all he")) == "all "
    assert eos_token_ids(folder) == (259,)


def test_loading_does_not_import_transformers(folder):
    code = (
        "import sys; from eagle_jax.text import load_tokenizer; from pathlib import Path; "
        f"load_tokenizer(Path({str(folder)!r})).encode_chat('he'); "
        "print('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
