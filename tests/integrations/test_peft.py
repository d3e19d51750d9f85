"""peft in either order: adapters stay in high precision by name, and both orders train the same
bits; `import peft` beside a Transformer Engine without kernels.
"""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from small_transformers import STEPS, adamw, framework, layers, llama, loader, same
from torch import nn

import fp4train as f4
from fp4train.integrations import Precision
from fp4train.precision import NVFP4

# peft asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

WHY = "kept in high precision by its name"


def adapted(*, converted_first: bool, **options: Any) -> nn.Module:
    """A Llama with adapters of rank 16 on q_proj and v_proj."""
    peft = framework("peft")
    base = llama(convert=converted_first)
    torch.manual_seed(1)
    model: nn.Module = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options
        ),
    )
    return model if converted_first else f4.convert(model)


def trained(model: nn.Module) -> nn.Module:
    precision = Precision("nvfp4", policy="all")
    precision.attach(model, steps=STEPS)
    optimizer = adamw(model)
    precision.count(optimizer)
    for step, batch in zip(range(3), loader(), strict=False):
        assert precision.step == step
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("converted_first", [True, False])
def test_the_plan_lists_adapters_in_high_precision_with_the_reason(converted_first: bool) -> None:
    rows = list(f4.plan(adapted(converted_first=converted_first), NVFP4()).rows)
    found = {row.layer.name: row for row in rows if "lora_" in row.layer.name}
    assert len(found) == 8 and all(
        WHY in row.why and row.elements == "BF16·BF16" for row in found.values()
    )
    bases = [
        row for row in rows if row.layer.name.endswith("q_proj.base_layer") and row.gemm == "fprop"
    ]
    assert len(bases) == 2 and all(row.elements == "E2M1·E2M1" for row in bases)


def test_both_orders_convert_the_same_layers_and_train_the_same_bits() -> None:
    one, other = (trained(adapted(converted_first=first)) for first in (True, False))
    assert [layer.layer.name for layer in layers(one)] == [
        layer.layer.name for layer in layers(other)
    ]
    assert same(one, other) and not same(one, adapted(converted_first=True))


def test_adapters_are_called_in_high_precision_beside_a_quantised_layer() -> None:
    """The adapters' part of the output has no quantisation error: with the base's weight at zero
    nothing is rounded.
    """
    model = adapted(converted_first=True)
    batch = next(iter(loader()))
    for layer in layers(model):
        nn.init.zeros_(layer.weight)
    with torch.no_grad():
        plain = model(**batch).logits
        with f4.autocast(NVFP4(), step=0):
            assert torch.equal(model(**batch).logits, plain)


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "mxfp8", "fp8_current"])
def test_adapters_that_are_merged_and_taken_out_again_reach_the_next_pass(recipe: str) -> None:
    model: Any = adapted(converted_first=True)
    batch = next(iter(loader()))
    Precision(recipe, policy="all").attach(model, steps=STEPS)
    model(**batch).loss.backward()
    with torch.no_grad():
        seen = [model(**batch).loss]
        for write in (model.merge_adapter, model.unmerge_adapter):
            write()
            seen.append(model(**batch).loss)
            assert seen[-1] == copy.deepcopy(model)(**batch).loss
        with model.disable_adapter():
            assert model(**batch).loss not in seen


@pytest.mark.long
def test_peft_and_the_trainer_import_beside_transformer_engine_without_kernels() -> None:
    """In a process of its own, whose environment stays as it was."""
    check = "assert 'NVTE_PROJECT_BUILDING' not in os.environ"
    program = f"import os, fp4train.integrations, peft; from transformers import Trainer; {check}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", [{"init_lora_weights": False}, {"use_dora": True}])
def test_a_converted_conv1d_is_one_for_peft_which_merges_adapters_into_it(
    options: dict[str, Any],
) -> None:
    """GPT-2's weights are [in, out]: peft transposes what it adds to them."""
    transformers, peft = framework("transformers"), framework("peft")
    shape = {"vocab_size": 128, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 32}
    tokens = torch.arange(32)[None]

    def merged(*, convert: bool) -> Any:
        torch.manual_seed(0)
        config = transformers.GPT2Config(**shape, bos_token_id=1, eos_token_id=2)
        base = transformers.GPT2LMHeadModel(config)
        torch.manual_seed(1)
        names = ["c_attn", "c_proj"]  # one square, one not
        adapters = peft.LoraConfig(r=4, target_modules=names, fan_in_fan_out=True, **options)
        model = peft.get_peft_model(f4.convert(base) if convert else base, adapters)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        return model.merge_and_unload().eval()

    assert torch.equal(merged(convert=True)(tokens).logits, merged(convert=False)(tokens).logits)
