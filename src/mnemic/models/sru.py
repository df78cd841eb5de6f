"""SRU++ (Lei 2021, arXiv 2102.12459): recurrence whose inputs come from attention, as a causal model of transformers.

A layer of SRU++, for inputs x_t of width d and an attention of width d' (section 3 there):

    Q = W_q X    K = W_k Q    V = W_v Q                       positions do not enter: the recurrence knows the order
    Z = layernorm(Q + alpha * softmax(Q K^T / sqrt(d')) V)    alpha: one trained number, which begins at 0
    U = W_o Z                                                 three vectors of width d for each token
    f_t = sigmoid(U_0 + v_f * c_{t-1} + b_f)    r_t = sigmoid(U_1 + v_r * c_{t-1} + b_r)
    c_t = f_t * c_{t-1} + (1 - f_t) * U_2       h_t = r_t * c_t + (1 - r_t) * x_t

Attention sees the last `xl_length` tokens of earlier segments too. Their keys and values are kept as they were
computed, as in our decoder; the author's code keeps the layer's inputs and projects them again, which is the same
but for training, where the weights have changed by a step and get a gradient from them. After the last layer there is
a layer normalisation, as in our decoder.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from mnemic.errors import UsageError
from mnemic.models.attention import attention_function
from mnemic.models.decoder import MnemicDecoderForCausalLM, MnemicDecoderModel, MnemicDecoderPreTrainedModel
from mnemic.models.recurrence import recur, states_before
from mnemic.models.sru_cache import SRUCache, SRUSegment
from mnemic.models.sru_config import MnemicSRUConfig


class ReducedAttention(nn.Module):
    """Attention of width d', whose keys and values are computed from its queries."""

    is_causal = True

    def __init__(self, config: MnemicSRUConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        width: int = config.attention_size  # type: ignore[assignment]
        self.heads = config.num_attention_heads
        self.scaling = (width // self.heads) ** -0.5
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.kv_proj = nn.Linear(width, 2 * width, bias=False)
        self.alpha = nn.Parameter(torch.empty(1))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: SRUSegment, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Z (B, T, d'), and the attention's weights where the attention function gives them."""
        query = self.q_proj(hidden_states)
        key, value = self.kv_proj(query).chunk(2, dim=-1)
        key, value = past_key_values.update(self._by_head(key), self._by_head(value), self.layer_idx)
        attention = attention_function(self.config._attn_implementation)
        attended, weights = attention(
            self,
            self._by_head(query),
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            **kwargs,
        )
        return self.norm(query + self.alpha * attended.flatten(2)), weights

    def _by_head(self, vectors: Tensor) -> Tensor:
        return vectors.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Recurrence(nn.Module):
    """From Z to a layer's output: W_o, the recurrence, and the way around it."""

    def __init__(self, config: MnemicSRUConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.dropout = config.dropout
        width: int = config.attention_size  # type: ignore[assignment]
        self.out_proj = nn.Linear(width, 3 * config.hidden_size, bias=False)
        self.forget_weight = nn.Parameter(torch.empty(config.hidden_size))
        self.forget_bias = nn.Parameter(torch.empty(config.hidden_size))
        self.reset_weight = nn.Parameter(torch.empty(config.hidden_size))
        self.reset_bias = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, attended: Tensor, inputs: Tensor, past: SRUSegment) -> Tensor:
        """The layer's output (B, T, d) from Z (B, T, d') and the layer's input (B, T, d)."""
        projected = self.out_proj(F.dropout(attended, self.dropout, self.training))
        # The state adds up over a whole document: never in less than 32 bits
        projected = projected.to(torch.promote_types(projected.dtype, torch.float32))
        forget, reset, values = projected.chunk(3, dim=-1)
        states, before = self._states(forget + self.forget_bias, values, past)
        reset = torch.sigmoid(torch.addcmul(reset + self.reset_bias, self.reset_weight, before))
        shown = F.dropout(states, self.dropout, self.training)
        return torch.lerp(inputs.to(shown), shown, reset).to(inputs.dtype)

    def _states(self, gates: Tensor, values: Tensor, past: SRUSegment) -> tuple[Tensor, Tensor]:
        """The state after and before each token; of memory tokens, which come first, in a run of their own."""
        prefix, weight = past.layout.prefix, self.forget_weight.to(values.dtype)
        state = past.state(self.layer_idx, values)
        sequence = gates[:, prefix:]
        if past.padding is not None:  # an open forget gate passes the state on
            sequence = sequence.masked_fill(past.padding.unsqueeze(2), torch.inf)
        states = recur(sequence, values[:, prefix:], weight, state, past.starts)
        before = states_before(states, state, past.starts)
        past.keep(self.layer_idx, states[:, -1 - past.layout.suffix])
        if not prefix:
            return states, before
        nothing, starts = torch.zeros_like(state), past.prefix_starts()
        first = recur(gates[:, :prefix], values[:, :prefix], weight, nothing, starts)
        return torch.cat([first, states], dim=1), torch.cat([states_before(first, nothing, starts), before], dim=1)


class SRUBlock(GradientCheckpointingLayer):
    """One layer of SRU++."""

    _can_checkpoint_with_cache = True  # an SRUSegment is read and written rightly when a layer runs twice

    def __init__(self, config: MnemicSRUConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = ReducedAttention(config, layer_idx)
        self.recurrence = Recurrence(config, layer_idx)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: SRUSegment, **kwargs: Any
    ) -> Tensor:
        """The layer's output (B, T, hidden_size)."""
        attended, _ = self.self_attn(hidden_states, attention_mask, past_key_values=past_key_values, **kwargs)
        return self.recurrence(attended, hidden_states, past_key_values)


class MnemicSRUModel(MnemicDecoderModel):
    """Embeddings, SRU++ layers and the final normalisation."""

    config: MnemicSRUConfig  # type: ignore[assignment]
    config_class = MnemicSRUConfig  # type: ignore[assignment]
    _no_split_modules = ["SRUBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": SRUBlock, "attentions": ReducedAttention}  # noqa: RUF012

    def __init__(self, config: MnemicSRUConfig) -> None:
        MnemicDecoderPreTrainedModel.__init__(self, config)  # its blocks are not the decoder's
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(SRUBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ReducedAttention):
            init.xavier_uniform_(module.q_proj.weight)
            init.xavier_uniform_(module.kv_proj.weight)
            init.constant_(module.alpha, self.config.attention_start)
        elif isinstance(module, Recurrence):
            init.xavier_uniform_(module.out_proj.weight)
            for weight in (module.forget_weight, module.reset_weight):
                init.normal_(weight, std=self.config.initializer_range)
            init.zeros_(module.forget_bias)
            init.constant_(module.reset_bias, self.config.highway_bias)

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
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The last hidden states; the arguments are those of `MnemicSRUForCausalLM.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("SRU++ takes either input_ids or inputs_embeds: give exactly one of them")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if past_key_values is None and use_cache and not self.training:
            past_key_values = self.new_cache(inputs_embeds.shape[0])
            segment = self._first_segment(past_key_values, inputs_embeds, attention_mask, document_starts, position_ids)
        elif past_key_values is None:
            nothing_kept = SRUCache(len(self.layers), 1, inputs_embeds.shape[0], inputs_embeds.device)
            segment = self._first_segment(nothing_kept, inputs_embeds, attention_mask, document_starts, position_ids)
        elif isinstance(past_key_values, SRUCache):
            segment = _begin(past_key_values, inputs_embeds, attention_mask, document_starts)
        else:
            raise UsageError(
                f"a {type(past_key_values).__name__} cannot carry the recurrent state of SRU++: "
                "leave past_key_values out, or pass model.new_cache(rows)"
            )
        mask = attention_mask
        if mask is None or mask.ndim != 4:
            mask = self._registered_mask(self._visible(segment.layout), inputs_embeds.dtype)
        hidden_states = F.dropout(inputs_embeds, self.config.dropout, self.training)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, past_key_values=segment, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def _first_segment(
        self,
        cache: SRUCache,
        embeds: Tensor,
        attention_mask: Tensor | None,
        document_starts: Tensor | None,
        position_ids: Tensor | None,
    ) -> SRUSegment:
        """The beginning of an empty cache, where positions say what is a memory token and where documents start."""
        if position_ids is None:
            return _begin(cache, embeds, attention_mask, document_starts)
        if document_starts is None:
            document_starts = (position_ids == 0).expand(embeds.shape[0], -1)
        before = position_ids[0, position_ids[0] < 0]
        cache.prefix, cache.groups = len(before), 1 + int((before.diff() < 0).sum())
        try:
            return _begin(cache, embeds, attention_mask, document_starts)
        finally:
            cache.prefix, cache.groups = 0, 1

    def new_cache(self, batch_size: int) -> SRUCache:
        """An empty cache of states and of `xl_length` tokens for a batch of that many rows."""
        return SRUCache(self.config.num_hidden_layers, self.config.xl_length, batch_size, self.device)


class MnemicSRUForCausalLM(MnemicDecoderForCausalLM):
    """SRU++ with its output layer; `AutoModelForCausalLM` finds it under the name "mnemic-sru".

    It is called as the decoder is. `position_ids` matter only where a forward begins without a cache: a token at
    position 0 starts a document, those below 0 are memory tokens.
    """

    config: MnemicSRUConfig  # type: ignore[assignment]
    config_class = MnemicSRUConfig  # type: ignore[assignment]
    _no_split_modules = ["SRUBlock"]  # noqa: RUF012
    _can_record_outputs = MnemicSRUModel._can_record_outputs
    _is_stateful = True

    def __init__(self, config: MnemicSRUConfig) -> None:
        MnemicDecoderPreTrainedModel.__init__(self, config)  # its stack is not the decoder's
        self.model = MnemicSRUModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        self.model._init_weights(module)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # it would not carry the recurrent state; the model makes a cache of its own


def _begin(cache: SRUCache, embeds: Tensor, attention_mask: Tensor | None, starts: Tensor | None) -> SRUSegment:
    if starts is not None and starts.shape != embeds.shape[:2]:
        raise UsageError(
            f"document_starts of shape {tuple(starts.shape)} for inputs of {tuple(embeds.shape[:2])}: "
            "give one value for each input, memory tokens included"
        )
    return cache.begin((embeds.shape[0], embeds.shape[1]), attention_mask, starts)
