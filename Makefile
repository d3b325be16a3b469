# Two commands do everything, set-up included: `make demo` and `make test`.
# One torch thread and parallel tests: on small machines two threads can be far slower than one.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
# Some virtual CPUs advertise AMX but cannot run it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

# Every process of the tests would compile all sources anew.
export PYTHONDONTWRITEBYTECODE =

PYTHON ?= python3
RUN = .venv/bin/python

.PHONY: demo digits test quick mutations faults lint bench bench-gpu bench-lab figure3 zoo

demo: .venv/ready
	$(RUN) examples/demo.py

digits: .venv/ready
	$(RUN) examples/digits.py

test: .venv/ready lint
	$(RUN) -m pytest -n 2 --dist worksteal

# The inner loop: what takes more than half a second stays out.
quick: .venv/ready
	$(RUN) -m pytest -n 2 --dist worksteal -m "not slow"

# Planted bugs: does the suite see them? Some twenty minutes.
mutations: .venv/ready
	$(RUN) tests/mutations.py

# Kills, full disks, damaged and hostile files: what is lost? Some eight minutes; writes docs/reliability.md.
faults: .venv/ready
	$(RUN) tests/faults.py

lint: .venv/ready
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

# What a CPU can do of it, in a few minutes.
bench: .venv/ready
	$(RUN) benchmarks/gpu.py --sizes cpu

# Every number of docs/performance.md, rivals included, in under nine minutes of one H200: pip install -e ".[benchmarks]"
bench-gpu: .venv/ready
	$(RUN) benchmarks/gpu.py --sizes gpu --out results/benchmarks/gpu_h200.json
	$(RUN) benchmarks/gpu.py --table results/benchmarks/gpu_h200.json

bench-lab: .venv/ready
	$(RUN) benchmarks/lab.py

zoo: .venv/ready
	$(RUN) benchmarks/zoo.py --workers 2 --out results/benchmarks/zoo.json
	$(RUN) benchmarks/zoo.py --table results/benchmarks/zoo.json

figure3: .venv/ready
	$(RUN) -m slimbayes.diagnostics.prior_functions --out docs/figure3.png

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet -c constraints.txt torch==2.13.0
	$(RUN) -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@
