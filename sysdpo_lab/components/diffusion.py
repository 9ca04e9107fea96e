"""A diffusion model as a component: its log-probability is a bound, comparable only under shared noise (E8)."""

import copy
import json
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Union

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sysdpo_lab import atomic, errors, scoring
from sysdpo_lab.components import adapters, elbo, stored
from sysdpo_lab.components.base import Batch, Component, batch_length, fresh_generator, group_rows
from sysdpo_lab.components.conditioning import CaptionCache, States, TextEncoder
from sysdpo_lab.components.image_space import ImageSpace
from sysdpo_lab.components.layout import Layout, Noise, captions_of_row, image_tensor, lay_out
from sysdpo_lab.components.reverse import draw_seeds, reverse_process
from sysdpo_lab.components.tool import plain

STRATEGIES = ("auto", "adapter", "copy")
WEIGHTINGS, ERRORS = ("elbo", "constant"), ("noise", "prediction")
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")  # what a LoRA of a given rank adapts, as in diffusers' own scripts
OPTIONS = (
    "weight", "weighting", "error", "prediction", "timesteps", "stratified", "steps", "guidance_scale", "eta",
    "unconditional", "seed", "max_batch", "patch", "value_range", "scaling_factor", "image_shape",
)  # fmt: skip
_TRAINS = "_sysdpo_diffusion_"


