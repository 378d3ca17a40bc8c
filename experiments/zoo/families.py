"""One small model for each family, from its configuration and seeds; nothing is downloaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, LENGTH, WORDS = 4, 6, 23
Inputs = dict[str, Tensor]
Losses = Callable[[Any, Inputs], Tensor]  # (outputs, inputs) -> (B,)


@dataclass(frozen=True)
class Family:
    """A model, batches for it, and the loss of each sample."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]  # of a seed
    losses: Losses
    copies: bool = False  # samples mix: rows are derivatives by own copies of the weights
    remedy: Mapping[str, Any] = field(default_factory=dict)  # settings to record with, where it is refused


def generator(seed: int) -> torch.Generator:
    """Of its own."""
    return torch.Generator().manual_seed(seed)


def tokens(seed: int, length: int = LENGTH, low: int = 3) -> Tensor:
    """(B, S) without special tokens."""
    return torch.randint(low, WORDS, (SAMPLES, length), generator=generator(seed))


def text(seed: int) -> Inputs:
    """Sequences with padding at the end."""
    ids, mask = tokens(seed), torch.ones(SAMPLES, LENGTH, dtype=torch.long)
    mask[1, LENGTH - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def square_text(seed: int) -> Inputs:
    """As many tokens as samples."""
    return {"input_ids": tokens(seed, SAMPLES)}


def pairs(seed: int) -> Inputs:
    """For encoder and decoder."""
    return {**text(seed), "decoder_input_ids": tokens(seed + 1, LENGTH - 1)}


def square_pairs(seed: int) -> Inputs:
    """As many tokens as samples, on both sides."""
    return {**square_text(seed), "decoder_input_ids": tokens(seed + 1, SAMPLES)}


def images(seed: int, size: int = 16) -> Inputs:
    """Of three colours."""
    return {"pixel_values": torch.randn(SAMPLES, 3, size, size, generator=generator(seed), dtype=torch.float64)}


def floats(*shape: int, name: str = "x") -> Callable[[int], Inputs]:
    """Random numbers of this shape for each sample."""
    return lambda seed: {name: torch.randn(SAMPLES, *shape, generator=generator(seed), dtype=torch.float64)}


def labels(outputs: Any, inputs: Inputs) -> Tensor:
    """Cross-entropy of one label for each sample."""
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[-1], reduction="none")


def next_tokens(outputs: Any, inputs: Inputs) -> Tensor:
    """Mean over a sample's tokens."""
    logits, ids = outputs.logits, inputs.get("decoder_input_ids", inputs.get("input_ids"))
    assert ids is not None
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def squares(outputs: Any, inputs: Inputs) -> Tensor:
    """Of any outputs."""
    out: Tensor = outputs if isinstance(outputs, Tensor) else next(iter(outputs.values()))
    return (out - 1).square().flatten(1).mean(1)


def pair_distance(outputs: Any, inputs: Inputs) -> Tensor:
    """Of the embeddings of each image and its own text: samples do not meet."""
    distance: Tensor = (outputs.image_embeds - outputs.text_embeds).square().sum(1)
    return distance


SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 16,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
VISION: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 16,
}  # fmt: skip
WAVES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "conv_dim": (6, 6),
    "conv_kernel": (6, 3), "conv_stride": (3, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_length": 2, "mask_time_prob": 0.3, "classifier_proj_size": 6,
}  # fmt: skip


