"""Our decoder: an ordinary causal language model of transformers, with four kinds of positions and an XL cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from mnemic.errors import UsageError
from mnemic.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, Projections, Tables
from mnemic.models.attention import PositionTerms, ResidualLinear, SelfAttention
from mnemic.models.blocks import Block, ScaledEmbedding
from mnemic.models.cache import Segment, XLCache, rows_to_generate
from mnemic.models.config import MnemicDecoderConfig
from mnemic.models.cross_entropy import IGNORED, ROWS, mean_loss, normalised_cross_entropy, token_cross_entropy
from mnemic.models.layout import Layout, plain_layout
from mnemic.models.masks import additive
from mnemic.models.positions import T5Bias, XLRelative, XLTerms, rotary_terms, sinusoids


class MnemicDecoderPreTrainedModel(PreTrainedModel):
    """What transformers needs to know about the decoder, and how its weights begin."""

    config: MnemicDecoderConfig
    config_class = MnemicDecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": Block, "attentions": SelfAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, ResidualLinear):
            init.normal_(module.weight, std=std / (2 * self.config.num_hidden_layers) ** 0.5)
        elif isinstance(module, T5Bias):
            init.normal_(module.weight, std=std)
        elif isinstance(module, XLRelative):
            init.normal_(module.content_bias, std=std)
            init.normal_(module.position_bias, std=std)
        elif isinstance(module, Tables):  # so that all bands, projected, begin as large as plain embeddings
            for table in module:
                init.normal_(table, std=std * (self.config.hidden_size / table.shape[1]) ** 0.5)
        elif isinstance(module, Projections):
            for projection in module:
                init.xavier_uniform_(projection)
        elif isinstance(module, AdaptiveSoftmax):
            init.normal_(module.clusters, std=std)


class MnemicDecoderModel(MnemicDecoderPreTrainedModel):
    """Embeddings, blocks and the final normalisation."""

    def __init__(self, config: MnemicDecoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens: nn.Module
        if config.adaptive_cutoffs:
            self.embed_tokens = AdaptiveEmbedding(config)
        else:
            scale = config.hidden_size**0.5 if config.position == "sinusoidal" else 1.0
            self.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size, scale)
        self.relative_bias = T5Bias(config) if config.position == "t5" else None
        self.layers = nn.ModuleList(
            Block(config, index, causal=True, pre_norm=True, cross=False) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_starts: Tensor | None = None,
        fixed_memory: bool = False,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The last hidden states; the arguments are those of `MnemicDecoderForCausalLM.forward`.

        fixed_memory: inputs at positions below 0, memory tokens, are equally far from all others.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("the decoder takes either input_ids or inputs_embeds: give exactly one of them")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        _check_starts(document_starts, inputs_embeds)
        if past_key_values is None and use_cache and not self.training:
            if self.config.xl_length:
                past_key_values = self.new_cache(inputs_embeds.shape[0])
            elif document_starts is None:  # an ordinary cache would not remember where documents start
                past_key_values = DynamicCache()
        past: Cache | Segment | None = past_key_values
        if isinstance(past_key_values, XLCache):
            shape = (inputs_embeds.shape[0], inputs_embeds.shape[1])
            past = past_key_values.begin(shape, attention_mask, document_starts, position_ids)
        elif self.gradient_checkpointing and self.training:
            past = past_key_values = None  # a layer that runs twice would write to it twice
        layout = self._layout(inputs_embeds, attention_mask, position_ids, past, document_starts)
        if fixed_memory:
            layout = replace(layout, fixed=True)
        mask = self._mask(layout, inputs_embeds, attention_mask, position_ids, past, document_starts)
        mask, terms = self._position_terms(layout, mask, attention_mask, inputs_embeds)

        hidden_states = inputs_embeds
        if self.config.position == "sinusoidal":
            hidden_states = hidden_states + sinusoids(layout.positions, hidden_states.shape[-1], hidden_states.dtype)
        if self.training and self.config.dropout:
            hidden_states = F.dropout(hidden_states, p=self.config.dropout)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, position_terms=terms, past_key_values=past, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def new_cache(self, batch_size: int) -> XLCache:
        """An empty XL cache of `xl_length` tokens for a batch of that many rows."""
        if not self.config.xl_length:
            raise UsageError("this model has no XL cache: make it with a config whose xl_length is above 0")
        return XLCache(self.config.num_hidden_layers, self.config.xl_length, batch_size, self.device)

    def _layout(
        self,
        embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: Cache | Segment | None,
        starts: Tensor | None,
    ) -> Layout:
        if isinstance(past, Segment):
            return past.layout
        cached = past.get_seq_length() if past is not None else 0
        if cached and starts is not None:
            raise UsageError(
                "document_starts with a filled cache that knows no documents: pass an XL cache (model.new_cache)"
            )
        shape = (embeds.shape[0], embeds.shape[1])
        return plain_layout(shape, embeds.device, cached, attention_mask, starts, position_ids)

    def _mask(
        self,
        layout: Layout,
        embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: Cache | Segment | None,
        starts: Tensor | None,
    ) -> Tensor | None:
        """The mask for the attention function: the user's 4D one, ours where there are documents, transformers' own."""
        if attention_mask is not None and attention_mask.ndim == 4:
            return attention_mask
        if isinstance(past, Segment) or starts is not None:
            return self._registered_mask(self._visible(layout), embeds.dtype)
        return create_causal_mask(self.config, embeds, attention_mask, past, position_ids)  # type: ignore[return-value]

    def _visible(self, layout: Layout) -> Tensor | None:
        """Which token sees which, (B or 1, T, K); None where the attention function sees to causality by itself."""
        visible = layout.visible()
        if visible is None and self.config._attn_implementation == "eager":
            length = layout.positions.shape[1]
            visible = torch.ones(1, length, length, dtype=torch.bool, device=layout.positions.device).tril()
        return visible

    def _registered_mask(self, visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The mask (B or 1, 1, T, K) that transformers' mask function makes of who sees whom.

        Those who change masks (memories do) have put themselves there.
        """
        if visible is None:
            return None
        name = self.config._attn_implementation
        if name not in ALL_MASK_ATTENTION_FUNCTIONS:
            return additive(visible.unsqueeze(1), dtype)
        return ALL_MASK_ATTENTION_FUNCTIONS[name](
            batch_size=visible.shape[0],
            q_length=visible.shape[1],
            kv_length=visible.shape[2],
            mask_function=lambda row, head, query, key: visible[row, query, key],
            allow_is_causal_skip=False,
            dtype=dtype,
            device=visible.device,
            config=self.config,
        )

    def _position_terms(
        self, layout: Layout, mask: Tensor | None, attention_mask: Tensor | None, embeds: Tensor
    ) -> tuple[Tensor | None, PositionTerms]:
        """What the layers need to know of positions, and the mask with T5's bias in it."""
        kind, dtype = self.config.position, embeds.dtype
        if kind == "rotary":
            width: int = self.config.head_dim  # type: ignore[assignment]
            return mask, rotary_terms(layout.positions, width, self.config.rotary_base, dtype)
        if kind == "sinusoidal":
            return mask, None
        queries, keys = layout.positions.shape[1], layout.key_positions.shape[1]
        if mask is None and queries > 1:  # a bias takes the place of the mask, so causality must be in it
            causal = torch.ones(queries, keys, dtype=torch.bool, device=embeds.device).tril(keys - queries)
            mask = causal.view(1, 1, queries, keys)
        if mask is not None:
            mask = additive(mask, dtype)
        if self.relative_bias is not None:
            bias = self.relative_bias(layout.distances())
            return bias if mask is None else bias + mask, None
        causal_only = attention_mask is None or attention_mask.ndim != 4
        return mask, XLTerms.of(layout, causal_only, self.config.hidden_size, dtype)


