"""Tiny models of real architectures with random weights, saved as sentence-transformers saves them.

Each builder writes one folder; the weights are drawn with a spread that makes attention matter, so
that a mistake in it shows in the vectors.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

_TEXT = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november "
    "oscar papa quebec romeo sierra tango uniform victor whiskey xray yankee zulu Straße naïve "
    "北京 東京 привет мир שלום مرحبا 1 2 3 42 1999 ! ? , . ' - query: passage: 👍 é"
)
WORDS = _TEXT.split()
MAX_TOKENS = 48
WINDOW = 8
"""Width of the sliding windows: far less than the longest text."""


@functools.cache
def wordpiece(*, lowercase: bool = True) -> Any:
    """A BERT-like tokenizer: [CLS] text [SEP], padding 0."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        _corpus(), trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # What a tokenizer.json may carry along, and what must not count.
    tokenizer.enable_padding(length=40)
    tokenizer.enable_truncation(7)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=MAX_TOKENS,
    )


@functools.cache
def unigram() -> Any:
    """A XLM-RoBERTa-like tokenizer: <s> text </s>, padding 1."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(
        _corpus(),
        trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>"),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=MAX_TOKENS,
    )


@functools.cache
def byte_level(*, end_token: bool = True) -> Any:
    """A decoder's tokenizer: byte-level BPE, text and then an end token, or no special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        _corpus(),
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|end|>", "<|pad|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    if end_token:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|end|>", special_tokens=[("<|end|>", 0)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=MAX_TOKENS,
    )


def _corpus() -> list[str]:
    return [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]


_BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 400,
}


def _config(name: str, **settings: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**(_BASE | settings))


def _decoder(name: str, *, head_dim: int = 8, **settings: Any) -> Any:
    return _config(
        name, num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=64, **settings
    )


ARCHITECTURES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "bert": (lambda: _config("Bert", max_position_embeddings=64), wordpiece),
    "electra": (
        lambda: _config("Electra", max_position_embeddings=64, embedding_size=16),
        wordpiece,
    ),
    "distilbert": (
        lambda: transformers.DistilBertConfig(
            dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=400, max_position_embeddings=64
        ),
        wordpiece,
    ),
    "roberta": (
        lambda: _config("Roberta", max_position_embeddings=MAX_TOKENS + 2, pad_token_id=1),
        unigram,
    ),
    "xlm-roberta": (
        lambda: _config("XLMRoberta", max_position_embeddings=MAX_TOKENS + 2, pad_token_id=1),
        unigram,
    ),
    "xlm-roberta-1-head": (  # of 32: vLLM's kernels for CPUs know no smaller one
        lambda: _config(
            "XLMRoberta",
            num_attention_heads=1,
            max_position_embeddings=MAX_TOKENS + 2,
            pad_token_id=1,
        ),
        unigram,
    ),
    "modernbert": (
        lambda: _config(
            "ModernBert",
            num_hidden_layers=4,
            local_attention=WINDOW,
            global_attn_every_n_layers=3,
            max_position_embeddings=64,
            pad_token_id=0,
            cls_token_id=2,
            sep_token_id=3,
        ),
        wordpiece,
    ),
    "qwen3": (lambda: _decoder("Qwen3"), byte_level),
    "qwen3-heads-of-32": (lambda: _decoder("Qwen3", head_dim=32), byte_level),
    "qwen3-window": (
        lambda: _decoder(
            "Qwen3",
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention"],
        ),
        byte_level,
    ),
    "qwen3-both-ways": (
        lambda: _decoder(
            "Qwen3",
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            is_causal=False,
        ),
        byte_level,
    ),
    "mistral": (lambda: _decoder("Mistral", sliding_window=WINDOW), byte_level),
    "gemma3-both-ways": (
        lambda: transformers.Gemma3TextConfig(
            **_BASE,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            sliding_window=2 * WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            use_bidirectional_attention=True,
            pad_token_id=1,
            eos_token_id=0,
            bos_token_id=0,
        ),
        byte_level,
    ),
}
"""Config and tokenizer by name."""


def save_transformer(path: Path, architecture: str, *, seed: int = 0) -> None:
    """Weights, configuration and tokenizer of one architecture, as transformers saves them."""
    make_config, make_tokenizer = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(make_config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def save_modules(
    path: Path, architecture: str, tail: Sequence[Any], *, settings: dict[str, Any] | None = None
) -> None:
    """A whole model in the format of today's sentence-transformers; `tail` begins with pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    inner = path.parent / f"{path.name}-transformer"
    save_transformer(inner, architecture)
    model = SentenceTransformer(modules=[Transformer(str(inner)), *tail], device="cpu")
    for name, value in (settings or {}).items():
        setattr(model, name, value)
    model.save(str(path), create_model_card=False)
