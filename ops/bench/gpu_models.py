"""Models of known sizes with random weights, made from configurations: nothing is downloaded.

What a pass costs does not depend on what the weights say. Needs torch, transformers and tokenizers
only, like everything that `ops/bench/gpu.sh` runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from model_server.engines.model_folder import (
    ModelFolder,
    NormalizeSpec,
    PoolingSpec,
    TransformerSpec,
)

INPUT_TOKENS_MAX = 512
_WORDS = 1_000
Config = Callable[[], Any]


def bert(**changes: Any) -> Config:
    """An encoder; by default of the size of all-MiniLM-L6-v2."""
    sizes = {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1_536,
        "vocab_size": 30_522,
        "max_position_embeddings": INPUT_TOKENS_MAX,
    }
    return lambda: transformers.BertConfig(**{**sizes, **changes})


def modernbert(**changes: Any) -> Config:
    """An encoder with sliding windows; by default of the size of ModernBERT-base."""
    sizes = {
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1_152,
        "vocab_size": 50_368,
        "local_attention": 32,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "sep_token_id": 2,
    }
    return lambda: transformers.ModernBertConfig(**{**sizes, **changes})


def qwen3(hidden: int, layers: int, heads: int, intermediate: int, **changes: Any) -> Config:
    """A decoder with grouped queries, as embedding models of 0.6B and more are."""
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, min(8, heads // 2)),
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": 151_669,
        "max_position_embeddings": 32_768,
    }
    return lambda: transformers.Qwen3Config(**{**sizes, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model to measure."""

    name: str
    config: Config
    dtypes: tuple[str, ...]


SIZES = (
    Size(name="minilm-sized", config=bert(), dtypes=("bfloat16", "float32")),
    Size(name="0.6b", config=qwen3(1_024, 28, 16, 3_072), dtypes=("bfloat16",)),
    Size(name="4b", config=qwen3(2_560, 36, 32, 9_728), dtypes=("bfloat16",)),
    Size(name="7b", config=qwen3(4_096, 33, 32, 12_288), dtypes=("bfloat16",)),
)
"""The decoders are of Qwen3's family; the last has 6.4 billion weights in its layers."""

_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMOKE_SIZES = (
    Size(
        name="encoder",
        config=bert(**_SMALL, intermediate_size=128, vocab_size=_WORDS),
        dtypes=("bfloat16", "float32"),
    ),
    Size(
        name="decoder",
        config=qwen3(64, 2, 2, 128, head_dim=32, vocab_size=_WORDS),
        dtypes=("bfloat16",),
    ),
)

ARCHITECTURES = {
    "bert": bert(),
    "modernbert": modernbert(num_hidden_layers=6),
    "qwen3": qwen3(512, 6, 8, 1_536, head_dim=64, vocab_size=30_000),
}
"""For correctness: both ways, with windows, and causal with grouped queries."""
SMOKE_ARCHITECTURES = {
    "bert": bert(**_SMALL, intermediate_size=128, vocab_size=_WORDS),
    "modernbert": modernbert(**_SMALL, intermediate_size=96, vocab_size=_WORDS),
    "qwen3": qwen3(64, 2, 2, 128, head_dim=32, vocab_size=_WORDS),
}


def save_model(config: Config, folder: Path) -> None:
    """Weights, a tokenizer of plain words, mean pooling, normalisation: as a server loads them."""
    torch.manual_seed(7)
    made = config()
    transformers.AutoModel.from_config(made).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": INPUT_TOKENS_MAX, "do_lower_case": False})
    )
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {
            "idx": 2,
            "name": "2",
            "path": "2_Normalize",
            "type": "sentence_transformers.models.Normalize",
        },
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": made.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def _tokenizer() -> Any:
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3}
    vocabulary |= {f"w{number}": number for number in range(4, _WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_max_length=INPUT_TOKENS_MAX,
    )


def random_transformer(config: Config, device: torch.device, dtype: str, attention: str) -> Any:
    """A transformer made on the device: for billions of weights the only quick way."""
    torch.manual_seed(7)
    made = config()
    if hasattr(made, "use_cache"):
        made.use_cache = False
    with torch.device(device):
        model = transformers.AutoModel.from_config(
            made, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    if hasattr(model, "pooler"):
        model.pooler = None
    return model.eval()


def folder_in_memory() -> ModelFolder:
    """What a folder of such a model would say."""
    return ModelFolder(
        path=Path(),
        transformer=TransformerSpec(path=Path(), max_seq_length=INPUT_TOKENS_MAX),
        pooling=PoolingSpec(modes=("mean",)),
        tail=(NormalizeSpec(),),
        prompts={},
    )
