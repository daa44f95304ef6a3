"""What a model folder in the sentence-transformers layout says, as frozen values.

Owns the reading of `modules.json` and of every configuration file that decides a vector, in the old
file formats and in those of sentence-transformers 6. Invariant: whatever this module does not know
how to honour exactly (a module, a key, a value, code of the model's own, pickled weights) refuses
the whole model with its name; nothing is guessed or ignored. It reads JSON only: no weights, no
torch, no network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

POOLING_MODES: Final = (
    "cls",
    "max",
    "mean",
    "mean_sqrt_len_tokens",
    "weightedmean",
    "lasttoken",
)
_POOLING_SETTING: Final = "MODEL_SERVER_POOLING"

_POOLING_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Old format, in the order in which sentence-transformers concatenates them."""

ACTIVATIONS: Final = frozenset(
    {
        "CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU",
        "LogSigmoid", "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign",
        "Tanh", "Tanhshrink",
    }
)  # fmt: skip
"""Classes of torch.nn without parameters of their own that act on each number by itself."""

_TRANSFORMER_CONFIG_NAMES: Final = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""In sentence-transformers' order of looking for them; the first that is not empty counts."""

_TEXT_ONLY: Final = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SENTENCE: Final = "sentence_embedding"
_UNDECLARED_PROMPTS: Final = ("query", "document")
"""Every SentenceTransformer has them, empty unless its folder says otherwise."""


