"""The stages that make training text: prompts, answers, the check of their spans, features."""

from __future__ import annotations

import numpy as np

from eagle_jax.bench.prompts import BenchPrompt, read_prompts
from eagle_jax.decode.measure import target_pass_ms
from eagle_jax.errors import InputError
from eagle_jax.target.load import Target
from train.answers import Question, write_answers
from train.check import check_spans, marked
from train.data import read_answers
from train.datasets import open_dataset, write_dataset_prompts
from train.features import extract
from train.lines import resume
from train.prompts import KEPT, MAX_TOKENS, write_own_prompts
from train.run import Run, given
from train.shelf import read_lines, shards


def prompts(run: Run) -> None:
    """Takes user turns from a data set, or lets the target write them; a file is taken as it is."""
    if run.options.prompts:
        run.say(f"{len(read_prompts(run.options.prompts))} prompts in {run.options.prompts}")
        return
    count = run.options.count
    if run.options.dataset:
        path = run.path("prompts.jsonl")
        if not path.is_file():
            with run.bar("prompts") as bar:
                skipped = write_dataset_prompts(open_dataset(run.options.dataset), path, count, bar)
            run.say(f"{skipped} rows of {run.options.dataset} held no user turns")
        run.say(f"{len(read_prompts(path))} prompts in {path}")
        return
    left = count - len(resume(run.path("prompts.jsonl")))
    if left > 0:
        hours = left / KEPT * MAX_TOKENS / _rate(run, 64) / 3600
        run.say(f"the target writes {left} prompts: up to {hours:.1f} hours")
    with run.bar("prompts") as bar:
        write_own_prompts(run.target, run.path("prompts.jsonl"), count, bar)
    run.say(f"{count} prompts in {run.path('prompts.jsonl')}")


def answers(run: Run) -> None:
    """Lets the target answer the prompts, turn by turn, and records its features."""
    options, target = run.options, run.target
    conversations = read_prompts(options.prompts or run.path("prompts.jsonl"))
    budget, folder = options.max_new_tokens, run.path("answers")
    expected = sum(len(c.turns) for c in conversations) * (budget + 64)
    rate = _rate(run, options.rows)
    hours = expected / rate / 3600
    run.say(
        f"answering {len(conversations)} conversations: up to {expected} tokens at about "
        f"{rate:.0f} a second, {hours:.1f} hours; features take up to "
        f"{expected * run.width * 2 / 2**30:.1f} GiB"
    )
    written: dict[str, list[int]] = {}
    for turn in range(max(len(c.turns) for c in conversations)):
        questions, long = [], 0
        for index, conversation in enumerate(conversations):
            if turn >= len(conversation.turns):
                continue
            if (ids := context_of(target, conversation, turn, written)) is None:
                continue
            if len(ids) > options.max_length - budget:
                long += 1
                continue
            temperature = options.temperatures[index % len(options.temperatures)]
            name = turn_name(conversation, turn)
            questions.append(Question(name, tuple(ids), temperature, seed=index))
        if long:
            run.say(
                f"turn {turn + 1}: {long} prompts left out; with {budget} new tokens they are "
                f"longer than --max-length {options.max_length}"
            )
        if not questions:
            continue
        with run.bar(f"answers, turn {turn + 1}") as bar:
            write_answers(
                target,
                questions,
                folder,
                run.taps if run.cached else None,
                budget,
                lambda done, of, tokens, bar=bar: bar(done, of),
                rows=options.rows,
            )
        written |= {row["id"]: row["out"] for row in read_lines(folder)}


def _rate(run: Run, rows: int) -> float:
    """Tokens a second that a batch of `rows` decodes."""
    return rows / target_pass_ms(run.target, 1, rows) * 1e3


def turn_name(conversation: BenchPrompt, turn: int) -> str:
    """What the answer to a turn is called on the shelf."""
    return conversation.id if turn == 0 else f"{conversation.id}+{turn}"


def context_of(target: Target, conversation, turn: int, written) -> list[int] | None:
    """Token ids up to where the answer to a turn begins; None where an earlier one is missing."""
    messages = []
    for number, text in enumerate(conversation.turns[: turn + 1]):
        messages.append({"role": "user", "content": text})
        if number < turn:
            name = turn_name(conversation, number)
            if name not in written:
                return None
            messages.append(
                {"role": "assistant", "content": target.tokenizer.decode(written[name])}
            )
    if target.tokenizer is None:
        raise InputError("this target has no tokenizer; give --answers as token ids")
    if target.tokenizer.has_chat_template:
        return target.tokenizer.encode_chat(messages)
    return target.tokenizer.encode(conversation.turns[0]) if turn == 0 else None


def check(run: Run) -> None:
    """Shows one conversation with its supervised span; refuses spans that are empty or shifted."""
    options, tokenizer = run.options, run.target.tokenizer
    files = [*(options.answers or ()), *(lines for lines, _ in shards(run.path("answers")))]
    whole = np.iinfo(np.int32).max
    samples = read_answers(files, run.target.config.vocab_size, whole, all=True)
    templated = check_spans(tokenizer, samples)
    if tokenizer is None:
        return
    run.console.print(marked(tokenizer, samples[0]))
    run.say(f"{templated} of {len(samples)} prompts end as the chat template lets them end")
    if tokenizer.has_chat_template and templated < len(samples):
        run.say("WARNING: the others look otherwise than what `generate` will feed the target")


def features(run: Run) -> None:
    """Computes the target's features of answers that were given as files."""
    if not run.cached:
        run.say("features: computed while the head is fitted")
        return
    if not run.options.answers:
        run.say("features: recorded with the answers")
        return
    samples = given(run)
    total = sum(len(sample.tokens) for sample in samples)
    rate = 64 / target_pass_ms(run.target, 64) * 1e3
    run.say(
        f"features of {len(samples)} conversations, {total} tokens: about "
        f"{total / rate / 60:.0f} minutes, {total * run.width * 2 / 2**30:.2f} GiB"
    )
    with run.bar("features") as bar:
        extract(run.target.model, samples, run.path("features"), run.taps, bar)
