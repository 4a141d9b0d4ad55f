"""The stages of training, in order; each can be run alone and is restartable."""

from __future__ import annotations

from train.stages.head import evaluate, export, fit_head
from train.stages.text import answers, check, features, prompts

STAGES = {
    "prompts": prompts,
    "answers": answers,
    "check": check,
    "features": features,
    "fit": fit_head,
    "evaluate": evaluate,
    "export": export,
}
