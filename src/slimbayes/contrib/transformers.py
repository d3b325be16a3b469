"""Hugging Face transformers: a Trainer that adds the KL, and predictions and generated text with uncertainty.

Sizes: B rows, T tokens, C classes or words, S draws.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from transformers import GenerationConfig, Trainer

from slimbayes.convert.bayesianize import conversions_of
from slimbayes.convert.checkpoint import save
from slimbayes.engine.noise import Seed
from slimbayes.files import read_folder
from slimbayes.prediction.batches import (
    IGNORED,
    LossKind,
    align_labels,
    base_model,
    loss_kind,
    without_labels,
)
from slimbayes.prediction.predict import predict
from slimbayes.prediction.prediction import Prediction
from slimbayes.prediction.sample import members
from slimbayes.train import schedules
from slimbayes.train.elbo import kl, warn_of_dwarfed
from slimbayes.train.optim import param_groups
from slimbayes.untrusted import check_tensors

FOLDER = (
    "posterior"  # of a checkpoint: what `sb.load(model, checkpoint / FOLDER)` reads
)
_EVALUATED, _TOLD = 4, 8  # draws of each member by default, in evaluation and in use


class BayesTrainer(Trainer):
    """A Trainer of converted models.

    The loss is the model's own plus KL / num_data, once for each optimizer step, however many batches it accumulates.
    Where that is the cross-entropy of its logits, which is looked at once, each row has a draw of its own.
    Weight decay leaves posteriors alone. Evaluation averages the probabilities of several draws and reports NLL, ECE
    and accuracy of classes; of other targets it is the Trainer's own, under one draw: `predict` averages. Checkpoints
    hold what trains: the posterior alone where `bayesianize(..., train=)` froze the rest;
    `sb.load(AutoModel.from_pretrained(...), f"{checkpoint}/posterior")` reads them back.

    Args:
        model: a converted model.
        args, options: as in transformers' Trainer.
        num_data: over how many targets the model's loss is a mean in the whole training set: by default its rows; a
            language model's is the number of its target tokens, which must be given.
        kl_schedule: the KL's weight after so many optimizer steps, from `slimbayes.train.schedules`.
        draws: number of draws in evaluation; by default four of each member.
    """

    compute_metrics: Any
    optimizer: Any

    def __init__(
        self,
        model: nn.Module,
        args: Any = None,
        num_data: int | None = None,
        kl_schedule: schedules.Schedule | None = None,
        draws: int | None = None,
        **options: Any,
    ) -> None:
        conversions_of(model)  # says what to do if it is not converted
        if num_data is not None and not num_data > 0:
            raise ValueError(
                f"BayesTrainer: num_data must be at least 1, got {num_data!r}."
            )
        super().__init__(model, args, **options)
        self.num_data, self.draws = num_data, draws
        if draws is None:
            self.draws = _EVALUATED * members(model)
        self.kl_schedule = kl_schedule or schedules.constant()
        self.kept_metrics = self.compute_metrics
        self.compute_metrics = self._scores
        self.found_loss: LossKind | None = None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        size = self._targets(inputs)
        if (
            self.compute_loss_func
            or self.label_smoother
            or self._loss_kind(inputs) != "cross-entropy"
        ):
            loss, outputs = super().compute_loss(
                model, inputs, True, num_items_in_batch=num_items_in_batch
            )
        else:
            # Without labels outputs hold rows alone, so that each has a draw of its own; with a loss all have one.
            outputs = model(
                **without_labels(self.accelerator.unwrap_model(model), inputs)[0]
            )
            loss = self._nll(
                model, outputs["logits"], inputs["labels"], num_items_in_batch
            )
        if model.training:
            divergence = kl(self.accelerator.unwrap_model(model)) / size
            # A loss that is normalised over the whole step is added up as it is; others are divided by the Trainer.
            steps = getattr(
                self,
                "current_gradient_accumulation_steps",
                self.args.gradient_accumulation_steps,
            )
            parts = steps if self._normalised(num_items_in_batch) else 1
            if (
                self.state.global_step == 0
            ):  # once, as it stalls a GPU; by the weight that annealing leads to
                weight = self.kl_schedule(self.state.max_steps)
                warn_of_dwarfed(self.model, float(weight * divergence.detach()))
            loss = (
                loss
                + (self.kl_schedule(self.state.global_step) * divergence).to(
                    loss.device
                )
                / parts
            )
        return (loss, outputs) if return_outputs else loss

    def _loss_kind(self, inputs: Any) -> LossKind:
        """What the model's own loss is, looked at once for labels that may be classes."""
        if (
            not isinstance(inputs.get("labels"), Tensor)
            or inputs["labels"].is_floating_point()
        ):
            return "other"
        if self.found_loss is None:
            self.found_loss = loss_kind(
                self.accelerator.unwrap_model(self.model), inputs
            )
        return self.found_loss

    def _nll(
        self, model: nn.Module, logits: Tensor, labels: Tensor, num_items: Any
    ) -> Tensor:
        """Mean over a batch's targets, or its share of the mean over those of the whole optimizer step; 0 of none."""
        logits, labels = align_labels(
            self.accelerator.unwrap_model(model), logits, labels
        )
        flat = logits.flatten(0, -2).float(), labels.flatten()
        total, count = (
            nn.functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum"),
            labels != IGNORED,
        )
        if not self._normalised(num_items):
            return total / count.sum().clamp_min(1)
        ranks = (
            self.accelerator.num_processes
            if self.args.average_tokens_across_devices
            else 1
        )
        return total * ranks / torch.as_tensor(num_items).clamp_min(1)

    def _targets(self, inputs: Any) -> int:
        """Over how many targets the training loss is a mean."""
        if self.num_data is not None:
            return self.num_data
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and labels.dim() > 1:
            raise ValueError(
                f"BayesTrainer: labels of shape {tuple(labels.shape)} are many for each row, and the loss is their "
                f"mean: give num_data=, the number of target tokens (or pixels, or labels) in the training set."
            )
        rows = getattr(self.train_dataset, "__len__", None)
        if rows is None:
            raise ValueError(
                "BayesTrainer: a dataset without a length does not say its size: give num_data=."
            )
        return max(rows(), 1)

    def _normalised(self, num_items: Any) -> bool:
        """Whether the Trainer takes the loss for one that is already a share of the whole optimizer step's."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        return (
            self.model_accepts_loss_kwargs and num_items is not None
        ) or self.compute_loss_func is not None

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            cls, options = self.get_optimizer_cls_and_kwargs(
                self.args, self.model if model is None else model
            )
            groups = param_groups(
                self.model if model is None else model,
                {"kernels": self.args.weight_decay},
            )
            self.optimizer = cls(groups, **options)
        return self.optimizer

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Loss, logs of averaged probabilities and labels; targets that are no classes are left to the Trainer."""
        inputs = self._prepare_inputs(inputs)
        if self._loss_kind(inputs) == "other":
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
        inner = self.accelerator.unwrap_model(model)
        rest, labels = without_labels(inner, inputs)
        with self.compute_loss_context_manager():
            found = predict(
                inner, rest, self.draws, keep_samples=False, output="logits"
            )
        logs, labels = align_labels(inner, found.log_probs, labels)
        empty = self.args.world_size == 1 and bool(
            (labels == IGNORED).all()
        )  # its mean is of nothing: it is left out
        loss = (
            None
            if empty
            else nn.functional.nll_loss(
                logs.flatten(0, -2), labels.flatten(), ignore_index=IGNORED
            )
        )
        return (
            (loss, None, None)
            if prediction_loss_only
            else (loss, logs.contiguous(), labels.contiguous())
        )

    def _scores(self, found: Any) -> dict[str, float]:
        """NLL, ECE and accuracy of classes, and what the user's own function says."""
        out: dict[str, float] = {}
        if self.found_loss not in (None, "other"):
            from slimbayes import metrics

            logs, labels = (
                torch.as_tensor(found.predictions),
                torch.as_tensor(found.label_ids),
            )
            kept = labels != IGNORED
            judged = Prediction.from_outputs(logs[kept].unsqueeze(0))
            for name, metric in (
                ("nll", metrics.NLL()),
                ("ece", metrics.ECE()),
                ("accuracy", metrics.Accuracy()),
            ):
                metric.update(judged, labels[kept])
                out[name] = float(metric.compute())
        return out | (self.kept_metrics(found) if self.kept_metrics is not None else {})

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        whole = any(
            p.requires_grad and ".posterior." not in f".{name}"
            for name, p in self.model.named_parameters()
        )
        frozen = any(conversion.frozen for _, conversion in conversions_of(self.model))
        save(self.model, folder / FOLDER, base=whole and not frozen)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        folder = Path(resume_from_checkpoint) / FOLDER
        state: dict[str, Tensor] = {}
        if not folder.is_dir():
            raise ValueError(
                f"{resume_from_checkpoint} has no checkpoint of a BayesTrainer in {FOLDER}/."
            )
        for name, data in read_folder(folder, {"posterior.safetensors"}).items():
            if name.endswith(".safetensors"):
                check_tensors(data)
                state |= load_tensors(data)
        fit = (self.model if model is None else model).load_state_dict(
            state, strict=False
        )
        if fit.unexpected_keys:
            raise ValueError(
                f"{folder} does not fit this model: it has {fit.unexpected_keys[0]}, which the model lacks."
            )

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


