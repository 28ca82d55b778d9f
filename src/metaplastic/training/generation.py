"""Text from a saved model, streamed to the terminal as it comes: what ``metaplastic generate`` does."""

import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

from .. import models  # noqa: F401  (registers the Auto classes)
from .run import find_model


def stream(
    model: str | os.PathLike,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Prints prompt and continuation token by token; returns the continuation. ``temperature`` 0 is greedy."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    if temperature < 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    folder = find_model(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    set_seed(seed)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].long()
    if ids.shape[1] == 0:  # nothing to continue: begin a new document
        ids = torch.tensor([[tokenizer.bos_token_id]])
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature > 0 else {"do_sample": False}
    out = network.generate(
        ids.to(network.device),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
