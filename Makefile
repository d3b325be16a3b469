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
# Which build of torch is right, and so its hash, depends on the machine: it is the one package that is not locked.
TORCH = torch==2.13.0

.PHONY: demo digits test suite quick kernels faults lint supply build lock audit bench bench-gpu bench-lab zoo coverage reproduction

demo: .venv/ready
	$(RUN) examples/demo.py

digits: .venv/ready
	$(RUN) examples/digits.py

# Side by side: checking the types takes one core a quarter of a minute.
test: .venv/ready
	@$(MAKE) --no-print-directory --jobs 3 lint supply suite

suite: .venv/ready
	$(RUN) -m pytest -n 2 --dist worksteal

# The inner loop: what takes more than a quarter of a second stays out.
quick: .venv/ready
	$(RUN) -m pytest -n 2 --dist worksteal -m "not slow"

# Kernels without a GPU: their tests in Triton's interpreter, and each compiled for an H200. Some two minutes.
kernels: .triton/ready
	PYTHONPATH=.triton $(RUN) -m pytest -n 2 --dist worksteal tests/insides/kernels

# Kills, full disks, damaged and hostile files: what is lost? Some eight minutes; writes docs/reliability.md.
faults: .venv/ready
	$(RUN) lab/tests/faults.py

lint: .venv/ready
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

# The lock against pyproject.toml and what is installed; licences; releases known as malware.
supply: .venv/ready
	$(RUN) tools/supply_chain.py check $(TORCH)

# The wheel, the source distribution and the bill of materials.
build: .venv/ready
	rm -rf dist
	$(RUN) -m hatchling build
	cd lab && ../$(RUN) -m hatchling build --directory ../dist
	for wheel in dist/*.whl; do $(RUN) tools/supply_chain.py sbom $$wheel || exit 1; done

# The two that need the network. Versions stay as they are where they can: UPGRADE=--upgrade takes the newest.
# Resolved as for a Mac, where torch brings no CUDA libraries; the hashes are those of all platforms.
lock: .tools/ready
	echo $(TORCH) | MACOSX_DEPLOYMENT_TARGET=14.0 .tools/bin/uv pip compile --quiet pyproject.toml lab/pyproject.toml --extra dev \
	  --constraint - --no-emit-package torch --no-emit-package slimbayes --generate-hashes --no-annotate --no-header $(UPGRADE) \
	  --python-version 3.11 --python-platform aarch64-apple-darwin --output-file requirements.lock

audit: .tools/ready
	.tools/bin/pip-audit --require-hashes --disable-pip --requirement requirements.lock
	echo $(TORCH) | .tools/bin/pip-audit --no-deps --disable-pip --requirement /dev/stdin

# What a CPU can do of it, in a few minutes; docs/performance.md takes its rows on a CPU from there.
bench: .venv/ready
	$(RUN) benchmarks/gpu.py --sizes cpu --out lab/results/benchmarks/cpu.json
	$(RUN) benchmarks/gpu.py --table lab/results/benchmarks/gpu_h200.json

# Every number of docs/performance.md, rivals included, in under nine minutes of one H200: pip install -e ".[benchmarks]"
bench-gpu: .venv/ready
	$(RUN) benchmarks/gpu.py --sizes gpu --out lab/results/benchmarks/gpu_h200.json
	$(RUN) benchmarks/gpu.py --table lab/results/benchmarks/gpu_h200.json

bench-lab: .venv/ready
	$(RUN) benchmarks/lab.py

zoo: .venv/ready
	$(RUN) benchmarks/zoo.py --workers 2 --out lab/results/benchmarks/zoo.json
	$(RUN) benchmarks/zoo.py --table lab/results/benchmarks/zoo*.json

# What of the papers is here: docs/coverage.md from docs/coverage.tsv.
coverage: .venv/ready
	$(RUN) lab/tests/coverage_page.py

# What the papers claim and what came out, and README's table: from the kept records alone.
reproduction: .venv/ready
	$(RUN) benchmarks/verdicts.py
	$(RUN) benchmarks/main_table.py
	$(RUN) benchmarks/paper_tables.py

.PHONY: docs gallery release-check

# The site, in build/docs, every page anew; warnings are errors.
docs: .venv/docs
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet --fresh-env docs build/docs
	$(RUN) docs/links.py build/docs

# The pictures of the gallery and of docs/concepts.md: two minutes.
gallery: .venv/ready
	for script in docs/gallery/*.py docs/pictures/draw.py; do $(RUN) $$script || exit 1; done

# What `make build` made, each installed in a fresh environment and used outside of the checkout; needs the network.
release-check: .venv/ready
	$(RUN) lab/tests/installed.py $(TORCH) dist

.venv/docs: .venv/ready
	$(RUN) -m pip install --quiet --no-build-isolation --editable ".[docs]"
	touch $@

.venv/ready: pyproject.toml lab/pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --require-hashes --no-deps --only-binary :all: -r requirements.lock
	$(RUN) -m pip install --quiet $(TORCH)
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable . --editable ./lab
	$(RUN) -m pip check
	touch $@

# Beside the environment, not in it: torch.compile asks for Triton.
.triton/ready: .venv/ready
	$(RUN) -m pip install --quiet --no-deps --target .triton triton==3.9.0
	touch $@

.tools/ready:
	$(PYTHON) -m venv .tools
	.tools/bin/pip install --quiet uv==0.13.7 pip-audit==2.10.1
	touch $@
