"""Tiny random models of the paper profile's own classes, saved to folders: a dry run of `run faces --profile paper`.

They say and draw nothing of sense. What they prove is that every loader, adapter, prompt and shape of the real run works,
on a laptop, in seconds, without a download.
"""

from pathlib import Path
from typing import Any

import torch

from sysdpo_lab import loading

SPECIAL = ("<|begin|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WIDTH, LONGEST, PIXELS = 8, 77, 16


def write(folder: Path | str, seed: int = 0) -> dict[str, str]:
    """Write language model, pipeline and CLIP into subfolders; the settings of `run faces --profile paper` that name them."""
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]), loading.quiet():
        torch.manual_seed(seed)
        for name, save in (("model", _save_language_model), ("pipeline", _save_pipeline), ("clip", _save_clip)):
            save(folder / name)
    return {"model": str(folder / "model"), "base": str(folder / "pipeline"), "scorer": str(folder / "clip")}


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> Any:
    """One token a byte, with a BOS and a chat template, as Llama-3-Instruct has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate([*SPECIAL, *_alphabet()])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=SPECIAL[0], eos_token=SPECIAL[-1], pad_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL[2:5]),
    )  # fmt: skip
    made.chat_template = CHAT
    return made


def clip_tokenizer() -> Any:
    """CLIP's own class of tokenizer, one token a byte."""
    from transformers import CLIPTokenizer

    letters = _alphabet()
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=LONGEST)


def _clip_text() -> dict[str, int]:
    return {
        "vocab_size": 2 + 2 * len(_alphabet()), "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": LONGEST, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


def _save_language_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=0, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _save_pipeline(folder: Path) -> None:
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    unet = UNet2DConditionModel(
        sample_size=PIXELS // 2, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16),
        norm_num_groups=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=WIDTH, attention_head_dim=4,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(4, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=2, latent_channels=4, sample_size=PIXELS,
    )  # fmt: skip
    schedule = PNDMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, skip_prk_steps=True, steps_offset=1
    )
    text = CLIPTextModel(CLIPTextConfig(**_clip_text()))
    made = StableDiffusionPipeline(
        vae, text, clip_tokenizer(), unet, schedule, None, None, requires_safety_checker=False
    )
    made.save_pretrained(str(folder), safe_serialization=True)


def _save_clip(folder: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    vision = {
        "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": PIXELS,
        "patch_size": 4,
    }  # fmt: skip
    CLIPModel(CLIPConfig(text_config=_clip_text(), vision_config=vision, projection_dim=4)).save_pretrained(str(folder))
    clip_tokenizer().save_pretrained(str(folder))
