# Every target makes .venv by itself, and does nothing twice: the stamp is renewed only when the two files change.
VENV   ?= .venv
PYTHON ?= python3
SEEDS  ?= 2000
START  ?= 0
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

ifneq ($(wildcard ../shared/data),)
export MARFL_DATA ?= $(abspath ../shared/data)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test recorded lint types docs reproduce bench longbench soak calm prove chaos clean

help: ## Show the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plots]'
	@touch $@

demo: $(STAMP) ## 125 peers on digits: the paper's four techniques side by side, with table, figures and a page
	$(BIN)/marfl plan --peers 125 --group-size 5
	@echo
	$(BIN)/marfl simulate --preset demo --compare mar,fedavg,rdfl,arfl --out runs/demo --overwrite
	$(BIN)/marfl report runs/demo/mar runs/demo/fedavg runs/demo/rdfl runs/demo/arfl --out runs/demo/report

test: $(STAMP) ## Run the tests, without the slow ones
	$(BIN)/python -m pytest -q -n auto --dist loadgroup

recorded: $(STAMP) ## Run many small configs and compare hashes, bytes, messages and epsilons with tests/recorded.json
	$(BIN)/python -m marfl.testing.recorded

lint: $(STAMP) ## Check style with ruff
	$(BIN)/ruff check .

types: $(STAMP) ## Check types with mypy --strict
	$(BIN)/mypy

docs: $(STAMP) ## Renew the references made from the code, and build the documentation into site/
	$(BIN)/python scripts/reference.py
	$(BIN)/mkdocs build --strict --quiet

SCALE ?= laptop
reproduce: $(STAMP) ## The paper's experiments at SCALE=laptop, and the page docs/reproduction.md; takes hours, goes on after a stop
	$(BIN)/marfl reproduce all --scale $(SCALE) --out runs/reproduce-$(SCALE) --docs docs

QUICK := aggregate growth joining local_step simulator slow_peer streams
LONG  := memory to_target participation distill privacy swarm

bench: $(STAMP) ## Run the benchmarks that take minutes; each prints ratios against something run beside it
	@set -e; for name in $(QUICK); do echo "== $$name"; PYTHONPATH=benchmarks $(BIN)/python benchmarks/$$name.py; done

longbench: $(STAMP) ## Run the benchmarks that take hours
	@set -e; for name in $(LONG); do echo "== $$name"; PYTHONPATH=benchmarks $(BIN)/python benchmarks/$$name.py; done

soak: $(STAMP) ## Run SEEDS random fault schedules through the protocol, from seed START on
	$(BIN)/python -m marfl.testing.soak --seeds $(SEEDS) --start $(START)

calm: $(STAMP) ## Run SEEDS worlds without faults: nobody may be left out of an average, no update may be lost
	$(BIN)/python -m marfl.testing.soak --calm --seeds $(SEEDS) --start $(START)

prove: $(STAMP) ## Try every order of events of one decision, up to 7 electors, some of which lie; takes minutes
	$(BIN)/python -m marfl.testing.exhaustive --long

MINUTES ?= 10
chaos: $(STAMP) ## Kill, stop, cut off and restart real peers for MINUTES=10, and check what must hold (SEED=N: that run again)
	$(BIN)/python -m marfl.testing.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