class ModelRefusedError(Exception):
    """This model can't be served exactly as sentence-transformers would; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSpec:
    """The Transformer module: where its weights and tokenizer lie, and how text enters it."""

    path: Path
    max_seq_length: int | None = None
    do_lower_case: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """How token vectors become one; several modes are concatenated in order."""

    modes: tuple[str, ...]
    include_prompt: bool = True
    dimension: int | None = None
    """Of the token vectors, where the model declares it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A linear layer and an activation function, a class name of `torch.nn`."""

    path: Path
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"
    use_residual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormSpec:
    """A layer norm with weights."""

    path: Path
    dimension: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizeSpec:
    """Division by the euclidean norm."""


TailSpec = DenseSpec | LayerNormSpec | NormalizeSpec
"""What may follow the pooling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A whole model folder, checked."""

    path: Path
    transformer: TransformerSpec
    pooling: PoolingSpec
    tail: tuple[TailSpec, ...] = ()
    prompts: Mapping[str, str]
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    """Every vector is cut to this, as sentence-transformers' `encode` does by the model's wish."""
    matryoshka_dimensions: tuple[int, ...] = ()


def read_model_folder(path: str | Path, pooling: str | None = None) -> ModelFolder:
    """Read and check a model folder.

    `pooling` is a mode, or several with commas; required where the folder has no `modules.json`,
    and refused where it contradicts what the model declares.

    Raises:
        ModelRefusedError: something in the folder is missing or not known to be served exactly.
    """
    root = Path(path)
    if not root.is_dir():
        raise ModelRefusedError(f"no such model folder: {root}")
    asked = _pooling_modes(pooling.split(","), _POOLING_SETTING) if pooling else None
    if (root / "modules.json").is_file():
        transformer, declared, tail = _read_modules(root)
        if asked is not None and asked != declared.modes:
            raise ModelRefusedError(
                f"{_POOLING_SETTING} says {','.join(asked)} but the model itself declares "
                f"{','.join(declared.modes)}: leave the setting out"
            )
    elif asked is None:
        raise ModelRefusedError(
            f"{root} has no modules.json, so its pooling is unknown: set {_POOLING_SETTING} to one "
            f"of {', '.join(POOLING_MODES)}, as the model's authors say"
        )
    else:
        transformer, declared, tail = _read_transformer(root), PoolingSpec(modes=asked), ()
    config = _check_transformer_files(transformer.path)
    prompts, default_prompt_name, truncate_dim = _read_sentence_transformers_config(root)
    return ModelFolder(
        path=root,
        transformer=transformer,
        pooling=declared,
        tail=tail,
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        truncate_dim=truncate_dim,
        matryoshka_dimensions=_matryoshka_dimensions(config),
    )


def _read_modules(root: Path) -> tuple[TransformerSpec, PoolingSpec, tuple[TailSpec, ...]]:
    entries = _read_json(root / "modules.json")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ModelRefusedError("modules.json is not a list of modules")
    transformer: TransformerSpec | None = None
    pooling: PoolingSpec | None = None
    tail: list[TailSpec] = []
    for position, entry in enumerate(entries):
        kind, folder = _module_entry(root, entry)
        if (kind == "Transformer") != (position == 0) or (kind == "Pooling") != (position == 1):
            raise ModelRefusedError(
                f"modules.json: {kind} at position {position}; served are a Transformer, then a "
                "Pooling, then any of Dense, LayerNorm and Normalize"
            )
        if kind == "Transformer":
            transformer = _read_transformer(folder)
        elif kind == "Pooling":
            pooling = _read_pooling(folder)
        else:
            tail.append(_TAIL_READERS[kind](folder))
    if transformer is None or pooling is None:
        raise ModelRefusedError("modules.json lacks a Transformer followed by a Pooling module")
    return transformer, pooling, tuple(tail)


def _module_entry(root: Path, entry: Mapping[str, Any]) -> tuple[str, Path]:
    _refuse_unknown("modules.json", entry, {"idx", "name", "path", "type", "kwargs"})
    if entry.get("kwargs"):
        raise ModelRefusedError(f"modules.json: unknown kwargs {entry['kwargs']!r} of a module")
    module_type, relative = entry.get("type"), entry.get("path", "")
    if not isinstance(module_type, str) or not isinstance(relative, str):
        raise ModelRefusedError(f"modules.json: a module without type or path: {entry!r}")
    package, _, kind = module_type.rpartition(".")
    if package.partition(".")[0] != "sentence_transformers":
        raise ModelRefusedError(f"modules.json: {module_type} is code of the model's own")
    if kind not in {"Transformer", "Pooling", *_TAIL_READERS}:
        raise ModelRefusedError(f"modules.json: unknown module {module_type}")
    folder = root / relative
    if not folder.resolve().is_relative_to(root.resolve()):
        raise ModelRefusedError(f"modules.json: path {relative!r} leads out of the model folder")
    return kind, folder


def _read_transformer(folder: Path) -> TransformerSpec:
    name, config = _TRANSFORMER_CONFIG_NAMES[0], {}
    for candidate in _TRANSFORMER_CONFIG_NAMES:
        if (folder / candidate).is_file():
            name, config = candidate, _read_object(folder / candidate)
            if config:
                break
    _refuse_unknown(
        name,
        config,
        {
            "max_seq_length", "do_lower_case", "model_args", "tokenizer_args", "config_args",
            "model_kwargs", "processor_kwargs", "config_kwargs", "transformer_task",
            "modality_config", "module_output_name", "processing_kwargs", "unpad_inputs",
            "query_length", "document_length", "query_expansion",
        },
    )  # fmt: skip
    # unpad_inputs changes how sentence-transformers computes, not what: any value is served.
    fixed = {
        "transformer_task": "feature-extraction",
        "modality_config": _TEXT_ONLY,
        "module_output_name": "token_embeddings",
    }
    for key in (*_EMPTY_TRANSFORMER_KEYS, *fixed):
        if config.get(key) and config[key] != fixed.get(key):
            raise ModelRefusedError(f"{name}: {key} = {config[key]!r} is not known to be served")
    return TransformerSpec(
        path=folder,
        max_seq_length=_optional_positive(name, config, "max_seq_length"),
        do_lower_case=_bool(name, config, "do_lower_case", default=False),
    )


_EMPTY_TRANSFORMER_KEYS: Final = (
    "model_args",
    "tokenizer_args",
    "config_args",
    "model_kwargs",
    "processor_kwargs",
    "config_kwargs",
    "processing_kwargs",
    "query_length",
    "document_length",
    "query_expansion",
)
"""Keys of which only an empty value is served."""


def _read_pooling(folder: Path) -> PoolingSpec:
    name = f"{folder.name}/config.json"
    config = _read_object(folder / "config.json")
    known = {"word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt"}
    _refuse_unknown(name, config, known | set(_POOLING_FLAGS))
    declared = config.get("pooling_mode")
    if declared is None:
        declared = [
            mode
            for flag, mode in _POOLING_FLAGS.items()
            if _bool(name, config, flag, default=False)
        ]
    elif isinstance(declared, str):
        declared = [declared]
    if not isinstance(declared, list):
        raise ModelRefusedError(f"{name}: pooling_mode = {declared!r}")
    key = "embedding_dimension" if "embedding_dimension" in config else "word_embedding_dimension"
    return PoolingSpec(
        modes=_pooling_modes(declared, name),
        include_prompt=_bool(name, config, "include_prompt", default=True),
        dimension=_optional_positive(name, config, key),
    )


def _pooling_modes(modes: list[Any], where: str) -> tuple[str, ...]:
    stripped = tuple(mode.strip() if isinstance(mode, str) else mode for mode in modes)
    for mode in stripped:
        if mode not in POOLING_MODES:
            raise ModelRefusedError(f"{where}: unknown pooling mode {mode!r}")
    if not stripped:
        raise ModelRefusedError(f"{where}: no pooling mode is chosen")
    return stripped


def _read_dense(folder: Path) -> DenseSpec:
    name = f"{folder.name}/config.json"
    config = _read_object(folder / "config.json")
    _refuse_unknown(
        name,
        config,
        {
            "in_features", "out_features", "bias", "activation_function", "module_input_name",
            "module_output_name", "use_residual",
        },
    )  # fmt: skip
    _refuse_other_features(name, config)
    _require_safetensors(folder)
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    package, _, short = str(activation).rpartition(".")
    if not package.startswith("torch.") or short not in ACTIVATIONS:
        raise ModelRefusedError(f"{name}: unknown activation function {activation!r}")
    return DenseSpec(
        path=folder,
        in_features=_positive(name, config, "in_features"),
        out_features=_positive(name, config, "out_features"),
        bias=_bool(name, config, "bias", default=True),
        activation=short,
        use_residual=_bool(name, config, "use_residual", default=False),
    )


def _read_layer_norm(folder: Path) -> LayerNormSpec:
    name = f"{folder.name}/config.json"
    config = _read_object(folder / "config.json")
    _refuse_unknown(name, config, {"dimension"})
    _require_safetensors(folder)
    return LayerNormSpec(path=folder, dimension=_positive(name, config, "dimension"))


def _read_normalize(folder: Path) -> NormalizeSpec:
    path = folder / "config.json"
    config = _read_object(path) if path.is_file() else {}
    name = f"{folder.name}/config.json"
    _refuse_unknown(name, config, {"module_input_name", "module_output_name"})
    _refuse_other_features(name, config)
    return NormalizeSpec()


_TAIL_READERS: Final[Mapping[str, Callable[[Path], TailSpec]]] = {
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
    "Normalize": _read_normalize,
}


def _refuse_other_features(name: str, config: Mapping[str, Any]) -> None:
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, _SENTENCE):
            raise ModelRefusedError(f"{name}: {key} = {config[key]!r}, served is {_SENTENCE!r}")


def _read_sentence_transformers_config(
    root: Path,
) -> tuple[Mapping[str, str], str | None, int | None]:
    name = "config_sentence_transformers.json"
    if not (root / name).is_file():
        return {}, None, None
    config = _read_object(root / name)
    # similarity_fn_name (once score_function) says how to compare vectors, not how to make them.
    known = {
        "__version__", "prompts", "default_prompt_name", "similarity_fn_name", "score_function",
        "model_type", "truncate_dim",
    }  # fmt: skip
    _refuse_unknown(name, config, known)
    if config.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        raise ModelRefusedError(f"{name}: model_type {config['model_type']!r} makes no such vector")
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(prompt, str) or prompt is None for prompt in prompts.values()
    ):
        raise ModelRefusedError(f"{name}: prompts are not texts by name")
    chosen = config.get("default_prompt_name")
    if chosen is not None and chosen not in {*prompts, *_UNDECLARED_PROMPTS}:
        raise ModelRefusedError(f"{name}: default_prompt_name {chosen!r} is not among the prompts")
    texts = {key: prompt for key, prompt in prompts.items() if prompt is not None}
    return texts, chosen, _optional_positive(name, config, "truncate_dim")


def _check_transformer_files(folder: Path) -> Mapping[str, Any]:
    """The model's `config.json`, after everything that would need code or pickles is refused."""
    config = _read_object(folder / "config.json")
    if (folder / "adapter_config.json").is_file():
        raise ModelRefusedError("adapter_config.json: merge the adapter into its base model first")
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file() and _read_object(folder / name).get("auto_map"):
            raise ModelRefusedError(f"{name}: auto_map asks for code of the model's own")
    for key in ("trust_remote_code", "quantization_config"):
        if config.get(key):
            raise ModelRefusedError(f"config.json: {key} = {config[key]!r} is not served")
    if config.get("is_encoder_decoder"):
        raise ModelRefusedError("config.json: is_encoder_decoder; served are encoders and decoders")
    _require_safetensors(folder)
    return config


