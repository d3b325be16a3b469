"""Where and how a run is carried out. None of it changes what is computed, but for rounding, so none of it names the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

PATIENCE = timedelta(minutes=5)  # how long processes wait for one another before the job ends with an error


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

    @property
    def device(self) -> torch.device:
        """Where a single process computes."""
        return torch.device("cuda" if self.accelerator != "cpu" and torch.cuda.is_available() else "cpu")

    def fabric(self, precision: str) -> Any:
        """The process group, devices and number format of a run."""
        import logging

        from lightning_fabric import Fabric

        if self.accelerator == "cuda" and not torch.cuda.is_available():
            raise ValueError("There is no GPU that torch can use here: leave --accelerator at auto, or say cpu.")
        if self.devices < 1:
            raise ValueError(f"--devices must be at least 1, got {self.devices}.")
        # Its hints are about settings that a run decides for itself.
        logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
        logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
        return Fabric(
            accelerator=self.accelerator, devices=self.devices, num_nodes=self.nodes, strategy=self._strategy(),
            precision={"32": "32-true", "bf16": "bf16-mixed"}[precision],
        )  # fmt: skip

    def _strategy(self) -> Any:
        if self.strategy == "fsdp":
            from lightning_fabric.strategies import ModelParallelStrategy

            return ModelParallelStrategy(shard, timeout=PATIENCE)
        if self.strategy == "ddp" or self.devices * self.nodes > 1:
            from lightning_fabric.strategies import DDPStrategy

            return DDPStrategy(timeout=PATIENCE)
        return "auto"

    def compiles(self, device: torch.device) -> bool:
        return device.type == "cuda" if self.compile is None else self.compile

    def captures(self, device: torch.device, world: int) -> bool:
        possible = device.type == "cuda" and world == 1
        return possible if self.graph is None else self.graph and possible


def shard(network: nn.Module, mesh: Any) -> nn.Module:
    """Shard a network's parameters over processes (FSDP2): its larger direct children each by itself, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for child in network.children():
        if sum(p.numel() for p in child.parameters()) >= 10_000:
            fully_shard(child, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


class Watcher(Protocol):
    """Whoever looks on: a progress bar, or nobody."""

    def begin(self, what: str, total: int, done: int = 0) -> None: ...

    def move(self, done: int, note: str = "") -> None: ...

    def say(self, message: str) -> None: ...


class Nobody:
    """Looks on and says nothing."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        pass

    def move(self, done: int, note: str = "") -> None:
        pass

    def say(self, message: str) -> None:
        pass


def watched(items: Iterable[Any], watcher: Watcher, what: str, total: int) -> Iterable[Any]:
    """Items, told to a watcher one by one."""
    watcher.begin(what, total)
    for count, item in enumerate(items, 1):
        yield item
        watcher.move(count)