class Diffusion(Component):
    """A diffusion model over sequences of images: one image a caption.

    log p_phi(z | captions) - log p_ref(z | captions) is replaced by (E8)

        - sum over the images i of W(t_i) (e_phi - e_ref),   e = mean over the D numbers of (eps - eps_hat)^2,

    where policy and reference (and both sides of a pair) see the same t_i and eps_i. `log_prob` returns the one model's
    part, - sum W e: alone it means nothing, only the difference under one noise does. It is an unbiased estimate of a
    difference of evidence lower bounds, neither an upper nor a lower bound of the log-ratio; and as -log sigmoid is
    convex, the mean loss with few timesteps is an upper bound of the loss with all of them (Wallace et al. 2023).

    A value is a tensor (n, C, H, W). Where the captions do not parse it has n = 0 images: the component was called and drew
    nothing, so the sequence stays in every denominator; a value of another number of images than captions has
    log-probability -inf. None: the component was not called (all its parents are None).

    Args:
        name, parents: as for every component.
        unet: a UNet2DConditionModel (or anything called as unet(x_t, t, encoder_hidden_states=...)), or a peft model
            around one. Without an adapter all of it is trained; when nothing in it needs gradients, that is switched on.
        scheduler: of diffusers (DDIM, DDPM, PNDM, ...): the noise schedule, the kind of prediction, and how to draw.
        encoder: `TextEncoder(model, tokenizer)`, a pair (model, tokenizer), or a module or function of one's own: list of
            captions -> (N, L, E), or a pair with a mask (N, L). It is frozen, and what it says is kept. None: the network
            reads no captions.
        weight: W of `weighting="constant"`; a larger one trains the images more, against the other components too. The
            loss has one beta, so Diffusion-DPO's two public conventions are beta x weight = 2500, which is
            0.5 x 5000.
        weighting: "elbo": W = T (D/2) (SNR(t-1)/SNR(t) - 1), nats, see `elbo.elbo_weights` for t = 1. "constant":
            W = weight. None: "constant" when a weight is given, else "elbo".
        error: "noise": every prediction is converted, so W means the same for all. "prediction": e is the mean square
            of the network's own prediction (with "constant" only); it weighs late timesteps of v- and sample-prediction
            more than "noise" does.
        prediction: "epsilon", "v_prediction", "sample"; None: what the scheduler's configuration says.
        timesteps: t drawn a picture and averaged; more is less noisy and costs as many network calls.
        stratified: draw them from equal parts of 1..T.
        captions: a function of the parents' values (in order; texts for completions) that returns the list of captions, or
            None or a ValueError where it cannot. Default: the one parent's value: a list, or one caption.
        vae, scaling_factor, patch, value_range: see `ImageSpace`. Default: the images are the network's own numbers.
        image_shape: (C, H, W) of an image; default from the network's configuration.
        steps: network calls when drawing.  eta: of DDIM, 0 is deterministic after the start.
        guidance_scale: 1: none. g > 1 draws with out_u + g (out_c - out_u), u the `unconditional` caption; it does not
            enter `log_prob`.
        seed: of the fixed noise of `greedy`.
        max_batch: images that the network reads at once.
        adapter: what is trained: a rank (LoRA on the attention, alpha = 2 x rank), a peft config, the folder of a saved
            adapter, the name of one that a peft model has, or another Diffusion (both share it). None: the whole network.
        reference: "adapter": the base with adapters off (or a frozen second copy of the start adapter where that is not
            zero). "copy": a second network. "auto": "adapter" with an adapter, else "copy".
        generator: for the random start of a new adapter.

    Attributes:
        last_errors: {"policy", "reference": (B,) mean of e over each row's images in the last `log_prob`}, NaN without
            images.

    Raises:
        UnknownOptionError, OptionRangeError, AdapterError, EncoderError, UnsupportedModelError.

    >>> from types import SimpleNamespace
    >>> class Silent(nn.Module):
    ...     def forward(self, x_t, t):
    ...         return torch.zeros_like(x_t)
    >>> scheduler = SimpleNamespace(alphas_cumprod=torch.linspace(0.9, 0.1, 10))
    >>> z = Diffusion("z", ("y",), Silent(), scheduler, weight=2.0)
    >>> image = torch.zeros(1, 1, 2, 2)
    >>> noise = z.draw_noise([image], generator=torch.Generator().manual_seed(0))
    >>> bool(torch.isclose(z.log_prob([image], {"y": ["a face"]}, noise), -2 * noise[0].eps.double().square().mean()))
    True
    """

    kind = "bound"

    def __init__(
        self,
        name: str,
        parents: Sequence[str],
        unet: nn.Module,
        scheduler: Any,
        encoder: Any = None,
        weight: float | None = None,
        *,
        weighting: str | None = None,
        error: str = "noise",
        prediction: str | None = None,
        timesteps: int = 1,
        stratified: bool = False,
        captions: Callable | None = None,
        vae: nn.Module | None = None,
        scaling_factor: float | None = None,
        patch: int = 1,
        value_range: tuple[float, float] | None = None,
        image_shape: tuple[int, int, int] | None = None,
        steps: int = 50,
        guidance_scale: float = 1.0,
        eta: float = 0.0,
        unconditional: Hashable = "",
        seed: int = 0,
        max_batch: int = 64,
        adapter: Union[adapters.AdapterSource, "Diffusion", None] = None,
        reference: str = "auto",
        generator: torch.Generator | None = None,
    ):
        super().__init__(name, parents)
        errors.check_option("reference", reference, STRATEGIES)
        self.weight, self.error, self.stratified = weight, error, bool(stratified)
        self.weighting = weighting if weighting is not None else "elbo" if weight is None else "constant"
        self.timesteps, self.steps, self.max_batch = timesteps, steps, max_batch
        self.guidance_scale, self.eta, self.unconditional, self.seed = guidance_scale, eta, unconditional, seed
        self.captions, self.image_shape = captions, None if image_shape is None else tuple(image_shape)
        self._check_options(unet, scheduler)
        self.scheduler = scheduler
        self.prediction = prediction or getattr(getattr(scheduler, "config", None), "prediction_type", "epsilon")
        self.space = ImageSpace(name, vae, scaling_factor, patch, value_range)
        self.encoder = _frozen(name, TextEncoder(*encoder) if isinstance(encoder, tuple) else encoder, unet)
        self.cache = None if encoder is None else CaptionCache(self.encoder)
        self._schedule()
        self.adapter_name: str | None = None
        self.reference_adapter: str | None = None
        self.reference_model: nn.Module | None = None
        self.tied_to: str | None = None
        self._attach(unet, adapter, reference, generator)
        self.last_errors: dict[str, Tensor] = {}
        self._last_x0: tuple | None = None

    def _check_options(self, unet: nn.Module, scheduler: Any) -> None:
        """Named errors now, not in the middle of a long run."""
        errors.check_option("weighting", self.weighting, WEIGHTINGS)
        errors.check_option("error", self.error, ERRORS)
        where = f"component {self.name!r}"
        if not isinstance(unet, nn.Module) or not hasattr(scheduler, "alphas_cumprod"):
            raise errors.UnsupportedModelError(
                f"{where}: a network and a DDPM-like scheduler are needed, found {type(unet).__name__} and "
                f"{type(scheduler).__name__}; loading.load_diffusion reads both from a folder or a hub id"
            )
        if (self.weighting == "constant") != (self.weight is not None):
            raise errors.UnknownOptionError(
                f"{where}: weighting={self.weighting!r} with weight={self.weight!r}; 'constant' needs a weight (Diffusion-DPO: "
                "beta x weight = 2500), 'elbo' has its own"
            )
        if self.weighting == "elbo" and self.error == "prediction":
            raise errors.UnknownOptionError(f"{where}: weighting='elbo' is in nats, which needs error='noise'")
        for option in ("timesteps", "steps", "max_batch"):
            _number(where, option, getattr(self, option), 1, whole=True)
        for option, value in (("weight", self.weight), ("guidance_scale", self.guidance_scale), ("eta", self.eta)):
            _number(where, option, 0 if value is None else value, 0)
        if len(self.parents) > 1 and self.captions is None:
            raise errors.CaptionError(
                f"{where} has the parents {self.parents}: pass captions=, a function of all of them"
            )
        sizes = [getattr(getattr(unet, "config", None), f"{side}_channels", None) for side in ("in", "out")]
        if sizes[0] != sizes[1]:
            raise errors.UnsupportedModelError(
                f"{where}: the network reads {sizes[0]} channels and returns {sizes[1]}; inpainting models and learned "
                "variances are not supported"
            )

    def _schedule(self) -> None:
        """What multiplies the network's own mean square: in `log_prob` (of one number, with "elbo"), and in reports."""
        abar = elbo.alphas_bar(self.scheduler)
        factor = elbo.noise_factor(self.prediction, abar) if self.error == "noise" else torch.ones_like(abar)
        exact = self.weighting == "elbo"
        scale = elbo.elbo_weights(self.prediction, abar, 1) if exact else float(self.weight) * factor
        self.abar, self.factor, self.scale = abar, factor, scale  # no buffers: .half() must not round them

    # -- the network --------------------------------------------------------------------------------------------------
    def _attach(self, unet: nn.Module, adapter: Any, reference: str, generator: torch.Generator | None) -> None:
        """Find or make the part that is trained, and its frozen start."""
        other = adapter if isinstance(adapter, Diffusion) else self._twin(unet, adapter)
        if other is not None:
            for attribute in ("model", "adapter_name", "strategy", "reference_adapter", "reference_model"):
                setattr(self, attribute, getattr(other, attribute))
            self.tied_to = other.tied_to or other.name
            return
        whole = adapter is None and not hasattr(unet, "peft_config")
        attached = None if whole else self._adapted(unet, adapter, generator)
        self.model = unet if attached is None else attached.model
        self.adapter_name = None if attached is None else attached.name
        self.network.__dict__[f"{_TRAINS}{self.adapter_name}"] = weakref.ref(self)
        if whole and not any(parameter.requires_grad for parameter in unet.parameters()):
            unet.requires_grad_(True)
        self._reference_strategy(reference, attached)

    def _adapted(self, unet: nn.Module, adapter: Any, generator: torch.Generator | None) -> adapters.Attached:
        other = _trainer(unet, None)
        if other is not None:
            raise errors.AdapterError(
                f"component {self.name!r}: component {other.name!r} trains all weights of this network, so an adapter cannot "
                "stand on it; give that component an adapter too, or load the network a second time"
            )
        if adapter is None or adapters.existing(unet, adapter):
            return adapters.adopt(unet, self.name, adapter)
        if isinstance(adapter, int) and not isinstance(adapter, bool) and adapter > 0:
            from peft import LoraConfig

            adapter = LoraConfig(r=adapter, lora_alpha=2 * adapter, target_modules=list(ATTENTION))
        return adapters.attach(unet, adapter, self.name, generator)

    def _twin(self, unet: nn.Module, adapter: Any) -> Union["Diffusion", None]:
        """Another component that already trains the same part of the same network: this one is then tied to it."""
        part = adapters.existing(unet, adapter) if isinstance(adapter, (str, type(None))) else adapter
        known = part is None or isinstance(part, str)
        other = _trainer(unet, part) if known and (adapter is None or part is not None) else None
        return None if other is None or other.name == self.name else other  # the same name: made anew, as in a notebook

    def _reference_strategy(self, wanted: str, attached: adapters.Attached | None) -> None:
        self.strategy = ("copy" if attached is None else "adapter") if wanted == "auto" else wanted
        if self.strategy == "adapter" and attached is None:
            raise errors.AdapterError(
                f"component {self.name!r}: reference='adapter' needs an adapter; without one choose 'copy'"
            )
        if self.strategy == "adapter" and not attached.neutral:
            self.reference_adapter = adapters.frozen_copy(attached, self.name)
        if self.strategy == "copy":
            self.reference_model = copy.deepcopy(self.network).requires_grad_(False)
            self.reference_adapter = self.adapter_name

    @property
    def network(self) -> nn.Module:
        """The network itself, adapters inside its layers."""
        return self.model.get_base_model() if self.adapter_name else self.model

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.network.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The network's; residuals and sums are never narrower than float32."""
        found = next((p.dtype for p in self.network.parameters() if p.is_floating_point()), torch.float32)
        return found

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @contextmanager
    def _acting(self) -> Iterator[nn.Module]:
        """The network that stands for the component now, policy or reference, without dropout."""
        network, name = self.network, self.adapter_name
        if self.is_reference:
            network, name = (
                self.network if self.reference_model is None else self.reference_model,
                self.reference_adapter,
            )
        with ExitStack() as stack:
            if self.adapter_name:
                stack.enter_context(adapters.activated(network, name))
            if self.is_reference:
                stack.enter_context(torch.no_grad())
            stack.enter_context(scoring.evaluation_mode(network))
            yield network

    def trainable(self) -> list[nn.Parameter]:
        """This component's adapter (without one: the whole network); never encoder, VAE, base or reference."""
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

    def _output(self, network: nn.Module, x_t: Tensor, t: Int[Tensor, " N"], states: States | None) -> Tensor:
        conditions = {}
        if states is not None:
            conditions["encoder_hidden_states"] = states.values.to(x_t.device, self.dtype)
            if states.mask is not None:
                conditions["encoder_attention_mask"] = states.mask.to(x_t.device)
        found = network(x_t.to(self.dtype), t, **conditions)
        return found if isinstance(found, Tensor) else found.sample

    # -- captions -----------------------------------------------------------------------------------------------------
    def captions_of(self, parent_values: Mapping[str, Batch]) -> list[tuple[Hashable, ...] | None]:
        """The captions of each row; () where they do not parse, None where the component is not called."""
        if not self.parents:
            return [(self.unconditional,)]
        rows = self.check_parents(parent_values)
        columns = [parent_values[parent] for parent in self.parents]
        values = [[plain(column[row]) for column in columns] for row in range(rows)]
        return [captions_of_row(self.name, row, self.captions, given) for row, given in enumerate(values)]

    # -- scores -------------------------------------------------------------------------------------------------------
    def draw_noise(self, value: Batch, generator: torch.Generator | None = None) -> list[Noise | None]:
        """Timesteps and noise of each row's images; rows draw one after another, so batches can be cut anywhere.

        Args:
            value: B tensors (n, C, H, W) (or None); only their shapes are read.
        """
        generator = fresh_generator() if generator is None else generator
        return [None if v is None else self._row_noise(row, v, generator) for row, v in enumerate(value)]

    def _row_noise(self, row: int, images: Any, generator: torch.Generator) -> Noise:
        n, *shape = image_tensor(self.name, row, images).shape
        if n == 0:
            return Noise(torch.zeros(0, self.timesteps, dtype=torch.long), torch.zeros(0, self.timesteps, 0, 0, 0))
        last = self.timesteps, *self.space.x0_shape(tuple(shape))
        drawn = [self._image_noise(last, generator) for _ in range(n)]  # an image's noise depends on those before it only
        return Noise(*(torch.cat(parts) for parts in zip(*drawn)))

    def _image_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Noise:
        t = elbo.draw_timesteps(1, self.timesteps, len(self.abar), generator, self.stratified)
        return Noise(t, torch.randn(1, *shape, generator=generator, device=generator.device))

    def repeat_noise(self, noise: list[Noise | None]) -> list[Noise | None]:
        """For a batch of B winners and then B losers: both sides of a pair get the same noise."""
        return [*noise, *noise]

    def log_prob(
        self, value: Batch, parent_values: Mapping[str, Batch], noise: Sequence[Noise | None] | None = None
    ) -> Float[Tensor, " B"]:
        """- sum over a row's images of W(t) e, mean over the drawn timesteps; float64 (E8). Dropout is never active.

        Only differences under one noise mean something: policy against reference, winner against loser.

        Args:
            value: B tensors (n, C, H, W); None: not called, 0.
            parent_values: {parent: B values}.
            noise: from `draw_noise` for these rows.

        Raises:
            NoiseRequiredError: no noise.  ImageShapeError, BatchMismatchError.
            NonFiniteError: the images, the VAE or the network gave NaN or infinity.
        """
        layout = self._layout(value, parent_values, noise)
        total = torch.zeros(layout.size, dtype=torch.float64, device=self.device)
        total[layout.impossible] = -torch.inf
        if layout.images:
            squares, times = self._squares(layout)
            size = layout.noise[0].eps[0].numel() if self.weighting == "elbo" else 1
            scores = -(_at(self.scale, times) * size * squares).mean(1)
            total = total.index_add(0, torch.tensor(layout.rows, device=self.device), scores)
            self._note(layout, (_at(self.factor, times) * squares.detach()).mean(1))
        else:
            self._note(layout, total[:0].detach())
        return total

    def denoising_errors(
        self, value: Batch, parent_values: Mapping[str, Batch], noise: Sequence[Noise | None] | None
    ) -> Float[Tensor, " B"]:
        """The mean of e over each row's images, differentiable; 0 without images. For anchors and reports."""
        layout = self._layout(value, parent_values, noise)
        total = torch.zeros(layout.size, dtype=torch.float64, device=self.device)
        if not layout.images:
            return total
        squares, times = self._squares(layout)
        rows = torch.tensor(layout.rows, device=self.device)
        counts = torch.zeros_like(total).index_add(0, rows, torch.ones_like(rows, dtype=total.dtype))
        return total.index_add(0, rows, (_at(self.factor, times) * squares).mean(1)) / counts.clamp(min=1)

    def _layout(self, value: Batch, parent_values: Mapping[str, Batch], noise: Any) -> Layout:
        if noise is None:
            raise errors.NoiseRequiredError(
                f"component {self.name!r} scores by a bound: draw noise once (draw_noise) and pass it for policy and reference"
            )
        captions, size = self.captions_of(parent_values), batch_length(value)
        captions = captions if self.parents else captions * size
        if not len(captions) == len(noise) == size:
            raise errors.BatchMismatchError(
                f"component {self.name!r}: {size} values, {len(captions)} rows of parents and {len(noise)} of noise"
            )
        return lay_out(self.name, self.space, value, captions, noise)

    def _squares(self, layout: Layout) -> tuple[Float[Tensor, "N M"], Int[Tensor, "N M"]]:
        """The network's own mean square at each image's timesteps, and these timesteps."""
        times = torch.stack([noise.timesteps for noise in layout.noise]).to(self.device)
        many = times.shape[1]
        x0 = self._x0(layout.images).repeat_interleave(many, 0)
        eps = torch.stack([noise.eps for noise in layout.noise]).flatten(0, 1).to(self.device, self._wide)
        captions = [caption for caption in layout.captions for _ in range(many)]
        t, found = times.flatten(), []
        with self._acting() as network:
            for start in range(0, len(x0), self.max_batch):
                part = slice(start, start + self.max_batch)
                found.append(self._part_squares(network, x0[part], eps[part], t[part], captions[part]))
        squares = torch.cat(found).reshape(times.shape)
        bad = (~torch.isfinite(squares.detach())).nonzero()
        if len(bad):
            image, place = bad[0].tolist()
            raise errors.NonFiniteError(
                f"component {self.name!r}, row {layout.rows[image]}: the network ({str(self.dtype).removeprefix('torch.')}) gave "
                f"NaN or infinity at timestep {int(times[image, place])}"
            )
        return squares, times

    def _part_squares(
        self, network: nn.Module, x0: Tensor, eps: Tensor, t: Tensor, captions: list
    ) -> Float[Tensor, " N"]:
        abar = _at(self.abar, t)
        states = None if self.cache is None else self.cache(captions)
        output = self._output(network, elbo.noised(x0, eps, abar), t, states)
        return elbo.mean_square(output, elbo.target(self.prediction, x0, eps, abar))

    def _x0(self, images: list[Tensor]) -> Float[Tensor, "N D h w"]:
        """The network's x0; the last batch is kept, since the reference asks for the policy's once more."""
        # the images are held with the key, so their memory cannot come to hold others
        marks = [(i.data_ptr(), None if i.is_inference() else i._version, i.shape, i.stride(), i.dtype) for i in images]
        key = (marks, self.device, self._wide)
        if self._last_x0 is None or self._last_x0[0] != key:
            parts = [images[i : i + self.max_batch] for i in range(0, len(images), self.max_batch)]
            x0 = torch.cat([self.space.to_x0(torch.stack(part).to(self.device, self._wide)) for part in parts])
            self._last_x0 = (key, images, x0)
        return self._last_x0[2]

    def _note(self, layout: Layout, errors_of_images: Float[Tensor, " N"]) -> None:
        rows = torch.tensor(layout.rows, dtype=torch.long, device=self.device)
        total = torch.zeros(layout.size, dtype=torch.float64, device=self.device).index_add(0, rows, errors_of_images)
        counts = torch.zeros_like(total).index_add(0, rows, torch.ones_like(errors_of_images))
        self.last_errors["reference" if self.is_reference else "policy"] = (total / counts).cpu()  # 0 / 0 is NaN

    # -- draws --------------------------------------------------------------------------------------------------------
    def sample(self, parent_values, num_samples: int = 1, generator: torch.Generator | None = None) -> Batch:
        """B tensors (n, C, H, W), or with num_samples = k > 1 B lists of k; the same generator, the same images.

        Each row has a random stream of its own: what it draws does not depend on the other rows' captions.
        """
        generator = fresh_generator() if generator is None else generator
        captions = [row for row in self.captions_of(parent_values) for _ in range(num_samples)]
        values = self._drawn(captions, draw_seeds(len(captions), generator))
        return values if num_samples == 1 else group_rows(values, num_samples)

    def greedy(self, parent_values) -> Batch:
        """The images from the fixed noise of `seed`: image i of every row starts from the same noise."""
        captions = self.captions_of(parent_values)
        return self._drawn(captions, [self.seed] * len(captions))

    def _drawn(self, captions: list[tuple | None], row_seeds: list[int]) -> list[Tensor | None]:
        flat = [caption for row in captions for caption in row or ()]
        seeds = [
            seed
            for row, start in zip(captions, row_seeds)
            for seed in draw_seeds(len(row or ()), torch.Generator().manual_seed(start))
        ]
        images = self._images(flat, seeds)
        values, start = [], 0
        for row in captions:
            values.append(None if row is None else images[start : start + len(row)].clone())
            start += len(row or ())
        return values

    @torch.no_grad()
    def _images(self, captions: list[Hashable], seeds: list[int]) -> Float[Tensor, "N C H W"]:
        shape = self._drawn_shape()
        parts = [torch.zeros(0, *shape)]
        with self._acting() as network:
            for start in range(0, len(captions), self.max_batch):
                some = captions[start : start + self.max_batch]
                x0 = reverse_process(
                    self._predictor(network, some), self.scheduler, seeds[start : start + len(some)], self.space.x0_shape(shape),
                    self.steps, self.eta, self.device, self._wide,
                )  # fmt: skip
                parts.append(self.space.to_images(x0).cpu())
        images = torch.cat(parts[1:] or parts)
        if not bool(torch.isfinite(images).all()):
            raise errors.NonFiniteError(f"component {self.name!r}: an image that was drawn holds NaN or infinity")
        return images

    def _predictor(self, network: nn.Module, captions: list[Hashable]) -> Callable[[Tensor, Tensor], Tensor]:
        """(x_t, t) -> the network's output, with classifier-free guidance (Ho & Salimans 2022) unless its scale is 1."""
        guided = self.guidance_scale != 1 and self.cache is not None
        read = [*captions, *[self.unconditional] * len(captions)] if guided else captions
        states = None if self.cache is None else self.cache(read)

        def predict(x_t: Tensor, t: Tensor) -> Tensor:
            x_t = torch.cat([x_t, x_t]) if guided else x_t
            times = torch.as_tensor(t, device=x_t.device).expand(len(x_t))
            output = self._output(network, x_t, times, states).to(self._wide)
            if not guided:
                return output
            with_caption, without = output.chunk(2)
            return without + self.guidance_scale * (with_caption - without)

        return predict

    def _drawn_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image that is drawn."""
        config = getattr(self.network, "config", None)
        size, channels = getattr(config, "sample_size", None), getattr(config, "in_channels", None)
        if self.image_shape is not None:
            return self.image_shape
        if size is None or channels is None:
            raise errors.ImageShapeError(
                f"component {self.name!r}: the network's configuration does not say how large an image is; "
                "pass image_shape=(channels, height, width)"
            )
        height, width = (size, size) if isinstance(size, int) else size
        return self.space.image_shape((channels, height, width))

    # -- files --------------------------------------------------------------------------------------------------------
    def config(self) -> dict:
        """What `from_config` needs beside the folder that `save` fills."""
        from sysdpo_lab import saving

        options = {name: getattr(self, name, None) for name in OPTIONS}
        options |= {name: getattr(self.space, name) for name in ("patch", "value_range", "scaling_factor")}
        return {
            "name": self.name,
            "parents": list(self.parents),
            "captions": None if self.captions is None else saving.function_path(self.captions),
            "options": options,
            "adapter": self.adapter_name,
            "reference": self.strategy,
            "start": self._start_kind(),
            "tied_to": self.tied_to,
            "base": stored.place(self.network, "unet") if self.adapter_name else {"folder": "model"},
            "encoder": stored.encoder_place(self.encoder),
            "vae": None if self.space.vae is None else stored.place(self.space.vae, "vae"),
        }

    def _start_kind(self) -> str:
        """Where the frozen start is when the system is loaded again."""
        if not self.adapter_name:
            return "model"
        return "adapter" if self.reference_adapter else "off"

    def save(self, folder: str | Path) -> None:
        """Write the adapter (in peft's and in diffusers' format) or the whole network, the start, scheduler, encoder and VAE.

        What `loading.load_diffusion` read and nobody changed is noted by its source; the rest is written once, beside
        this component's folder. Only safetensors and JSON.
        """
        folder, config = Path(folder), self.config()
        folder.mkdir(parents=True, exist_ok=True)
        stored.save_at(self.network, config["base"], folder)
        stored.save_encoder(self.encoder, config["encoder"], folder)
        if self.space.vae is not None:
            stored.save_at(self.space.vae, config["vae"], folder)
        self.scheduler.save_config(str(folder / "scheduler"))
        source = config["base"].get("source", "")
        if self.adapter_name:
            adapters.save_weights(self.network, self.adapter_name, folder, source)
            stored.save_for_diffusers(self.network, self.adapter_name, folder)
        if config["start"] == "adapter":
            start = self.network if self.reference_model is None else self.reference_model
            adapters.save_weights(start, self.reference_adapter, folder / "reference", source)
        elif config["start"] == "model":
            stored.save_at(self.reference_model, {"folder": "reference"}, folder)
        atomic.write_json(folder / "component.json", config)

    @classmethod
    def load(cls, folder: str | Path) -> "Diffusion":
        """One component alone, from the folder that `save` filled."""
        path = Path(folder) / "component.json"
        if not path.is_file():
            raise errors.SaveFormatError(f"{path}: there is no such file; is {folder} the folder of a saved component?")
        return cls.from_config(json.loads(path.read_text(encoding="utf-8")), folder, {})

    @classmethod
    def from_config(cls, config: dict, folder: str | Path, shared: dict) -> "Diffusion":
        """Rebuild a component; a network, encoder or VAE that several components use is loaded once.

        Args:
            config: from `config()`.
            folder: what `save` filled.
            shared: pass the same dict for all components of a system.

        Raises:
            SaveFormatError, MissingModelError, AdapterError.
        """
        from sysdpo_lab import saving

        folder = Path(folder)
        start = {"folder": "reference"} if config["start"] == "model" else config["base"]
        tie = ("diffusion", config["tied_to"] or config["name"])
        first = shared.get(tie)
        vae = None if config["vae"] is None else stored.load_at(config["vae"], folder, shared, config["name"])
        options = dict(config["options"])
        for name in ("value_range", "image_shape"):
            options[name] = None if options[name] is None else tuple(options[name])
        component = cls(
            config["name"], config["parents"],
            first.model if first is not None else stored.load_at(start, folder, shared, config["name"]),
            stored.load_scheduler(folder / "scheduler"), stored.load_encoder(config["encoder"], folder, shared, config["name"]),
            captions=None if config["captions"] is None else saving.function_at(config["captions"]),
            adapter=first if first is not None else stored.start_adapter(config, folder),
            reference=config["reference"], vae=vae, **options,
        )  # fmt: skip
        if first is None:
            component._load_trained(config, folder)
            shared[tie] = component
        return component

    def _load_trained(self, config: dict, folder: Path) -> None:
        """After the frozen start: the trained weights."""
        if self.adapter_name:
            adapters.load_weights(self.model, self.adapter_name, folder, self.name)
        else:
            trained = stored.load_at(config["base"], folder, {}, self.name)
            self.network.load_state_dict(trained.state_dict())

    def extra_repr(self) -> str:
        weighting = self.weighting if self.weight is None else f"{self.weighting}, weight={self.weight:g}"
        return f"{super().extra_repr()}, adapter={self.adapter_name!r}, prediction={self.prediction!r}, {weighting}"


# --- helpers ----------------------------------------------------------------------------------------------------------


def _number(where: str, option: str, value: Any, least: float, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < math.inf:
        kind = "a whole number" if whole else "a finite number"
        raise errors.OptionRangeError(f"{where}: {option}={value!r} must be {kind} >= {least}")


def _at(table: Float[Tensor, " T"], times: Int[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    return table.to(times.device)[times]


def _frozen(name: str, encoder: Any, unet: nn.Module) -> Any:
    """The encoder, never trained; an error when there is none and the network reads captions."""
    if encoder is None and hasattr(getattr(unet, "config", None), "cross_attention_dim"):
        raise errors.EncoderError(
            f"component {name!r}: the network reads captions; pass encoder=TextEncoder(model, tokenizer)"
        )
    if encoder is not None and not callable(encoder):
        raise errors.EncoderError(
            f"component {name!r}: the encoder must be callable with a list of captions, found {encoder!r}"
        )
    return encoder.requires_grad_(False).eval() if isinstance(encoder, nn.Module) else encoder


def _trainer(unet: nn.Module, part: str | None) -> Diffusion | None:
    """The living component that trains this part of this very network (a deep copy keeps the mark of its original)."""
    base = unet.get_base_model() if hasattr(unet, "get_base_model") else unet
    component = base.__dict__.get(f"{_TRAINS}{part}", lambda: None)()
    return component if component is not None and component.network is base else None
