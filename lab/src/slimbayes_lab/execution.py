"""Where and how a run is carried out. None of it changes what is computed, but for rounding, so none names the run.

Randomness is a pure function of where it is used: nothing to save, so a run resumes bit for bit at any step.

seed_everything(seed, "step", 1200)      before step 1200, and every draw of that step follows
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from slimbayes.train.recorded import compiled

if TYPE_CHECKING:
    from lightning_fabric import Fabric


PATIENCE = timedelta(
    minutes=5
)  # how long processes wait for one another before the job ends with an error


@dataclass(frozen=True)
class Execution:
    """Devices, processes and conveniences.

    Attributes:
        accelerator: "auto" takes a GPU if there is one.
        devices, nodes: processes are started on as many, unless torchrun or SLURM has done so.
        strategy: how several processes share a model: "ddp" copies it, "fsdp" shards its parameters (FSDP2).
        compile: torch.compile the network; by default on a GPU.
        graph: record the training step as one CUDA graph; by default where one GPU trains.
        workers: processes that decode images of folders.
        checkpoint_every: steps between checkpoints; by default at the end of epochs, a minute apart.
        tensorboard: write curves for TensorBoard too.
        data_dir: where data sets lie; $SLIMBAYES_DATA by default.
    """

    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    devices: int = 1
    nodes: int = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    compile: bool | None = None
    graph: bool | None = None
    workers: int = 4
    checkpoint_every: int | None = None
    tensorboard: bool = False
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.accelerator == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "There is no GPU that torch can use here: leave --accelerator at auto, or say cpu."
            )
        if self.devices < 1:
            raise ValueError(f"--devices must be at least 1, got {self.devices}.")

    @property
    def device(self) -> torch.device:
        """Where a single process computes."""
        return torch.device(
            "cuda" if self.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
        )

    def fabric(self, precision: str) -> Fabric:
        """The process group, devices and number format of a run."""
        from lightning_fabric import Fabric

        if self.devices * self.nodes > 1:
            self._meet()
        for name in ("lightning_fabric", "lightning.fabric"):
            logging.getLogger(name).setLevel(
                logging.ERROR
            )  # its hints are about what a run decides for itself
        return Fabric(
            accelerator=self.accelerator,
            devices=self.devices,
            num_nodes=self.nodes,
            strategy=self._strategy(),
            precision="bf16-mixed" if precision == "bf16" else "32-true",
        )

    def _meet(self) -> None:
        """Form the process group, if torchrun gives every start of this machine's job the same store.

        Without names of its own, a start would find addresses of the processes of the one before.
        """
        if (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            or self.nodes > 1
            or dist.is_initialized()
        ):
            return
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=PATIENCE,
        )
        dist.init_process_group(
            "gloo" if self.device.type == "cpu" else "nccl",
            store=dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store),
            rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), timeout=PATIENCE,
        )  # fmt: skip

    def _strategy(self) -> Any:
        from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

        if self.strategy == "fsdp":
            return ModelParallelStrategy(shard, timeout=PATIENCE)
        return (
            DDPStrategy(timeout=PATIENCE)
            if self.strategy == "ddp" or self.devices * self.nodes > 1
            else "auto"
        )

    def compiled(self, network: nn.Module, device: torch.device) -> nn.Module:
        """The network as it is run on a device, compiled or not."""
        asked = device.type == "cuda" if self.compile is None else self.compile
        return compiled(network, dynamic=False) if asked else network  # type: ignore[no-any-return]

    def captures(self, device: torch.device, world: int) -> bool:
        return device.type == "cuda" and world == 1 and self.graph is not False


def shard(network: nn.Module, mesh: Any) -> nn.Module:
    """Shard a network's parameters over processes (FSDP2): its larger direct children each by itself, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for child in network.children():
        if sum(p.numel() for p in child.parameters()) >= 10_000:
            fully_shard(child, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


_LEFT: list[Any] = []  # process groups


def leave_together(fabric: Any) -> None:
    """End the group of processes: the first goes on alone, and draws as one process does."""
    fabric.barrier()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Gloo's threads drop their last tensors under Python's lock. Were the group destroyed at that moment, both
        # would wait for ever; so they get time, and the group is kept until the process ends.
        _LEFT.append(torch.distributed.group.WORLD)
        time.sleep(0.3)
        torch.distributed.destroy_process_group()


@contextmanager
def signals_to(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Some signals go to a handler; former ones come back afterwards. Only the main thread sees signals."""
    here = threading.current_thread() is threading.main_thread()
    former = {number: signal.signal(number, handler) for number in numbers if here}
    try:
        yield
    finally:
        for number, old in former.items():
            signal.signal(number, old)


def noting_signals(noted: list[int]) -> AbstractContextManager[None]:
    """SIGTERM and Ctrl-C are only noted."""
    return signals_to(lambda came, _: noted.append(came), signal.SIGTERM, signal.SIGINT)
