"""Running the jobs of a sweep on other machines: SLURM by way of submitit, and Ray. Run directories lie on a file system that all of them see.

results = Slurm(Path("runs/.submitit"), at_once=8, options={"timeout_min": 120, "gpus_per_node": 1}).run(jobs)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimbayes.lab.backends import RETRIES, Job, Result, Told, result_of, start, state_of
from slimbayes.lab.config_files import ConfigError


class Call:
    """A job on another machine. SLURM's warning before a time limit or a preemption stops it and queues it again."""

    def __call__(self, job: Job) -> int:
        self.group = start(job)
        try:
            while (code := self.group.poll()) is None:
                time.sleep(0.1)
        finally:
            self.group.end()
        return code

    def checkpoint(self, job: Job) -> Any:
        """What submitit calls upon that warning."""
        from submitit.helpers import DelayedSubmission

        self.group.end()
        return DelayedSubmission(Call(), job)


@dataclass(frozen=True)
class Slurm:
    """SLURM by way of submitit. Stopping the sweep leaves submitted jobs in the queue; the next call waits for them instead of submitting them anew.

    Args:
        folder: for submitit's own files.
        at_once: jobs of the array that may run at a time.
        options: of submitit's AutoExecutor: timeout_min, gpus_per_node, cpus_per_task, mem_gb, slurm_partition, ... `cluster` is "slurm" by
            default; "local" stands in for it on a machine without. `max_timeouts` is how often a job may run into its time limit.
    """

    folder: Path
    at_once: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, jobs: Sequence[Job], tell: Told = lambda job, state: None) -> list[Result]:
        submitted = self._submit(jobs)
        results: dict[Job, Result] = {}
        try:
            while len(results) < len(jobs):
                for job in (job for job in jobs if job not in results):
                    if submitted[job].done():
                        results[job] = self._result(job, submitted[job])
                    tell(job, results[job].state if job in results else submitted[job].state.lower())
                time.sleep(0.5)
        except KeyboardInterrupt:
            print(
                "The jobs stay with the scheduler. Call again to wait for them, or cancel them: scancel --name slimbayes",
                file=sys.stderr,
            )
            raise
        return [results[job] for job in jobs]

    def _executor(self) -> Any:
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise ImportError('The slurm backend needs submitit: pip install "slimbayes[sweep]"') from error

        options = {"timeout_min": 24 * 60, **self.options}
        cluster, timeouts = options.pop("cluster", "slurm"), options.pop("max_timeouts", 20)
        if cluster == "slurm":
            options = {"slurm_array_parallelism": self.at_once, "name": "slimbayes", **options}
        try:
            executor = submitit.AutoExecutor(
                folder=str(self.folder), cluster=cluster, **{f"{cluster}_max_num_timeout": timeouts}
            )
            executor.update_parameters(**options)
        except (NameError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"slurm: {error}") from error
        return executor

    def _submit(self, jobs: Sequence[Job]) -> dict[Job, Any]:
        executor = self._executor()
        found: dict[Job, Any] = {
            job: queued for job in jobs if executor.cluster == "slurm" and (queued := self._queued(job)) is not None
        }
        new: dict[Job, Any] = {}
        if len(found) < len(jobs):
            with executor.batch():  # one array
                new = {job: executor.submit(Call(), job) for job in jobs if job not in found}
        for job, handle in new.items():
            (job.folder / "submitted.json").write_text(json.dumps({"job": handle.job_id}) + "\n")
        return found | new

    def _queued(self, job: Job) -> Any:
        """The job of a former call, if it waits or runs still."""
        import submitit

        with suppress(OSError, ValueError, KeyError, TypeError):
            handle: Any = submitit.SlurmJob(
                folder=str(self.folder), job_id=json.loads((job.folder / "submitted.json").read_text())["job"]
            )
            # Of jobs that SLURM has forgotten the state is unknown, for ever.
            known = handle.watcher.get_state(handle.job_id, mode="force") != "UNKNOWN"
            return handle if known and not handle.done() else None
        return None

    def _result(self, job: Job, handle: Any) -> Result:
        try:
            return result_of(job, handle.result())
        except Exception as error:  # whatever the cluster has to say about it
            reason = " ".join(str(error).split())[:300]
            return (
                Result(job, "finished")
                if state_of(job.folder, job.hash) == "finished"
                else Result(job, "failed", reason)
            )


@dataclass(frozen=True)
class Ray:
    """A Ray cluster, or Ray on this machine without an `address`. Jobs of workers that are lost run again elsewhere.

    Args:
        slots: CPUs of a Ray that is started here.
        options: `address` of a cluster; `num_cpus`, `num_gpus` and `max_retries` of each job.
    """

    slots: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, jobs: Sequence[Job], tell: Told = lambda job, state: None) -> list[Result]:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ImportError('The ray backend needs Ray: pip install "slimbayes[ray]"') from error

        options = {"num_cpus": 1, "max_retries": RETRIES, **self.options}
        address = options.pop("address", None)
        ray.init(
            address=address,
            log_to_driver=False,
            **({} if address else {"num_cpus": self.slots, "include_dashboard": False}),
        )
        work = ray.remote(**options)(_carry_out)
        handles: dict[Any, Job] = {work.remote(job): job for job in jobs}
        for job in jobs:
            tell(job, "submitted")
        results: dict[Job, Result] = {}
        try:
            while len(results) < len(jobs):
                waiting = [handle for handle, job in handles.items() if job not in results]
                for handle in ray.wait(waiting, timeout=0.5)[0]:
                    job = handles[handle]
                    results[job] = self._result(job, ray, handle)
                    tell(job, results[job].state)
        except BaseException:
            for handle in handles:
                ray.cancel(handle, recursive=False)
            ray.wait(list(handles), num_returns=len(handles), timeout=60)
            raise
        finally:
            ray.shutdown()
        return [results[job] for job in jobs]

    def _result(self, job: Job, ray: Any, handle: Any) -> Result:
        try:
            return result_of(job, ray.get(handle))
        except ray.exceptions.RayError as error:
            return Result(job, "failed", " ".join(str(error).split())[:300])


def _carry_out(job: Job) -> int:
    return Call()(job)