def classify(
    model: Any,
    tokenizer: Any,
    texts: str | Sequence[str],
    draws: int | None = None,
    batch_size: int = 32,
    seed: Seed = None,
) -> list[dict[str, Any]]:
    """Labels of texts with uncertainty, as a text-classification pipeline would give them.

    Args:
        model: a converted model for sequence classification.
        texts: several, or one.
        draws: number of draws; by default eight of each member.

    Returns:
        for each text its label, the label's probability as "score", the entropy of the prediction in nats, and the
        part of it that is about the weights, "mutual_information".
    """
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        use = 'predict(model, inputs, likelihood="bernoulli", output="logits")'
        raise ValueError(
            f"classify tells one label of each text, and this model's problem_type is several: use {use}."
        )
    texts = [texts] if isinstance(texts, str) else list(texts)
    draws = _TOLD * members(model) if draws is None else draws
    found: list[dict[str, Any]] = []
    device, names = (
        next(model.parameters()).device,
        getattr(model.config, "id2label", {}),
    )
    for start in range(0, len(texts), batch_size):
        batch = tokenizer(
            texts[start : start + batch_size],
            padding=True,
            truncation=True,
            return_tensors="pt",
        )
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        pred = predict(
            model, inputs, draws, keep_samples=False, output="logits", seed=seed
        )
        numbers = (pred.label, pred.confidence, pred.total, pred.epistemic)
        for label, *scores in zip(*(n.tolist() for n in numbers), strict=True):
            said = dict(
                zip(("score", "entropy", "mutual_information"), scores, strict=True)
            )
            found.append({"label": names.get(label, label)} | said)
    return found


