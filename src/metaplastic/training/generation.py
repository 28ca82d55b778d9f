"""Text from a saved model, streamed to the terminal as it comes: what ``metaplastic generate`` does."""

import os
from typing import Any

import torch
from transformers import TextStreamer, set_seed

from .saved import find_model, load_model, load_reader, read_config


def stream(
    model: str | os.PathLike,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    tokenizer: str | None = None,
) -> str:
    """Prints prompt and continuation token by token; returns the continuation. ``temperature`` 0 is greedy.

    ``tokenizer``: "bytes", a folder or a name; None: the one saved with the model.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    # A shell hands over bytes that are no text as lone surrogates; in a model's text they would be unknown characters.
    prompt = prompt.encode(errors="surrogateescape").decode(errors="replace")
    folder = find_model(model)
    # The configuration first: reading the tokenizer stumbles over a broken one too, without naming it.
    reader = load_reader(folder, tokenizer, read_config(folder))
    network: Any = load_model(folder).eval()
    if torch.cuda.is_available():
        network.cuda()
    set_seed(seed)
    ids = reader(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].long()
    if ids.shape[1] == 0:  # nothing to continue: begin a new document
        begin = reader.eos_token_id if reader.bos_token_id is None else reader.bos_token_id
        ids = torch.tensor([[begin]])
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    out = network.generate(
        ids.to(network.device),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(reader, skip_special_tokens=True),
        pad_token_id=reader.pad_token_id,
        **sampling,
    )
    return str(reader.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
