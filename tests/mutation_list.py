"""The bugs that mutations.py plants: wrong signs, forgotten factors, swapped members, stale draws."""


class Mutation:
    """A text that occurs once in the source, what takes its place, and the tests that should see it."""

    def __init__(self, name: str, old: str, new: str, *tests: str) -> None:
        self.name, self.old, self.new, self.tests = name, old, new, tests


MUTATIONS = [
    # Passes and calls.
    Mutation(
        "draws-share-inputs",
        "more, options = own((args, mine) if tile else",
        "more, options = ((args, mine) if tile else",
        "whole_models/test_calls.py -k write_into",
    ),
    Mutation(
        "cache-of-draw-0",
        "value.of(j) if isinstance(value, NotJoined)",
        "value.of(0) if isinstance(value, NotJoined)",
        "whole_models/test_outputs.py -k with_a_cache",
    ),
    Mutation(
        "objects-fold",
        "cached = layout.objects or any(",
        "cached = any(",
        "whole_models/test_outputs.py -k objects_of_somebody",
    ),
    Mutation(
        "transforms-of-draw-0",
        "or any(attributes_of(leaf, around) for leaf in leaves)",
        "or False",
        "whole_models/test_outputs.py -k transforms_of",
    ),
    Mutation(
        "derivatives-shared",
        "if any(a.requires_grad for a in map(padded, arrays_of((args, kwargs)))):",
        "if False:",
        "whole_models/test_workflows.py -k take_derivatives",
    ),
    Mutation(
        "layers-called-later",
        "    if calls_layers(first):",
        "    if False:",
        "whole_models/test_outputs.py -k are_gone",
    ),
    Mutation(
        "some-of-the-rows",
        "(x.shape[found] % self.rows and (key, x.dim()) not in self.layout.merged)",
        "False",
        "whole_models/test_outputs.py -k some_of_the_rows",
    ),
    Mutation(
        "trials-leave-hooks",
        "            held.pop(number, None)",
        "            pass",
        "whole_models/test_outputs.py -k hidden_states",
    ),
    Mutation("rowless-of-member-0", "objects.append(f", "str(f", "whole_models/test_outputs.py -k began_alike"),
    Mutation(
        "members-at-once-forget",
        "alone = current.layout.stateful or _needs_loop",
        "alone = _needs_loop",
        "whole_models/test_outputs.py -k at_once_keep",
    ),
    Mutation(
        "norms-of-all-draws",
        "if evaluates and mean is None:",
        "if evaluates and mean is not None:",
        "whole_models/test_outputs.py -k running_statistics",
    ),
    Mutation(
        "reruns-find-own-weights",
        "held = found.substitutes  #",
        "held = found.substitutes = found.substitutes.copy()  #",
        "whole_models/test_outputs.py -k other_types",
    ),
    Mutation(
        "methods-draw-anew",
        "if self.frozen is None and not needs_rows(self.posteriors):",
        "if False:",
        "whole_models/test_outputs.py -k has_one_draw",
    ),
    Mutation(
        "outputs-cut-anywhere",
        "if not torch.compiler.is_compiling() and leaf.shape[dim] % (draws * rows):",
        "if not torch.compiler.is_compiling() and leaf.shape[dim] % draws:",
        "whole_models/test_calls.py -k never_mixed",
    ),
    Mutation(
        "padding-learns",
        "return torch.where(moves, y, y.detach())",
        "return y",
        "whole_models/test_calls.py -k padding",
    ),
    Mutation(
        "methods-of-member-0",
        "return _call(module, members, int(found.first) % members.members, args, kwargs, method=name)",
        "return _call(module, members, 0, args, kwargs, method=name)",
        "whole_models/test_calls.py -k copied_part",
    ),
    Mutation(
        "single-rows",
        "        start = index * rows\n        own",
        "        start = 0\n        own",
        "contract/test_contract.py -k draws_differ",
    ),
    Mutation(
        "single-member",
        "1, self.first + index, index, {}, {}",
        "1, self.first, index, {}, {}",
        "engine/test_passes_and_rows.py -k right_folding",
    ),
    Mutation(
        "take-first-draws",
        "Noise(noise.block[index], ",
        "Noise(noise.block[: len(index)], ",
        "engine/test_sharing.py -k same_outputs",
    ),
    Mutation(
        "view-keeps-calls",
        "        new._begin_call()\n",
        "        new._begin_call()\n        new.calls = self.calls\n",
        "engine/test_passes_and_rows.py -k held_masks",
    ),
    Mutation(
        "noise-of-all-draws-alike",
        "generator.manual_seed((first + j * GOLDEN) % 2**63)",
        "generator.manual_seed(first)",
        "engine/test_seeds.py -k function_of_model",
    ),
    Mutation(
        "draws-numbered-from-zero",
        "numbers = range(start, start + new.draws)",
        "numbers = range(new.draws)",
        "engine/test_seeds.py -k function_of_model",
    ),
    Mutation(
        "masks-alike-at-all-places",
        "number = _mixed(keys + _signed(place * GOLDEN))",
        "number = _mixed(keys)",
        "posteriors/test_dropout.py -k held_draws_drop",
    ),
    Mutation(
        "forks-not-told-apart",
        "key(self.own, self.children), 0, torch.initial_seed()",
        "0, 0, torch.initial_seed()",
        "engine/test_seeds.py -k forked",
    ),
    Mutation(
        "nan-outputs-pass", "return not bool(total.isnan())", "return True", "prediction/test_inputs.py -k outputs_that"
    ),
    Mutation(
        "block-edges",
        "edges = [-(-j * rows // blocks) for",
        "edges = [(j * rows // blocks) for",
        "engine/test_passes_and_rows.py -k held",
        "engine/test_sharing.py -k windows",
    ),
    Mutation(
        "first-member",
        "first = noise.random_member(posteriors[0].device) if most > 1 else 0",
        "first = 0",
        "engine/test_passes_and_rows.py -k random_member",
    ),
    Mutation(
        "forget-backward", "    passes.remember(out, new)\n", "", "engine/test_passes_and_rows.py -k checkpointing"
    ),
    Mutation(
        "backward-task",
        "(found is None or found.task != task)",
        "found is None",
        "engine/test_passes_and_rows.py -k checkpoint",
    ),
    Mutation(
        "split-apart",
        "    if split and not layout.rowwise:\n",
        "    if split and not layout.folds:\n",
        "engine/test_passes_and_rows.py -k within_a_batch",
    ),
    Mutation(
        "scope",
        "return passes.run(scope, lambda: _look_at_first(module, name, own)(*args, **kwargs))",
        "return own(*args, **kwargs)",
        'whole_models/test_first_review.py -k "method or generate"',
    ),
    Mutation(
        "noticed-once", "    posteriors[0].told_of_unused = True\n", "", "engine/test_passes_and_rows.py -k never"
    ),
    # The proof of rows.
    Mutation(
        "proof-some-rows",
        "self._change(some, double, out2)",
        "pass",
        "engine/test_passes_and_rows.py -k within_a_batch",
    ),
    Mutation(
        "proof-first-half",
        "self._change(~second, double, out2)",
        "pass",
        "engine/test_passes_and_rows.py -k wrong_folding",
    ),
    Mutation(
        "larger-inputs",
        "        if why:\n            layout.run_one_by_one",
        "        if False:\n            layout.run_one_by_one",
        "engine/test_passes_and_rows.py -k cut_only",
    ),
    Mutation(
        "more-rows",
        "(rows <= self.largest[0] and numbers <= self.largest[1])",
        "numbers <= self.largest[1]",
        "engine/test_passes_and_rows.py -k looked_at",
    ),
    Mutation(
        "proof-allowed",
        "if not visit.layer.may_hold_rows(dim, len(visit.shapes[0])):",
        "if False:",
        "engine/test_passes_and_rows.py -k wrong_folding",
    ),
    Mutation(
        "forget-drawn",
        "            state.forget()\n",
        "            pass\n",
        "whole_models/test_workflows.py -k computed_from_drawn",
    ),
    Mutation("trial-parameters", "            data.copy_(old)\n", "", "whole_models/test_workflows.py -k trials_leave"),
    Mutation(
        "longest-of-all",
        'if any(getattr(p.layer, "bayes_copied", False) for',
        "if any(False for",
        "whole_models/test_workflows.py -k cut_sequences",
    ),
    Mutation("steps-no-rows", "if looped and along:", "if False:", "whole_models/test_workflows.py -k run_one_by_one"),
    Mutation(
        "late-of-seed",
        "kept = current.stream is not None and",
        "kept = False and",
        "whole_models/test_workflows.py -k drawn_late",
    ),
    Mutation(
        "proof-used", "    if probe.quiet.used:\n", "    if False:\n", "engine/test_passes_and_rows.py -k wrong_folding"
    ),
    Mutation(
        "proof-outputs",
        "if not all(self._close(half, a) for half in halves):",
        "if not all(self._close(half, a) for half in halves[:1]):",
        "engine/test_passes_and_rows.py -k halves",
    ),
    Mutation(
        "proof-prints",
        "sums = (lines * self.weights[at]).sum(1, dtype=torch.float64)",
        "sums = lines[:, 0].double()",
        "engine/test_passes_and_rows.py -k alike",
    ),
    Mutation(
        "proof-apart",
        "layout.why = str(error)\n            if",
        "layout.why, layout.rowwise = str(error), True\n            if",
        "engine/test_passes_and_rows.py -k within_a_batch",
    ),
    Mutation(
        "proof-tree",
        "if former is not None and former.identities == found.identities:",
        "if former is not None:",
        'engine/test_passes_and_rows.py -k "again or layout or replaced"',
        'whole_models/test_first_review.py -k "replaced or added or removed"',
    ),
    Mutation(
        "proof-verify", "                    proof.verify()\n", "", "engine/test_passes_and_rows.py -k folds_wrongly"
    ),
    Mutation(
        "quiet-norm",
        'if name == "batch_norm":',
        'if name == "batch_normal":',
        "engine/test_passes_and_rows.py -k quiet",
    ),
    # Sharing.
    Mutation(
        "share-drawn",
        "found.shared is None or found.drawn_yet or",
        "found.shared is None or",
        "engine/test_sharing.py -k draw_was_used",
    ),
    Mutation(
        "share-repeat",
        "repeats[dims[i]] = total\n",
        "repeats[dims[i]] = total - 1\n",
        "engine/test_sharing.py -k same_outputs",
    ),
    Mutation(
        "share-flags",
        "                    module.training = training",
        "                    module.training = True",
        "engine/test_sharing.py",
        "train/test_objective.py -k predict",
    ),
    # Rows and layouts.
    Mutation(
        "rows-interleave",
        "factor.repeat_interleave(seen // factor.shape[0], 0)",
        "factor.repeat(seen // factor.shape[0], 1)",
        "engine/test_sharing.py -k windows",
        'contract/test_contract.py -k "EmbeddingBag or any_number"',
        "engine/test_awkward_models.py -k written_out",
    ),
    Mutation(
        "rows-uneven",
        "lines, count = _looked_up(lines, block_of_row(rows, count, factor.device)), rows",
        "lines, count = _looked_up(lines, torch.arange(rows, device=factor.device) % count), rows",
        "engine/test_passes_and_rows.py -k held",
    ),
    Mutation(
        "tile-draws",
        "parts = leaf.unflatten(dim, (draws, leaf.shape[dim] // draws))",
        "parts = leaf.unflatten(dim, (leaf.shape[dim] // draws, draws)).movedim(dim + 1, dim)",
        "contract/test_contract.py -k rank1-normal",
    ),
    # Layers.
    Mutation(
        "mask",
        "return change if self.mask is None else change * self.mask.to(change.dtype)",
        "return change",
        "whole_models/test_first_review.py -k padding",
    ),
    Mutation(
        "rank-mean",
        "y = sum(parts[1:], parts[0]) / len(parts)",
        "y = sum(parts[1:], parts[0])",
        'contract/test_contract.py -k "plain and rank1"',
    ),
    Mutation(
        "conv-groups",
        "r = r.view(self.groups, 1, -1).expand(-1, self.in_channels // self.groups, -1)",
        "r = r.view(1, self.groups, -1).expand(self.in_channels // self.groups, -1, -1)",
        "contract/test_contract.py -k ConvTranspose2d",
    ),
    Mutation("attention-values", '("v", value))', '("k", value))', "contract/test_contract.py -k Attention"),
    Mutation("attention-scale", "/ math.sqrt(q.shape[-1])", "", "contract/test_contract.py -k Attention"),
    Mutation(
        "recurrent-backwards",
        "reversed(range(x.shape[0])) if backwards else",
        "range(x.shape[0]) if backwards else",
        "contract/test_contract.py -k bi",
    ),
    Mutation(
        "recurrent-biases",
        "(*weights[i : i + 2], *biases[i : i + 2])",
        "(*weights[i : i + 2], *biases[i : i + 2][::-1])",
        'contract/test_contract.py -k "GRU and not Cell"',
        "layers/test_recurrent_reference.py",
    ),
    Mutation(
        "bag-mean", "out = out / count.clamp_min(1).unsqueeze(-1)", "pass", "contract/test_contract.py -k EmbeddingBag"
    ),
    Mutation(
        "norm-groups",
        "F.group_norm(x, self.num_groups, weight, bias, self.eps)",
        "F.group_norm(x, 1, weight, bias, self.eps)",
        "contract/test_contract.py -k GroupNorm",
    ),
    Mutation(
        "any-blocks",
        "            start += size\n",
        "            start += size if j else 0\n",
        "engine/test_passes_and_rows.py -k drawn_weights",
    ),
    Mutation(
        "copied-member",
        "int(current.first) % members.members, args",
        "0, args",
        "contract/test_contract.py -k ensemble",
        "posteriors/test_ensemble.py",
    ),
    Mutation(
        "copied-order",
        "return _select(torch.cat(leaves, dim), dim, total, back)",
        "return torch.cat(leaves, dim)",
        "contract/test_contract.py -k ensemble",
        "posteriors/test_ensemble.py",
    ),
    # Posteriors.
    Mutation(
        "flipout-signs",
        "& digit) > 0, -1.0, 1.0)",
        "& digit) > 0, 1.0, 1.0)",
        "posteriors/test_mean_field.py -k flipout",
        "posteriors/test_mean_field.py",
    ),
    Mutation(
        "flipout-output",
        "linear.rows(onto, z, drawn.sign_out, self.current)",
        "linear.rows(onto, z, drawn.sign_out.abs(), self.current)",
        'contract/test_contract.py -k "row and flipout"',
    ),
    Mutation(
        "local-bias",
        "(2 * self._capped(self.bias_log_scale)).exp().to",
        "self._capped(self.bias_log_scale).exp().to",
        "posteriors/test_mean_field.py -k local",
        "posteriors/test_mean_field.py",
    ),
    Mutation(
        "kl-bias-twice",
        "return [self.bias_prior.gaussian_kl(widen(linear.bias)",
        "return [2 * self.bias_prior.gaussian_kl(widen(linear.bias)",
        "contract/test_contract.py -k kl_is",
    ),
    Mutation(
        "kl-one-prior",
        "return f.family, f.prior, *f.loc",
        "return f.family, *f.loc",
        "engine/test_passes_and_rows.py -k priors_of",
    ),
    Mutation(
        "kl-outputs-only",
        "for f in (p.r, p.s) if f.family is not Point]",
        "for f in (p.r,) if f.family is not Point]",
        "contract/test_contract.py -k kl_is",
    ),
    Mutation(
        "lines-without-a-graph",
        "kind = rows, x.dtype, torch.is_grad_enabled()",
        "kind = rows, x.dtype",
        "engine/test_steps.py",
    ),
    Mutation(
        "lines-of-a-tied-layer", "drawn.lines if drawn.own is linear.bias and", "drawn.lines if", "engine/test_plans.py"
    ),
    Mutation(
        "member-biases",
        "F.pad(side_by_side(offsets, 1), (0, 0, 1, 0))",
        "F.pad(side_by_side(offsets, 1), (0, 0, 0, 1))",
        "posteriors/test_rank1_paper.py",
    ),
    Mutation(
        "nested-rows",
        "q.rsample(lines.view(spread.shape + lines.shape[1:])).view(lines.shape)",
        "q.rsample(lines.view(spread.shape + lines.shape[1:])).transpose(-3, -2).reshape(lines.shape)",
        "posteriors/test_rank1_paper.py",
    ),
    Mutation(
        "rows-bias",
        "return torch.addcmul(bias, x, factor) if combine is operator.mul else",
        "return torch.addcmul(bias * 2, x, factor) if combine is operator.mul else",
        "posteriors/test_rank1_paper.py",
    ),
    Mutation(
        "dense-bias", "y = y * lines[1] + lines[2]", "y = y * lines[1] + 2 * lines[2]", "posteriors/test_rank1_paper.py"
    ),
    Mutation("joint-biases", "lines = lines + torch.cat(", "lines = lines + 0 * torch.cat(", "engine/test_plans.py"),
    Mutation(
        "shared-bias",
        "given = drawn.own is not None and drawn.own is own",
        "given = drawn.own is not None",
        "engine/test_plans.py",
    ),
    Mutation("tree-stands", "len(found) == len(self.children) and all(", "True or all(", "engine/test_plans.py"),
    Mutation(
        "numbered-draws",
        "generator=generator.manual_seed((first + j * GOLDEN) % 2**63)",
        "generator=generator.manual_seed((first + (j - start) * GOLDEN) % 2**63)",
        "engine/test_seeds.py",
    ),
    Mutation(
        "numbered-masks",
        "keys = [(first + j * GOLDEN) % 2**63 for j in numbers]",
        "keys = [first for j in numbers]",
        "engine/test_seeds.py",
    ),
    Mutation(
        "clip",
        "F.hardtanh(values, -clip, clip)",
        "values",
        "posteriors/test_rank1_paper.py -k clip",
        "posteriors/test_rank1_paper.py",
    ),
    Mutation(
        "tied-sums", "u[:, -2] * v[:, -1] + u[:, -1] * v[:, -2]", "u[:, -2] * v[:, -1]", "distributions/test_sums.py"
    ),
    Mutation(
        "excess-gradient",
        "log_scale.sub(ctx.log_prior).mul_(2).expm1_()",
        "log_scale.expm1()",
        "distributions/test_sums.py",
    ),
    Mutation(
        "tied-products",
        "[u[a] * u[b] for a, b in pairs]",
        "[u[a] * u[a] for a, b in pairs]",
        "posteriors/test_mean_field.py -k local",
        "posteriors/test_mean_field.py",
    ),
    Mutation(
        "patch-half",
        "precision / 2 * _expected_squares(alike)",
        "precision * _expected_squares(alike)",
        "contract/test_contract.py -k eq_8",
    ),
    Mutation("folded-mean", "biases - shift", "biases + shift", "layers/test_norm_layers.py -k folded"),
    Mutation(
        "mixed-owner",
        "tuple(counts), picked[0].device",
        "tuple(counts[::-1]), picked[0].device",
        "layers/test_norm_layers.py -k widths",
    ),
    Mutation(
        "kept-share",
        "return kept / (1 - self.probabilities()[-1]).to(self.dtype)",
        "return kept",
        'contract/test_contract.py -k "mc-dropout or drop-connect"',
        "posteriors/test_dropout.py",
    ),
    Mutation(
        "gumbel-sign",
        "unsqueeze(-1) - (-numbers.log()).log()",
        "unsqueeze(-1) + (-numbers.log()).log()",
        "posteriors/test_emp_paper.py -k learn",
        "posteriors/test_emp_paper.py",
    ),
    Mutation(
        "picks-reversed",
        "probs.cumsum(0)[:-1].to(lines.dtype)",
        "probs.flip(0).cumsum(0)[:-1].to(lines.dtype)",
        "posteriors/test_emp_paper.py -k prob",
        "posteriors/test_dropout.py",
    ),
    Mutation(
        "dropout-scale", "x * kept.to(x.dtype) / (1 - rate)", "x * kept.to(x.dtype)", "posteriors/test_dropout.py"
    ),
    Mutation(
        "member-momentum",
        "share = share * layer.momentum",
        "share = share * (1 - layer.momentum)",
        "layers/test_member_norm.py",
    ),
    Mutation(
        "ensemble-decay",
        'Role:\n        return "weight"\n',
        'Role:\n        return "scale"\n',
        "posteriors/test_ensemble.py",
    ),
    # Distributions.
    Mutation(
        "kl-normal",
        "+ 0.5 * ((q.loc - p.loc) / p.scale) ** 2",
        "+ ((q.loc - p.loc) / p.scale) ** 2",
        "contract/test_contract.py -k kl_is",
        "distributions/test_sums.py",
    ),
    Mutation(
        "kl-cauchy", "/ (4 * q.scale * p.scale)", "/ (2 * q.scale * p.scale)", "contract/test_contract.py -k kl_is"
    ),
    Mutation(
        "kl-lognormal",
        "return gaussian + q.loc if isinstance",
        "return gaussian - q.loc if isinstance",
        "distributions/test_families.py",
    ),
    Mutation("kl-excess", "- _entropy(q) - correction", "- _entropy(q)", "distributions/test_families.py"),
    Mutation("log-density", "log_prob(x.log()) - x.log()", "log_prob(x.log())", "distributions/test_families.py"),
    Mutation(
        "cauchy-draw",
        "torch.sign(noise) / torch.tan(",
        "torch.sign(noise) * torch.tan(",
        "distributions/test_families.py",
    ),
    # Training.
    Mutation(
        "kl-shares",
        "_kl(model, every) / (num_data * micro_batches)",
        "_kl(model, every) / num_data",
        "prediction/test_extreme_numbers.py -k micro",
    ),
    Mutation(
        "kl-tied-twice",
        "kinds = kinds_of(every)",
        "kinds = kinds_of([p for m in model.modules() if hasattr(m, 'posterior') for p in m.posterior.values()])",
        "engine/test_passes_and_rows.py -k tied",
    ),
    Mutation("mixture-count", "- math.log(logp.shape[0])", "", "train/test_objective.py"),
    Mutation(
        "ignored-rows",
        "(_combine(picked, form) * kept).sum() / kept.sum()",
        "(_combine(picked, form) * kept).mean()",
        "train/test_objective.py",
    ),
    Mutation("noise-floor", "(LEAST_NOISE**2 + wide.square()).sqrt()", "wide", "train/test_objective.py"),
    Mutation(
        "posterior-rate",
        "posterior_lr_multiplier if group.variational else 1.0",
        "posterior_lr_multiplier if group.of_posterior else 1.0",
        "engine/test_passes_and_rows.py -k multiplier",
    ),
    Mutation(
        "decay-of-means",
        "undecayed = variational or p.in_kl",
        "undecayed = variational",
        "posteriors/test_mean_field.py -k decay",
        "posteriors/test_mean_field.py",
        "posteriors/test_ensemble.py",
    ),
    Mutation("anneal", "min(1.0, (step + 1) / steps)", "min(1.0, step / steps)", "train/test_objective.py"),
    # Prediction.
    Mutation(
        "draws-of-members",
        "by_member = values.unflatten(0, (-1, self.members))",
        "by_member = values.unflatten(0, (self.members, -1)).transpose(0, 1)",
        "prediction/test_prediction.py",
        "train/test_objective.py",
    ),
    Mutation(
        "chan",
        "shift**2 * (self.count * len(values) / (self.count + len(values)))",
        "shift**2 * len(values)",
        "train/test_objective.py",
        "prediction/test_prediction.py",
    ),
    Mutation(
        "member-weights",
        "weights.to(values.device).repeat(each, *[1] * (weights.dim() - 1)) / each",
        "weights.to(values.device).repeat_interleave(each, 0) / each",
        "prediction/test_prediction.py",
    ),
    Mutation(
        "rescaled-noise", "else square * self.noise,", "else factor * self.noise,", "prediction/test_prediction.py"
    ),
    Mutation(
        "density-count",
        "return torch.logsumexp(logs, 0) - math.log(len(logs))",
        "return torch.logsumexp(logs, 0)",
        "prediction/test_prediction.py",
    ),
    Mutation("stack-shares", "(a - b.log())[c]", "a[c]", "prediction/test_stacking.py"),
    Mutation(
        "information",
        "(entropy(log_mean(by_member, weights)) - aleatoric)",
        "(entropy(log_mean(by_member, weights)))",
        "train/test_objective.py",
        "prediction/test_prediction.py",
    ),
    # Conversion.
    Mutation(
        "tie",
        'converted[0].config, converted[0].name, ""',
        'converted[0].config, None, ""',
        "engine/test_passes_and_rows.py -k tied",
    ),
    Mutation(
        "first-pattern",
        'dict.fromkeys(selected("config", pattern, layers), one) | configs',
        'configs | dict.fromkeys(selected("config", pattern, layers), one)',
        "convert/test_convert.py",
        "posteriors/test_mixed_methods.py",
    ),
    Mutation(
        "keeps-mode", "return cls, out.train(layer.training)", "return cls, out", "convert/test_convert.py -k mode_of"
    ),
    Mutation(
        "fast-paths",
        'setattr(module, attribute, 0 if attribute == "activation_relu_or_gelu" else False)',
        "pass",
        "whole_models/test_real_models.py -k encoder",
        "engine/test_awkward_models.py -k transformer",
    ),
    Mutation(
        "base-weights",
        'if check == "weights" and _fingerprint',
        'if check == "never" and _fingerprint',
        "convert/test_checkpoint.py",
    ),
    # Mixtures of members, members of an ensemble, correlated weights.
    Mutation(
        "mixture-of-layers",
        "terms += [-information(mixed)] if mixed else []",
        "terms += [-information([q]) for q in mixed]",
        "posteriors/test_rank1_paper.py -k different_members",
    ),
    Mutation(
        "mixture-density",
        "(density.diagonal() - density.logsumexp(0)).mean()",
        "(density.diagonal() - density.logsumexp(1)).mean()",
        "posteriors/test_rank1_paper.py -k three_kls",
    ),
    Mutation(
        "log-uniform-pole",
        "(0.5 if isinstance(p, LogUniform) else 1.0)",
        "1.0",
        "posteriors/test_rank1_paper.py -k dawson",
    ),
    Mutation(
        "members-share-the-rate",
        "found.loss * (len(self.networks) / train.accumulate)",
        "found.loss / train.accumulate",
        "lab/test_fit.py -k networks_would_apart",
    ),
    Mutation(
        "members-clipped-together",
        "for parameters in self.networks:",
        "for parameters in [self.network.parameters()]:",
        "lab/test_fit.py -k networks_would_apart",
    ),
    Mutation(
        "members-start-by-guess",
        "method = method.of_networks_from(afresh)",
        "pass",
        "lab/test_fit.py -k own_initialiser",
    ),
    Mutation(
        "correlated-diagonal",
        "+ self.log_diagonal())\n",
        "+ 2 * self.log_diagonal())\n",
        "posteriors/test_correlated.py -k torchs",
    ),
    Mutation(
        "correlated-pruned",
        "self.spread(self._normal(noise.block) * free)",
        "self.spread(self._normal(noise.block))",
        "posteriors/test_correlated.py -k pruned",
    ),
    Mutation(
        "seeds-of-its-own",
        "same = all(map(torch.equal, map(padded, one), map(padded, other)))",
        "same = False",
        "whole_models/test_workflows.py -k seeds_itself",
    ),
    Mutation(
        "state-that-shows-later",
        "alike and _rows_in(first) == _rows_in(second)",
        "alike",
        "whole_models/test_workflows.py -k after_some_calls",
    ),
    Mutation(
        "attention-past-its-forward",
        'values = (own.weight, own.bias) if found.probing else self._drawn("out")',
        "values = own.weight, own.bias",
        "whole_models/test_workflows.py -k past_its_forward",
    ),
    Mutation(
        "graphs-not-copied",
        "kept = [v for v in inside if isinstance(v, Tensor) and v.grad_fn is not None]",
        "kept = []",
        "whole_models/test_workflows.py -k tensors_of_a_graph",
    ),
]
