# Every target sets up its own virtual environment (.venv) on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# one thread per test process: two are far slower on small tensors when the machine is busy
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help setup demo test test-all browser check format clean

help:
	@echo "make demo      train DCDM and its baselines on English, and watch chunks form (minutes)"
	@echo "make test      lint, types and the default test suite"
	@echo "make test-all  the same with the slow tests and a browser"
	@echo "make browser   Debian's Chromium, which the tests of the playground drive"
	@echo "make check     lint and types only"
	@echo "make format    let ruff rewrite the code's layout"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

setup: $(STAMP)

# what the demo and the server need is installed sooner than everything
$(DEMO_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[serve]"
	touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(BIN)/dcdm demo

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/mypy

test: check
	$(PYTEST) -m "not slow"

test-all: check browser
	$(PYTEST) --hypothesis-profile thorough

# Debian's Chromium for the tests of the playground, which are skipped without it; never fails
browser:
	@command -v chromedriver >/dev/null 2>&1 || { \
	  sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
	  $$sudo apt-get install --yes --quiet chromium chromium-driver || \
	  echo "no browser was installed: the playground's tests will be skipped"; \
	}

format: $(STAMP)
	$(BIN)/ruff check --fix src tests benchmarks tools
	$(BIN)/ruff format src tests benchmarks tools

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
