"""A language model as a component: p(y | parents) over token sequences, with a prompt made from the parents."""

import copy
import hashlib
import json
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Union

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sysdpo_lab import atomic, errors, loading, scoring
from sysdpo_lab.components import adapters
from sysdpo_lab.components.base import Batch, Component, take_rows
from sysdpo_lab.components.prompts import Encoder, Ids, Template, check_template, fill, stop_ids

STRATEGIES = ("auto", "adapter", "copy", "cached")
_WHOLE = "_sysdpo_trained_as_a_whole"


class CausalLM(Component):
    """A decoder language model: log p(y | parents) = sum over y's tokens, EOS included, of log p(token | prompt, before).

    Args:
        name: the variable's name.
        parents: names of the variables that the template reads.
        model: a transformers causal language model, a peft model around one, or a source for `loading.load_causal_lm`.
        tokenizer: its tokenizer; may be None when `model` is a source.
        template: a format string over the parents ("Question: {x}\\nAnswer:"), or a function of them, called with
            keywords where its signature allows that, else with one dict. It makes a str or a list of chat messages; with
            a chat template a str becomes one user message. A function that returns None: not called in this row.
        adapter: what is trained. A rank (LoRA on all linear layers, alpha = 2 x rank), a peft config, the folder of a
            saved adapter to start from, the name of an adapter that a peft model has, or another CausalLM (both share its
            adapter). None trains the whole model, or, for a peft model, its active adapter. Components given the same
            base share it.
        max_new_tokens: longest completion that is generated; one that is cut there has no EOS and none is scored.
        reference: the frozen start. "adapter": the base with adapters off, or a frozen second copy of the start adapter
            where that is not zero; no second model. "copy": a second model (twice the memory). "cached": stored
            log-probabilities (see `cache_reference`). "auto": "adapter" with an adapter, else "copy".
        min_new_tokens: for `diverse` only, since an empty intermediate is useless; `sample` and `greedy` never forbid the
            EOS, so that they agree with `log_prob`.
        diversity_penalty: default of `diverse`, nats a repeated token; larger is more diverse.
        temperature: of `sample` only; scores are always those of temperature 1. Smaller is closer to greedy.
        pad_to_multiple: widths of scored batches are rounded up to multiples of it: fewer different shapes.
        generator: for the random start of a new adapter; None takes a seed from the name.
        dtype, revision: for `load_causal_lm` when `model` is a source.

    Raises:
        TemplateError, TokenizerError, AdapterError, UnknownOptionError, MissingModelError.
    """

    def __init__(
        self,
        name: str,
        parents: Sequence[str],
        model: nn.Module | str | Path,
        tokenizer: Any = None,
        template: Template = "{x}",
        adapter: Union[adapters.AdapterSource, "CausalLM", None] = None,
        max_new_tokens: int = 64,
        *,
        reference: str = "auto",
        min_new_tokens: int = 1,
        diversity_penalty: float = 20.0,
        temperature: float = 1.0,
        pad_to_multiple: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | str | None = None,
        revision: str | None = None,
    ):
        super().__init__(name, parents)
        errors.check_option("reference", reference, STRATEGIES)
        check_template(name, self.parents, template)
        self.template, self.temperature, self.diversity_penalty = template, temperature, diversity_penalty
        self.max_new_tokens, self.min_new_tokens = _whole(name, max_new_tokens=max_new_tokens), min_new_tokens
        self.pad_to_multiple = pad_to_multiple and _whole(name, pad_to_multiple=pad_to_multiple)
        self._check_options()
        if isinstance(model, (str, Path)):
            model, found = loading.load_causal_lm(model, dtype=dtype, revision=revision)
            tokenizer = found if tokenizer is None else tokenizer
        if not isinstance(model, nn.Module):
            raise errors.MissingModelError(
                f"component {name!r}: model must be a transformers model, a folder, a .gguf file or a hub id, found {model!r}"
            )
        self.adapter_name: str | None = None
        self.reference_adapter: str | None = None
        self.reference_model: nn.Module | None = None
        self.tied_to: str | None = None  # the component whose weights these are, when they are shared
        self._cache: dict[tuple[Ids, Ids], float] = {}
        adapter = self._twin(model, adapter) or adapter
        neutral = self._attach(model, adapter, generator)
        self.encoder = Encoder(name, tokenizer, stop_ids(self.network, tokenizer))
        self._reference_strategy(reference, neutral, adapter)
        self._start = self._weights_mark() if self.strategy == "cached" else None

    def _check_options(self) -> None:
        """Named errors now, not at the first draw of a long run."""
        for option, least, limit in (("temperature", math.ulp(0.0), "> 0"), ("diversity_penalty", 0.0, ">= 0")):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise errors.OptionRangeError(f"component {self.name!r}: {option}={value!r} must be a finite number {limit}")
        shortest = self.min_new_tokens
        if isinstance(shortest, bool) or not isinstance(shortest, int) or not 0 <= shortest <= self.max_new_tokens:
            raise errors.OptionRangeError(
                f"component {self.name!r}: min_new_tokens={shortest!r} must be a whole number from 0 to "
                f"max_new_tokens={self.max_new_tokens}"
            )

    # -- the model ----------------------------------------------------------------------------------------------------
    def _attach(self, model: nn.Module, adapter: Any, generator: torch.Generator | None) -> bool:
        """Find or make the part that is trained; returns whether adapters off is its start."""
        if isinstance(adapter, CausalLM):
            self.model, self.adapter_name = adapter.model, adapter.adapter_name
            self.tied_to = adapter.tied_to or adapter.name
            return False
        if adapter is None and not hasattr(model, "peft_config"):
            self.model = model
            model.__dict__[_WHOLE] = weakref.ref(self)
            return False
        if adapter is None or adapters.existing(model, adapter):
            attached = adapters.adopt(model, self.name, adapter)
        else:
            self._check_base(model)
            attached = adapters.attach(model, adapter, self.name, generator)
        attached.model.get_base_model().__dict__[f"{_WHOLE}_{attached.name}"] = weakref.ref(self)
        self.model, self.adapter_name = attached.model, attached.name
        return attached.neutral

    def _twin(self, model: nn.Module, adapter: Any) -> Union["CausalLM", None]:
        """Another component that already trains the same part of the same model: this one is then tied to it."""
        if adapter is None and not hasattr(model, "peft_config"):
            mark = _WHOLE
        else:
            mark = f"{_WHOLE}_{adapters.existing(model, adapter)}"
        other = _trainer(model, mark)
        return None if other is None or other.name == self.name else other  # the same name: made anew, as in a notebook

    def _check_base(self, model: nn.Module) -> None:
        other = _trainer(model, _WHOLE)
        if other is not None:
            raise errors.AdapterError(
                f"component {self.name!r}: component {other.name!r} trains all weights of this model, so an adapter cannot "
                "stand on it; give that component an adapter too, or load the model a second time"
            )

    def _reference_strategy(self, wanted: str, neutral: bool, adapter: Any) -> None:
        if isinstance(adapter, CausalLM):
            self.strategy, self.reference_adapter = adapter.strategy, adapter.reference_adapter
            self.reference_model, self._cache = adapter.reference_model, adapter._cache
            return
        self.strategy = ("adapter" if self.adapter_name else "copy") if wanted == "auto" else wanted
        if self.strategy == "adapter" and not self.adapter_name:
            raise errors.AdapterError(
                f"component {self.name!r}: reference='adapter' needs an adapter; without one choose 'copy' or 'cached'"
            )
        if self.strategy == "adapter" and not neutral:
            attached = adapters.Attached(self.model, self.adapter_name, neutral)
            self.reference_adapter = adapters.frozen_copy(attached, self.name)
        if self.strategy == "copy":
            self.reference_model = copy.deepcopy(self.network).requires_grad_(False)
            self.reference_adapter = self.adapter_name

    @property
    def network(self) -> nn.Module:
        """The transformers model itself, adapters inside its layers."""
        return self.model.get_base_model() if self.adapter_name else self.model

    @property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer

    @property
    def device(self) -> torch.device:
        return self.network.get_input_embeddings().weight.device

    @contextmanager
    def _acting(self) -> Iterator[nn.Module]:
        """The network that stands for the component now, policy or reference, with the right adapter active."""
        if not self.is_reference:
            network, name = self.network, self.adapter_name
        else:
            network, name = self.reference_model, self.reference_adapter
            network = self.network if network is None else network
        with ExitStack() as stack:
            if self.adapter_name:
                stack.enter_context(adapters.activated(network, name))
            if self.is_reference:
                stack.enter_context(torch.no_grad())
            yield network

    def trainable(self) -> list[nn.Parameter]:
        """This component's adapter (without one: the whole model); never the shared base, never the reference."""
        if self.adapter_name:
            return list(adapters.adapter_parameters(self.model, self.adapter_name).values())
        return list(self.model.parameters())

    @contextmanager
    def reference(self) -> Iterator[None]:
        before = self.is_reference
        self._in_reference = True
        try:
            yield
        finally:
            self._in_reference = before

    # -- prompts ------------------------------------------------------------------------------------------------------
    def prompt_ids(self, parent_values: Mapping[str, Batch]) -> list[Ids | None]:
        """The prompt's ids of each row, the same for sampling and scoring; None where the template says: not called."""
        rows = self.check_parents(parent_values)
        columns = {parent: parent_values[parent] for parent in self.parents}
        filled = [fill(self.name, self.template, {p: column[row] for p, column in columns.items()}) for row in range(rows)]
        called = [row for row in range(rows) if filled[row] is not None]
        prompts: list[Ids | None] = [None] * rows
        for row, ids in zip(called, self.encoder.prompts(filled[row] for row in called)):
            prompts[row] = ids
        return prompts

    @property
    def _vocabulary(self) -> int:
        return self.network.get_input_embeddings().weight.shape[0]

    @property
    def _pad(self) -> int:
        return self.encoder.pad if self.encoder.pad < self._vocabulary else 0

    def _check_ids(self, rows: Sequence[int], *parts: Sequence[Ids]) -> None:
        vocabulary = self._vocabulary
        for part in parts:
            for row, ids in zip(rows, part):
                if min(ids) < 0 or max(ids) >= vocabulary:
                    wrong = next(i for i in ids if not 0 <= i < vocabulary)
                    raise errors.TokenIdError(
                        f"component {self.name!r}, row {row}: token id {wrong} lies outside the model's vocabulary "
                        f"0..{vocabulary - 1}; do tokenizer and model belong together?"
                    )

    def _check_lengths(self, rows: Sequence[int], prompts: Sequence[Ids], lengths: Sequence[int], what: str) -> None:
        limit = getattr(self.network.config.get_text_config(), "max_position_embeddings", None)
        long = [i for i in range(len(rows)) if limit and len(prompts[i]) + lengths[i] > limit]
        if long:
            first = long[0]
            raise errors.PromptTooLongError(
                f"component {self.name!r}, rows {[rows[i] for i in long][:10]}: a prompt of {len(prompts[first])} tokens and "
                f"{what} of {lengths[first]} (row {rows[first]}) are more than the model's context of {limit}; shorten the "
                "prompt or max_new_tokens, or drop these rows"
            )

    # -- scores -------------------------------------------------------------------------------------------------------
    def log_prob(self, value: Batch, parent_values: Mapping[str, Batch]) -> Float[Tensor, " B"]:
        """log p(value | parents), nats, summed over the completion's tokens with its EOS; float32 (float64 models: float64).

        Dropout is never active. Rows without a call (value None) score 0; a value where the template says "not called"
        has log-probability -inf.

        Args:
            value: B of `Completion` (its ids are scored as they are), str (encoded, then EOS) or None.
            parent_values: {parent: B values}.

        Raises:
            EmptyCompletionError, PromptTooLongError, CompletionError, TokenIdError, BatchMismatchError,
            ReferenceNotCachedError.
        """
        prompts, completions = self._pairs(value, parent_values)
        total = torch.zeros(len(prompts), dtype=self._score_dtype(), device=self.device)
        impossible = [row for row, ids in enumerate(completions) if ids is not None and prompts[row] is None]
        if impossible:
            total[impossible] = -torch.inf
        rows = [row for row, ids in enumerate(completions) if ids is not None and prompts[row] is not None]
        if not rows:
            return total
        scores = self._score(rows, take_rows(prompts, rows), take_rows(completions, rows))
        return total.index_copy(0, torch.tensor(rows, device=self.device), scores)

    def _pairs(self, value: Batch, parent_values: Mapping[str, Batch]) -> tuple[list, list]:
        prompts, completions = self.prompt_ids(parent_values), self.encoder.completions(list(value))
        if not self.parents:
            prompts = prompts * len(completions)
        if len(prompts) != len(completions):
            raise errors.BatchMismatchError(
                f"component {self.name!r}: {len(completions)} values for {len(prompts)} rows of parents"
            )
        return prompts, completions

    def identities(self, value: Batch) -> list[Ids | None]:
        """The ids that are scored, through the first EOS: the text "a" and the completion of its ids are one value."""
        return self.encoder.completions(list(value))

    def _score_dtype(self) -> torch.dtype:
        return torch.float64 if self.network.get_input_embeddings().weight.dtype == torch.float64 else torch.float32

    def _score(self, rows: Sequence[int], prompts: list[Ids], completions: list[Ids]) -> Float[Tensor, " N"]:
        if self.is_reference and self.strategy == "cached":
            return self._look_up(rows, prompts, completions)
        self._check_ids(rows, prompts, completions)
        self._check_lengths(rows, prompts, [len(ids) for ids in completions], "a completion")
        with self._acting() as network:
            return scoring.sequence_log_probs(network, prompts, completions, self._pad, self.pad_to_multiple)

    # -- the cached reference -----------------------------------------------------------------------------------------
    @torch.no_grad()
    def cache_reference(self, value: Batch, parent_values: Mapping[str, Batch]) -> int:
        """Score these rows with the present weights and keep the numbers for `reference()`; returns how many are kept.

        Call it before training. For Direct, or Sampling with a fixed set of intermediates: values that are drawn anew
        each step cannot be known beforehand.

        Raises:
            UnknownOptionError: the component was not made with reference="cached".
            ReferenceNotCachedError: the weights have changed since the start, or a row is missing inside `reference()`.
        """
        if self.strategy != "cached":
            raise errors.UnknownOptionError(f"component {self.name!r} has reference={self.strategy!r}; make it with 'cached'")
        if self.is_reference:
            raise errors.ReferenceNotCachedError(f"component {self.name!r}: call cache_reference outside reference()")
        if self._weights_mark() != self._start:
            raise errors.ReferenceNotCachedError(
                f"component {self.name!r}: its weights have changed since the start, so the start can no longer be scored; "
                "call cache_reference before training"
            )
        prompts, completions = self._pairs(value, parent_values)
        rows = [row for row, ids in enumerate(completions) if ids is not None and prompts[row] is not None]
        if rows:
            kept = [(prompts[row], completions[row]) for row in rows]
            scores = self._score(rows, [prompt for prompt, _ in kept], [completion for _, completion in kept])
            self._cache.update(zip(kept, scores.double().tolist()))
        return len(self._cache)

    def _look_up(self, rows: Sequence[int], prompts: list[Ids], completions: list[Ids]) -> Float[Tensor, " N"]:
        pairs = list(zip(prompts, completions))
        missing = [row for row, pair in zip(rows, pairs) if pair not in self._cache]
        if missing:
            raise errors.ReferenceNotCachedError(
                f"component {self.name!r}, rows {missing[:10]}: no cached reference log-probability; 'cached' works for Direct, "
                "or for Sampling with a fixed set of intermediates, after component.cache_reference(values, parent_values); "
                "otherwise choose reference='adapter' or 'copy'"
            )
        return torch.tensor([self._cache[pair] for pair in pairs], dtype=self._score_dtype(), device=self.device)

    def _weights_mark(self) -> str:
        """A digest of some of each trainable parameter's numbers: any training step changes it."""
        digest = hashlib.sha256()
        for parameter in self.trainable():
            digest.update(parameter.detach().reshape(-1)[:32].double().cpu().numpy().tobytes())
        return digest.hexdigest()

    # -- draws --------------------------------------------------------------------------------------------------------
    def sample(self, parent_values, num_samples: int = 1, generator: torch.Generator | None = None) -> Batch:
        """Exact ancestral samples, as `Completion`s with the ids that were generated: B, or with k > 1 B lists of k.

        Only `generator` is used (None: a fresh one); torch's global random state is untouched.
        """
        from sysdpo_lab.decoding import sample_tokens
        from sysdpo_lab.system import fresh_generator

        options = {
            "num_samples": num_samples,
            "temperature": self.temperature,
            "generator": fresh_generator() if generator is None else generator,
        }
        drawn = self._decode(sample_tokens, parent_values, num_samples, options)
        return [row[0] for row in drawn] if num_samples == 1 else drawn

    def greedy(self, parent_values) -> Batch:
        """The greedy decode of each row, as a `Completion`."""
        from sysdpo_lab.decoding import greedy_tokens

        return [row[0] for row in self._decode(greedy_tokens, parent_values, 1, {})]

    def diverse(
        self,
        parent_values,
        k: int,
        *,
        diversity_penalty: float | None = None,
        min_new_tokens: int | None = None,
        max_new_tokens: int | None = None,
        **search: Any,
    ) -> Batch:
        """k likely and different completions a row by diverse beam search, k groups of one beam: B lists of k, by group.

        Args:
            diversity_penalty, min_new_tokens, max_new_tokens: None takes the component's own.
            search: length_penalty, early_stopping, finished_groups of `samplers.diverse_beam_search`.
        """
        from sysdpo_lab.samplers.beam_search import diverse_beam_search

        options = {
            "num_groups": k,
            "diversity_penalty": self.diversity_penalty if diversity_penalty is None else diversity_penalty,
            "min_new_tokens": self.min_new_tokens if min_new_tokens is None else min_new_tokens,
            **search,
        }
        return self._decode(diverse_beam_search, parent_values, k, options, max_new_tokens)

    def perturbed_top_k(self, parent_values, log_probs, gumbels, k, generator):
        """Stochastic beam search over this component's completions: see `Component.perturbed_top_k`."""
        from sysdpo_lab.samplers.stochastic_beam import stochastic_beam_tokens

        prompts = self.prompt_ids(parent_values)
        prompts = prompts * log_probs.numel() if not self.parents else prompts
        if any(prompt is None for prompt in prompts):
            raise errors.UnsupportedSamplerError(
                f"component {self.name!r}: Gumbel top-k needs every component to be called in every row"
            )
        found = self._run(stochastic_beam_tokens, list(range(len(prompts))), prompts, {
            "k": k, "log_probs": log_probs, "gumbels": gumbels, "generator": generator
        }, self.max_new_tokens)
        ids, lengths = found.token_ids.tolist(), found.lengths.tolist()
        values = [[self.encoder.completion(i[:n]) for i, n in zip(*row)] for row in zip(ids, lengths)]
        # an entry that does not exist (weight -inf) repeats the best, so that it can be shown and scored
        values = [[v if n else row[0] for v, n in zip(row, some)] for row, some in zip(values, lengths)]
        return found.parents.cpu(), values, found.log_probs.cpu(), found.gumbels.cpu()

    def _decode(self, search: Callable, parent_values, k: int, options: dict, longest: int | None = None) -> list[list]:
        """B lists of k completions; k times None in a row that is not called."""
        prompts = self.prompt_ids(parent_values)
        rows = [row for row, prompt in enumerate(prompts) if prompt is not None]
        values: list[list] = [[None] * k for _ in prompts]
        if not rows:
            return values
        found = self._run(search, rows, take_rows(prompts, rows), options, longest or self.max_new_tokens)
        ids, lengths = found.token_ids.tolist(), found.lengths.tolist()
        for row, some, counts in zip(rows, ids, lengths):
            values[row] = [self.encoder.completion(i[:n]) for i, n in zip(some, counts)]
        return values

    def _run(self, search: Callable, rows: list[int], prompts: list[Ids], options: dict, longest: int) -> Any:
        if self.is_reference and self.strategy == "cached":
            raise errors.ReferenceNotCachedError(
                f"component {self.name!r}: a cached reference cannot generate; choose reference='adapter' or 'copy'"
            )
        self._check_ids(rows, prompts)
        self._check_lengths(rows, prompts, [longest] * len(rows), "max_new_tokens")
        if not self.encoder.stop_ids:
            raise errors.TokenizerError(
                f"component {self.name!r}: neither tokenizer nor model names an end-of-sequence token; set tokenizer.eos_token"
            )
        ids, mask = scoring.left_padded(prompts, self._pad)
        options |= {"max_new_tokens": longest, "eos_token_id": list(self.encoder.stop_ids), "pad_token_id": self._pad}
        with self._acting() as network, scoring.contiguous_head(network):
            return search(network, ids.to(self.device), mask.to(self.device), **options)

    # -- files --------------------------------------------------------------------------------------------------------
    def config(self) -> dict:
        """What `from_config` needs beside the folder that `save` fills."""
        from sysdpo_lab import saving

        template = self.template if isinstance(self.template, str) else None
        return {
            "name": self.name,
            "parents": list(self.parents),
            "template": template,
            "template_function": None if template is not None else saving.function_path(self.template),
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "diversity_penalty": self.diversity_penalty,
            "temperature": self.temperature,
            "pad_to_multiple": self.pad_to_multiple,
            "adapter": self.adapter_name,
            "reference": self.strategy,
            "start": self._start_kind(),
            "tied_to": self.tied_to,
            "base": self._base(),
        }

    def _start_kind(self) -> str:
        """Where the frozen start is when the system is loaded again."""
        if self.strategy == "cached":
            return "cache"
        if not self.adapter_name:
            return "model"
        return "adapter" if self.reference_adapter else "off"

    def _base(self) -> dict:
        """Source of the shared base: as `load_causal_lm` found it, or a folder beside this component's."""
        dtype = str(self.network.get_input_embeddings().weight.dtype).removeprefix("torch.")
        if not self.adapter_name:
            return {"folder": "model", "dtype": dtype}
        origin = loading.origin_of(self.network)
        if origin is None:
            return {"folder": f"../base_{loading.fingerprint(self.network)}", "dtype": dtype}
        return {"source": origin.source, "revision": origin.revision, "dtype": dtype,
                "fingerprint": loading.fingerprint(self.network)}

    def save(self, folder: str | Path) -> None:
        """Write the adapter (in peft's format), or the whole model, and the frozen start where it is something else.

        A base that `load_causal_lm` did not load, or that was changed since, is written once into a folder beside this one.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        base = self._base()
        if "folder" in base:
            self._save_model(self.network, folder / base["folder"])
        source = base.get("source", "")
        if self.adapter_name:
            adapters.save_weights(self.network, self.adapter_name, folder, source)
        kind = self._start_kind()
        if kind == "adapter":
            start = self.network if self.reference_model is None else self.reference_model
            adapters.save_weights(start, self.reference_adapter, folder / "reference", source)
        elif kind == "model":
            self._save_model(self.reference_model, folder / "reference")
        elif kind == "cache":
            entries = [[list(prompt), list(ids), score] for (prompt, ids), score in self._cache.items()]
            (folder / "reference.json").write_text(json.dumps({"start": self._start, "entries": entries}), encoding="utf-8")
        atomic.write_json(folder / "component.json", self.config())

    def _save_model(self, network: nn.Module, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            loading.save_plain(network, folder)
            self.tokenizer.save_pretrained(str(folder))

    @classmethod
    def load(cls, folder: str | Path) -> "CausalLM":
        """One component alone, from the folder that `save` filled."""
        path = Path(folder) / "component.json"
        if not path.is_file():
            raise errors.SaveFormatError(f"{path}: there is no such file; is {folder} the folder of a saved component?")
        return cls.from_config(json.loads(path.read_text(encoding="utf-8")), folder, {})

    @classmethod
    def from_config(cls, config: dict, folder: str | Path, shared: dict) -> "CausalLM":
        """Rebuild a component; a base or adapter that several components use is loaded once.

        Args:
            config: from `config()`.
            folder: what `save` filled.
            shared: filled with the bases and adapters found so far; pass the same dict for all components of a system.

        Raises:
            SaveFormatError, MissingModelError, AdapterError.
        """
        folder = Path(folder)
        model, tokenizer = _shared_base(config, folder, shared)
        tie = ("tie", config["tied_to"] or config["name"])
        adapter = shared.get(tie)
        component = cls(
            config["name"], config["parents"], model, tokenizer, _template(config),
            adapter if adapter is not None else _start_adapter(config, folder, model),
            config["max_new_tokens"],
            reference=config["reference"],
            **{key: config[key] for key in ("min_new_tokens", "diversity_penalty", "temperature", "pad_to_multiple")},
        )
        if adapter is None:
            component._load_trained(config, folder)
            shared[tie] = component
        return component

    def _load_trained(self, config: dict, folder: Path) -> None:
        """After the frozen start: the trained weights."""
        if self.adapter_name:
            adapters.load_weights(self.model, self.adapter_name, folder, self.name)
        elif config["start"] == "model":
            trained, _ = loading.load_causal_lm(folder / "model", dtype=config["base"]["dtype"])
            self.network.load_state_dict(trained.state_dict())
        if config["start"] == "cache":
            path = folder / "reference.json"
            kept = json.loads(path.read_text(encoding="utf-8"))
            self._cache.update({(tuple(prompt), tuple(ids)): score for prompt, ids, score in kept["entries"]})
            self._start = kept["start"]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, adapter={self.adapter_name!r}, reference={self.strategy!r}"


# --- helpers ----------------------------------------------------------------------------------------------------------------


def _whole(name: str, **number: int) -> int:
    option, value = next(iter(number.items()))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise errors.OptionRangeError(f"component {name!r}: {option}={value!r} must be a whole number >= 1")
    return value


def _trainer(model: nn.Module, mark: str) -> CausalLM | None:
    """The living component that trains the marked part of this very model (a deep copy keeps the mark of its original)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    component = base.__dict__.get(mark, lambda: None)()
    return component if component is not None and component.network is base else None


