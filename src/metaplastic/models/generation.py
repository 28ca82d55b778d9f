"""What ``generate()`` needs to know of a memory without a length: saved caches are fed only what is new."""

from transformers import Cache, GenerationMixin

from . import cache as states


def one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache under either of its names."""
    if cache is not None and past_key_values is not None:
        raise ValueError("give cache or past_key_values (its old name), not both")
    return past_key_values if cache is None else cache


class RecurrentGenerationMixin(GenerationMixin):
    """Hugging Face's generate(), mended for caches that are all recurrent."""

    def prepare_inputs_for_generation(
        self,
        input_ids,
        cache=None,
        attention_mask=None,
        inputs_embeds=None,
        is_first_iteration=False,
        past_key_values=None,
        **kwargs,
    ):
        """As in Hugging Face, but a single step gets no mask: a new token is never padding."""
        cache = one_cache(cache, past_key_values)
        if not is_first_iteration and cache is not None:
            attention_mask = None
        return super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids,
            cache=cache,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        """Feeds a saved cache only what it has not seen; Hugging Face feeds all-recurrent caches the whole text again.

        Its convention: the prompt is the whole text so far, or, with an attention_mask that is longer than the prompt,
        only the new tokens; ``inputs_embeds`` are always the whole text.
        """
        if generation_config.prefill_chunk_size is not None:
            raise ValueError(
                f"prefill_chunk_size must be None, got {generation_config.prefill_chunk_size}: "
                "feed a long prompt in pieces through the cache instead"
            )
        cache = model_kwargs.get("cache")
        if is_first_iteration and cache is not None and (seen := states.tokens_seen(cache)) > 0:
            embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
            length = (input_ids if embeds is None else embeds).shape[1]
            # generate() drops a mask of ones and keeps its length in the generation configuration.
            covered = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", length)
            if covered == length or embeds is not None:
                if seen >= length:
                    raise ValueError(
                        f"cache has seen {seen} tokens but the prompt has only {length}: give the whole text so far "
                        "plus at least one new token, or only new tokens with an attention_mask over the whole text"
                    )
                if embeds is None:
                    input_ids = input_ids[:, seen:]
                else:
                    model_kwargs = model_kwargs | {"inputs_embeds": embeds[:, seen:]}
        prefill = super()._prefill  # pyright: ignore[reportAttributeAccessIssue]
        return prefill(input_ids, generation_config, model_kwargs, is_first_iteration)


if "_prefill" not in vars(GenerationMixin):  # without it generate() would feed saved caches twice, silently
    raise ImportError("metaplastic.models needs transformers >= 5.24, < 6 (GenerationMixin._prefill is missing)")
