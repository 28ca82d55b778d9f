"""The learning rate over a run: ``warmup`` steps up to the peak, then one of Hugging Face's schedules.

    constant   the peak
    cosine     half a cosine, down to ``minimum_rate`` of the peak at the last step
    linear     a line, down to the same
    wsd        the peak, and in the last ``cooldown`` steps half a cosine down to the same (warm-up, stable, decay);
               Hugging Face's warm-up of this one begins at ``minimum_rate`` too, that of the others at 0

Palimpsa's language models were trained with 2,000 steps of warm-up to 3e-3 (170M) or 1.25e-3 (760M); an ablation is
turned into its metaplastic form with 200 to a tenth of that (arXiv 2602.09075).
"""

from typing import Any

from .config import TrainConfig


def scheduler_arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments of Hugging Face's Trainer."""
    least = config.minimum_rate
    kind, options = config.schedule, {}
    if kind == "constant":
        kind = "constant_with_warmup"
    elif kind == "wsd":
        kind, options = "warmup_stable_decay", {"num_decay_steps": cooldown_steps(config), "min_lr_ratio": least}
    elif kind == "cosine" and least:
        kind, options = "cosine_with_min_lr", {"min_lr_rate": least}
    elif kind == "linear" and least and config.warmup >= config.steps:
        kind = "constant_with_warmup"  # the line never comes; Hugging Face's divides by its length
    elif kind == "linear" and least:
        kind, options = "polynomial", {"power": 1.0, "lr_end": least * config.learning_rate}
    return {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options, "warmup_steps": config.warmup}


def cooldown_steps(config: TrainConfig) -> int:
    """The last steps of "wsd": as configured, else a fifth of all, at least one, as far as the warm-up leaves them."""
    if config.cooldown is not None:
        return config.cooldown
    return max(min(config.steps // 5, config.steps - config.warmup), 1)


def in_words(config: TrainConfig) -> str:
    words = f"{config.learning_rate:g}, {config.warmup:g} steps of warm-up, then "
    if config.schedule == "wsd":
        words += f"constant, in the last {cooldown_steps(config):,} steps cosine"
    else:
        words += config.schedule
    return words + (f" to {config.minimum_rate:g} of it" if config.minimum_rate else "")