def hugging(kind: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A model of `transformers` by the names of its classes."""

    def make() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        return model

    return make


def encoders() -> dict[str, Family]:
    """That classify texts."""
    of = {
        "BERT": ("Bert", SMALL),
        "RoBERTa": ("Roberta", {**SMALL, "pad_token_id": 1}),
        "DistilBERT": ("DistilBert", {"vocab_size": WORDS, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12}),
        "ModernBERT": ("ModernBert", {**SMALL, "pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 4}),
        "DeBERTa-v2": (
            "DebertaV2",
            {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        ),
        "ALBERT": ("Albert", {**SMALL, "embedding_size": 6}),
        "ELECTRA": ("Electra", {**SMALL, "embedding_size": 6}),
    }  # fmt: skip
    return {
        name: Family(hugging(f"{kind}ForSequenceClassification", f"{kind}Config", **sizes), text, labels)
        for name, (kind, sizes) in of.items()
    }


def decoders() -> dict[str, Family]:
    """That predict the next token."""
    grouped = {**SMALL, "num_key_value_heads": 1}
    of = {
        "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": WORDS, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}),
        "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
        "OPT": ("OPTForCausalLM", "OPTConfig", {**SMALL, "ffn_dim": 12, "word_embed_proj_dim": 8}),
        "BLOOM": ("BloomForCausalLM", "BloomConfig", {"vocab_size": WORDS, "hidden_size": 8, "n_layer": 2, "n_head": 2}),
        "Falcon": ("FalconForCausalLM", "FalconConfig", SMALL),
        "Llama": ("LlamaForCausalLM", "LlamaConfig", grouped),
        "Mistral": ("MistralForCausalLM", "MistralConfig", grouped),
        "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", grouped),
        "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**grouped, "head_dim": 4}),
        "Mixtral": ("MixtralForCausalLM", "MixtralConfig", ROUTED),
        "Qwen2-MoE": (
            "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
            {**grouped, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "experts_implementation": "eager"},
        ),
    }  # fmt: skip
    return {
        name: Family(hugging(kind, config, **sizes), text, next_tokens) for name, (kind, config, sizes) in of.items()
    }


def both() -> dict[str, Family]:
    """Encoders with decoders, and two towers."""
    t5, bart = (
        hugging("T5ForConditionalGeneration", "T5Config", **T5),
        hugging("BartForConditionalGeneration", "BartConfig", **BART),
    )
    clip = {"text_config": {**SMALL, "eos_token_id": WORDS - 1}, "vision_config": VISION, "projection_dim": 6}
    return {
        "T5": Family(t5, pairs, next_tokens),
        "T5, batch = length": Family(t5, square_pairs, next_tokens),
        "BART": Family(bart, pairs, next_tokens),
        "CLIP": Family(hugging("CLIPModel", "CLIPConfig", **clip), lambda seed: {**text(seed), **images(seed)}, pair_distance),
    }  # fmt: skip


def vision() -> dict[str, Family]:
    """That classify images."""
    swin = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4}
    residual = {"embedding_size": 6, "hidden_sizes": (6, 8), "depths": (1, 1), "layer_type": "basic"}
    of = {
        "ViT": ("ViTForImageClassification", "ViTConfig", VISION),
        "DeiT": ("DeiTForImageClassification", "DeiTConfig", VISION),
        "BEiT": ("BeitForImageClassification", "BeitConfig", {**VISION, "use_relative_position_bias": True, "layer_scale_init_value": 0.3}),
        "DINOv2": ("Dinov2ForImageClassification", "Dinov2Config", {**VISION, "mlp_ratio": 2}),
        "Swin": ("SwinForImageClassification", "SwinConfig", swin),
        "ConvNeXt": ("ConvNextForImageClassification", "ConvNextConfig", {"hidden_sizes": (6, 8), "depths": (1, 1), "num_stages": 2, "image_size": 16}),
        "ResNet": ("ResNetForImageClassification", "ResNetConfig", residual),
    }  # fmt: skip
    made = {
        name: Family(hugging(kind, config, **sizes), images, labels, copies=name == "ResNet")
        for name, (kind, config, sizes) in of.items()
    }
    made["ConvNeXt"] = Family(made["ConvNeXt"].make, lambda seed: images(seed, 32), labels)
    return made


def speech() -> dict[str, Family]:
    """That hear."""
    whisper = {
        "vocab_size": WORDS, "d_model": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "num_mel_bins": 5, "max_source_positions": 8, "max_target_positions": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip

    def heard(seed: int) -> Inputs:
        return {**floats(5, 16, name="input_features")(seed), "decoder_input_ids": tokens(seed)}

    return {
        "Whisper": Family(hugging("WhisperForConditionalGeneration", "WhisperConfig", **whisper), heard, next_tokens),
        "wav2vec 2.0": Family(
            hugging("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **WAVES),
            floats(90, name="input_values"),
            labels,
        ),
    }


def families() -> dict[str, Family]:
    """All of them."""
    from .plain import plain

    return encoders() | decoders() | both() | vision() | speech() | plain()
