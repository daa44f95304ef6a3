"""The torch engine against sentence-transformers itself, on tiny random models of each kind."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    LayerNorm,
    Normalize,
    Pooling,
)

from model_server.engines.base import (
    EngineDiedError,
    EngineOutOfMemoryError,
    Text,
    TextRefused,
    Tokens,
    Vectors,
)
from model_server.engines.golden import cosine
from model_server.engines.model_folder import POOLING_MODES, ModelRefusedError
from model_server.engines.torch_engine import TorchEngine, TorchOptions
from model_server.server.requests import Prompts
from protos.embedding.v1 import query_pb2
from tests.contract.tiny_models import (
    ARCHITECTURES,
    MAX_TOKENS,
    WORDS,
    save_modules,
    save_transformer,
    write_json,
)

pytestmark = pytest.mark.torch
COSINE_MIN = 0.9999
SIZE = 32

_RANDOM = random.Random(11)
TEXTS = [" ".join(_RANDOM.choices(WORDS, k=count)) for count in (1, 1, 2, 2, 5, 9, 13, 20, 29)] + [
    "alpha " * 200,  # cut at the maximum
    "[SEP] <pad> </s> <|end|> literally",
    "a",
]
"""Of all lengths up to the maximum, several longer than the sliding windows."""


def options(path: Path, **chosen: Any) -> TorchOptions:
    """One thread: for such small products, more only wait for each other."""
    return TorchOptions(model_path=path, device="cpu", threads=1, **chosen)


def tokens_of(engine: TorchEngine, texts: list[str], prompt: str = "") -> list[Tokens]:
    answers = engine.tokenize([Text(text=text, prompt=prompt, truncate=True) for text in texts])
    tokens = [answer for answer in answers if isinstance(answer, Tokens)]
    assert len(tokens) == len(texts), answers
    return tokens


def theirs(path: Path, texts: list[str], **how: Any) -> tuple[Vectors, list[list[int]]]:
    """Vectors and token ids by sentence-transformers, each text alone."""
    model = SentenceTransformer(str(path), device="cpu")
    vectors = np.asarray(model.encode(texts, batch_size=1, **how), dtype=np.float32)
    prompt = how.get("prompt")
    ids = [
        model[0].preprocess([text], prompt=prompt)["input_ids"][0].tolist()  # type: ignore[operator]
        for text in texts
    ]
    return vectors, ids


def assert_as_theirs(path: Path, *, prompt: str = "", **chosen: Any) -> TorchEngine:
    """Every text's vector and ids, in one pass with all others, are sentence-transformers'."""
    engine = TorchEngine.load(options(path, **chosen))
    tokens = tokens_of(engine, TEXTS, prompt)
    expected, ids = theirs(path, TEXTS, **({"prompt": prompt} if prompt else {}))
    assert [list(one.ids) for one in tokens] == ids
    vectors = engine.embed(tokens)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), engine.info.dimensions)
    assert cosine(vectors, expected).min() >= COSINE_MIN
    np.testing.assert_allclose(vectors, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(engine.reference(tokens), expected, rtol=1e-3, atol=1e-4)
    return engine


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "model"
    save_modules(path, architecture, [Pooling(SIZE, "mean"), Normalize()])
    engine = assert_as_theirs(path)
    assert engine.info.input_tokens_max == MAX_TOKENS
    assert engine.info.normalized


@pytest.mark.parametrize("mode", POOLING_MODES)
@pytest.mark.parametrize("architecture", ["xlm-roberta", "qwen3"])
def test_pooling_modes(tmp_path: Path, architecture: str, mode: str) -> None:
    path = tmp_path / "model"
    save_modules(path, architecture, [Pooling(SIZE, mode)])
    assert not assert_as_theirs(path).info.normalized


TAILS: dict[str, Callable[[], list[Any]]] = {
    "all modes concatenated": lambda: [Pooling(SIZE, list(POOLING_MODES))],
    "dense": lambda: [Pooling(SIZE), Dense(SIZE, 12)],
    "dense without bias or activation": lambda: [
        Pooling(SIZE),
        Dense(SIZE, 12, bias=False, activation_function=torch.nn.Identity()),
        Normalize(),
    ],
    "dense on two modes, gelu, layer norm, normalised": lambda: [
        Pooling(SIZE, ["cls", "max"]),
        Dense(2 * SIZE, 24, activation_function=torch.nn.GELU()),
        LayerNorm(24),
        Normalize(),
    ],
    "dense with residual": lambda: [
        Pooling(SIZE),
        Dense(SIZE, 12, use_residual=True),
        Dense(12, 12, use_residual=True),
    ],
    "normalised, then dense": lambda: [Pooling(SIZE), Normalize(), Dense(SIZE, 12)],
}


@pytest.mark.parametrize("tail", TAILS)
def test_modules_after_the_pooling(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "model"
    torch.manual_seed(3)
    save_modules(path, "bert", TAILS[tail]())
    assert_as_theirs(path)


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_prompts_left_out_of_pooling(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "model"
    save_modules(path, "bert", [Pooling(SIZE, mode, include_prompt=False)])
    engine = assert_as_theirs(path, prompt="query: alpha bravo ")
    with_prompt = engine.embed(tokens_of(engine, TEXTS, "query: alpha bravo "))
    pooled_too = engine.embed(
        [Tokens(ids=one.ids) for one in tokens_of(engine, TEXTS, "query: alpha bravo ")]
    )
    if mode != "lasttoken":
        assert cosine(with_prompt, pooled_too).min() < COSINE_MIN


def test_prompts_and_default_prompt(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_modules(
        path,
        "bert",
        [Pooling(SIZE)],
        settings={"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"},
    )
    engine = assert_as_theirs(path, prompt="query: ")
    assert engine.info.prompts == {"query": "query: ", "document": ""}
    assert engine.info.default_prompt == "query: "
    expected, _ = theirs(path, TEXTS)
    vectors = engine.embed(tokens_of(engine, TEXTS, engine.info.default_prompt))
    assert cosine(vectors, expected).min() >= COSINE_MIN


PROMPTS: list[dict[str, Any]] = [
    {"prompts": {}},
    {"prompts": {"query": "alpha ", "document": "bravo "}},
    {"prompts": {"other": "alpha bravo: "}, "default_prompt_name": "other"},
    {"prompts": {"query": "alpha "}, "default_prompt_name": "query"},
    {"prompts": {"query": "alpha ", "passage": "bravo ", "corpus": "charlie "}},
    {"prompts": {"passage": "bravo ", "query": "alpha "}, "default_prompt_name": "passage"},
    {"prompts": {"query": None, "other": "alpha "}, "default_prompt_name": "other"},
    {"prompts": {"other": "alpha "}, "default_prompt_name": "query"},
    {"prompts": {"other": "alpha "}, "default_prompt_name": "document"},
]


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "model"
    save_modules(path, "bert", [Pooling(SIZE)])
    return path


@pytest.mark.parametrize("declared", PROMPTS)
def test_input_types_choose_the_prompts_of_the_library(
    plain_model: Path, declared: dict[str, Any]
) -> None:
    write_json(plain_model / "config_sentence_transformers.json", declared)
    library = SentenceTransformer(str(plain_model), device="cpu")
    engine = TorchEngine.load(options(plain_model))
    chosen = Prompts(engine.info).by_type
    for input_type, encode in (
        (query_pb2.INPUT_TYPE_UNSPECIFIED, library.encode),
        (query_pb2.INPUT_TYPE_QUERY, library.encode_query),
        (query_pb2.INPUT_TYPE_DOCUMENT, library.encode_document),
    ):
        expected = np.asarray(encode(TEXTS, batch_size=1), dtype=np.float32)
        vectors = engine.embed(tokens_of(engine, TEXTS, chosen[input_type]))
        assert cosine(vectors, expected).min() >= COSINE_MIN, encode.__name__


def write_old_format(path: Path, architecture: str) -> None:
    """As sentence-transformers 2 wrote it."""
    save_transformer(path, architecture)
    package = "sentence_transformers.models."
    write_json(
        path / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": package + "Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": package + "Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": package + "Normalize"},
        ],
    )
    write_json(path / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": True})
    write_json(
        path / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": SIZE,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": True,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )


@pytest.mark.parametrize("architecture", ["bert", "xlm-roberta"])
def test_old_format_with_lower_case_and_its_own_maximum(tmp_path: Path, architecture: str) -> None:
    write_old_format(tmp_path, architecture)
    engine = assert_as_theirs(tmp_path)
    assert engine.info.input_tokens_max == 20
    assert tokens_of(engine, ["STRASSE Alpha"]) == tokens_of(engine, ["strasse alpha"])
    (refused,) = engine.tokenize([Text(text="alpha " * 200)])
    assert isinstance(refused, TextRefused)


def test_truncate_dim_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_modules(path, "bert", [Pooling(SIZE)], settings={"truncate_dim": 8})
    assert assert_as_theirs(path).info.dimensions == 8


def test_no_modules_needs_a_pooling(tmp_path: Path) -> None:
    save_transformer(tmp_path, "roberta")
    with pytest.raises(ModelRefusedError, match="pooling"):
        TorchEngine.load(options(tmp_path))
    engine = TorchEngine.load(options(tmp_path, pooling="mean"))
    expected, _ = theirs(tmp_path, TEXTS)  # sentence-transformers does guess: mean
    assert cosine(engine.embed(tokens_of(engine, TEXTS)), expected).min() >= COSINE_MIN


@pytest.fixture(scope="module", params=["bert", "xlm-roberta", "modernbert", "qwen3-window"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    path = tmp_path_factory.mktemp("torch") / "model"
    save_modules(path, request.param, [Pooling(SIZE, "mean")])
    return TorchEngine.load(options(path))


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=16),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_vector_does_not_depend_on_its_mates(
    engine: TorchEngine, lengths: list[int], seed: int
) -> None:
    ids = np.random.default_rng(seed)
    inputs = [Tokens(ids=ids.integers(1, 300, size=length).tolist()) for length in lengths]
    together = engine.embed(inputs)
    alone = np.concatenate([engine.embed([one]) for one in inputs])
    assert cosine(together, alone).min() >= COSINE_MIN
    np.testing.assert_allclose(together, alone, rtol=1e-3, atol=1e-4)
    reversed_ = engine.embed(inputs[::-1])
    np.testing.assert_allclose(together, reversed_[::-1], rtol=1e-3, atol=1e-4)


def test_bfloat16_stays_near(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_modules(path, "bert", [Pooling(SIZE), Normalize()])
    engine = TorchEngine.load(options(path, dtype="bfloat16"))
    tokens = tokens_of(engine, TEXTS)
    vectors = engine.embed(tokens)
    assert engine.info.precision == "bfloat16"
    assert cosine(vectors, engine.reference(tokens)).min() >= 0.999
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_the_maximum_may_only_be_lowered(tmp_path: Path) -> None:
    write_old_format(tmp_path, "bert")
    lowered = TorchEngine.load(options(tmp_path, input_tokens_max=9))
    assert lowered.info.input_tokens_max == 9
    assert len(tokens_of(lowered, ["alpha " * 99])[0].ids) == 9
    with pytest.raises(ModelRefusedError, match="only lower the model's maximum of 20"):
        TorchEngine.load(options(tmp_path, input_tokens_max=21))


def change_json(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)


def test_positions_bound_the_maximum(tmp_path: Path) -> None:
    """A tokenizer that claims more than there are positions is not believed."""
    write_old_format(tmp_path, "xlm-roberta")
    change_json(tmp_path / "tokenizer_config.json", model_max_length=4_096)
    write_json(tmp_path / "sentence_bert_config.json", {})
    engine = TorchEngine.load(options(tmp_path))
    assert engine.info.input_tokens_max == MAX_TOKENS
    tokens = tokens_of(engine, ["alpha " * 99])
    assert np.isfinite(engine.embed(tokens)).all()


def test_missing_weights_are_refused_not_drawn_at_random(tmp_path: Path) -> None:
    write_old_format(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "encoder.layer.1.output.dense.weight"
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match=name):
        TorchEngine.load(options(tmp_path))


def test_a_broken_file_of_weights_is_named(tmp_path: Path) -> None:
    write_old_format(tmp_path, "bert")
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(ModelRefusedError, match=f"weights in {tmp_path} can't be read"):
        TorchEngine.load(options(tmp_path))


@pytest.mark.parametrize("name", ["MPNet", "T5", "Deberta"])
def test_attention_that_knows_relative_positions_is_refused(tmp_path: Path, name: str) -> None:
    import transformers

    save_transformer(tmp_path, "bert")
    if name == "T5":
        config = transformers.T5Config(d_model=SIZE, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    else:
        config = getattr(transformers, f"{name}Config")(
            hidden_size=SIZE, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
        )
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelRefusedError, match=name if name != "T5" else "is_encoder_decoder"):
        TorchEngine.load(options(tmp_path, pooling="mean"))


@pytest.mark.parametrize(
    ("chosen", "named"),
    [({"dtype": "int4"}, "int4"), ({"device": "abacus"}, "abacus"), ({"threads": -1}, "-1")],
)
def test_wrong_options_are_named(tmp_path: Path, chosen: dict[str, Any], named: str) -> None:
    write_old_format(tmp_path, "bert")
    with pytest.raises(ModelRefusedError, match=named):
        TorchEngine.load(TorchOptions(model_path=tmp_path, **chosen))


def test_memory_running_out_is_told_apart(engine: TorchEngine) -> None:
    """By what torch raises, on a GPU and on a CPU."""
    failures: list[Exception] = [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
        ),
        MemoryError(),
    ]
    for failure in failures:
        with raising(engine, failure), pytest.raises(EngineOutOfMemoryError):
            engine.embed([Tokens(ids=[1, 2])])
    gone = RuntimeError("CUDA error: device-side assert triggered")
    with raising(engine, gone), pytest.raises(EngineDiedError):
        engine.embed([Tokens(ids=[1, 2])])
    with (
        raising(engine, RuntimeError("shapes differ")),
        pytest.raises(RuntimeError, match="differ"),
    ):
        engine.embed([Tokens(ids=[1, 2])])


class raising:  # noqa: N801 - reads as a statement
    """While entered, the engine's transformer raises."""

    def __init__(self, engine: TorchEngine, failure: Exception) -> None:
        model: Any = engine._model
        self._transformer = model._transformer
        self._failure = failure

    def __enter__(self) -> None:
        def fail(*_: Any) -> None:
            raise self._failure

        self._hook = self._transformer.register_forward_pre_hook(fail)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def test_closed_means_dead(tmp_path: Path) -> None:
    write_old_format(tmp_path, "bert")
    engine = TorchEngine.load(options(tmp_path))
    engine.close()
    engine.close()
    with pytest.raises(EngineDiedError):
        engine.embed([Tokens(ids=[1, 2])])


def test_revision_follows_what_decides_the_vectors(tmp_path: Path) -> None:
    def revision(path: Path, **chosen: Any) -> str:
        return TorchEngine.load(options(path, cache_dir=tmp_path / "cache", **chosen)).info.revision

    first, second = tmp_path / "first", tmp_path / "second"
    write_old_format(first, "bert")
    shutil.copytree(first, second)
    original = revision(first)
    assert revision(first) == original == revision(second)
    assert revision(second, dtype="bfloat16") != original
    assert revision(second, input_tokens_max=19) != original
    write_json(second / "config_sentence_transformers.json", {"__version__": {"pytorch": "2"}})
    assert revision(second) == original
    write_json(second / "config_sentence_transformers.json", {"prompts": {"query": "q: "}})
    assert revision(second) != original
    save_transformer(second, "bert", seed=1)
    (second / "config_sentence_transformers.json").unlink()
    assert revision(second) != original