@dataclass(frozen=True)
class Generated:
    """Sequences with the uncertainty of each new token, under all draws of the posterior.

    Attributes:
        sequences: (B, prompt + T) tokens.
        log_prob: (B, T) log-probability of each new token under the averaged prediction.
        entropy: (B, T) of the averaged prediction, in nats.
        mutual_information: (B, T), the part of it that is about the weights: what draws disagree on.
        mask: (B, T) whether a token counts: up to the first end of sequence.
    """

    sequences: Tensor
    log_prob: Tensor
    entropy: Tensor
    mutual_information: Tensor
    mask: Tensor

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over a sequence's tokens (B,) of one of the fields: of `mutual_information` a score of hallucination."""
        return (values * self.mask).sum(1) / self.mask.sum(1).clamp_min(1)


@torch.no_grad()
def generate(
    model: Any,
    inputs: Any,
    config: GenerationConfig | None = None,
    draws: int | None = None,
    seed: Seed = None,
) -> Generated:
    """Generate text, each sequence with a draw of its own, and say how sure all draws are of every token of it.

    Args:
        model: a converted causal language model, or one that reads a sequence and writes another (T5, BART).
        inputs: what a tokenizer gives: "input_ids" (B, prompt), of causal models padded on the left, and
            "attention_mask".
        config: how to generate; with `num_return_sequences` a prompt gets several, of different members.
        draws: number of draws in judging; by default eight of each member.
        seed: of the draws in judging.
    """
    prompt: Tensor = inputs["input_ids"]
    given = {
        "input_ids": prompt,
        "attention_mask": inputs.get("attention_mask", torch.ones_like(prompt)),
    }
    sequences = model.generate(**given, generation_config=config)
    times = len(sequences) // len(prompt)
    told = {name: tensor.repeat_interleave(times, 0) for name, tensor in given.items()}
    begun = prompt.shape[1]
    if model.config.is_encoder_decoder:
        told, begun = told | {"decoder_input_ids": sequences}, 1
    else:
        told = _continued(model, told["attention_mask"], sequences)
    new = sequences[:, begun:]
    draws = _TOLD * members(model) if draws is None else draws
    judged = predict(model, told, draws, keep_samples=False, output="logits", seed=seed)
    tells = slice(begun - 1, sequences.shape[1] - 1)  # each token tells the next
    log_prob = judged.log_probs[:, tells].gather(-1, new.unsqueeze(-1)).squeeze(-1)
    total, epistemic = judged.total[:, tells], judged.epistemic[:, tells]
    return Generated(sequences, log_prob, total, epistemic, _alive(model, config, new))


def _continued(model: Any, seen: Tensor, sequences: Tensor) -> dict[str, Tensor]:
    """Prompts and what follows as one input, with positions as they were generated: padding does not count."""
    mask = nn.functional.pad(seen, (0, sequences.shape[1] - seen.shape[1]), value=1)
    placed = "position_ids" in inspect.signature(base_model(model).forward).parameters
    where = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if placed else {}
    return {"input_ids": sequences, "attention_mask": mask} | where


def _alive(model: Any, config: GenerationConfig | None, new: Tensor) -> Tensor:
    """Tokens up to and with the first end of sequence, (B, T)."""
    known = (
        getattr(given, "eos_token_id", None)
        for given in (config, model.generation_config)
    )
    ends = next(
        (end for end in known if end is not None), None
    )  # what a config leaves open is the model's own
    if ends is None:
        return torch.ones_like(new, dtype=torch.bool)
    ended = torch.isin(new, torch.as_tensor(ends, device=new.device))
    return ended.cumsum(1) - ended.long() == 0