def _template(config: dict) -> Template:
    from sysdpo_lab import saving

    return config["template"] if config["template"] is not None else saving.function_at(config["template_function"])


def _shared_base(config: dict, folder: Path, shared: dict) -> tuple[nn.Module, Any]:
    base = config["base"]
    start = "reference" if not config["adapter"] and config["start"] == "model" else base.get("folder")
    source = base.get("source") or str((folder / start).resolve())
    key = (source, base.get("revision"), base["dtype"])
    if key not in shared:
        shared[key] = loading.load_causal_lm(source, dtype=base["dtype"], revision=base.get("revision"))
    model, tokenizer = shared[key]
    mark = base.get("fingerprint")
    if mark is not None and mark != loading.fingerprint(model):
        raise errors.SaveFormatError(
            f"component {config['name']!r}: the base {source!r} is not the one that its adapter was trained on"
        )
    return model, tokenizer


def _start_adapter(config: dict, folder: Path, model: nn.Module) -> Any:
    """What the component is built with: the start adapter's folder, or a fresh adapter like the saved one."""
    if not config["adapter"]:
        return None
    if config["start"] == "adapter":
        return folder / "reference"
    from peft import PeftConfig

    fresh = PeftConfig.from_pretrained(str(folder))
    fresh.inference_mode = False
    return fresh
