"""Our encoder-decoder: the original Transformer (arXiv 1706.03762) as an ordinary model of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from mnemic.errors import UsageError
from mnemic.models.attention import CrossAttention, SelfAttention
from mnemic.models.blocks import Block, ScaledEmbedding
from mnemic.models.config import MnemicEncoderDecoderConfig
from mnemic.models.cross_entropy import IGNORED, mean_loss, token_cross_entropy
from mnemic.models.layout import plain_layout
from mnemic.models.positions import sinusoids


class MnemicEncoderDecoderPreTrainedModel(PreTrainedModel):
    """What transformers needs to know about the encoder-decoder, and how its weights begin."""

    config: MnemicEncoderDecoderConfig
    config_class = MnemicEncoderDecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ScaledEmbedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.Linear):  # the paper's code begins with Glorot's, which post-norm needs
            init.xavier_uniform_(module.weight)


class Stack(MnemicEncoderDecoderPreTrainedModel):
    """What encoder and decoder share: embeddings with positions, and blocks."""

    def __init__(self, config: MnemicEncoderDecoderConfig, layers: int, causal: bool) -> None:
        super().__init__(config)
        pre_norm = config.norm == "pre"
        self.embed_tokens: nn.Module = ScaledEmbedding(config.vocab_size, config.hidden_size, config.hidden_size**0.5)
        self.layers = nn.ModuleList(
            Block(config, index, causal=causal, pre_norm=pre_norm, cross=causal) for index in range(layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if pre_norm else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """The embeddings, from exactly one of the two."""
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("each side takes either input ids or input embeddings: give exactly one of them")
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def with_positions(
        self, embeds: Tensor, attention_mask: Tensor | None, cached: int, position_ids: Tensor | None = None
    ) -> Tensor:
        """The embeddings plus sinusoids of the given positions, or of real tokens counted from 0."""
        if position_ids is None:
            shape = (embeds.shape[0], embeds.shape[1])
            position_ids = plain_layout(shape, embeds.device, cached, attention_mask, None, None).positions
        hidden_states = embeds + sinusoids(position_ids, embeds.shape[-1], embeds.dtype)
        return F.dropout(hidden_states, p=self.config.dropout, training=self.training)


class MnemicEncoder(Stack):
    """The encoder."""

    _can_record_outputs = {"hidden_states": Block, "attentions": SelfAttention}  # noqa: RUF012

    def __init__(self, config: MnemicEncoderDecoderConfig) -> None:
        super().__init__(config, config.encoder_layers, causal=False)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """The encoded source (B, S, hidden_size); `attention_mask` is (B, S) with 0 on padding."""
        embeds = self.embed(input_ids, inputs_embeds)
        mask = create_bidirectional_mask(self.config, embeds, attention_mask)
        hidden_states = self.with_positions(embeds, attention_mask, 0, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class MnemicSeq2SeqDecoder(Stack):
    """The decoder, which attends to its own past and to the encoded source."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": Block,
        "attentions": OutputRecorder(SelfAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(CrossAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: MnemicEncoderDecoderConfig) -> None:
        super().__init__(config, config.decoder_layers, causal=True)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """The decoder's hidden states (B, T, hidden_size)."""
        embeds = self.embed(input_ids, inputs_embeds)
        if self.gradient_checkpointing and self.training:
            past_key_values = None  # a layer that runs twice would write to it twice
        elif past_key_values is None and use_cache and not self.training:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        own = getattr(past_key_values, "self_attention_cache", past_key_values)
        mask = create_causal_mask(self.config, embeds, attention_mask, own)
        source_mask = create_bidirectional_mask(
            self.config, embeds, encoder_attention_mask, encoder_hidden_states=encoder_hidden_states
        )
        hidden_states = self.with_positions(embeds, attention_mask, cached, position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, mask, encoder_hidden_states, source_mask, past_key_values=past_key_values, **kwargs
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values
        )


class MnemicEncoderDecoderModel(MnemicEncoderDecoderPreTrainedModel):
    """Encoder and decoder without the output layer."""

    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MnemicEncoderDecoderConfig) -> None:
        super().__init__(config)
        self.encoder = MnemicEncoder(config)
        self.decoder = MnemicSeq2SeqDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The encoder's embeddings."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the encoder's embeddings, and the decoder's if they are tied."""
        self.encoder.embed_tokens = value
        if self.config.tie_word_embeddings:
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """The decoder's hidden states; the arguments are those of the model with the output layer."""
        encoded: Any = encoder_outputs
        if encoded is None:
            encoded = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif not isinstance(encoded, BaseModelOutput):
            encoded = BaseModelOutput(*encoded[:3])
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class MnemicEncoderDecoderForConditionalGeneration(MnemicEncoderDecoderPreTrainedModel, GenerationMixin):
    """The encoder-decoder with its output layer; `AutoModelForSeq2SeqLM` knows it as "mnemic-encoder-decoder"."""

    _tied_weights_keys = {  # noqa: RUF012
        "model.decoder.embed_tokens.weight": "model.encoder.embed_tokens.weight",
        "lm_head.weight": "model.encoder.embed_tokens.weight",
    }

    def __init__(self, config: MnemicEncoderDecoderConfig) -> None:
        super().__init__(config)
        self.model = MnemicEncoderDecoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, which `generate` runs once per source."""
        return self.model.encoder

    def get_decoder(self) -> nn.Module:
        """The decoder."""
        return self.model.decoder

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """The logits of the target side, and the loss if there are labels.

        attention_mask, decoder_attention_mask: (B, S) and (B, T) with 0 on padding.
        encoder_outputs: what the encoder gave before; then `input_ids` are not needed.
        labels: (B, T), the target; without decoder inputs it is shifted right behind decoder_start_token_id.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            targets = labels.flatten()
            loss = mean_loss(token_cross_entropy(logits.flatten(0, 1), targets), targets, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The labels one step to the right behind decoder_start_token_id; ignored ones become padding."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or padding is None:
            raise UsageError("labels without decoder inputs need decoder_start_token_id and pad_token_id in the config")
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == IGNORED, padding)
