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

    def _prepare_model_inputs(self, inputs=None, bos_token_id=None, model_kwargs=None):
        """As in Hugging Face, with a clear error for a prompt without a token."""
        found = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)  # pyright: ignore
        tensor, name, _ = found
        if tensor.shape[1] == 0:
            raise ValueError(f"{name} must hold at least one token to begin with (such as bos_token_id), got none")
        return found

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

        The prompt is the whole text so far, or, with an attention_mask over the whole text, only the new tokens; tokens
        and ``inputs_embeds`` alike.
        """
        if generation_config.prefill_chunk_size is not None:
            raise ValueError(
                f"prefill_chunk_size must be None, got {generation_config.prefill_chunk_size}: "
                "feed a long prompt in pieces through the cache instead"
            )
        embeds, mask, cache = (model_kwargs.get(name) for name in ("inputs_embeds", "attention_mask", "cache"))
        length = (input_ids if embeds is None else embeds).shape[1]
        if is_first_iteration and cache is not None and (seen := states.tokens_seen(cache)) > 0:
            # generate() drops a mask of ones and keeps its length in the generation configuration.
            covered = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", length)
            new = _new_tokens(seen, length, covered)
            if embeds is None:
                input_ids = input_ids[:, length - new :]
            else:
                model_kwargs = model_kwargs | {"inputs_embeds": embeds[:, length - new :]}
        prefill = super()._prefill  # pyright: ignore[reportAttributeAccessIssue]
        return prefill(input_ids, generation_config, model_kwargs, is_first_iteration)


def _new_tokens(seen: int, length: int, covered: int) -> int:
    """How many of the last of a prompt's ``length`` tokens a cache that has ``seen`` some has to be fed."""
    if covered == length:  # the whole text so far
        if seen >= length:
            raise ValueError(
                f"cache has seen {seen} tokens but the prompt has only {length}: give the whole text so far "
                "plus at least one new token, or only new tokens with an attention_mask over the whole text"
            )
        return length - seen
    if missing := covered - seen - length:
        came = f"cache has seen {seen} tokens and the prompt has {length} new ones, but attention_mask covers {covered}"
        if missing < 0:
            raise ValueError(f"{came}: {-missing} too few (it must cover the whole text)")
        last = " (the last token that generate returned has not been fed yet: begin the new tokens with it)"
        last = last if missing == 1 else ""
        raise ValueError(f"{came}, so that {missing} of the text {'is' if missing == 1 else 'are'} missing{last}")
    return length


if "_prefill" not in vars(GenerationMixin):  # without it generate() would feed saved caches twice, silently
    raise ImportError("metaplastic.models needs transformers >= 5.24, < 6 (GenerationMixin._prefill is missing)")
