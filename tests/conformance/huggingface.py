"""Models of Hugging Face's transformers in tiny configurations with random weights. Nothing is downloaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import transformers
from tests.conformance.ordinary import tokens
from tests.conformance.subject import Subject
from torch import Tensor, nn

logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY, LENGTH = 7, 3
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}


def _net(kind: Any, config: Any) -> nn.Module:
    net: nn.Module = kind(config)
    for p in net.parameters():  # larger than the library's initialisation, which is nearly linear
        if p.ndim > 1:
            nn.init.normal_(p, std=0.5)
    return net.double().eval()


def _text(masked: bool, **more: Any) -> dict[str, Any]:
    """Return tokens, and if `masked` a mask in which only one row has no padding."""
    x: dict[str, Any] = {"input_ids": tokens(3, LENGTH, VOCABULARY - 1) + 1}
    if masked:
        x["attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    return {**x, **more}


def _bert_config(kind: Any, **more: Any) -> Any:
    return kind(**TEXT, intermediate_size=4, max_position_embeddings=8, num_labels=2, type_vocab_size=1, **more)


def bert(masked: bool = False) -> Subject:
    """BertForSequenceClassification."""
    net = _net(transformers.BertForSequenceClassification, _bert_config(transformers.BertConfig))
    return Subject(net, _text(masked), output="logits")


def roberta(masked: bool = False) -> Subject:
    """RobertaForSequenceClassification."""
    config = _bert_config(transformers.RobertaConfig, pad_token_id=0)
    return Subject(_net(transformers.RobertaForSequenceClassification, config), _text(masked), output="logits")


def distilbert(masked: bool = False) -> Subject:
    """The last hidden state of DistilBertModel at the first token."""
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=4, n_layers=1, n_heads=2, hidden_dim=4, max_position_embeddings=8
    )
    net = _net(transformers.DistilBertModel, config)
    return Subject(net, _text(masked), output=lambda o: o.last_hidden_state[:, 0])


def _gpt2_config(**more: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 8, "n_inner": 4}
    return transformers.GPT2Config(**{**sizes, **more})


def gpt2(masked: bool = False) -> Subject:
    """The logits of the last token of GPT2LMHeadModel, without its cache."""
    net = _net(transformers.GPT2LMHeadModel, _gpt2_config())
    return Subject(net, _text(masked, use_cache=False), output=lambda o: o.logits[:, -1, :2])


def gpt2_cached() -> Subject:
    """GPT2LMHeadModel with its cache, as it is by default."""
    net = _net(transformers.GPT2LMHeadModel, _gpt2_config())
    return Subject(net, _text(False), output=lambda o: o.logits[:, -1, :2])


def gpt2_classifier() -> Subject:
    """GPT2ForSequenceClassification, which searches for the last token that is not padding."""
    net = _net(transformers.GPT2ForSequenceClassification, _gpt2_config(num_labels=2, pad_token_id=0))
    ids = torch.tensor([[3, 1, 5], [2, 4, 0], [6, 0, 0]])
    return Subject(net, {"input_ids": ids, "attention_mask": (ids != 0).long(), "use_cache": False}, output="logits")


def gpt2_every_token() -> Subject:
    """The logits of every token of GPT2LMHeadModel, of shape (n, T, V), selected by the name of the field."""
    net = _net(transformers.GPT2LMHeadModel, _gpt2_config(vocab_size=4))
    return Subject(net, {"input_ids": tokens(2, 2, 4), "use_cache": False}, output="logits")


def llama(masked: bool = False) -> Subject:
    """LlamaForCausalLM, with rotary embeddings and with norms that compute in float32."""
    config = transformers.LlamaConfig(**TEXT, intermediate_size=4, max_position_embeddings=8, num_key_value_heads=1)
    net = _net(transformers.LlamaForCausalLM, config)
    return Subject(net, _text(masked, use_cache=False), output=lambda o: o.logits[:, -1, :2])


def mixtral(masked: bool = False, experts: str = "eager") -> Subject:
    """MixtralForCausalLM with three experts, of which each token uses two."""
    config = transformers.MixtralConfig(
        **TEXT, intermediate_size=4, max_position_embeddings=8, num_key_value_heads=1, num_local_experts=3,
        num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = experts
    net = _net(transformers.MixtralForCausalLM, config)
    return Subject(net, _text(masked, use_cache=False), output=lambda o: o.logits[:, -1, :2], reach=0.5)


def mixtral_grouped() -> Subject:
    """MixtralForCausalLM as it is by default, with grouped matrix products, which torch does not have in float64."""
    exact, grouped = mixtral(), mixtral(experts="grouped_mm")
    assert isinstance(exact.net, nn.Module)
    assert isinstance(grouped.net, nn.Module)
    grouped.net.load_state_dict(exact.net.state_dict())
    return replace(grouped, net=grouped.net.float(), plain=exact.net)


def t5(masked: bool = False) -> Subject:
    """T5ForConditionalGeneration, an encoder and decoder whose norms compute in float32."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2, decoder_start_token_id=0,
        relative_attention_num_buckets=4,
    )  # fmt: skip
    net = _net(transformers.T5ForConditionalGeneration, config)
    x = _text(masked, use_cache=False, decoder_input_ids=tokens(3, 2, VOCABULARY, seed=8))
    return Subject(net, x, output=lambda o: o.logits[:, -1, :2])


def vit() -> Subject:
    """ViTForImageClassification."""
    config = transformers.ViTConfig(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=4, image_size=4, patch_size=2,
        num_channels=1, num_labels=2,
    )  # fmt: skip
    net = _net(transformers.ViTForImageClassification, config)
    return Subject(net, {"pixel_values": _pixels()}, output="logits")


def _pixels(channels: int = 1, size: int = 4) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(3, channels, size, size, generator=draw, dtype=torch.float64)


def resnet() -> Subject:
    """ResNetForImageClassification."""
    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=2, hidden_sizes=[2], depths=[1], layer_type="basic", num_labels=2
    )
    net = _net(transformers.ResNetForImageClassification, config)
    return Subject(net, {"pixel_values": _pixels(1, 8)}, output="logits")


def mamba() -> Subject:
    """MambaForCausalLM, a selective state space model that computes in float32 inside."""
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=4, state_size=2, num_hidden_layers=1, conv_kernel=2, expand=1,
        time_step_rank=1,
    )  # fmt: skip
    net = _net(transformers.MambaForCausalLM, config)
    return Subject(net, _text(False, use_cache=False), output=lambda o: o.logits[:, -1, :2])


def lora(masked: bool = False) -> Subject:
    """GPT-2 with LoRA, where only the adapters are trained."""
    import peft

    net = _net(transformers.GPT2LMHeadModel, _gpt2_config())
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(net, config)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:  # it is initialised to zero, where some terms vanish
            nn.init.normal_(p, std=0.2)
    return Subject(adapted.double().eval(), _text(masked, use_cache=False), output=lambda o: o.logits[:, -1, :2])