class MnemicDecoderForCausalLM(MnemicDecoderPreTrainedModel, GenerationMixin):
    """The decoder with its output layer; `AutoModelForCausalLM` finds it under the name "mnemic-decoder"."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MnemicDecoderConfig) -> None:
        super().__init__(config)
        self.model = MnemicDecoderModel(config)
        self.lm_head: nn.Module
        if config.adaptive_cutoffs:
            self.lm_head = AdaptiveSoftmax(config)
            shared = [name for name, _ in self.model.embed_tokens.named_parameters()]
            self._tied_weights_keys = {f"lm_head.{name}": f"model.embed_tokens.{name}" for name in shared}
        else:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_starts: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The logits (log-probabilities if the softmax is adaptive), and the loss if there are labels.

        attention_mask: (B, T) with 0 on padding, left or right (with a filled ordinary cache: of all tokens), or
            (B, 1, T, K), added to the scores as it is.
        position_ids: (B or 1, T); left out, real tokens are counted, from 0 at each document's start.
        past_key_values: an XLCache, which is updated in place, or any cache of transformers.
        document_starts: (B, T), true at a document's first token; what follows sees nothing before it.
        labels: (B, T), shifted here: position t is scored on labels[t + 1]; -100 is ignored.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            document_starts=document_starts,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            if logits.shape[:-1] != labels.shape:
                raise UsageError(f"labels of shape {tuple(labels.shape)} for logits of {tuple(logits.shape[:-1])}")
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
            loss = mean_loss(token_cross_entropy(logits.flatten(0, 1), targets), targets, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> Any:
        """Generation with the XL cache that the model was trained with, if any."""
        rows = rows_to_generate(generation_config, model_kwargs, batch_size)
        if self.config.xl_length and rows:
            model_kwargs["past_key_values"] = self.model.new_cache(rows)
            return None
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, mode, batch_size, max_cache_length
        )

    def token_losses(self, targets: Tensor, **inputs: Any) -> tuple[Tensor, BaseModelOutputWithPast]:
        """-log p(targets[b, t] | inputs up to t), (B, T), 0 where the target is -100; and the hidden states."""
        losses, _, outputs = self.token_masses(targets, **inputs)
        return losses, outputs

    def token_masses(self, targets: Tensor, **inputs: Any) -> tuple[Tensor, Tensor, BaseModelOutputWithPast]:
        """The losses of the targets, the logarithms of the softmax's normalisers, (B, T) each, and the hidden states.

        The logits are never held for the whole vocabulary and batch at once in two copies; with the adaptive softmax
        only those of the targets' bands are computed.
        """
        outputs = self.model(**inputs)
        hidden, flat = outputs.last_hidden_state.flatten(0, 1), targets.flatten()
        if hidden.shape[0] != flat.shape[0]:
            raise UsageError(f"targets of shape {tuple(targets.shape)} for {hidden.shape[0]} hidden states in all")
        if isinstance(self.lm_head, AdaptiveSoftmax):
            losses, normalisers = self.lm_head.losses(hidden, flat)
        else:
            pieces = zip(hidden.split(ROWS), flat.split(ROWS), strict=True)
            masses = [normalised_cross_entropy(self.lm_head(states), wanted) for states, wanted in pieces]
            losses, normalisers = (torch.cat(parts) for parts in zip(*masses, strict=True))
        return losses.view_as(targets), normalisers.view_as(targets), outputs

    def new_cache(self, batch_size: int) -> XLCache:
        """An empty XL cache of `xl_length` tokens for a batch of that many rows."""
        return self.model.new_cache(batch_size)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As transformers does it; an XL cache knows the positions better than a count of all tokens."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        if isinstance(inputs.get("past_key_values"), XLCache):
            inputs.pop("position_ids", None)
        return inputs

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; adaptive embeddings, whose tokens are sorted by frequency, cannot be resized."""
        if self.config.adaptive_cutoffs:
            raise UsageError("adaptive embeddings cannot be resized: make a new model for the new vocabulary")
        return super().resize_token_embeddings(*args, **kwargs)


def _check_starts(starts: Tensor | None, embeds: Tensor) -> None:
    if starts is not None and starts.shape != embeds.shape[:2]:
        raise UsageError(
            f"document_starts of shape {tuple(starts.shape)} for inputs of {tuple(embeds.shape[:2])}: "
            "give one value for each input, memory tokens included"
        )
