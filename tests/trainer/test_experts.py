"""The router's balancing loss against transformers' own, and experts that other ranks hold."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from windlass.errors import UserError
from windlass.plan.checks import check_objective
from windlass.spec import parse_run
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.fast.head import return_loss
from windlass.trainer.model.experts import Balance, balance_weight
from windlass.trainer.step import return_log_probabilities

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_local_experts": 4}
ALONE = Ranks(0, 1, 0, torch.device("cpu"), None, None)  # type: ignore[arg-type]


def a_mixture() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_hidden_layers=1, num_key_value_heads=2)).train()


def test_the_balancing_loss_is_transformers_own() -> None:
    theirs, ours = a_mixture(), a_mixture()
    tokens, labels = torch.randint(0, 64, (2, 3, 16))
    out = theirs(input_ids=tokens, output_router_logits=True)
    (F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()) + 0.3 * out.aux_loss).backward()

    return_loss(ours, fused=False)
    balance = Balance(ours, 0.3, ALONE)
    loss = ours(tokens, labels, None, 1 / labels.numel())
    loss.backward()
    assert loss.item() == pytest.approx(F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()).item())
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-7, msg=name)
    assert sum(balance.shares()[0]) == pytest.approx(1, abs=1e-3)


def test_tokens_that_do_not_count_are_not_balanced() -> None:
    """Padding and prompts: the same gradient as a batch without them."""
    model = a_mixture()
    tokens, labels = torch.randint(0, 64, (2, 2, 16))
    gradients = []
    for rows in (1, 2):
        copied = copy.deepcopy(model)
        return_loss(copied, fused=False)
        Balance(copied, 0.3, ALONE)
        shown = labels[:rows].clone()
        shown[1:] = -100
        copied(tokens[:rows], shown, None, 1 / 16).backward()
        gradients.append(copied.model.layers[0].mlp.gate.weight.grad)
    torch.testing.assert_close(*gradients)


def test_pairs_of_answers_are_not_balanced() -> None:
    """Their loss is no sum over tokens; the model's forward takes no scale of it."""
    model = a_mixture()
    run = {"model": {"path": "m", "init": "pretrained"}, "data": {"source": "x", "format": "preference"}}
    run["train"] = {"objective": "dpo"}
    return_log_probabilities(model)
    assert Balance.of(model, parse_run(run), ALONE) is None
    tokens, labels = torch.randint(0, 64, (2, 3, 16))
    positions = torch.arange(16).repeat(3, 1)
    assert model(tokens, labels, positions, torch.tensor([0, 16, 32, 48])).shape == (3, 16)
    run["train"]["balance_experts"] = 0.1
    with pytest.raises(UserError, match=r"train\.balance_experts"):
        check_objective(parse_run(run))


def test_a_router_that_is_not_known_is_balanced_by_nobody() -> None:
    model = a_mixture()
    model.model.layers[0].mlp.gate = torch.nn.Linear(32, 4)
    run = {"name": "x", "model": {"preset": "mixtral-tiny"}, "data": {"source": "x"}}
    assert Balance.of(model, parse_run(run), ALONE) is None
    with pytest.raises(UserError, match="cannot be balanced"):
        Balance.of(model, parse_run(run | {"train": {"balance_experts": 0.1}}), ALONE)


def test_weights_that_are_trained_already_are_left_alone() -> None:
    run = {"name": "x", "model": {"preset": "mixtral-8x7b"}, "data": {"source": "x"}}
    config = MixtralConfig(router_aux_loss_coef=0.02)
    assert balance_weight(parse_run(run), config) == 0.02
    assert balance_weight(parse_run(run | {"train": {"balance_experts": 0}}), config) == 0
    pretrained = run | {"model": {"preset": "mixtral-8x7b", "init": "pretrained"}}
    assert balance_weight(parse_run(pretrained), config) == 0
    pretrained["model"]["config"] = {"router_aux_loss_coef": 0.02}
    assert balance_weight(parse_run(pretrained), config) == 0.02, "asked for by name"


def test_a_model_without_experts_is_not_said_to_be_balanced() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_local_experts"}
    dense = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    run = {"model": {"preset": "llama3.2-tiny"}, "data": {"source": "x"}, "train": {"balance_experts": 0.1}}
    with pytest.raises(UserError, match="no experts"):
        Balance.of(dense, parse_run(run), ALONE)
