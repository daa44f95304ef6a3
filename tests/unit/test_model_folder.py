"""What a model folder says is read exactly, in old and new formats, or the model is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_server.engines.model_folder import (
    DenseSpec,
    LayerNormSpec,
    ModelRefusedError,
    NormalizeSpec,
    read_model_folder,
)

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules."


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


def entries(*modules: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"idx": index, "name": str(index), "path": path, "type": module_type}
        for index, (module_type, path) in enumerate(modules)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT in the old format: mean pooling, a Dense, a layer norm, normalised."""
    write(tmp_path / "config.json", {"model_type": "bert", "hidden_size": 8})
    touch(tmp_path / "model.safetensors")
    write(
        tmp_path / "modules.json",
        entries(
            (OLD + "Transformer", ""),
            (OLD + "Pooling", "1_Pooling"),
            (OLD + "Dense", "2_Dense"),
            (OLD + "LayerNorm", "3_LayerNorm"),
            (OLD + "Normalize", "4_Normalize"),
        ),
    )
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": True})
    write(
        tmp_path / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": 8,
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    write(
        tmp_path / "2_Dense" / "config.json",
        {
            "in_features": 16,
            "out_features": 4,
            "bias": False,
            "activation_function": "torch.nn.modules.activation.GELU",
        },
    )
    touch(tmp_path / "2_Dense" / "model.safetensors")
    write(tmp_path / "3_LayerNorm" / "config.json", {"dimension": 4})
    touch(tmp_path / "3_LayerNorm" / "model.safetensors")
    return tmp_path


def test_old_format(folder: Path) -> None:
    model = read_model_folder(folder)
    assert model.transformer.path == folder
    assert model.transformer.max_seq_length == 256
    assert model.transformer.do_lower_case
    assert model.pooling.modes == ("cls", "mean")
    assert model.pooling.include_prompt
    assert model.pooling.dimension == 8
    assert model.tail == (
        DenseSpec(
            path=folder / "2_Dense", in_features=16, out_features=4, bias=False, activation="GELU"
        ),
        LayerNormSpec(path=folder / "3_LayerNorm", dimension=4),
        NormalizeSpec(),
    )
    assert (model.prompts, model.default_prompt_name, model.truncate_dim) == ({}, None, None)


def test_new_format(folder: Path) -> None:
    write(
        folder / "modules.json",
        entries(
            ("sentence_transformers.base.modules.transformer.Transformer", ""),
            (NEW + "pooling.Pooling", "1_Pooling"),
            ("sentence_transformers.base.modules.dense.Dense", "2_Dense"),
            ("sentence_transformers.base.modules.normalize.Normalize", "3_Normalize"),
        ),
    )
    write(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "last_hidden_state"}
            },
            "module_output_name": "token_embeddings",
            "unpad_inputs": False,
        },
    )
    write(
        folder / "1_Pooling" / "config.json",
        {
            "embedding_dimension": 8,
            "pooling_mode": ["weightedmean", "lasttoken"],
            "include_prompt": False,
        },
    )
    write(
        folder / "2_Dense" / "config.json",
        {
            "in_features": 16,
            "out_features": 16,
            "bias": True,
            "activation_function": "torch.nn.modules.linear.Identity",
            "module_input_name": "sentence_embedding",
            "module_output_name": "sentence_embedding",
            "use_residual": True,
        },
    )
    write(
        folder / "3_Normalize" / "config.json",
        {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"},
    )
    model = read_model_folder(folder)
    assert model.transformer.max_seq_length is None
    assert model.pooling.modes == ("weightedmean", "lasttoken")
    assert not model.pooling.include_prompt
    dense, normalize = model.tail
    assert isinstance(dense, DenseSpec)
    assert (dense.activation, dense.use_residual) == ("Identity", True)
    assert normalize == NormalizeSpec()


def test_one_mode_as_a_string(folder: Path) -> None:
    write(
        folder / "1_Pooling" / "config.json",
        {"embedding_dimension": 8, "pooling_mode": "weightedmean", "pooling_mode_cls_token": True},
    )
    assert read_model_folder(folder).pooling.modes == ("weightedmean",)


def test_prompts_and_declared_dimensions(folder: Path) -> None:
    write(
        folder / "config_sentence_transformers.json",
        {
            "__version__": {"sentence_transformers": "6.2.0"},
            "model_type": "SentenceTransformer",
            "prompts": {"query": "query: ", "document": "", "unset": None},
            "default_prompt_name": "query",
            "similarity_fn_name": "cosine",
            "truncate_dim": 3,
        },
    )
    write(folder / "config.json", {"model_type": "bert", "matryoshka_dimensions": [4, 2, 4]})
    model = read_model_folder(folder)
    assert model.prompts == {"query": "query: ", "document": ""}
    assert model.default_prompt_name == "query"
    assert model.truncate_dim == 3
    assert model.matryoshka_dimensions == (2, 4)


@pytest.mark.parametrize("name", ["query", "document"])
def test_a_default_prompt_that_needs_no_declaration(folder: Path, name: str) -> None:
    write(
        folder / "config_sentence_transformers.json",
        {"prompts": {"other": "other: "}, "default_prompt_name": name},
    )
    assert read_model_folder(folder).default_prompt_name == name


def test_an_old_folder_with_its_transformer_below(folder: Path) -> None:
    inner = folder / "0_Transformer"
    for name in ("config.json", "model.safetensors"):
        inner.mkdir(exist_ok=True)
        (folder / name).rename(inner / name)
    (folder / "sentence_bert_config.json").unlink()
    write(inner / "sentence_roberta_config.json", {"max_seq_length": 99})
    modules = entries((OLD + "Transformer", "0_Transformer"), (OLD + "Pooling", "1_Pooling"))
    write(folder / "modules.json", modules)
    model = read_model_folder(folder)
    assert model.transformer.path == inner
    assert model.transformer.max_seq_length == 99


def test_without_modules_the_pooling_must_be_said(folder: Path) -> None:
    (folder / "modules.json").unlink()
    with pytest.raises(ModelRefusedError, match=r"no modules\.json.* set MODEL_SERVER_POOLING to"):
        read_model_folder(folder)
    model = read_model_folder(folder, pooling="cls, max")
    assert model.pooling.modes == ("cls", "max")
    assert model.tail == ()
    with pytest.raises(ModelRefusedError, match="unknown pooling mode 'median'"):
        read_model_folder(folder, pooling="median")


def test_the_pooling_option_may_not_contradict_the_model(folder: Path) -> None:
    assert read_model_folder(folder, pooling="cls,mean").pooling.modes == ("cls", "mean")
    with pytest.raises(ModelRefusedError, match="model itself declares cls,mean"):
        read_model_folder(folder, pooling="mean")


Refusal = tuple[str, Any, str]
"""File, keys to merge into it (or a whole list), what the refusal must name."""

REFUSALS: list[Refusal] = [
    ("config.json", {"auto_map": {"AutoModel": "own.Model"}}, r"config\.json: auto_map"),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.T", None]}}, "auto_map"),
    ("config.json", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("config.json", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    ("config.json", {"matryoshka_dimensions": [0]}, "matryoshka_dimensions"),
    ("adapter_config.json", {}, "adapter"),
    ("sentence_bert_config.json", {"surprise": 1}, r"sentence_bert_config\.json: .* surprise"),
    ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length"),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task"),
    ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "modality_config"),
    ("sentence_bert_config.json", {"query_length": 32}, "query_length"),
    ("sentence_bert_config.json", {"model_args": {"dtype": "float16"}}, "model_args"),
    ("1_Pooling/config.json", {"surprise": 1}, r"1_Pooling/config\.json: .* surprise"),
    ("1_Pooling/config.json", {"pooling_mode": "median"}, "median"),
    ("1_Pooling/config.json", {"pooling_mode": []}, "no pooling mode"),
    ("1_Pooling/config.json", {"pooling_mode": 3}, "pooling_mode = 3"),
    ("1_Pooling/config.json", {"include_prompt": "no"}, "include_prompt"),
    ("2_Dense/config.json", {"surprise": 1}, "surprise"),
    ("2_Dense/config.json", {"activation_function": "own.Tanh"}, r"own\.Tanh"),
    ("2_Dense/config.json", {"activation_function": "torch.nn.Softmax"}, "Softmax"),
    ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "token_embeddings"),
    ("2_Dense/config.json", {"in_features": 0}, "in_features"),
    ("3_LayerNorm/config.json", {"eps": 1e-3}, "eps"),
    ("4_Normalize/config.json", {"module_output_name": "elsewhere"}, "elsewhere"),
    ("4_Normalize/config.json", {"p": 1}, "unknown key p"),
    ("config_sentence_transformers.json", {"surprise": 1}, "surprise"),
    ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
    ("config_sentence_transformers.json", {"default_prompt_name": "other"}, "default_prompt_name"),
    ("config_sentence_transformers.json", {"prompts": {"query": 3}}, "prompts"),
    ("modules.json", entries((OLD + "Transformer", "")), "Pooling"),
    ("modules.json", entries((OLD + "Pooling", "1_Pooling")), "Pooling at position 0"),
    (
        "modules.json",
        entries((OLD + "Transformer", ""), (OLD + "Normalize", "4_Normalize")),
        "Normalize at position 1",
    ),
    (
        "modules.json",
        entries((OLD + "Transformer", ""), (OLD + "Pooling", "1_Pooling"), (OLD + "CNN", "2_CNN")),
        r"models\.CNN",
    ),
    ("modules.json", entries(("custom_st.Transformer", "")), "code of the model's own"),
    ("modules.json", entries((OLD + "Transformer", "../elsewhere")), "out of the model folder"),
    ("modules.json", [{"type": OLD + "Transformer", "path": "", "extra": 1}], "extra"),
    ("modules.json", [{"type": OLD + "Transformer", "path": "", "kwargs": ["task"]}], "kwargs"),
    ("modules.json", ["Transformer"], "not a list of modules"),
]


@pytest.mark.parametrize(("name", "change", "named"), REFUSALS)
def test_whatever_is_not_known_is_refused_by_name(
    folder: Path, name: str, change: Any, named: str
) -> None:
    path = folder / name
    if isinstance(change, dict):
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        change = before | change
    write(path, change)
    with pytest.raises(ModelRefusedError, match=named):
        read_model_folder(folder)


def test_pickles_alone_are_refused(folder: Path) -> None:
    touch(folder / "pytorch_model.bin")
    read_model_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefusedError, match=r"pytorch_model\.bin is a pickle"):
        read_model_folder(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelRefusedError, match=r"no model\.safetensors"):
        read_model_folder(folder)


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "config.json"])
def test_broken_files_are_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b'{"a": \xff')
    with pytest.raises(ModelRefusedError, match=name.rpartition("/")[2]):
        read_model_folder(folder)


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "2_Dense/config.json", "config.json"])
def test_missing_files_are_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelRefusedError, match=f"missing file.*{name}"):
        read_model_folder(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="nowhere"):
        read_model_folder(tmp_path / "nowhere")