def _require_safetensors(folder: Path) -> None:
    names = ("model.safetensors", "model.safetensors.index.json")
    if any((folder / name).is_file() for name in names):
        return
    pickles = [name for name in _PICKLES if (folder / name).is_file()]
    if pickles:
        raise ModelRefusedError(
            f"{folder / pickles[0]} is a pickle, which can run code: convert it to safetensors"
        )
    raise ModelRefusedError(f"no model.safetensors in {folder}")


def _matryoshka_dimensions(config: Mapping[str, Any]) -> tuple[int, ...]:
    """As SGLang and vLLM read them from a model's `config.json`."""
    declared = config.get("matryoshka_dimensions") or []
    if not isinstance(declared, list) or not all(
        isinstance(size, int) and size > 0 for size in declared
    ):
        raise ModelRefusedError(f"config.json: matryoshka_dimensions = {declared!r}")
    return tuple(sorted(set(declared)))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelRefusedError(f"missing file: {path}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelRefusedError(f"unreadable file {path}: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ModelRefusedError(f"{path} is not a JSON object")
    return value


def _refuse_unknown(where: str, config: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(config) - known)
    if unknown:
        raise ModelRefusedError(f"{where}: unknown key {', '.join(unknown)}")


def _bool(where: str, config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelRefusedError(f"{where}: {key} = {value!r} is neither true nor false")
    return value


def _positive(where: str, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelRefusedError(f"{where}: {key} = {value!r} is not a positive number")
    return value


def _optional_positive(where: str, config: Mapping[str, Any], key: str) -> int | None:
    return None if config.get(key) is None else _positive(where, config, key)
